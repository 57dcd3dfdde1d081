"""Where practice in the dream takes place: tasks of recorded episodes, in their worlds or in like ones.

The members of a rollout group share a seed, and the seed chooses the world; so they share it too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Protocol

from dreamgym.config import nearest_name
from dreamgym.envs.synthetic import SyntheticEnvironment
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.experience.hindsight import hindsight_sheet
from dreamgym.experience.sheet_sampler import CanSucceed, Worlds
from dreamgym.protocols import ExperienceModel, Keys, Retriever
from dreamgym.training.metrics import UNREADABLE
from dreamgym.types import (
    Demonstration,
    FailureKind,
    Outcome,
    Prediction,
    RetrievalFilter,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)

_REMEMBERED = 4096
"""Worlds drawn and kept for the other members of their group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beginning:
    """How an imagined episode begins."""

    sheet: WorldSheet
    first: State | None = None
    """The first state, where it is known; else the experience model imagines it."""


class WorldFor(Protocol):
    """Says in which world a task is dreamt."""

    def __call__(self, task: Task, seed: int) -> Beginning | None:
        """The same arguments, the same world; None for a task that it knows no world for."""
        ...


class RecordedStarts:
    """The worlds of recorded tasks, as they were or recombined within their room."""

    def __init__(self, trajectories: Iterable[Trajectory], *, recombine: CanSucceed | None = None) -> None:
        """
        Args:
            recombine: if given, things are laid anew, such that this still says yes to the task.
        """
        self._found: dict[str, tuple[Task, Beginning]] = {}
        for each in trajectories:
            if each.task.id not in self._found:
                # The dream never lists admissible actions, so its first state does not either.
                first = State(text=each.start.text)
                beginning = Beginning(sheet=each.sheet or hindsight_sheet(each), first=first)
                self._found[each.task.id] = (each.task, beginning)
        self._recombine = recombine
        self._drawn: dict[tuple[str, int], Beginning] = {}
        self._worlds = Worlds(known.sheet for _, known in self._found.values()) if recombine else None

    @property
    def tasks(self) -> list[Task]:
        return [task for task, _ in self._found.values()]

    def __call__(self, task: Task, seed: int) -> Beginning | None:
        _, known = self._found.get(task.id, (None, None))
        if known is None or self._worlds is None or self._recombine is None:
            return known
        if (task.id, seed) not in self._drawn:
            if len(self._drawn) >= _REMEMBERED:
                self._drawn.clear()
            drawn = self._worlds.draw(task, Random(f"{task.id}/{seed}"), self._recombine)
            # Another room has other things to see from its middle: the experience model says which.
            self._drawn[task.id, seed] = known if drawn is None else Beginning(sheet=drawn)
        return self._drawn[task.id, seed]


class DreamFactory:
    """Makes imagined episodes: an `EnvironmentFactory` like any other."""

    def __init__(
        self,
        experience_model: ExperienceModel,
        tasks: Sequence[Task],
        world_for: WorldFor,
        *,
        horizon: int,
        refusal_ends: bool = False,
    ) -> None:
        self.name = tasks[0].environment if tasks else "dream"
        self._model = experience_model
        self._tasks = tuple(tasks)
        self._world_for = world_for
        self._horizon = horizon
        self._refusal_ends = refusal_ends

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(sorted({task.split for task in self._tasks}))

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        found = [task for task in self._tasks if task.split == split]
        if not found:
            raise ConfigError(f"unknown split {split!r}{nearest_name(split, self.splits)}")
        if count is not None and count > len(found):
            raise ConfigError(f"split {split!r} holds {len(found)} tasks, asked for {count}")
        Random(seed).shuffle(found)
        return found[:count]

    def make(self, task: Task, *, seed: int = 0) -> SyntheticEnvironment:
        begin = self._world_for(task, seed)
        if begin is None:
            raise ConfigError(f"task {task.id!r} has no world sheet to be dreamt on")
        return SyntheticEnvironment(
            task,
            self._model,
            begin.sheet,
            horizon=self._horizon,
            refusal_ends=self._refusal_ends,
            first=begin.first,
        )

    async def aclose(self) -> None:
        """Nothing to close: the experience model belongs to whoever made it."""


class ForgivingModel:
    """An experience model that says no, as its environment would, where it gave an action no readable reply.

    A policy that babbles leads the model to places it was never taught. That is the policy's to learn from,
    and not a failure that drops its whole rollout group; outcomes of this kind are marked and counted.
    """

    def __init__(self, inner: ExperienceModel, refusal: str) -> None:
        self._inner = inner
        self._refusal = refusal

    @property
    def name(self) -> str:
        return self._inner.name

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return await self._inner.imagine_start(task, sheet)

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        try:
            return await self._inner.predict(task, sheet, history, state, action)
        except EpisodeFailedError as error:
            if error.kind is not FailureKind.PARSE_ERROR:
                raise
        outcome = Outcome(
            next_state=State(text=self._refusal), reward=0.0, terminated=False, reward_source=UNREADABLE
        )
        return Prediction(outcome=outcome, sheet=sheet, refused=True)


class CappedRetriever:
    """Another retriever, with a limit on the synthetic ones among the demonstrations."""

    def __init__(self, inner: Retriever, max_synthetic: int | None) -> None:
        self._inner = inner
        self._max_synthetic = max_synthetic

    async def nearest(
        self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter]
    ) -> list[list[Demonstration]]:
        capped = [replace(each, max_synthetic=self._max_synthetic) for each in filters]
        return await self._inner.nearest(keys, k=k, filters=capped)
