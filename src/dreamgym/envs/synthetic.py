"""The synthetic environment: an experience model behind the interface of a real one.

Nothing that trains or evaluates a policy can tell it from a real environment, except by the provenance that
the trajectory carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dreamgym.config import nearest_name
from dreamgym.errors import ConfigError, EpisodeOverError
from dreamgym.protocols import ExperienceModel
from dreamgym.types import Fact, Outcome, Prediction, State, Task, Transition, WorldSheet

SheetFor = Callable[[Task], WorldSheet]
"""The world sheet on which a task is dreamt: the same for every member of a rollout group."""


class SyntheticEnvironment:
    """One imagined episode."""

    def __init__(
        self,
        task: Task,
        experience_model: ExperienceModel,
        sheet: WorldSheet,
        *,
        horizon: int,
        refusal_ends: bool = False,
        first: State | None = None,
    ) -> None:
        """
        Args:
            horizon: actions after which the episode is truncated.
            refusal_ends: whether an action that the environment says no to ends the episode, without success.
            first: the first state, where it is known; by default the experience model imagines it.
        """
        self.task = task
        self._model = experience_model
        self._first_sheet = self._sheet = sheet
        self._horizon = horizon
        self._refusal_ends = refusal_ends
        self._first = first
        self._prediction: Prediction | None = None
        self._history: list[Transition] = []
        self._state: State | None = None
        self._over: str | None = "has not started"
        self._refused: dict[tuple[frozenset[Fact], str], Prediction] = {}

    async def start(self) -> State:
        if self._over != "has not started":
            raise EpisodeOverError(
                "an environment is one episode: make a new one instead of starting it again"
            )
        self._over = "is starting"
        self._state = self._first or await self._model.imagine_start(self.task, self._first_sheet)
        self._over = None
        return self._state

    async def step(self, action: str) -> Outcome:
        if self._over is not None or self._state is None:
            raise EpisodeOverError(f"this episode {self._over}: step only between start and the end")
        prediction = await self._predicted(self._state, action)
        outcome = prediction.outcome
        if prediction.refused and self._refusal_ends:
            outcome = replace(outcome, terminated=True)
        if not outcome.over and len(self._history) + 1 >= self._horizon:
            outcome = replace(outcome, truncated=True)
        self._history.append(Transition(state=self._state, action=action, outcome=outcome))
        self._state, self._sheet = outcome.next_state, prediction.sheet
        self._prediction = prediction
        if outcome.over:
            self._over = "is over"
        return outcome

    async def _predicted(self, state: State, action: str) -> Prediction:
        """What is refused stays refused while the facts are the same: a model that is wrong once in ten times
        would be asked until it says yes, and a policy learns to ask."""
        key = (frozenset(self._sheet.facts), action)
        known = self._refused.get(key)
        if known is not None:
            return replace(known, sheet=self._sheet)
        found = await self._model.predict(self.task, self._sheet, self._history, state, action)
        if found.refused and self._sheet.facts:
            self._refused[key] = found
        return found

    async def world_sheet(self) -> WorldSheet:
        return self._first_sheet

    @property
    def sheet(self) -> WorldSheet:
        """The facts as they are now."""
        return self._sheet

    @property
    def prediction(self) -> Prediction | None:
        """What the experience model answered last, with the demonstrations it was shown."""
        return self._prediction

    async def aclose(self) -> None:
        self._over = self._over or "is closed"


class SyntheticFactory:
    """Makes imagined episodes of known tasks."""

    def __init__(
        self,
        experience_model: ExperienceModel,
        tasks: Sequence[Task],
        sheet_for: SheetFor,
        *,
        horizon: int = 50,
        refusal_ends: bool = False,
    ) -> None:
        self.name = tasks[0].environment if tasks else "synthetic"
        self._model = experience_model
        self._tasks = tuple(tasks)
        self._sheet_for = sheet_for
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
            raise ConfigError(f"asked for {count} tasks of split {split!r}, there are {len(found)}")
        return found[:count]

    def make(self, task: Task, *, seed: int = 0) -> SyntheticEnvironment:
        return SyntheticEnvironment(
            task,
            self._model,
            self._sheet_for(task),
            horizon=self._horizon,
            refusal_ends=self._refusal_ends,
        )

    async def aclose(self) -> None:
        """Nothing to close: the language model belongs to whoever made it."""
