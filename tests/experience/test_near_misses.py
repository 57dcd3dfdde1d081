"""Refusals that recordings prove without showing them."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from dreamgym.experience.near_misses import is_near_miss, near_misses
from dreamgym.types import State, Trajectory
from tests.experience.test_known_replies import episode

NAMES = [frozenset({"nuts", "gum"})]


def listed(trajectory: Trajectory, *actions: str) -> Trajectory:
    """With the same admissible actions in every state."""
    steps = [
        replace(step, state=State(text=step.state.text, admissible_actions=actions))
        for step in trajectory.transitions
    ]
    return replace(trajectory, transitions=tuple(steps))


def won() -> Trajectory:
    trajectory = listed(episode("won", "t", ("press A", "nuts fall"), ("take nuts", "Taken.")), "take nuts")
    [first, last] = trajectory.transitions
    end = replace(last.outcome, success=True, terminated=True, reward=1.0)
    return replace(trajectory, transitions=(first, replace(last, outcome=end)))


def wants_gum(*actions: str) -> Trajectory:
    trajectory = listed(
        episode("other", "u", ("take cake", "Not in the tray."), ("look", "A machine.")), *actions
    )
    return replace(trajectory, task=replace(trajectory.task, instruction="Get the gum."))


def test_the_winning_action_is_refused_where_it_is_not_admissible_with_the_names_of_the_task() -> None:
    found = [
        each for each in near_misses([won(), wants_gum("look")], NAMES, refusal="No.") if each.task.id == "u"
    ]
    assert found
    for each in found:
        last = each.transitions[-1]
        assert last.action == "take gum"
        assert last.outcome.next_state.text == "Not in the tray.", "as this kind of action was refused"
        assert not last.outcome.success
        assert is_near_miss(each)


def test_where_it_is_admissible_nothing_is_claimed() -> None:
    found = near_misses([won(), wants_gum("look", "take gum")], NAMES, refusal="No.")
    assert [each for each in found if each.task.id == "u"] == []


def test_without_lists_of_admissible_actions_nothing_is_certain() -> None:
    plain = episode("other", "u", ("look", "A machine."))
    assert [each for each in near_misses([won(), plain], NAMES, refusal="No.") if each.task.id == "u"] == []


def test_a_list_can_be_extended_by_its_own_near_misses() -> None:
    found = [won(), wants_gum("look")]
    found.extend(islice(near_misses(found, NAMES, refusal="No."), 50))
    assert len(found) < 10
