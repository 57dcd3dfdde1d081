"""The quickstart's settings: a preset of its environment, scaled to the minutes that it may take."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from importlib.resources import files
from itertools import islice
from pathlib import Path
from typing import Any

from pydantic import Field

from dreamgym.config import CollectConfig, Config, Section, validate
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.registry import find_environment
from dreamgym.errors import ConfigError, DataError
from dreamgym.files import write_text

USUAL_MINUTES = 15.0
"""What a preset is made for, on 2 idle cores."""
STAGES_FILE = "stages.json"
MIN_SUCCESS = 0.2
"""Success of the first training step in the dream; below, the warm start is repeated with more updates, since
most rollout groups would fail as a whole, and there would be nothing to learn from."""
MORE_UPDATES = 4 / 3
MAX_STARTS = 4


class Extent(Section):
    """The table ``quickstart`` of a preset; the other tables are ordinary settings."""

    record: dict[str, int] = Field(description="real episodes by policy")
    datasets: dict[str, int] = Field(default_factory=dict, description="shipped trajectories by dataset")
    fidelity_episodes: int
    evaluation_episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One quickstart: what each of its commands is called with."""

    out: Path
    minutes: float
    extent: Extent
    config: Config

    @classmethod
    def load(cls, env: str, minutes: float, seed: int, out: Path) -> Plan:
        """
        Raises:
            ConfigError: there is no such environment, or no time.
        """
        if not minutes > 0:
            raise ConfigError(f"expected --minutes above 0, got {minutes:g}")
        find_environment(env)
        folder = files("dreamgym.quickstart") / "presets"
        file = folder / f"{env}.toml"
        values = tomllib.loads((file if file.is_file() else folder / "default.toml").read_text("utf-8"))
        extent = values.pop("quickstart")
        # Less time than usual buys disproportionately less: every stage has fixed costs.
        scale: float = min(1.0, minutes / USUAL_MINUTES) ** 1.2 * max(1.0, minutes / USUAL_MINUTES)

        def scaled(table: dict[str, Any], name: str, least: int, most: int | None = None) -> None:
            table[name] = min(max(least, round(table[name] * scale)), table[name] if most else 10**9)

        for table, least in ((extent["record"], 4), (extent.get("datasets", {}), 24)):
            for name in table:
                scaled(table, name, least, most=1 if table is not extent["record"] else None)
        scaled(extent, "fidelity_episodes", 1)
        scaled(extent, "evaluation_episodes", 2)
        scaled(values["experience"], "steps", 4)
        for name, least in (("warm_start_steps", 2), ("steps", 2)):
            scaled(values["train"], name, least)
        for name in ("tasks_per_step", "group_size"):
            scaled(values["train"], name, 2, most=1)
        values |= {"seed": seed, "environment": {"name": env, **values.get("environment", {})}}
        # The agent starts from the experience model's weights, which know the environment's language.
        values["agent"]["model"] = f"hf:{out / 'experience' / 'model'}"
        values["train"] |= {"out": str(out / "agent"), "experience": str(out / "experience")}
        if minutes < USUAL_MINUTES:  # a short fine-tuning shows the loop, not a good dream
            values["train"]["gate"] = "warn"
        return cls(
            out=out,
            minutes=minutes,
            extent=validate(Extent, extent),
            config=validate(Config, values),
        )

    @property
    def splits(self) -> tuple[str, str]:
        """For training, and for evaluation on games that nothing was trained on."""
        names = find_environment(self.config.environment.name).splits or ("train",)
        return names[0], names[-1]

    def recordings(self) -> list[Config]:
        """The settings of each call of `collect`."""
        return [
            self.recording(
                policy, episodes, self.splits[0], self.out / "trajectories" / policy.partition(":")[0]
            )
            for policy, episodes in self.extent.record.items()
        ]

    def recording(self, policy: str, episodes: int, split: str, out: Path) -> Config:
        chosen = CollectConfig(policy=policy, episodes=episodes, split=split, out=out)
        return self.config.model_copy(update={"collect": chosen})

    def data(self) -> list[str]:
        """Recorded and shipped trajectories; the latter are copied, as many as the time allows."""
        found = [str(config.collect.out) for config in self.recordings()]
        for name, count in self.extent.datasets.items():
            copy = self.out / "shipped" / name
            if not copy.exists():
                with TrajectoryWriter(copy) as writer:
                    writer.append(list(islice(read_trajectories(builtin_dataset(name)), count)))
            found.append(str(copy))
        return found

    def training(self, *, updates: int, steps: int | None = None) -> Config:
        """The settings of `train`."""
        train = self.config.train
        changes = {
            "data": self.data(),
            "split": self.splits[0],
            "warm_start_steps": updates,
            "steps": train.steps if steps is None else steps,
        }
        return self.config.model_copy(update={"train": train.model_copy(update=changes)})


class Stages:
    """The results and seconds of finished stages, in a file of the quickstart's directory."""

    def __init__(self, plan: Plan) -> None:
        """
        Raises:
            ConfigError: the directory belongs to a quickstart with other arguments.
            DataError: its file is damaged.
        """
        self._file = plan.out / STAGES_FILE
        config = plan.config
        self._given = {"env": config.environment.name, "minutes": plan.minutes, "seed": config.seed}
        self.done: dict[str, dict[str, Any]] = {}
        if not self._file.exists():
            return
        try:
            stored = json.loads(self._file.read_text(encoding="utf-8"))
            given, self.done = dict(stored["given"]), dict(stored["stages"])
            assert all(isinstance(each["seconds"], float) for each in self.done.values())
        except (OSError, ValueError, LookupError, TypeError, AssertionError, RecursionError):
            raise DataError(
                f"{self._file}: expected the stages of a quickstart; choose another --out"
            ) from None
        for name, value in self._given.items():
            if given.get(name) != value:
                raise ConfigError(
                    f"{plan.out} was started with --{name} {given.get(name)}, got {value}; "
                    "choose another --out"
                )

    @property
    def seconds(self) -> float:
        return float(sum(each["seconds"] for each in self.done.values()))

    def finish(self, stage: str, seconds: float, result: dict[str, Any]) -> None:
        self.done[stage] = {"seconds": round(seconds, 1), **result}
        write_text(self._file, json.dumps({"given": self._given, "stages": self.done}, indent=2) + "\n")
