"""What travels with an experience model: `run.json` in its run directory, and the settings that commands take
from it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from dreamgym.config import Config, EnvironmentConfig, ExperienceConfig, Section, validate
from dreamgym.data.datasets import PREFIX as BUILTIN
from dreamgym.data.datasets import builtin_dataset
from dreamgym.envs.registry import (
    EnvironmentSpec,
    environment_from_data,
    environment_horizon,
    find_environment,
    is_known,
)
from dreamgym.errors import ConfigError, DataError
from dreamgym.files import atomic_write
from dreamgym.models.registry import names_language_model
from dreamgym.types import Trajectory

RUN_FILE = "run.json"
DEFAULT_HORIZON = 50
"""Actions of an imagined episode where neither settings nor environment limit it."""
SUPPORT = ("min_support", "unsupported")
"""Settings of ``experience`` that act when the model is used, not when it is fine-tuned."""
_ANY_TIME = {
    *(f"experience.{name}" for name in ("steps", "attempts", "refusal_ends", *SUPPORT)),
    *("experience.device", "experience.precision"),
    *("data", "splits", "horizon", "refusals"),
}
"""What may change when a run is resumed."""
_MACHINE_OPTIONS = frozenset({"data", "cache", "processes", "step_timeout"})
"""Options of environments that may differ between machines."""


class ExperienceRun(Section):
    """What an experience model was fine-tuned with: `run.json` in its run directory."""

    environment: EnvironmentConfig
    """Name and options of the environment that the trajectories come from."""
    splits: tuple[str, ...] = ()
    """Of the tasks in the trajectories."""
    data: tuple[str, ...] = ()
    """``builtin:NAME``, an absolute path, or a path relative to the run directory; see `data_sources`."""
    horizon: int = DEFAULT_HORIZON
    """Actions of an imagined episode."""
    refusals: tuple[str, ...] = ()
    """The exact texts with which the environment refuses an action."""
    actor: str | None = None
    """The agent's name among the facts, where it has one."""
    annotator: str
    """The name of the annotator of its trajectories."""
    k: int
    """Demonstrations in a prompt."""
    embedder: str = "lexical"
    experience: ExperienceConfig
    seed: int = 0

    @classmethod
    def of(
        cls,
        config: Config,
        spec: EnvironmentSpec | None,
        *,
        annotator: str,
        splits: Iterable[str] = (),
        prompted: bool = False,
    ) -> Self:
        """The run that a configuration describes; `with_data` adds its trajectories."""
        options = config.environment.options
        horizon = config.train.horizon or environment_horizon(spec, options) or DEFAULT_HORIZON
        return cls(
            environment=config.environment,
            splits=tuple(sorted(set(splits))),
            horizon=horizon,
            refusals=spec.refusals if spec is not None else (),
            actor=spec.actor if spec is not None else None,
            annotator=annotator,
            k=config.replay.demonstrations(prompted=prompted),
            embedder=config.replay.embedder,
            experience=config.experience,
            seed=config.seed,
        )

    @classmethod
    def read(cls, run: Path) -> Self:
        try:
            return validate(cls, json.loads((run / RUN_FILE).read_text(encoding="utf-8")))
        except OSError as error:
            raise DataError(
                f"{run}: expected the run directory of an experience model, found no readable {RUN_FILE} "
                f"({error.strerror}); make one: dreamgym experience train --out {run}"
            ) from None
        except (ValueError, RecursionError, ConfigError) as error:
            raise DataError(
                f"{run}: expected the run directory of an experience model, {RUN_FILE} has: {error}"
            ) from None

    def write(self, run: Path) -> None:
        with atomic_write(run / RUN_FILE) as partial:
            partial.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")

    def with_data(self, run: Path, data: Iterable[Path | str]) -> Self:
        """The same with these trajectories: relative to the run where they lie in it, so that it can be
        moved."""

        def portable(source: Path | str) -> str:
            if str(source).startswith(BUILTIN):
                return str(source)
            path, root = Path(source).resolve(), run.resolve()
            if path.parent == builtin_dataset().resolve().parent:
                return BUILTIN + path.name.removesuffix(".jsonl.xz")
            return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)

        return self.model_copy(update={"data": tuple(portable(source) for source in data)})

    def data_sources(self, run: Path) -> list[str]:
        """Its trajectories as `dataset_path` takes them."""
        return [name if name.startswith(BUILTIN) else str(run.resolve() / name) for name in self.data]

    def check_resumes(self, run: Path) -> None:
        if not (run / "checkpoint.pt").exists():
            return
        started, asked = ExperienceRun.read(run).model_dump(), self.model_dump()
        for part in (started, asked):
            part |= {f"experience.{name}": value for name, value in part.pop("experience").items()}
        for name, value in asked.items():
            if started[name] != value and name not in _ANY_TIME:
                raise ConfigError(
                    f"{run} was started with {name}={started[name]!r}, not {value!r}; "
                    "choose another directory, or resume it with the same settings"
                )


