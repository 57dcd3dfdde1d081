"""The dream: an experience model with tasks, start states, grader and replay buffer, as a family of
environments."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

from dreamgym.config import Config, TrainConfig, is_database, validate
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import environment_horizon
from dreamgym.envs.synthetic import EpisodeStart, StartFor, SyntheticFactory
from dreamgym.errors import ConfigError
from dreamgym.experience.black_box import BlackBoxExperienceModel
from dreamgym.experience.recorded_rules import RecordedRules
from dreamgym.experience.rule_mining import RecordedStep, mine_rules, recorded_steps
from dreamgym.experience.world_sheet import TaskCheck
from dreamgym.models.registry import LanguageModels, names_language_model
from dreamgym.protocols import ExperienceModel, Retriever
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import make_embedder
from dreamgym.replay.sqlite import copy_store
from dreamgym.replay.store import records
from dreamgym.training.dream import RecordedStarts
from dreamgym.training.experience_loading import (
    OWN_BUFFER,
    demonstrations_shown,
    known_starts,
    load_experience_model,
)
from dreamgym.training.experience_run import (
    DEFAULT_HORIZON,
    inherit_settings,
    known_environment,
    with_environment_of_data,
)
from dreamgym.types import RolloutGroup, Task, Trajectory, Transition

_REFUSAL = "Nothing happens."
"""Where the environment names no text of its own."""
_CACHED_REPLIES = 20_000
"""Of the experience model: a third of the requests of a step are repeats."""
_BATCH = 50
"""Trajectories stored in one transaction."""
OnRow = Callable[[int, int], None]
"""Receives how many of how many trajectories are in the buffer."""
Data = str | Path | Trajectory
BeginAfter = Callable[[Task], Sequence[Transition]]


class Dream(SyntheticFactory):
    """An experience model as a family of environments: `EnvironmentFactory`, like a real environment.

    Example::

        dream = dg.Dream.load("runs/experience")
        groups = await dg.rollout(agent, dream, (await dream.tasks())[:8], group_size=8)
        await dream.remember(groups)        # fresh transitions become demonstrations

    `load` copies the replay buffer of the experience model, so that `remember` never changes the model's own.
    """

    def __init__(
        self,
        experience_model: ExperienceModel,
        trajectories: Iterable[Trajectory],
        config: Config | None = None,
        *,
        buffer: ReplayBuffer | None = None,
        start_for: StartFor | None = None,
        refusal_ends: bool = False,
    ) -> None:
        """`start_for` gives the starts of tasks that no trajectory holds, such as generated ones."""
        config = config or Config()
        chosen, spec = config.train, known_environment(config.environment.name)
        self.trajectories = list(trajectories)
        place = (config.environment.name, chosen.split)
        recorded = [t for t in self.trajectories if (t.task.environment, t.task.split) == place]
        if not recorded:
            raise ConfigError(
                f"expected trajectories of environment {place[0]!r}, split {place[1]!r} to take tasks from, "
                f"train.data={chosen.data} has none; set environment.name, train.split or train.data"
            )
        black_box = isinstance(experience_model, BlackBoxExperienceModel)
        imagined = chosen.start_states == "imagined"
        if imagined and not black_box:
            raise ConfigError(
                "train.start_states=imagined: this experience model has a world sheet, which is disclosed or "
                "recorded; only a black box (experience.facts=replies) imagines its facts; use recorded"
            )
        starts = RecordedStarts(
            recorded,
            recombine=_can_succeed(config),
            known_replies=black_box,
            imagined=chosen.imagined_fraction if imagined else 0.0,
        )
        refusals = (spec.refusals if spec is not None else ()) or (_REFUSAL,)
        self.experience_model = experience_model
        self.buffer = buffer
        self.split = chosen.split
        self.config = config
        self.start_for = start_for
        self.models: LanguageModels | None = None
        """Opens further language models, which share endpoints and budget."""
        self.begin_after: BeginAfter | None = None
        """Turns of a known episode of a task that its imagined episodes begin after; None: no turns."""
        self._resources: list[Any] = []

        def start(task: Task, seed: int) -> EpisodeStart | None:
            found = starts(task, seed)
            if found is None and self.start_for is not None:
                found = self.start_for(task, seed)
            if found is not None and self.begin_after is not None:
                found = replace(found, turns=tuple(self.begin_after(task)))
            return found

        super().__init__(
            experience_model,
            starts.tasks[: chosen.num_tasks],
            start,
            horizon=chosen.horizon
            or environment_horizon(spec, config.environment.options)
            or DEFAULT_HORIZON,
            refusal_ends=refusal_ends,
            unreadable=refusals[0],
            admissible_actions=spec.dreamt_actions if spec is not None else None,
        )

    @classmethod
    def load(
        cls,
        experience: str | Path,
        config: Config | None = None,
        *,
        data: Data | Iterable[Data] | None = None,
        buffer: str | Path | None = None,
        **settings: Any,
    ) -> Self:
        """Load an experience model by name, with everything that training in it needs.

        Args:
            experience: the run directory of a fine-tuned model, or a language model to prompt
                (``endpoint:NAME``, ``hf:NAME_OR_PATH``).
            config: endpoints, prompt and environment of a prompted model; defaults otherwise.
            data: trajectories, or files and directories of them; by default the data of the run.
            buffer: file of the replay buffer; by default a temporary one, deleted by `aclose`.
            settings: settings of the section ``train``, such as ``split``, ``horizon`` or ``reward``.

        Raises:
            ConfigError: the name or the settings cannot be used.
            DataError: the directory is not an experience run.
        """
        config, name = config or Config(), str(experience)
        train = config.train.model_dump(exclude_unset=True) | {"experience": name} | settings
        config = config.model_copy(update={"train": validate(TrainConfig, train, prefix="train.")})
        trajectories = None if data is None else read_data(data)
        if names_language_model(name):
            if trajectories is None:
                raise ConfigError(
                    f"{name} is prompted, so it has no data of its own: pass data=, recorded episodes"
                )
            config = with_environment_of_data(config, trajectories)
        config = inherit_settings(config, name)
        if trajectories is None:
            trajectories = read_data(config.train.data)
        resources: list[Any] = []
        if buffer is None:
            resources.append(temporary := tempfile.TemporaryDirectory(prefix="dreamgym-"))
            buffer = Path(temporary.name) / OWN_BUFFER
        opened = _run_sync(open_buffer(str(buffer), config, trajectories))
        dream = cls.create(config, trajectories, opened)
        dream._resources += [*resources, opened]
        return dream

    @classmethod
    def create(
        cls,
        config: Config,
        trajectories: Sequence[Trajectory],
        buffer: ReplayBuffer | None,
        *,
        models: LanguageModels | None = None,
        start_for: StartFor | None = None,
        retriever: Retriever | None = None,
    ) -> Self:
        """With the experience model of ``train.experience``, over a buffer that is open; a `retriever` is
        searched in its place."""
        if config.train.experience is None:
            raise ConfigError("expected train.experience to name the run of an experience model")
        loaded = load_experience_model(
            config.train.experience,
            config,
            reward=config.train.reward,
            retriever=retriever or buffer,
            models=models,
            starts=known_starts(trajectories),
            rules=_rules_of_data(config, trajectories),
            cached_replies=_CACHED_REPLIES,
        )
        dream = cls(
            loaded.model,
            trajectories,
            config,
            buffer=buffer,
            start_for=start_for,
            refusal_ends=loaded.run.experience.refusal_ends,
        )
        dream.models = loaded.models
        dream._resources.append(getattr(loaded.model, "language_model", None))
        if models is None:
            dream._resources.append(loaded.models)
        return dream

    @property
    def known_tasks(self) -> tuple[Task, ...]:
        return self._tasks

    async def tasks(
        self, split: str | None = None, count: int | None = None, *, seed: int = 0
    ) -> Sequence[Task]:
        """The tasks that can be imagined, in the order that `seed` gives."""
        return await super().tasks(split or self.split, count, seed=seed)

    async def remember(self, groups: Iterable[RolloutGroup]) -> int:
        """Add the transitions of rollouts to the replay buffer; returns the number of new ones."""
        if self.buffer is None:
            raise ConfigError("this dream has no replay buffer; open it with Dream.load")
        return await self.buffer.add(
            [row for group in groups for each in group.trajectories for row in records(each)]
        )

    async def aclose(self) -> None:
        """Close what `load` opened."""
        while self._resources:
            resource = self._resources.pop()
            if hasattr(resource, "aclose"):
                await resource.aclose()
            elif resource is not None:
                (resource.close if hasattr(resource, "close") else resource.cleanup)()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


def read_data(data: Data | Iterable[Data]) -> list[Trajectory]:
    """Trajectories from themselves, from files and directories, or from ``builtin:NAME``."""
    if isinstance(data, str | Path | Trajectory):
        data = [data]
    found: list[Trajectory] = []
    for each in data:
        found += [each] if isinstance(each, Trajectory) else read_trajectories(dataset_path(str(each)))
    return found


async def open_buffer(
    store: str,
    config: Config,
    trajectories: Sequence[Trajectory],
    *,
    shown: bool = True,
    on_row: OnRow | None = None,
) -> ReplayBuffer:
    """The replay buffer of a run: other runs with the same experience model must not see its rows. With
    `shown`, it starts with the trajectories."""
    name = config.train.experience
    path = None if is_database(store) else Path(store)
    if shown and name is not None and not names_language_model(name) and path and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        copy_store(
            Path(name) / OWN_BUFFER,
            path,
            embedder=make_embedder(config.replay.embedder).identity,
            trajectories={each.id for each in trajectories if each.transitions},
        )
    buffer = ReplayBuffer.open_configured(store, config.replay)
    try:
        known = await buffer.known([each.id for each in trajectories]) if shown else {}
        missing = [each for each in trajectories if len(known.get(each.id, ())) < len(each)] if shown else []
        for start in range(0, len(missing), _BATCH):
            some = missing[start : start + _BATCH]
            await buffer.add([row for each in some for row in records(each)])
            if on_row is not None:
                on_row(start + len(some), len(missing))
    except BaseException:
        buffer.close()
        raise
    return buffer


def uses_demonstrations(config: Config) -> bool:
    """Whether the experience model of the settings is shown demonstrations."""
    name = config.train.experience
    return config.train.mode == "dream" and name is not None and demonstrations_shown(name, config) > 0


def _can_succeed(config: Config) -> TaskCheck | None:
    if config.train.start_states != "recombined":
        return None
    spec = known_environment(config.environment.name)
    if spec is None or spec.can_succeed is None:
        raise ConfigError(
            f"train.start_states=recombined: environment {config.environment.name!r} has no check that "
            "a task can succeed from other facts (can_succeed); use recorded"
        )
    return spec.can_succeed


def _rules_of_data(config: Config, trajectories: Sequence[Trajectory]) -> RecordedRules | None:
    """What trajectories with facts prove about actions, for a prompted model; a run has its own rules."""
    spec = known_environment(config.environment.name)
    if spec is None or spec.annotator is None or not names_language_model(config.train.experience or ""):
        return None
    known = recorded_steps(trajectories, spec.annotator(), spec.refusals)

    async def listed() -> list[RecordedStep]:
        return [step async for step in known]

    steps = _run_sync(listed())
    return mine_rules(steps, actor=spec.actor) if steps else None


def _run_sync(coroutine: Any) -> Any:
    """Run a coroutine to its end, also while an event loop runs in this thread (a notebook)."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
