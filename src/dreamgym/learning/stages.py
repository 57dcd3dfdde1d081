"""The finished stages of a run of `learn`, in a file of its directory: what a resumed run skips."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamgym.errors import ConfigError, DataError
from dreamgym.files import write_text

STAGES_FILE = "stages.json"


class Stages:
    """The results and seconds of finished stages."""

    def __init__(self, out: Path, given: Mapping[str, Any]) -> None:
        """`given` are the settings of the run by their full names.

        Raises:
            ConfigError: the directory belongs to a run with other settings.
            DataError: its file is damaged.
        """
        self._file = out / STAGES_FILE
        self._given = json.loads(json.dumps(given, default=str))
        self.done: dict[str, dict[str, Any]] = {}
        if not self._file.exists():
            return
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            before, self.done = dict(stored["given"]), dict(stored["stages"])
            assert all(isinstance(each["seconds"], float) for each in self.done.values())
        except (OSError, ValueError, LookupError, TypeError, AssertionError, RecursionError):
            raise DataError(
                f"{self._file}: expected the stages of a run of learn; choose another --out"
            ) from None
        for name in sorted(before.keys() | self._given.keys()):
            if before.get(name) != self._given.get(name):
                raise ConfigError(
                    f"{out} was started with {name}={before.get(name)!r}, got {self._given.get(name)!r}; "
                    "choose another --out, or use the same settings to resume"
                )

    def finish(self, stage: str, seconds: float, result: Mapping[str, Any]) -> None:
        self.done[stage] = {"seconds": round(seconds, 1), **result}
        self.write()

    def write(self) -> None:
        write_text(self._file, json.dumps({"given": self._given, "stages": self.done}, indent=2) + "\n")
