"""Made-up household episodes for the tests of the replay buffer."""

from __future__ import annotations

import random

from dreamgym.types import Outcome, Provenance, Source, State, Task, Trajectory, Transition

PLACES = (
    "cabinet",
    "drawer",
    "shelf",
    "fridge",
    "countertop",
    "garbagecan",
    "microwave",
    "sinkbasin",
    "desk",
)
THINGS = ("apple", "bread", "knife", "mug", "plate", "pan", "egg", "potato", "soapbottle", "book", "pillow")


def state(rng: random.Random) -> State:
    place = f"{rng.choice(PLACES)} {rng.randrange(1, 7)}"
    seen = ", ".join(f"a {rng.choice(THINGS)} {rng.randrange(1, 4)}" for _ in range(rng.randrange(1, 4)))
    return State(
        text=f"You arrive at {place}. On the {place}, you see {seen}.",
        admissible_actions=("look", "inventory", f"open {place}"),
    )


def episode(
    number: int,
    *,
    steps: int = 4,
    environment: str = "household",
    source: Source = "real",
    task: str | None = None,
    reward: float = 1.0,
) -> Trajectory:
    """The same number always gives the same episode."""
    rng = random.Random(number)
    states = [state(rng) for _ in range(steps + 1)]
    transitions = tuple(
        Transition(
            state=states[step],
            action=f"take {rng.choice(THINGS)} {step} from {rng.choice(PLACES)} {number}",
            outcome=Outcome(
                next_state=states[step + 1],
                reward=reward if step == steps - 1 else 0.0,
                terminated=step == steps - 1,
                success=step == steps - 1 and reward > 0,
                reasoning="because" if source == "synthetic" else None,
            ),
            thought="I should look." if step % 2 else None,
        )
        for step in range(steps)
    )
    return Trajectory(
        id=f"{environment}-{source}-{number}",
        task=Task(
            id=task or f"task-{number % 5}", instruction="put a mug in the sink", environment=environment
        ),
        start=states[0],
        transitions=transitions,
        provenance=Provenance(
            source=source,
            policy="noisy:0.3",
            policy_version=number,
            experience_model="dreamer-1" if source == "synthetic" else None,
            recorded_at=1_700_000_000.5 + number,
        ),
    )
