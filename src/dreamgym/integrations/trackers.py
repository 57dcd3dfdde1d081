"""Mirrors the metrics of a run, and some of its episodes, to trackio, Weights & Biases or TensorBoard.

`metrics.jsonl` is the record; a tracker is a copy of it. The mirror reads the run directory, remembers in
`track-NAME.json` how far the tracker has stored it, and sends the rest when it is called again: nothing is
lost by a crash of the tracker, and a step may be sent twice. Everything stays on this machine, unless the
tracker itself is configured otherwise (WANDB_MODE=online, TRACKIO_SPACE_ID).
"""

from __future__ import annotations

import importlib
import json
import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.files import write_text
from dreamgym.printable import printable
from dreamgym.report.run_reader import CONFIG, METRICS
from dreamgym.types import Trajectory

PROJECT = "dreamgym"
EPISODES_EVERY = 10
"""Training steps between two episodes that are sent."""
_TRAJECTORIES = "trajectories"


class Tracker(Protocol):
    """Where metrics are sent."""

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None: ...

    def episode(self, step: int, trajectory: Trajectory) -> None:
        """Show an episode, turn by turn."""
        ...

    def flush(self) -> bool:
        """Store what was sent; False if that is certain only after `close`."""
        ...

    def close(self) -> None: ...


class Tensorboard:
    """Event files in `tensorboard/` of the run directory."""

    def __init__(self, run: Path, name: str, config: Mapping[str, Any]) -> None:
        self._writer = _library("tensorboard").SummaryWriter(logdir=str(run / "tensorboard"))

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self._writer.add_scalar(f"{kind}/{key}", value, step)

    def episode(self, step: int, trajectory: Trajectory) -> None:
        self._writer.add_text("episode", transcript(trajectory), step)

    def flush(self) -> bool:
        self._writer.flush()
        return True

    def close(self) -> None:
        self._writer.close()


class Trackio:
    """A local SQLite database; `trackio show --project dreamgym` opens it."""

    def __init__(self, run: Path, name: str, config: Mapping[str, Any]) -> None:
        self._trackio = _library("trackio")
        self._trackio.init(project=PROJECT, name=name, config=dict(config), resume="allow", embed=False)

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._trackio.log({f"{kind}/{key}": value for key, value in values.items()}, step=step)

    def episode(self, step: int, trajectory: Trajectory) -> None:
        trace = self._trackio.Trace(messages=messages(trajectory), metadata=facts(trajectory))
        self._trackio.log({"episode": trace}, step=step)

    def flush(self) -> bool:
        return False

    def close(self) -> None:
        self._trackio.finish()


class Wandb:
    """An offline run in `wandb/` of the run directory; `wandb sync` sends it."""

    def __init__(self, run: Path, name: str, config: Mapping[str, Any]) -> None:
        self._wandb = _library("wandb")
        self._run = self._wandb.init(
            project=PROJECT,
            name=name,
            id=f"{name.replace('/', '-')}-{config.get('seed', 0)}",
            config=dict(config),
            resume="allow",
            mode=os.environ.get("WANDB_MODE", "offline"),
            dir=str(run),
            settings=self._wandb.Settings(silent=True),
        )

    def log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/step")
        self._run.log({f"{kind}/step": step, **{f"{kind}/{key}": value for key, value in values.items()}})

    def episode(self, step: int, trajectory: Trajectory) -> None:
        rows = [
            [turn.action, printable(turn.outcome.next_state.text), turn.outcome.reward]
            for turn in trajectory.transitions
        ]
        table = self._wandb.Table(columns=["action", "next state", "reward"], data=rows)
        self._run.log({"episode/step": step, "episode/turns": table, **facts(trajectory)})

    def flush(self) -> bool:
        return False

    def close(self) -> None:
        self._run.finish()


TRACKERS: dict[str, Callable[[Path, str, Mapping[str, Any]], Tracker]] = {
    "trackio": Trackio,
    "wandb": Wandb,
    "tensorboard": Tensorboard,
}


