"""The finished stages of a run of `learn`, in a file of its directory: what a resumed run skips."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamgym.errors import ConfigError, DataError
from dreamgym.files import write_text
from dreamgym.training.run_dir import CHECKPOINT, differences

STAGES_FILE = "stages.json"
_OF_TRAINING = ("train.", "learner.", "agent.", "curriculum.", "prompted.")
"""Settings that may differ until the stage ``train`` has finished: its run checks them itself."""


class Stages:
    """The results and seconds of finished stages."""

    def __init__(self, out: Path, given: Mapping[str, Any]) -> None:
        """`given` are the settings of the run by their full names. Those of a stage that has not finished may
        differ; those of fine-tuning until the agent has trained.

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
        places = [Path(str(given.get("train.out", ""))) for given in (before, self._given)]
        for name in differences(before, self._given, *places):
            if not self._may_change(out, name):
                raise ConfigError(
                    f"{out} was started with {name}={before.get(name)!r}, got {self._given.get(name)!r}; "
                    "choose another --out, or use the same settings to resume"
                )

    def _may_change(self, out: Path, name: str) -> bool:
        if "train" in self.done:
            return False
        if name.startswith("experience.") and not (out / "agent" / CHECKPOINT).exists():
            self.done.pop("experience", None)  # it is fine-tuned further, or says what it was started with
            return True
        return name.startswith(_OF_TRAINING)

    def finish(self, stage: str, seconds: float, result: Mapping[str, Any]) -> None:
        self.done[stage] = {"seconds": round(seconds, 1), **result}
        self.write()

    def write(self) -> None:
        write_text(self._file, json.dumps({"given": self._given, "stages": self.done}, indent=2) + "\n")
