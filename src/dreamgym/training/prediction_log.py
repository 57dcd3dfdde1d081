"""Keeps what an experience model was shown and what it changed, for the few episodes that a run keeps.

A trajectory holds states, actions and reasoning. The demonstrations behind a prediction and the facts that it
ended and began are known only while it is made. `predictions.jsonl` in the run's folder has them, one line
per step of a kept episode, and `dreamgym report` shows them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dreamgym.protocols import ExperienceModel
from dreamgym.training.metrics import MetricsLog
from dreamgym.types import Demonstration, Fact, Prediction, State, Task, Trajectory, Transition, WorldSheet

PREDICTIONS = "predictions.jsonl"


class WatchedModel:
    """An experience model like the one it is made of; its predictions can be asked for until forgotten."""

    def __init__(self, inner: ExperienceModel) -> None:
        self._inner = inner
        # A prediction is found by the very state that it led to, which is part of the trajectory. Holding the
        # state here keeps that identity from being given to another one.
        self._made: dict[int, tuple[WorldSheet, Prediction]] = {}

    @property
    def name(self) -> str:
        return self._inner.name

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return await self._inner.imagine_start(task, sheet)

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        prediction = await self._inner.predict(task, sheet, history, state, action)
        self._made[id(prediction.outcome.next_state)] = (sheet, prediction)
        return prediction

    def behind(self, transition: Transition) -> tuple[WorldSheet, Prediction] | None:
        """The world sheet before a transition, and what was predicted; None for one that it did not make."""
        return self._made.get(id(transition.outcome.next_state))

    def forget(self) -> None:
        self._made.clear()


class PredictionLog:
    """Appends what was behind the transitions of kept episodes."""

    def __init__(self, path: Path, model: WatchedModel) -> None:
        self._log = MetricsLog(path)
        self._model = model

    def keep(self, trajectories: Iterable[Trajectory]) -> None:
        """Write down what is known of these, and forget about all others."""
        for trajectory in trajectories:
            for row in prediction_rows(self._model, trajectory):
                self._log.append(row)
        self._model.forget()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._log.close()


def prediction_rows(model: WatchedModel, trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """One row per transition that the model made; the first one has the world sheet of the start too."""
    for position, transition in enumerate(trajectory.transitions):
        found = model.behind(transition)
        if found is None:
            continue
        before, prediction = found
        ended, begun = _changed(before, prediction.sheet)
        yield {
            "trajectory": trajectory.id,
            "position": position,
            **({"sheet": before.facts} if position == 0 else {}),
            "ended": ended,
            "begun": begun,
            "refused": prediction.refused,
            "demonstrations": [_row(each) for each in prediction.demonstrations],
        }


def _changed(before: WorldSheet, after: WorldSheet) -> tuple[list[Fact], list[Fact]]:
    """The facts that ended and those that began, in the order of their sheets."""
    old, new = set(before.facts), set(after.facts)
    return [fact for fact in before.facts if fact not in new], [f for f in after.facts if f not in old]


def _row(demonstration: Demonstration) -> dict[str, Any]:
    transition = demonstration.transition
    return {
        "state": transition.state.text,
        "action": transition.action,
        "next_state": transition.outcome.next_state.text,
        "similarity": round(demonstration.similarity, 4),
        "trajectory": demonstration.trajectory_id,
        "source": demonstration.provenance.source,
    }
