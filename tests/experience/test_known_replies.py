"""Facts in hindsight for any text: known replies of a task, and what a prompt shows of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.known_replies import (
    Selected,
    mentions,
    newest_counts,
    recorded_replies,
    reply_fact,
    seed_of,
    select,
    task_sheets,
    training_replies,
    with_known_replies,
    with_seed,
)
from dreamgym.experience.recorded_patterns import counter_forms, no_effect, persistent_kinds
from dreamgym.experience.reply_format import refer, resolve
from dreamgym.types import Outcome, Provenance, State, Task, Trajectory, Transition


def episode(name: str, task: str, *steps: tuple[str, str], start: str = "start") -> Trajectory:
    states = [start, *(reply for _, reply in steps)]
    return Trajectory(
        id=name,
        task=Task(id=task, instruction="Get the nuts.", environment="shop"),
        start=State(text=start),
        transitions=tuple(
            Transition(
                state=State(text=state),
                action=action,
                outcome=Outcome(next_state=State(text=reply), reward=0.0, terminated=False),
            )
            for state, (action, reply) in zip(states, steps, strict=False)
        ),
        provenance=Provenance(source="real", policy="random"),
    )


FIRST = episode("1", "t", ("read A", "nuts"), ("insert coin", "Coins: 1."), ("read A", "nuts"))
SECOND = episode("2", "t", ("read B", "gum"), ("insert coin", "Coins: 1."), ("insert coin", "Coins: 2."))
OTHER = episode("3", "u", ("read A", "soda"))


def test_a_task_knows_what_any_of_its_recordings_revealed_and_nothing_of_other_tasks() -> None:
    sheet = task_sheets([FIRST, SECOND, OTHER])["t"]
    known = {(fact[2], fact[3]) for fact in recorded_replies(sheet)}
    assert ("read A", "nuts") in known
    assert ("read B", "gum") in known
    assert ("read A", "soda") not in known


def test_a_recording_is_given_the_replies_of_the_others_and_never_its_own() -> None:
    first, second, other = with_known_replies([FIRST, SECOND, OTHER])
    assert {fact[2] for fact in recorded_replies(first.sheet)} == {"read B", "insert coin"}  # type: ignore[arg-type]
    assert {fact[2] for fact in recorded_replies(second.sheet)} == {"read A", "insert coin"}  # type: ignore[arg-type]
    assert recorded_replies(other.sheet) == []  # type: ignore[arg-type]


def test_a_training_example_never_contains_its_own_reply_as_a_known_one() -> None:
    lonely = replace(episode("4", "v", ("read A", "cake"), ("look", "a room")), sheet=None)
    for position in range(2):
        own = lonely.transitions[position]
        assert (own.action, own.outcome.next_state.text) not in {
            (fact[2], fact[3]) for fact in training_replies(lonely, position)
        }


def test_the_same_action_in_the_same_state_comes_before_the_same_action_elsewhere() -> None:
    facts = [reply_fact("here", "open", "It opens."), reply_fact("there", "open", "It is stuck.")]
    found = select(facts, "here", "open")
    assert found.here == facts[0]
    assert found.elsewhere == (facts[1],)
    assert select(facts, "nowhere", "close") == Selected()


def test_words_that_only_some_replies_share_with_an_action_are_related_to_it() -> None:
    facts = [
        reply_fact("s", "read A", "nuts"),
        reply_fact("s", "read B", "gum"),
        reply_fact("s", "look", "x"),
    ]
    assert [fact[2] for fact in select(facts, "s", "press A").related] == ["read A"]


def test_the_newest_value_of_a_counter_is_shown_unless_the_state_shows_it() -> None:
    many = [
        episode(str(n), str(n), ("insert coin", "Coins: 1."), ("insert coin", "Coins: 2.")) for n in range(6)
    ]
    forms = counter_forms(many)
    assert forms == {"Coins: #."}
    steps = episode(
        "x", "x", ("insert coin", "Coins: 1."), ("look", "a room"), ("look", "a room")
    ).transitions
    assert newest_counts(forms, steps[:2], "a room") == ("Coins: 1.",)
    assert newest_counts(forms, steps[:1], "Coins: 1.") == ()


def test_replies_that_do_not_depend_on_the_state_are_persistent() -> None:
    many = [
        episode(
            str(n), str(n), ("read A", f"nuts {n}"), ("go", f"room {n}"), ("read A", f"nuts {n}"), ("go", "b")
        )
        for n in range(8)
    ]
    assert persistent_kinds(many) == {"read/2"}


@given(st.text(min_size=1), st.lists(st.text(min_size=1), max_size=4))
def test_any_text_survives_being_referred_to(text: str, others: list[str]) -> None:
    named = {f"=else {number}": other for number, other in enumerate(others, 1)}
    assert resolve(refer(text, named), named) == text


def test_a_reply_that_names_a_text_which_the_prompt_does_not_have_is_a_parse_error() -> None:
    with pytest.raises(EpisodeFailedError, match="expected a text or one of"):
        resolve("=here", {"=state": "a room"})


def test_a_sheet_carries_the_seed_of_its_episode() -> None:
    sheet = task_sheets([FIRST])["t"]
    assert seed_of(with_seed(with_seed(sheet, 3), 7)) == 7
    assert recorded_replies(with_seed(sheet, 7)) == recorded_replies(sheet)


def corridor(name: str, task: str, *actions: str) -> Trajectory:
    """A door that `open` opens; `say` is refused, `read` tells the number of the room."""
    opened, steps = False, []
    for action in actions:
        opened |= action == "open"
        replies = {"open": "The door opens.", "read": f"Room {task}.", "say": "What?"}
        steps.append((action, replies.get(action, "You walk out." if opened else "The door is shut.")))
    return episode(name, task, *steps, start=f"You are in room {task}.")


CORRIDORS = [
    corridor(f"{order}{task}", task, *actions)
    for task in "abcdef"
    for order, actions in enumerate(
        (
            ("say", "leave", "say", "leave", "open", "leave"),
            ("leave", "leave", "read", "leave", "open", "say", "leave"),
        )
    )
]


def test_refusals_and_reading_are_found_to_have_no_effect() -> None:
    found = no_effect(CORRIDORS)
    assert found.replies == {"What?", "The door is shut."}
    assert found.kinds == {"read/1"}, "the number of a room is no refusal, but it changes nothing"


def test_a_state_lasts_until_something_has_an_effect() -> None:
    found = no_effect(CORRIDORS)
    turns = found.states(CORRIDORS[1].transitions)
    assert [turn.state.text for turn in turns] == 5 * ["You are in room a."] + 2 * ["The door opens."]
    assert [turn.outcome for turn in turns] == [turn.outcome for turn in CORRIDORS[1].transitions]
    assert found.state_after(turns[:3], "Room a.") == "You are in room a."
    assert found.state_after(turns[:5], "The door opens.") == "The door opens."


def test_a_reply_that_was_known_before_a_refusal_is_known_after_it() -> None:
    first, second = CORRIDORS[:2]
    [known, *_] = with_known_replies(CORRIDORS)
    sheet = known.sheet
    assert sheet is not None
    assert select(recorded_replies(sheet), first.start.text, "leave").here is not None
    assert (first.start.text, "leave", "The door is shut.") in {
        fact[1:] for fact in recorded_replies(task_sheets([first, second, *CORRIDORS[2:]])["a"])
    }


def test_what_happened_to_the_things_of_an_action_is_found_by_their_names() -> None:
    steps = [("press A", "The nuts fall."), ("press B", "The gum falls."), ("read A", "Slot A: nuts.")]
    past = episode("1", "t", *steps).transitions
    assert [each.action for each in mentions(past, "take nuts")] == ["press A", "read A"]
    assert mentions(past, "take cake") == mentions(past, "look") == ()
