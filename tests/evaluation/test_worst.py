"""The worst actions and states of an experience model, and what to do about each."""

from __future__ import annotations

from typing import Any

import pytest

from dreamgym.evaluation.one_step import StepRecord
from dreamgym.evaluation.worst import AdviceSettings, Kinds, worst_kinds
from dreamgym.types import FailureKind, Outcome, State

REFUSED = "The machine does not react."


def outcome(text: str, *, success: bool = False) -> Outcome:
    return Outcome(next_state=State(text=text), reward=float(success), terminated=success, success=success)


def record(
    action: str,
    expected: str,
    predicted: str | None,
    *,
    episode: int = 0,
    state: str = "A machine.",
    **how: Any,
) -> StepRecord:
    return StepRecord(
        trajectory_id=f"episode {episode}",
        action=action,
        state=state,
        real=outcome(expected),
        predicted=None if predicted is None else outcome(predicted, **how),
        failure=FailureKind.PARSE_ERROR if predicted is None else None,
    )


def machine(right: int, total: int = 64) -> list[StepRecord]:
    """`insert coin` as counted and `look` always right."""
    coins = [
        record("insert coin", "coins left 2", f"coins left {2 if n < right else 1}", episode=n, state=f"s{n}")
        for n in range(total)
    ]
    return [*coins, *(record("look", "A machine.", "A machine.", episode=n) for n in range(total))]


def settings(**changes: Any) -> AdviceSettings:
    given: dict[str, Any] = {"environment": "machine", "refusals": (REFUSED,), "steps": 100}
    return AdviceSettings(**given | changes)


def test_the_worst_action_is_named_with_its_counts_an_example_and_advice() -> None:
    found = worst_kinds(machine(right=20), settings(exchange_numbers=True))
    (worst,) = found.actions
    assert (worst.kind, worst.wrong, worst.exact.count) == ("insert coin", 44, 64)
    assert worst.exact.high is not None
    assert worst.exact.high < 0.5
    assert str(worst).startswith(
        "`insert coin`: 31% of 64 replies exact; expected 'coins left 2', predicted 'coins left 1'; "
    )
    assert worst.advice == "only numbers are wrong: fine-tune with experience.exchange_numbers=false"
    assert "| `insert coin` | 31.2%" in found.markdown()


def test_one_wrong_reply_of_one_is_not_worse_than_many() -> None:
    records = [*machine(right=20), record("kick", "Ouch.", "Nothing.", episode=3)]
    assert [each.kind for each in worst_kinds(records, settings()).actions] == ["insert coin", "kick"]


@pytest.mark.parametrize(
    ("records", "changes", "expected"),
    [
        ([record("press", REFUSED, "You take the nuts.")], {}, "collect --env machine --policy explore"),
        ([record("press", "Nothing.", "Nuts!", success=True)], {}, "its failures are not known"),
        ([record("press", "Nothing.", "Nuts!", success=True)], {"policies": None}, "add traces of this kind"),
        ([record("press", "Nothing.", None)], {}, "fine-tune longer (experience.steps, 100 now)"),
        ([record("press", "Nothing.", None)], {"prompted": True}, "replay.k"),
        (
            [record("press", "Nuts.", "Gum.", episode=1), record("press", "Gum.", "Gum.", episode=2)],
            {},
            "raise experience.history (1 now)",
        ),
        (
            [
                record("press", "Nuts.", "Gum.", episode=1, state="A" * 64 + "nuts"),
                record("press", "Gum.", "Gum.", episode=2, state="A" * 64 + "gum"),
            ],
            {},
            "cut to 64 characters: raise experience.text_limit",
        ),
        (
            [record("press", "Nuts.", "Gum.")],
            {
                "recorded": [("e", "press")] * 7 + [("e", "look")],
                "policies": ("noisy:0.5", "clumsy:0.5"),
                "options": {"slots": 3, "kind": "hot drinks"},
            },
            "7 examples were recorded; record more of this kind: dreamgym collect --env machine "
            "--set environment.options.slots=3 --set 'environment.options.kind=hot drinks' --policy noisy",
        ),
    ],
)
def test_advice_follows_from_what_was_measured(
    records: list[StepRecord], changes: dict[str, Any], expected: str
) -> None:
    assert expected in worst_kinds(records, settings(**changes)).actions[0].advice


def test_kinds_mask_what_varies_between_episodes_and_keep_the_rest() -> None:
    actions = [
        (f"e{number}", text)
        for number, food in enumerate(["carrot", "red apple", "pork chop", "banana"])
        for text in (
            f"cook {food} with stove",
            f"go to shelf {number}",
            "insert coin",
            f'{{"name": "close_ticket", "arguments": {{"id": "T-{number}"}}}}',
        )
    ]
    kind = Kinds(actions)
    assert kind("cook purple onion with stove") == "cook … with stove"
    assert kind("go to shelf 9") == "go to shelf …"
    assert kind("insert coin") == "insert coin"
    slots = Kinds([(f"e{number}", f"press {slot}") for number in range(3) for slot in "ABC"])
    assert slots("press B") == "press …", "a single capital letter is an id"
    ticket = kind('{"name": "close_ticket", "arguments": {"id": "T-77"}}')
    assert ticket == kind(actions[3][1])
    assert "close_ticket" in ticket
    assert "77" not in ticket


def test_states_are_named_too() -> None:
    records = [
        record(
            "look", "x", "y" if number % 2 else "x", episode=number, state=f"Coins left {number}. Price 3."
        )
        for number in range(20)
    ]
    (state,) = worst_kinds(records, settings()).states
    assert state.kind == "Coins left … . Price … ."
    assert state.wrong == 10
