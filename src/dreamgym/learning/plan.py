"""What a run of `learn` does: a preset, scaled, with the settings of the user on top."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field

from dreamgym.config import HF_PREFIX, CollectConfig, Config, Section, validate
from dreamgym.data.datasets import PREFIX as BUILTIN
from dreamgym.data.datasets import builtin_experience, dataset_path
from dreamgym.data.trajectories import read_trajectories, shards
from dreamgym.envs.registry import EnvironmentSpec, environment_from_data, find_environment
from dreamgym.errors import ConfigError, DataError
from dreamgym.training.experience_run import ExperienceRun, known_environment
from dreamgym.training.model_setup import check_model
from dreamgym.training.settings_check import check

_SCALED = {"experience": ("steps",), "train": ("warm_start_steps", "steps")}
_ONLY_DOWN = ("tasks_per_step", "group_size")
"""A larger scale means more steps, not larger ones."""


_AUDITS = 5
LORA_RATE = 1e-4
"""Of practice; `presets/pretrained.toml` has that of all weights."""


class Extent(Section):
    """The table ``learn`` of a preset; its other tables are ordinary settings."""

    record: dict[str, int] = Field(description="real episodes by policy, with an expert")
    explore: int = Field(description="real episodes of the policy explore, without one")
    datasets: dict[str, int] = Field(default_factory=dict, description="shipped trajectories by dataset")
    evaluation_episodes: int = Field(ge=1)
    workers: int = Field(0, ge=0, description="processes for rollouts, at most one for each core; 0: none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of every stage."""

    out: Path
    extent: Extent
    config: Config
    data: tuple[str, ...] = ()
    """Given trajectories; without any, they are recorded."""
    experience: str | None = None
    """A given experience model: its run directory, or ``builtin:NAME``."""
    recording: CollectConfig | None = None
    """What to record if the user chose it; else `extent` says."""

    @classmethod
    def load(
        cls,
        environment: str | None,
        out: Path,
        *,
        values: Mapping[str, Any] | None = None,
        data: Sequence[str] = (),
        experience: str | None = None,
        real_steps: int | None = None,
        scale: float = 1.0,
    ) -> Plan:
        """
        Args:
            environment: its name; None for that of the data or of the experience model.
            values: settings by section, which win over the preset.
            real_steps: budget of real steps for audits during practice.
            scale: multiplies the preset's episodes, updates and steps.

        Raises:
            ConfigError: a setting is wrong; nothing was started.
        """
        if not 0 < scale <= 1000:
            raise ConfigError(f"expected a scale above 0 (1: the preset as it is), got {scale:g}")
        name = _environment(environment, data, experience)
        chosen = dict(values or {})
        models = [chosen.get(section, {}).get("model", "") for section in ("experience", "agent")]
        preset = _preset(name, pretrained=any(str(model).startswith(HF_PREFIX) for model in models))
        if chosen.get("environment", {}).get("options"):  # other games than the preset's may be longer
            preset["train"].pop("horizon", None)
        extent = preset.pop("learn")
        _scale(preset, extent, scale)
        merged = _merged(preset, chosen)
        if real_steps is not None:
            _add_audits(merged["train"], real_steps)
        merged["environment"] = {**merged.get("environment", {}), "name": name}
        folder = out / "experience" if experience is None or experience.startswith(BUILTIN) else experience
        # The agent starts from the experience model's weights, which know the environment's language.
        merged.setdefault("agent", {}).setdefault("model", f"{HF_PREFIX}{folder}/model")
        merged["learner"].setdefault("decay_steps", merged["train"]["steps"])  # calm at the end
        if scale < 1:  # a short fine-tuning shows the loop, not a good dream
            merged["train"].setdefault("gate", "warn")
        merged["train"] |= {"out": str(out / "agent"), "experience": str(folder)}
        plan = cls(
            out=out,
            extent=validate(Extent, extent),
            config=validate(Config, merged),
            data=tuple(data),
            experience=experience,
            recording=validate(CollectConfig, chosen["collect"]) if chosen.get("collect") else None,
        )
        plan._check(own_agent="model" in chosen.get("agent", {}))
        return plan

    def _check(self, *, own_agent: bool) -> None:
        config = self.config
        if self.data and self.experience is not None:
            raise ConfigError(
                "expected trajectories (--data) or an experience model (--experience), got both"
            )
        spec = self.spec
        if spec is None and not self.data:
            find_environment(config.environment.name)  # says what is known
        if self.experience is not None:
            ExperienceRun.read(experience_folder(self.experience))
        for source in self.data:
            shards(dataset_path(source))
        if spec is None and config.train.audit_every:
            raise ConfigError(
                f"audits need the real environment, {config.environment.name!r} is not installed: leave "
                "out --real-steps"
            )
        if spec is not None:
            validate(spec.options, config.environment.options, prefix="environment.options.")
        for section, chosen in (("experience", config.experience), ("agent", config.agent)):
            if section == "experience" or own_agent:
                check_model(chosen, section=section)
        check(config, has_experience_model=True)

    @property
    def spec(self) -> EnvironmentSpec | None:
        """None: the environment is not installed, only its trajectories are known."""
        return known_environment(self.config.environment.name)

    def recordings(self, *, expert: bool) -> list[Config]:
        """The settings of each call of `collect`."""
        split = self.spec.splits[0] if self.spec is not None and self.spec.splits else "train"
        folder, chosen = self.out / "trajectories", self.recording
        wanted: list[CollectConfig] = []
        if chosen is not None:
            usual = CollectConfig(policy="mix" if expert else "explore", split=split, out=folder)
            stated = {name: getattr(chosen, name) for name in chosen.model_fields_set}
            wanted.append(_explored(usual.model_copy(update=stated | {"out": folder})))
        elif expert:
            for policy, episodes in self.extent.record.items():
                out = folder / policy.partition(":")[0]
                wanted.append(CollectConfig(policy=policy, episodes=episodes, split=split, out=out))
        else:
            wanted.append(
                _explored(
                    CollectConfig(policy="explore", episodes=self.extent.explore, split=split, out=folder)
                )
            )
        return [self.config.model_copy(update={"collect": each}) for each in wanted]


