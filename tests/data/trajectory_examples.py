"""Arbitrary trajectories for Hypothesis, and small ones for examples."""

from __future__ import annotations

from hypothesis import strategies as st

from dreamgym.types import (
    JsonValue,
    Outcome,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)

# Every character that UTF-8 can carry: NUL, controls, look-alikes, line separators, astral planes.
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=30)
names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
numbers = st.floats(allow_nan=False, allow_infinity=False)
optional_texts = st.none() | texts
states = st.builds(State, text=texts, admissible_actions=st.none() | st.lists(texts, max_size=3).map(tuple))
json_values: st.SearchStrategy[JsonValue] = st.recursive(
    st.none() | st.booleans() | st.integers() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=5,
)
tasks = st.builds(
    Task,
    id=names,
    instruction=texts,
    environment=names,
    split=texts,
    family=texts,
    origin=st.sampled_from(["seed", "generated"]),
    parameters=st.dictionaries(texts, json_values, max_size=3),
)


def provenances(integers: st.SearchStrategy[int]) -> st.SearchStrategy[Provenance]:
    return st.builds(
        Provenance,
        source=st.sampled_from(["real", "synthetic"]),
        policy=texts,
        policy_version=integers,
        experience_model=optional_texts,
        recorded_at=numbers,
    )


@st.composite
def trajectories(
    draw: st.DrawFn,
    *,
    min_turns: int = 0,
    max_number: float | None = None,
    whole: st.SearchStrategy[int] | None = None,
) -> Trajectory:
    """Any trajectory; rewards up to `max_number`, integers from `whole`, where a format has limits."""
    rewards = st.floats(-max_number, max_number) if max_number else numbers
    integers = st.integers() if whole is None else whole
    state = start = draw(states)
    transitions = []
    length = draw(st.integers(min_turns, 4))
    for position in range(length):
        last = position == length - 1
        outcome = Outcome(
            next_state=draw(states),
            reward=draw(rewards),
            terminated=last and draw(st.booleans()),
            truncated=last and draw(st.booleans()),
            success=draw(st.booleans()),
            reasoning=draw(optional_texts),
            confidence=draw(st.none() | numbers),
            reward_source=draw(texts),
        )
        transitions.append(
            Transition(state=state, action=draw(texts), outcome=outcome, thought=draw(optional_texts))
        )
        state = outcome.next_state
    facts = st.lists(st.lists(texts, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)
    return Trajectory(
        id=draw(names),
        task=draw(tasks),
        start=start,
        transitions=tuple(transitions),
        provenance=draw(provenances(integers)),
        seed=draw(integers),
        sheet=draw(st.none() | st.builds(WorldSheet, facts=facts)),
    )


def episode(identity: str, *, turns: int = 3, success: bool = True, family: str = "treasure") -> Trajectory:
    """A short made-up episode that ends in the given way."""
    state = start = State(text="You stand in a hall.", admissible_actions=("go north", "look"))
    transitions = []
    for position in range(turns):
        last = position == turns - 1
        after = State(text=f"You are in room {position}.", admissible_actions=("go north", "look"))
        outcome = Outcome(
            next_state=after,
            reward=float(last and success),
            terminated=last and success,
            truncated=last and not success,
            success=last and success,
        )
        transitions.append(Transition(state=state, action="go north", outcome=outcome))
        state = after
    return Trajectory(
        id=identity,
        task=Task(
            id=f"task-{identity}", instruction="Find the chest.", environment="textworld", family=family
        ),
        start=start,
        transitions=tuple(transitions),
        provenance=Provenance(source="real", policy="expert"),
    )
