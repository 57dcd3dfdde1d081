"""Checks of the tests: what a user writes to grade episodes of an MCP server."""

import subprocess
from typing import Any


def converted(episode: Any) -> bool:
    """The answer is the converted time, and the server was asked for it."""
    asked = any(call.tool == "convert_time" and not call.failed for call in episode.calls)
    return asked and episode.answer == episode.task.parameters["time"]


def branched(episode: Any) -> bool:
    """The repository itself has the branch."""
    command = ["git", "branch", "--list", episode.task.parameters["branch"]]
    return bool(
        subprocess.run(command, cwd=episode.folder, capture_output=True, text=True, check=True).stdout
    )


def written(episode: Any) -> float:
    """Half a point for the file, the other half for its content."""
    path = episode.folder / "note.txt"
    return 0.5 * path.exists() + 0.5 * (path.exists() and path.read_text() == "Buy milk.")
