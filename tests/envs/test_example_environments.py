"""The example environments for black-box studies: opened by reference, with hidden facts and many tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dreamgym as dg
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import find_environment, is_known
from dreamgym.errors import ConfigError
from dreamgym.types import Outcome, State, Task
from tests.conftest import ROOT

FOLDER = ROOT / "examples" / "environments"
VENDING, HELPDESK = f"{FOLDER}/vending.py:Vending", f"{FOLDER}/helpdesk.py:HelpDesk"
LAKE = f"{FOLDER}/frozen_lake.py:FrozenLake"
ALL = pytest.mark.parametrize("name", [VENDING, HELPDESK, LAKE], ids=["vending", "helpdesk", "lake"])


async def play(name: str, actions: Sequence[str], task: Task | None = None) -> tuple[State, list[Outcome]]:
    factory = dg.make(name)
    if task is None:
        (task,) = await factory.tasks("train", 1)
    environment = factory.make(task)
    start = await environment.start()
    return start, [await environment.step(action) for action in actions]


async def task_where(name: str, wanted: Any) -> tuple[Task, Any]:
    """A training task whose plain object satisfies a condition, and the object."""
    factory: Any = dg.make(name)
    for task in await factory.tasks("train", 500):
        plain = factory.make(task)._plain
        if wanted(plain):
            return task, plain
    raise AssertionError("no such task")


def facts_of(plain: Any) -> str:
    """The hidden facts of a task, whatever the environment calls them."""
    return repr(next(getattr(plain, name) for name in ("machine", "desk", "map") if hasattr(plain, name)))


@ALL
async def test_it_meets_the_contract_of_environments(name: str) -> None:
    report = await dg.check_environment(name, episodes=20, concurrency=8)
    assert report.passed, report.to_dict()


@ALL
async def test_it_has_many_tasks_and_no_task_is_in_two_splits(name: str) -> None:
    factory: Any = dg.make(name)
    facts: dict[str, set[str]] = {}
    for split, least in {"train": 2_000, "validation": 200, "test": 400}.items():
        tasks = await factory.tasks(split)
        assert len(tasks) >= least
        assert {task.environment for task in tasks} == {name}
        facts[split] = {facts_of(factory.make(task)._plain) for task in tasks}
    assert not facts["train"] & facts["test"]
    assert not facts["validation"] & (facts["train"] | facts["test"])


@ALL
def test_it_gives_no_hints_to_experience_models(name: str) -> None:
    spec = find_environment(name)
    assert (spec.annotator, spec.goal_met, spec.select_facts) == (None, None, None)
    assert spec.refusals == ()


async def test_a_vending_machine_sells_for_the_price_on_the_label() -> None:
    task, plain = await task_where(VENDING, lambda plain: plain.machine.jammed == 3)
    machine = plain.machine
    slot = machine.products.index(machine.wanted)
    letter, price = "ABC"[slot], machine.prices[slot]
    actions = [f"press {letter}", f"read label {letter}", *["insert coin"] * price, f"press {letter}"]
    _, outcomes = await play(VENDING, [*actions, f"take {machine.wanted}"], task)
    texts = [outcome.next_state.text for outcome in outcomes]
    assert texts[0] == f"The display shows: insert {price} more."
    assert texts[1] == f"Slot {letter}: {machine.wanted}, price {price}."
    assert texts[1 + price].endswith(f"Coins inserted: {price}. Coins left: {machine.coins - price}.")
    assert [outcome.success for outcome in outcomes] == [False] * (len(outcomes) - 1) + [True]


async def test_a_jammed_slot_gives_its_product_after_a_shake() -> None:
    def jams(plain: Any) -> bool:
        machine = plain.machine
        return bool(machine.jammed < 3 and machine.products[machine.jammed] == machine.wanted)

    task, plain = await task_where(VENDING, jams)
    wanted, letter = plain.machine.wanted, "ABC"[plain.machine.jammed]
    actions = [*["insert coin"] * 3, f"press {letter}", f"take {wanted}", "shake machine", f"take {wanted}"]
    _, outcomes = await play(VENDING, actions, task)
    assert [outcome.next_state.text for outcome in outcomes[3:]] == [
        "Something is stuck behind the glass.",
        "That is not in the tray.",
        f"The {wanted} falls into the tray.",
        f"You take the {wanted}.",
    ]
    assert outcomes[-1].success


async def test_a_help_desk_refunds_by_policy_and_closes_the_ticket() -> None:
    task, plain = await task_where(HELPDESK, lambda plain: True)
    ticket = plain.desk.wanted
    right = plain.desk.right_amount(ticket)
    actions = [
        f"set_status id={ticket.id} status=closed",
        f'search_tickets customer="{ticket.customer}"',
        f"get_ticket id={ticket.id}",
        f"lookup_order id={ticket.order}",
        f"get_policy state={ticket.state}",
        "refund order=1 amount=5",
        f"refund order={ticket.order} amount={right}",
        f"set_status id={ticket.id} status=closed",
    ]
    _, outcomes = await play(HELPDESK, actions, task)
    texts = [outcome.next_state.text for outcome in outcomes]
    assert texts[0] == "error: a refund is due"
    assert ticket.id in texts[1]
    assert f"order={ticket.order}" in texts[2]
    assert f"={right}" in texts[3]
    assert texts[5] == "error: unknown order"
    assert outcomes[-1].success
    wrong = ticket.amounts[1 - ticket.amounts.index(right)]
    _, (outcome,) = await play(HELPDESK, [f"refund order={ticket.order} amount={wrong}"], task)
    assert outcome.terminated
    assert not outcome.success


async def test_a_lake_shows_holes_only_beside_you_and_ends_in_one() -> None:
    task, _ = await task_where(LAKE, lambda plain: plain.map[0][1] == "H" and plain.map[1][0] == "F")
    start, outcomes = await play(LAKE, ["go left", "jump", "go right"], task)
    assert start.text.startswith("Row 1, column 1. left: a wall, down: ice, right: a hole, up: a wall.")
    assert start.admissible_actions == ("go down", "go right")
    assert outcomes[0].next_state.text == f"There is a wall. {start.text}"
    assert outcomes[1].next_state.text == "You can go left, down, right or up."
    assert (outcomes[2].terminated, outcomes[2].success) == (True, False)


async def test_a_lake_is_crossed_along_free_ice() -> None:
    def free_border(plain: Any) -> bool:
        return plain.map[0] == "SFFF" and "H" not in "".join(row[-1] for row in plain.map)

    task, _ = await task_where(LAKE, free_border)
    _, outcomes = await play(LAKE, [*["go right"] * 3, *["go down"] * 3], task)
    assert outcomes[-1].success


def test_a_reference_that_leads_nowhere_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    cases = {
        f"{tmp_path}/nowhere.py:Thing": "there is no file",
        f"{FOLDER}/vending.py:Vendign": "did you mean 'Vending'",
        f"{tmp_path}/broken.py:Thing": "raised ModuleNotFoundError",
        "no.such.module:Thing": "raised ModuleNotFoundError",
        ":Thing": "expected FILE.py:CLASS",
        f"{FOLDER}/vending.py:PRODUCTS": "expected an environment",
        "dreamgym.envs.textworld:SPEC": "needs an entry point",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            find_environment(name)
    assert not is_known(f"{tmp_path}/nowhere.py:Thing")
    assert not is_known("no.such.module:Thing")
    assert not is_known("a:b:c")
    assert is_known(VENDING)


async def test_an_environment_by_reference_is_recorded_under_that_name(tmp_path: Path) -> None:
    report = await dg.collect(VENDING, tmp_path / "data", episodes=3, policy="random")
    assert report.episodes == 3
    first = next(iter(read_trajectories(tmp_path / "data")))
    assert first.task.environment == VENDING
    assert first.id.startswith("vending-train-0-random-")
    assert first.sheet is None
