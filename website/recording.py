"""Records `dreamgym play` in a dream and in reality, the same actions in both, as one SVG of two terminals.

`python -m website.recording` writes docs/assets/play.svg: the shipped experience model plays a game of the
test split, which it has not seen. Both columns are what the two commands printed.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import textwrap
from collections.abc import Iterator
from html import escape
from importlib.resources import files
from pathlib import Path

from website.examples import ROOT

OUT = ROOT / "docs" / "assets" / "play.svg"
RUN = "runs/quickstart/experience"
TASK = ["--split", "test", "--task", "3"]
ACTIONS = [
    *("examine cookbook", "open fridge", "take red onion from fridge", "prepare meal", ":why"),
    *("take knife from table", "slice red onion with knife", "cook red onion with stove"),
    *("prepare meal", "eat meal"),
]
_COLUMNS, _ROW, _CHAR, _PAD = 58, 17, 7.25, 14
_SECONDS = 1.1
_STYLE = (
    "text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#d5dae1;white-space:pre}"
    ".action{fill:#8fd0ff;font-weight:700}.why{fill:#c3a6ff}.head{fill:#fff;font-weight:700}.end{fill:#7ee0a8}"
    "g.turn{animation:appear .2s both}@keyframes appear{from{opacity:0}}"
    "@media (prefers-reduced-motion:reduce){g.turn{animation:none}}"
)


def replies(words: list[str], lines: list[str]) -> list[str]:
    """What `dreamgym play` prints: before the first line, then after each."""
    from typer.testing import CliRunner

    from dreamgym.cli import app

    typed = "".join(f"{line}\n" for line in lines)
    done = CliRunner().invoke(app, ["play", *words, *TASK], input=typed, env={"COLUMNS": "400"})
    assert done.exit_code == 0, done.output
    return [part.strip() for part in done.stdout.split("\n\n> ")][: len(lines) + 1]


def record() -> list[tuple[str, str, str]]:
    """(action, reply of the dream, reply of reality) of each turn; reality is not asked why."""
    from dreamgym.learning.shipped import install_experience

    shipped = Path(str(files("dreamgym"))) / "datasets" / "experience" / "textworld"
    run = json.loads((shipped / "run.json").read_text(encoding="utf-8"))
    options = [
        word
        for key, value in run["environment"]["options"].items()
        for word in ("--set", f"environment.options.{key}={value}")
    ]
    typed = [line for line in ACTIONS if not line.startswith(":")]
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(install_experience(shipped, Path(folder) / RUN))
        dreamt = replies(["--dream", f"{folder}/{RUN}"], ACTIONS)
    real = replies(["--env", run["environment"]["name"], *options], typed)
    turns = [("", dreamt[0].partition("\n(:help")[0], real[0].partition("\n(:help")[0])]
    known = iter(real[1:])
    for action, reply in zip(ACTIONS, dreamt[1:], strict=True):
        turns.append((action, reply, "" if action.startswith(":") else next(known)))
    return turns


def draw(turns: list[tuple[str, str, str]]) -> str:
    """Two terminals side by side; a turn appears after the other, in both at the same height."""
    width = 2 * (_COLUMNS * _CHAR + 2 * _PAD) + _PAD
    heads = (f"$ dreamgym play --dream {RUN}", "$ dreamgym play --env textworld")
    parts, y = [], 46.0
    for place, (action, *sides) in enumerate(turns):
        columns = [list(_lines(action, side)) for side in sides]
        parts.append(f'<g class="turn" style="animation-delay:{place * _SECONDS:.1f}s">')
        for column, lines in enumerate(columns):
            x = _PAD + column * (width / 2 + _PAD / 2)
            for row, (name, text) in enumerate(lines):
                parts.append(
                    f'<text class="{name}" x="{x:.0f}" y="{y + row * _ROW:.0f}">{escape(text)}</text>'
                )
        parts.append("</g>")
        y += max(map(len, columns)) * _ROW + 5
    half = width / 2 - _PAD / 2
    frames = "".join(
        f'<rect x="{x:.0f}" width="{half:.0f}" height="{y:.0f}" rx="8" fill="#161b22"/>'
        f'<text class="head" x="{x + _PAD:.0f}" y="22">{escape(head)}</text>'
        for x, head in zip((0.0, width / 2 + _PAD / 2), heads, strict=True)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {y:.0f}" role="img">'
        "<title>The same actions in the dream and in the real game</title>"
        f"<style>{_STYLE}</style>{frames}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _lines(action: str, reply: str) -> Iterator[tuple[str, str]]:
    if action and reply:
        yield "action", f"> {action}"
    paragraphs = reply.splitlines()
    for paragraph in paragraphs if len(paragraphs) < 4 else [" / ".join(paragraphs)]:
        over = paragraph.startswith("The episode is over")
        name = "why" if action == ":why" else "end" if over else "said"
        for line in textwrap.wrap(paragraph, _COLUMNS) or [""]:
            yield name, line


if __name__ == "__main__":
    OUT.write_text(draw(record()), encoding="utf-8")