def inherit_settings(config: Config, name: str) -> Config:
    """The settings with environment, options, split, data, horizon and support of a fine-tuned run where they
    set none; those of a prompted language model stay as they are."""
    if names_language_model(name):
        return config
    folder = Path(name)
    run, asked, train = ExperienceRun.read(folder), config.environment, config.train
    if "name" in asked.model_fields_set and asked.name != run.environment.name:
        raise ConfigError(
            f"{name} was fine-tuned on environment {run.environment.name!r}, not {asked.name!r}; "
            "leave environment.name (--env) out, or choose another experience model"
        )
    spec = known_environment(run.environment.name)
    options = {**run.environment.options, **asked.options}
    for option in _differing(spec, run.environment.options, options):
        raise ConfigError(
            f"{name} was fine-tuned with environment.options.{option}="
            f"{run.environment.options.get(option, 'its default')!r}, not {options[option]!r}; "
            "leave the option out, or choose another experience model"
        )
    if config.replay.k not in (None, run.k):
        raise ConfigError(
            f"{name} was fine-tuned with replay.k={run.k}, not {config.replay.k}; leave the setting out, or "
            "choose another experience model"
        )
    update: dict[str, Any] = {}
    if "data" not in train.model_fields_set and run.data:
        update["data"] = run.data_sources(folder)
    if train.horizon is None:
        update["horizon"] = run.horizon
    if "split" not in train.model_fields_set and run.splits and train.split not in run.splits:
        update["split"] = run.splits[0]
    support = {name: getattr(run.experience, name) for name in SUPPORT}
    update = {
        "environment": EnvironmentConfig(name=run.environment.name, options=options),
        "experience": config.experience.model_copy(update=support | support_settings(config)),
        "train": train.model_copy(update=update),
    }
    return config.model_copy(update=update)


def support_settings(config: Config) -> dict[str, Any]:
    """What the settings say about unsupported predictions; they may differ from those of fine-tuning."""
    chosen = config.experience
    return {name: getattr(chosen, name) for name in SUPPORT if name in chosen.model_fields_set}


def _differing(
    spec: EnvironmentSpec | None, before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
    if spec is not None:
        before, after = (validate(spec.options, each).model_dump(mode="json") for each in (before, after))
    return [name for name in after if name not in _MACHINE_OPTIONS and before.get(name, ...) != after[name]]


def known_environment(name: str) -> EnvironmentSpec | None:
    """None for an environment that is not installed: only its trajectories are known."""
    return find_environment(name) if is_known(name) else None


def with_environment_of_data(config: Config, trajectories: Iterable[Trajectory]) -> Config:
    """The settings with the environment that the trajectories name, where the settings name none."""
    found = {trajectory.task.environment for trajectory in trajectories}
    if "name" in config.environment.model_fields_set or len(found) != 1:
        return config
    name = environment_from_data(found.pop())
    environment = EnvironmentConfig(name=name, options=config.environment.options)
    return config.model_copy(update={"environment": environment})


def environment_of_data(name: str, trajectories: Iterable[Trajectory]) -> EnvironmentSpec | None:
    """`known_environment(name)`, which all trajectories must come from."""
    found = sorted({trajectory.task.environment for trajectory in trajectories})
    if found != [name]:
        raise ConfigError(
            f"expected trajectories of the environment {name!r}, got "
            f"{', '.join(map(repr, found)) or 'none'}; name theirs (--env), one experience model for each"
        )
    return known_environment(name)
