"""Practice with exchanged names: the policy sees other names, environment and trajectory the original ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dreamgym.renaming import Names, Renaming, RenamingPolicy, renamed_copies, renaming_policies
from dreamgym.types import (
    Decision,
    Outcome,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
)

PRODUCTS = ("cake", "chips", "gum", "nuts")
NAMES = Names(classes=(PRODUCTS,), ids=True)
TASK = Task(id="t", instruction="Buy nuts for ticket 4711.", environment="shop")
START = State(text="Slot A: gum. Slot B: nuts.", admissible_actions=("press A", "take nuts"))


class Taker:
    """Takes what its task names, and keeps what it has read."""

    name = "taker"

    def __init__(self) -> None:
        self.read: list[str] = []

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        self.read += [task.instruction, state.text, *(past.outcome.next_state.text for past in history)]
        product = next(each for each in PRODUCTS if each in task.instruction)
        number = task.instruction.split()[-1].rstrip(".")
        return Decision(action=f"take {product} {number}")


def turn(action: str, reply: str) -> Transition:
    outcome = Outcome(next_state=State(text=reply), reward=0.0, terminated=False)
    return Transition(state=START, action=action, outcome=outcome)


def seed_that_changes_nuts() -> int:
    return next(seed for seed in range(99) if "nuts" not in Renaming(NAMES, seed).text("nuts"))


async def test_the_policy_reads_other_names_and_the_environment_gets_the_original_ones() -> None:
    inner = Taker()
    policy = RenamingPolicy(inner, Renaming(NAMES, seed_that_changes_nuts()))
    decision = await policy.act(TASK, [turn("press B", "The nuts fall.")], START)
    assert decision.action == "take nuts 4711"
    assert not any("nuts" in text or "4711" in text for text in inner.read[::2])


async def test_members_of_a_group_share_their_names_and_groups_do_not() -> None:
    seen: list[str] = []

    class Recorder(Taker):
        async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
            seen.append(task.instruction)
            return Decision(action="look")

    make = renaming_policies(lambda environment, name, seed: Recorder(), NAMES)
    for name in ("dream-1-00", "dream-1-01", "dream-2-00", "dream-3-00", "dream-4-00"):
        await make(None, name, 0).act(TASK, (), START)  # type: ignore[arg-type]
    assert seen[0] == seen[1]
    assert len(set(seen)) > 2


def test_copies_of_a_demonstration_are_consistent_and_the_demonstration_itself_is_kept() -> None:
    recorded = Trajectory(
        id="r",
        task=TASK,
        start=START,
        transitions=(turn("take nuts 4711", "You take the nuts."),),
        provenance=Provenance(source="real", policy="expert"),
    )
    found = renamed_copies([recorded], NAMES, copies=5, seed=0)
    assert found[0] == recorded
    assert len({each.task.instruction for each in found}) > 2
    for each in found:
        product, number = each.task.instruction.split()[1], each.task.instruction.split()[-1].rstrip(".")
        assert each.transitions[0].action == f"take {product} {number}"
        assert each.transitions[0].outcome.next_state.text == f"You take the {product}."
    assert renamed_copies([recorded], Names(), copies=5, seed=0) == [recorded]


def test_names_are_found_in_recordings_and_numbers_are_ids_where_actions_hold_them() -> None:
    def recording(number: int, product: str, action: str) -> Trajectory:
        task = replace(TASK, id=f"t{number}", instruction=f"Buy {product} now.")
        return Trajectory(
            id=f"r{number}",
            task=task,
            start=State(text="A shop."),
            transitions=tuple(turn(action, f"You see {product} here.") for _ in range(4)),
            provenance=Provenance(source="real", policy="explore"),
        )

    cases = [recording(n, PRODUCTS[n % 4], "look") for n in range(16)]
    assert Names.of(cases) == Names(classes=(PRODUCTS,), ids=False)
    assert Names.of([*cases, recording(17, "gum", "open 4711")]).ids


@given(
    st.lists(st.sampled_from([*PRODUCTS, "1234", "12", "3.555", "999999", "take", "nutshell"]), max_size=12),
    st.integers(0, 1000),
)
def test_every_exchange_can_be_undone(words: list[str], seed: int) -> None:
    renaming, text = Renaming(NAMES, seed), " ".join(words)
    changed = renaming.text(text)
    assert renaming.original(changed) == text
    assert [len(word) for word in changed.split() if word[0].isdigit()] == [
        len(word) for word in words if word[0].isdigit()
    ]
    assert renaming.text(text) == changed
