"""Monitors, metrics and sources of tasks: the small parts of the loop, each by itself."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym.config import TrainConfig
from dreamgym.envs.synthetic import UNREADABLE, SyntheticEnvironment
from dreamgym.errors import (
    ConfigError,
    DataError,
    DreamExploitedError,
    EpisodeFailedError,
    TrainingCollapsedError,
)
from dreamgym.testing import CorridorFactory
from dreamgym.training.dream import RecordedStarts
from dreamgym.training.metrics import MetricsLog, read_metrics
from dreamgym.training.monitors import Monitors
from dreamgym.training.uniform_tasks import UniformTasks
from dreamgym.types import (
    FailureKind,
    Outcome,
    Prediction,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)

GOOD = {
    "step": 0,
    "episodes": 8,
    "return_mean": 0.5,
    "repeated_share": 0.1,
    "refused_share": 0.1,
    "failure_share": 0.0,
    "reply_tokens": 3.0,
    "learner": {"entropy": 1.0},
}


def watched(monitors: Monitors, *rows: dict[str, Any]) -> list[str]:
    return [warning for row in rows for warning in monitors.watch({**GOOD, **row})]


@pytest.mark.parametrize(
    ("bad", "reported"),
    [
        ({"return_mean": 0.0}, "no reward at all"),
        ({"learner": {"entropy": 0.001}}, "entropy near zero"),
        ({"repeated_share": 0.95}, "repeated states"),
        ({"refused_share": 0.99}, "nearly every action refused"),
        ({"unreadable_share": 0.6}, "most predictions unreadable"),
        ({"failure_share": 0.6}, "most rollout groups failing"),
        ({"reply_tokens": 31.9}, "replies cut off"),
    ],
)
def test_a_bad_sign_is_reported_after_some_steps_and_ends_the_run_after_twice_as_many(
    bad: dict[str, Any], reported: str
) -> None:
    monitors = Monitors(TrainConfig(monitor_patience=3), max_tokens=32)
    assert not watched(monitors, {}, bad, bad)
    assert [warning.partition(" for ")[0] for warning in watched(monitors, bad)] == [reported]
    assert not watched(monitors, bad, bad, bad)
    with pytest.raises(TrainingCollapsedError, match=f"{reported} for 6 steps"):
        monitors.check()


def test_one_good_step_starts_the_count_anew() -> None:
    monitors = Monitors(TrainConfig(monitor_patience=2))
    bad = {"return_mean": 0.0}
    assert not watched(monitors, bad, {}, bad, {}, bad)
    monitors.check()


def test_a_policy_that_succeeds_may_be_sure_of_itself() -> None:
    monitors = Monitors(TrainConfig(monitor_patience=1))
    assert not watched(monitors, {}, {"learner": {"entropy": 0.001}, "return_mean": 0.95})


def test_monitors_only_warn_or_are_silent_where_the_settings_say_so() -> None:
    bad = {"return_mean": 0.0}
    warning = Monitors(TrainConfig(monitor_patience=1, monitors="warn"))
    assert watched(warning, bad, bad, bad)
    warning.check()
    assert not watched(Monitors(TrainConfig(monitor_patience=1, monitors="off")), bad, bad)


def test_monitors_go_on_counting_where_they_were_stopped() -> None:
    bad = {"return_mean": 0.0}
    first = Monitors(TrainConfig(monitor_patience=2))
    watched(first, {}, bad)
    second = Monitors(TrainConfig(monitor_patience=2))
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert len(watched(second, bad)) == 1
    assert second.first_entropy == 1.0


def test_a_dream_that_is_far_better_than_reality_is_warned_of() -> None:
    monitors = Monitors(TrainConfig())
    assert not monitors.watch_gap({"gap": 0.1})
    assert not monitors.watch_gap({"gap": None})
    assert "40 points above success in reality" in monitors.watch_gap({"gap": 0.4})[0]


def test_of_two_rows_about_a_step_the_last_holds_and_torn_lines_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        for step, value in ((0, 1), (1, 2), (1, 3)):
            log.append({"kind": "train", "step": step, "value": value})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')
    with MetricsLog(path) as log:
        log.append({"kind": "evaluation", "step": 1, "value": 4})
    assert [row["value"] for row in read_metrics(path)] == [1, 4, 3]
    assert [row["value"] for row in read_metrics(path, "train")] == [1, 3]
    with pytest.raises(DataError, match="expected the metrics of a run"):
        read_metrics(tmp_path / "nothing")


async def test_every_task_comes_once_before_any_comes_again() -> None:
    tasks = await CorridorFactory(length=4).tasks("train")
    source = UniformTasks(tasks, seed=3)
    drawn: list[str] = []
    for _ in range(2 * len(tasks)):
        drawn += [task.id for task in await source.sample(3)]
        assert not await source.record([])
    for start in range(0, len(drawn), len(tasks)):
        assert len(set(drawn[start : start + len(tasks)])) == len(tasks)
    assert drawn[: len(tasks)] != drawn[len(tasks) : 2 * len(tasks)]


async def test_a_list_resumes_where_it_was_and_refuses_the_state_of_another() -> None:
    tasks = await CorridorFactory(length=4).tasks("train")
    source = UniformTasks(tasks, seed=3)
    await source.sample(5)
    await source.record([])
    assert await source.sample(2) == await source.sample(2), "a step that was interrupted is asked for again"
    restored = UniformTasks(tasks, seed=3)
    restored.load_state_dict(json.loads(json.dumps(source.state_dict())))
    assert await restored.sample(4) == await source.sample(4)
    with pytest.raises(ConfigError, match="was started with"):
        UniformTasks(tasks[1:]).load_state_dict(source.state_dict())
    with pytest.raises(ConfigError, match="at least one training task"):
        UniformTasks([])


def episode(name: str, *places: str) -> Trajectory:
    """A mug in some place of a room of two shelves."""
    state = State(text=f"A room, {name}.", admissible_actions=("look",))
    outcome = Outcome(next_state=state, reward=1.0, terminated=True, success=True)
    facts = tuple(("inreceptacle", f"mug {number}", place) for number, place in enumerate(places))
    return Trajectory(
        id=name,
        task=Task(id=name, instruction="find the mug", environment="room"),
        start=state,
        transitions=(Transition(state=state, action="look", outcome=outcome),),
        provenance=Provenance(source="real", policy="p"),
        sheet=WorldSheet(facts=(("opens", "shelf 1"), ("opens", "shelf 2"), *facts)),
    )


def test_a_recorded_task_is_simulated_with_its_own_world_sheet() -> None:
    recorded = [episode("a", "shelf 1"), episode("b", "shelf 2")]
    worlds = RecordedStarts(recorded)
    assert [task.id for task in worlds.tasks] == ["a", "b"]
    for each in recorded:
        found = worlds(each.task, 7)
        assert found is not None
        assert found.sheet == each.sheet
        assert found.state == State(text=each.start.text), "the dream lists no admissible actions"
    assert worlds(replace(recorded[0].task, id="c"), 0) is None


class _Stammering:
    """An experience model whose replies cannot be read, or that is gone."""

    name = "stammering"

    def __init__(self, kind: FailureKind) -> None:
        self._kind = kind

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return State(text="A room.")

    async def predict(self, *arguments: object) -> Prediction:
        raise EpisodeFailedError(self._kind, "expected four lines")


async def test_an_action_without_a_readable_reply_is_refused_and_counted() -> None:
    task = episode("a", "shelf 1").task
    sheet = WorldSheet(facts=(("opens", "shelf 1"),))
    for kind in (FailureKind.PARSE_ERROR, FailureKind.SERVER_DOWN):
        dream = SyntheticEnvironment(task, _Stammering(kind), sheet, horizon=2, unreadable="Nothing happens.")
        await dream.start()
        if kind is FailureKind.SERVER_DOWN:
            with pytest.raises(EpisodeFailedError):
                await dream.step("sing")
            continue
        first, last = await dream.step("sing"), await dream.step("sing")
        assert (first.next_state.text, first.reward, first.over) == ("Nothing happens.", 0.0, False)
        assert (first.reward_source, last.truncated, dream.sheet) == (UNREADABLE, True, sheet)


def test_recombined_worlds_differ_by_seed_and_a_group_shares_one() -> None:
    recorded = [episode("a", "shelf 1", "shelf 2", "shelf 1"), episode("b", "shelf 2", "shelf 1", "shelf 2")]

    def can_succeed(task: Task, sheet: WorldSheet) -> bool:
        return ("inreceptacle", "mug 0", "shelf 2") in sheet.facts

    worlds = RecordedStarts(recorded, recombine=can_succeed)
    found = [worlds(recorded[0].task, seed) for seed in range(20)]
    assert all(each is not None and can_succeed(recorded[0].task, each.sheet) for each in found)
    assert len({each.sheet for each in found if each is not None}) > 2
    assert found == [RecordedStarts(recorded, recombine=can_succeed)(recorded[0].task, s) for s in range(20)]
    never = RecordedStarts(recorded, recombine=lambda task, sheet: False)
    kept = never(recorded[0].task, 0)
    assert kept is not None
    assert kept.sheet == recorded[0].sheet, "where no new world will do, the old one does"


def success(dream: float, supported: float, step: int = 0) -> dict[str, Any]:
    return {"success": dream, "supported_success": supported, "step": step, "return_mean": dream}


def test_success_that_rises_without_support_is_warned_of_then_stops_the_run_with_a_typed_reason() -> None:
    monitors = Monitors(TrainConfig(monitor_patience=3))
    assert not watched(monitors, *[success(0.2, 0.2, step) for step in range(5)])
    rising = [success(0.9, 0.2, step) for step in range(5, 12)]
    (warning,) = watched(monitors, *rising)
    assert warning.startswith(
        "success in the dream rises, and success that is supported does not for 3 steps"
    )
    with pytest.raises(DreamExploitedError, match=r"since step 5: .* use an earlier policy") as stopped:
        monitors.check()
    assert stopped.value.since == 5
    kept = Monitors(TrainConfig(monitor_patience=3))
    kept.load_state_dict(json.loads(json.dumps(monitors.state_dict())))
    assert kept.state_dict() == monitors.state_dict()


def test_success_that_rises_with_support_or_says_nothing_of_it_goes_on() -> None:
    monitors = Monitors(TrainConfig(monitor_patience=2))
    rows = [success(0.2 + 0.03 * step, 0.15 + 0.02 * step, step) for step in range(25)]
    unknown = [{"success": row["success"]} for row in rows]
    for row in [*rows, *unknown]:
        assert not watched(monitors, row)
        monitors.check()


def test_success_that_audits_do_not_find_is_warned_of_and_the_second_such_audit_stops_the_run() -> None:
    def audit(step: int, real: float | None) -> dict[str, Any]:
        return {"step": step, "successes": {"value": real, "count": 10}}

    monitors = Monitors(TrainConfig())
    assert monitors.watch_audit(audit(10, 0.8), 0.3) == []
    assert monitors.watch_audit(audit(20, 0.7), 0.5) == [], "real success rises too"
    assert monitors.watch_audit(audit(30, None), 0.9) == []
    (warning,) = monitors.watch_audit(audit(40, 0.2), 0.9)
    assert "2 of 10 are real" in warning
    monitors.check()
    monitors.watch_audit(audit(50, 0.1), 0.95)
    with pytest.raises(DreamExploitedError) as stopped:
        monitors.check()
    assert stopped.value.since == 39