class Mirror:
    """Sends what a run directory records to a tracker. Errors of the tracker end the mirror, not the run."""

    def __init__(self, run: Path, name: str, *, warn: Callable[[str], None]) -> None:
        if name not in TRACKERS:
            raise ConfigError(f"--track: expected one of {', '.join(TRACKERS)}, got {name!r}")
        _library(name)  # or it would be missed after the first step
        self._run, self._name, self._warn = run, name, warn
        self._tracker: Tracker | None = None
        self._failed = False
        self._offset, self._episodes = self._remembered()
        self.rows = 0
        """Rows sent by this object."""

    def sync(self) -> None:
        """Send the rows and episodes that are new."""
        if self._failed:
            return
        try:
            self._send()
        except Exception as error:  # a tracker may fail in any way; training goes on
            self._failed = True
            self._warn(f"{self._name} is no longer updated: {error}; `dreamgym track` sends the rest later")

    def close(self) -> None:
        """Send the rest, and remember that all is stored."""
        self.sync()
        if self._tracker is not None and not self._failed:
            self._tracker.close()
            self._remember()

    def _send(self) -> None:
        newest = -1
        for offset, row in self._fresh_rows():
            kind, step = str(row.get("kind", "metrics")), row.get("step")
            if isinstance(step, int):
                self._open().log(kind.replace(" ", "_"), step, dict(flatten(row)))
                newest = max(newest, step if kind == "train" else -1)
            self._offset = offset
            self.rows += 1
        if newest >= self._episodes * EPISODES_EVERY and (found := self._newest_episode()) is not None:
            self._open().episode(newest, found)
            self._episodes = newest // EPISODES_EVERY + 1
        if newest >= 0 and self._open().flush():
            self._remember()

    def _open(self) -> Tracker:
        if self._tracker is None:
            run = self._run.resolve()
            self._tracker = TRACKERS[self._name](self._run, f"{run.parent.name}/{run.name}", _config(run))
        return self._tracker

    def _fresh_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Whole lines after the last one that was sent, each with the offset of its end."""
        path = self._run / METRICS
        if not path.exists() or path.stat().st_size <= self._offset:
            return
        with path.open("rb") as file:
            file.seek(self._offset)
            end = self._offset
            for line in file:
                end += len(line)
                if not line.endswith(b"\n"):
                    return  # still being written
                try:
                    row = json.loads(line)
                except ValueError:
                    continue
                if isinstance(row, dict):
                    yield end, row

    def _newest_episode(self) -> Trajectory | None:
        folder = self._run / _TRAJECTORIES
        newest = deque(
            read_trajectories(folder, on_bad=lambda bad: None) if folder.is_dir() else (), maxlen=1
        )
        return newest[0] if newest else None

    @property
    def _memory(self) -> Path:
        return self._run / f"track-{self._name}.json"

    def _remembered(self) -> tuple[int, int]:
        try:
            stored = json.loads(self._memory.read_text(encoding="utf-8"))
            return int(stored["offset"]), int(stored["episodes"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0, 0

    def _remember(self) -> None:
        write_text(self._memory, json.dumps({"offset": self._offset, "episodes": self._episodes}) + "\n")


def flatten(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The finite numbers of a row, nested ones under a path.

    >>> dict(flatten({"kind": "train", "step": 3, "success": 0.5, "learner": {"entropy": 1.0, "note": "x"}}))
    {'success': 0.5, 'learner/entropy': 1.0}
    """
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}/")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            continue
        elif prefix or key != "step":
            yield f"{prefix}{key}", float(value)


def transcript(trajectory: Trajectory) -> str:
    """An episode as Markdown."""
    lines = [f"**{printable(trajectory.task.instruction)}** ({_outcome(trajectory)})", ""]
    lines += [printable(trajectory.start.text), ""]
    for turn in trajectory.transitions:
        lines += [f"`> {printable(turn.action)}`", "", printable(turn.outcome.next_state.text), ""]
    return "\n".join(lines)


def messages(trajectory: Trajectory) -> list[dict[str, str]]:
    """An episode as a chat: actions are the assistant's messages."""
    found = [{"role": "user", "content": f"{trajectory.task.instruction}\n\n{trajectory.start.text}"}]
    for turn in trajectory.transitions:
        found += [
            {"role": "assistant", "content": turn.action},
            {"role": "user", "content": turn.outcome.next_state.text},
        ]
    return [{**each, "content": printable(each["content"])} for each in found]


def facts(trajectory: Trajectory) -> dict[str, Any]:
    return {
        "episode/success": float(trajectory.success),
        "episode/source": trajectory.provenance.source,
        "episode/task": printable(trajectory.task.id),
    }


def _outcome(trajectory: Trajectory) -> str:
    return f"{trajectory.provenance.source}, {'success' if trajectory.success else 'no success'}"


def _config(run: Path) -> dict[str, Any]:
    try:
        found = json.loads((run / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _library(tracker: str) -> Any:
    try:
        return importlib.import_module({"tensorboard": "tensorboardX"}.get(tracker, tracker))
    except ImportError:
        raise MissingExtraError(f"--track {tracker}", tracker) from None
