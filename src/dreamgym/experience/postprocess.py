"""From an experience model's reply to a prediction: refusals, the world sheet, grader, demonstrations."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from dreamgym.experience.world_sheet import apply
from dreamgym.protocols import Grader, Retriever
from dreamgym.types import (
    Change,
    Demonstration,
    Outcome,
    Prediction,
    RetrievalFilter,
    State,
    Task,
    Transition,
    WorldSheet,
)

_NOTHING = Change()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a model said of one action, in a reply that was understood."""

    next_state: str
    reasoning: str = ""
    change: Change = _NOTHING
    terminated: bool = False
    success: bool | None = None
    """None where it cannot say: then the grader is asked as if success had been claimed."""
    confidence: float | None = None


async def conclude(
    told: Told,
    task: Task,
    sheet: WorldSheet,
    state: State,
    action: str,
    *,
    grader: Grader,
    refusals: Collection[str] = (),
    shown: Sequence[Demonstration] = (),
) -> Prediction:
    """The prediction that a reply amounts to. A refusal changes nothing and earns nothing, whoever grades."""
    refused = told.next_state in refusals
    if refused:
        told = replace(told, change=_NOTHING, terminated=False, success=False)
    after = apply(sheet, told.change)
    outcome = Outcome(
        next_state=State(text=told.next_state),
        reward=0.0,
        terminated=told.terminated,
        reasoning=told.reasoning,
        confidence=told.confidence,
    )
    transition = Transition(state=state, action=action, outcome=outcome)
    claimed = told.success is not False
    verdict = await grader.verdict(task, after, transition, claimed=claimed)
    if refused:
        verdict = replace(verdict, reward=0.0, success=False)
    return Prediction(
        outcome=replace(
            outcome,
            reward=verdict.reward,
            # A grader that sees success ends the episode, and one that sees none takes the model's back.
            terminated=verdict.success or (told.terminated and not told.success),
            success=verdict.success,
            reward_source=verdict.source,
        ),
        sheet=after,
        demonstrations=tuple(shown),
        refused=refused,
    )


async def demonstrations(
    retriever: Retriever | None,
    task: Task,
    state: State,
    action: str,
    *,
    k: int,
) -> Sequence[Demonstration]:
    """The nearest past transitions, never of the same task."""
    if retriever is None or not k:
        return ()
    wanted = RetrievalFilter(environment=task.environment, exclude_task=task.id)
    return (await retriever.search([(state.text, action)], k=k, filters=[wanted]))[0]