def with_model(sections: Mapping[str, Mapping[str, Any]], model: str | None, *, lora: bool) -> dict[str, Any]:
    """Settings by section, with the model of experience model and agent. From scratch, the agent starts from
    the weights of the experience model, so only that is named."""
    values: dict[str, Any] = {name: dict(section) for name, section in sections.items()}
    pretrained = model is not None and model.startswith(HF_PREFIX)
    for section in ("experience", "agent") if pretrained or lora else ("experience",):
        chosen = values.setdefault(section, {})
        if model is not None:
            chosen.setdefault("model", model)
        if lora:
            chosen.setdefault("adapter", "lora")
    if lora:
        values.setdefault("learner", {}).setdefault("learning_rate", LORA_RATE)
    return values


def _add_audits(train: dict[str, Any], real_steps: int) -> None:
    """Audits at equal distances, each with an equal part of the budget."""
    every = train.setdefault("audit_every", max(1, train["steps"] // _AUDITS))
    train.setdefault("audit_steps", max(1, real_steps * every // max(every, train["steps"])))
    train["real_steps"] = real_steps


def _explored(collect: CollectConfig) -> CollectConfig:
    """A black box needs several episodes of a task: what one reveals, the others can repeat."""
    if collect.policy == "explore" and "episodes_per_task" not in collect.model_fields_set:
        return collect.model_copy(update={"episodes_per_task": 8})
    return collect


def _environment(name: str | None, data: Sequence[str], experience: str | None) -> str:
    if name is not None:
        return name
    if experience is not None:
        return ExperienceRun.read(experience_folder(experience)).environment.name
    for source in data:
        first = next(iter(read_trajectories(dataset_path(source))), None)
        if first is None:
            raise DataError(f"{source}: expected trajectories, found none")
        return environment_from_data(first.task.environment)
    raise ConfigError("expected an environment (--env), trajectories (--data) or an experience model")


def experience_folder(name: str) -> Path:
    """The run directory of an experience model, which may be shipped (``builtin:NAME``)."""
    return builtin_experience(name.removeprefix(BUILTIN)) if name.startswith(BUILTIN) else Path(name)


def _preset(environment: str, *, pretrained: bool) -> dict[str, Any]:
    folder = files("dreamgym.learning") / "presets"
    own = folder / f"{environment}.toml"
    found = tomllib.loads((folder / "default.toml").read_text("utf-8"))
    if own.is_file():
        found = _merged(found, tomllib.loads(own.read_text("utf-8")), replaced=("record", "datasets"))
    if pretrained:
        found = _merged(found, tomllib.loads((folder / "pretrained.toml").read_text("utf-8")))
        for name in ("warm_start_lr", "warm_start_muon_lr"):
            found["train"].pop(name)
        found["learner"].pop("muon_lr")
    return found


def _merged(
    base: Mapping[str, Any], over: Mapping[str, Any], replaced: Sequence[str] = ("options",)
) -> dict[str, Any]:
    """Nested tables are merged, apart from those that are replaced as a whole."""
    found = dict(base)
    for name, value in over.items():
        both = isinstance(value, Mapping) and isinstance(found.get(name), Mapping) and name not in replaced
        found[name] = _merged(found[name], value, replaced) if both else value
    return found


def _scale(preset: dict[str, Any], extent: dict[str, Any], scale: float) -> None:
    def scaled(table: dict[str, Any], name: str, least: int, factor: float = scale) -> None:
        table[name] = max(least, round(table[name] * factor))

    for policy in extent["record"]:
        scaled(extent["record"], policy, 4)
    for dataset in extent.get("datasets", {}):
        scaled(extent["datasets"], dataset, 24, min(1.0, scale))
    scaled(extent, "explore", 8)
    scaled(extent, "evaluation_episodes", 2)
    for section, names in _SCALED.items():
        for name in names:
            scaled(preset[section], name, 2)
    for name in _ONLY_DOWN:
        scaled(preset["train"], name, 2, min(1.0, scale))
