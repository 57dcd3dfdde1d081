"""How far a quickstart is: the stages behind it, what each came to and took, and what is left of its time.

Kept in `stages.json`, so that a quickstart that was stopped goes on, and its estimates with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import ConfigError, DataError
from dreamgym.evaluation.sim_real_gap import dream_success
from dreamgym.files import atomic_write
from dreamgym.quickstart.plan import DREAMGYM, SFT, STAGES, Plan
from dreamgym.training.run_dir import METRICS

_IN_LINE = ("collect", "learn", "practice", "evaluation", "report")
"""Stages that take time one after another."""
_LANES = (("experience", "warm start"), ("experience", "fidelity"))
"""While both models learn: the second of each goes on beside the other."""
_MEASURED = ("experience",)
"""By what the pace of a machine is told: recording is quick where games are kept from before."""
_COMPARED = ("difference", "first_only", "second_only", "p_value")
_KEPT_EVERY = 5.0
"""Seconds of a stage that a `kill -9` may leave uncounted."""


class Tick(Protocol):
    """Called now and then while a stage goes on."""

    def __call__(self, *, now: bool = False) -> None: ...


class Progress:
    """Which stages are behind us, what they came to, and what each has taken, also before it was stopped."""

    def __init__(self, folder: Path, plan: Plan) -> None:
        """
        Raises:
            ConfigError: the folder was begun with another plan.
            DataError: what it holds cannot be read.
        """
        self._path = folder / "stages.json"
        self.plan = plan
        self.seconds: dict[str, float] = {}
        self.results: dict[str, dict[str, Any]] = {}
        if self._path.exists():
            self._read()
        self._write()

    def _read(self) -> None:
        try:
            stored = json.loads(self._path.read_text(encoding="utf-8"))
            begun = {"minutes": float(stored["plan"]["minutes"]), "seed": int(stored["plan"]["seed"])}
            env = str(stored["plan"].get("env", "alfworld"))
            self.seconds = {str(name): float(taken) for name, taken in stored["seconds"].items()}
            self.results = {str(name): dict(found) for name, found in stored["results"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(f"{self._path}: expected the stages of a quickstart, {error!r}") from None
        if env != self.plan.env:
            raise ConfigError(
                f"{self._path.parent} was begun with --env {env}, now {self.plan.env} is asked for; "
                "choose another folder (--out), or the same to go on"
            )
        for name, value in begun.items():
            asked = getattr(self.plan, name)
            if value != asked:
                raise ConfigError(
                    f"{self._path.parent} was begun with --{name} {value:g}, now {asked:g} is asked for; "
                    "choose another folder (--out), or the same to go on"
                )
        if stored["plan"] != asdict(self.plan):
            raise ConfigError(
                f"{self._path.parent} was begun by another version, with another plan; choose another --out"
            )

    @contextmanager
    def timed(self, stage: str) -> Iterator[Tick]:
        """Counts the seconds of the block; the function that it gives keeps the count, now and then."""
        before, began = self.seconds.get(stage, 0.0), time.perf_counter()
        kept = began

        def tick(*, now: bool = False) -> None:
            nonlocal kept
            self.seconds[stage] = before + time.perf_counter() - began
            if now or time.perf_counter() - kept > _KEPT_EVERY:
                kept = time.perf_counter()
                self._write()

        try:
            yield tick
        finally:
            tick(now=True)

    @property
    def pace(self) -> float:
        """How much longer stages took than on the machine that the plan was measured on; 1 at first."""
        known = [stage for stage in _MEASURED if stage in self.results]
        expected = sum(map(self.plan.seconds_of, known))
        return sum(self.seconds.get(stage, 0.0) for stage in known) / expected if expected else 1.0

    def expected(self) -> dict[str, float]:
        """Seconds that each stage which is not behind us will take, by the pace so far."""
        found: dict[str, float] = {}
        for stage in ("collect", "learn", "practice", "evaluation"):
            if stage not in self.results:
                lanes = _LANES if stage == "learn" else ((stage,),)
                found[stage] = max(map(self._left, lanes))
        if "practice" in found:  # no more than the minutes asked for leave to it
            left = self.left_for("practice") - found.get("collect", 0.0) - found.get("learn", 0.0)
            found["practice"] = min(found["practice"], self.plan.preparing + max(1.0, left))
        return found

    def _left(self, stages: Sequence[str]) -> float:
        """Seconds until these, one after another, are done."""
        missing = [stage for stage in stages if stage not in self.results]
        taken = sum(self.seconds.get(stage, 0.0) for stage in missing)
        return max(0.0, self.pace * sum(map(self.plan.seconds_of, missing)) - taken)

    def left_for(self, stage: str) -> float:
        """Seconds of the minutes asked for that practice may take, so that evaluation still fits."""
        taken = sum(self.seconds.get(name, 0.0) for name in _IN_LINE)
        others = ("evaluation", "report")
        after = self.plan.preparing + self.plan.step + sum(self.plan.seconds_of(other) for other in others)
        begun = self.seconds.get(stage, 0.0)
        return max(1.0, 60 * self.plan.minutes - (taken - begun) - self.pace * after)

    def summary(self, out: Path, data: Sequence[str]) -> dict[str, Any]:
        """What stands in `summary.json`."""
        found = self.results
        after, practice = found["evaluation"], found["practice"]
        before = after["other"]
        real = {
            "collect": sum(_steps(config.collect.out) for config in self.plan.collect_configs(out)),
            "fidelity": int(found["fidelity"]["recorded_steps"]),
            "evaluation": after["real_steps"] + before["real_steps"],
        }
        tried = found.get("start", {}).get("tried", [])
        dreamt = {
            "warm start": int(sum(each["synthetic_steps"] for each in tried[:-1])),
            "practice": int(practice["spent"].get("synthetic_steps", 0)),
        }
        return {
            "out": str(out),
            "environment": self.plan.environment,
            "seed": self.plan.seed,
            "minutes": self.plan.minutes,
            "plan": asdict(self.plan),
            "data": list(data),
            "policies": {SFT: _policy(before), DREAMGYM: _policy(after)},
            "difference": {name: after["comparison"][name] for name in _COMPARED},
            "fidelity": found["fidelity"] | {"agreement": found["experience"]["agreement"]},
            "practice": {name: practice[name] for name in ("steps", "ended")}
            | {"success_in_dream": dream_success(out / DREAMGYM / METRICS)},
            "starts": tried,
            "stages": {
                stage: {
                    "seconds": round(self.seconds.get(stage, 0.0), 1),
                    "real_steps": real.get(stage, 0),
                    "synthetic_steps": dreamt.get(stage, 0),
                }
                for stage in STAGES
                if stage != "learn"
            },
            "seconds": round(sum(self.seconds.get(name, 0.0) for name in _IN_LINE), 1),
        }

    def finish(self, stage: str, result: Mapping[str, Any]) -> None:
        self.results[stage] = dict(result)
        self._write()

    def _write(self) -> None:
        told = {"plan": asdict(self.plan), "seconds": self.seconds, "results": self.results}
        with atomic_write(self._path) as file:
            file.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")


def _policy(evaluation: Mapping[str, Any]) -> dict[str, Any]:
    success = evaluation["success"]
    return {
        "success": success["value"],
        "interval": [success["low"], success["high"]],
        "episodes": success["count"],
        "policy": evaluation["policy"],
        "split": evaluation["split"],
    }


def _steps(folder: Path) -> int:
    return sum(len(each) for each in read_trajectories(folder))
