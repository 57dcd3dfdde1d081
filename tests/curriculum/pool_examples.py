"""Tasks, rollout groups and a tiny language of instructions for tests of the curriculum."""

from __future__ import annotations

from collections.abc import Sequence

from dreamgym.types import (
    Outcome,
    Provenance,
    RolloutGroup,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)

COLOURS = ("red", "green", "blue", "black", "white", "pink")
SHEET = WorldSheet(facts=(("in", "cup 1", "shelf 1"),))


def seed_task(number: int, instruction: str | None = None) -> Task:
    return Task(id=f"seed-{number}", instruction=instruction or f"paint {number}", environment="studio")


def read_colour(instruction: str) -> Task | None:
    """``paint it COLOUR`` or ``make it COLOUR``: two wordings of one task."""
    words = instruction.split()
    if len(words) != 3 or words[0] not in ("paint", "make") or words[1] != "it" or words[2] not in COLOURS:
        return None
    return Task(
        id=f"generated/{words[2]}",
        instruction=f"paint it {words[2]}",
        environment="studio",
        origin="generated",
    )


def group(task: Task, returns: Sequence[float]) -> RolloutGroup:
    def episode(number: int, reward: float) -> Trajectory:
        after = Outcome(next_state=State(text="done"), reward=reward, terminated=True, success=reward > 0)
        return Trajectory(
            id=f"{task.id}/{number}",
            task=task,
            start=State(text="begin"),
            transitions=(Transition(state=State(text="begin"), action="go", outcome=after),),
            provenance=Provenance(source="synthetic", policy="test"),
        )

    return RolloutGroup(
        task=task, trajectories=tuple(episode(number, reward) for number, reward in enumerate(returns))
    )
