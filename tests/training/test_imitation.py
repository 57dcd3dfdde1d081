"""The benchmarks of imitation and expert iteration: what is trained, where they start, their tables."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import cells
import check_results
import claim
import expert_iteration
import imitation
from dreamgym.types import Trajectory


def share(value: float) -> dict[str, Any]:
    return {"value": value, "low": value - 0.1, "high": value + 0.1, "count": 100}


def evaluation(success: list[bool], temperature: float = 0.4) -> dict[str, Any]:
    return {
        "temperature": temperature,
        "episodes": len(success),
        "of_all": share(sum(success) / len(success)),
        "in_view_not_taken": share(0.25),
        "outcomes": [{"number": number, "success": each} for number, each in enumerate(success)],
    }


def store(folder: Path, name: str, **values: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"cell": name, "seed": 0, "seconds": 90.0, **values}))


def imitation_cell(folder: Path, count: int, success: float, *, done: bool = True) -> None:
    checkpoints = [{"updates": 400, "evaluation": evaluation([True] * 4)}]
    end = {"saturated": True, "updates": 400, "unseen": evaluation([True, False])} if done else {}
    store(
        folder, f"alfworld-imitation-{count}-0", method="imitation", demonstrations=count, done=done, **end,
        lessons={"trajectories": count}, checkpoints=checkpoints,
        legs=[{"updates": 400, "valid_seen": success, "rising": False}],
    )  # fmt: skip


@pytest.fixture(scope="module")
def more() -> list[Trajectory]:
    return imitation.demonstrations("builtin:alfworld", 60, 0)


def test_fewer_demonstrations_are_the_first_of_more_and_families_take_turns(more: list[Trajectory]) -> None:
    few = imitation.demonstrations("builtin:alfworld", 6, 0)
    assert [each.id for each in few] == [each.id for each in more[:6]]
    assert len({each.task.family for each in few}) == 6
    assert all(each.success for each in more)


async def test_random_turns_of_recorded_noisy_demonstrators_are_found_by_their_seed(
    more: list[Trajectory],
) -> None:
    noisy = [each for each in more if each.provenance.policy.startswith("noisy:")]
    found = [await imitation.random_turns(each) for each in noisy]
    turns = sum(map(len, noisy))
    assert 0.15 < sum(map(len, found)) / turns < 0.45, "noisy:0.3 draws three of ten actions"
    chosen = max(noisy, key=len)
    with pytest.raises(ValueError, match="does not give the random action"):
        await imitation.random_turns(replace(chosen, seed=chosen.seed + 1))


def test_a_result_resumes_with_its_time_and_refuses_another_plan(tmp_path: Path) -> None:
    identity = {"config": {"plan": {"updates": 4}, "agent": {"model": "nano"}}, "seed": 0}
    cells.Result(tmp_path / "cell.json", identity).save(seconds=100.0)
    grown = {"config": {"plan": {"updates": 4}, "agent": {"model": "nano", "new": 1}}, "seed": 0}
    resumed = cells.Result(tmp_path / "cell.json", grown)
    resumed.save(done=True)
    assert resumed.values["seconds"] >= 100.0
    assert cells.Result(tmp_path / "cell.json", grown).done
    with pytest.raises(SystemExit, match="another plan"):
        cells.Result(tmp_path / "cell.json", {"config": {"plan": {"updates": 5}}, "seed": 0})


def test_the_table_of_imitation_shows_unfinished_cells(tmp_path: Path) -> None:
    imitation_cell(tmp_path, 200, 0.47)
    imitation_cell(tmp_path, 400, 0.72, done=False)
    *_, first, second = imitation.table(tmp_path).splitlines()
    assert first == "| 200 (200) | 0 | 400: 100% | yes | 50.0% [40.0%, 60.0%] | 25% | 2 |"
    assert "| not done | – |" in second


def test_the_start_is_chosen_once_among_finished_cells(tmp_path: Path) -> None:
    folder, results = tmp_path / "imitation", tmp_path / "results"
    imitation_cell(folder, 100, 0.20)
    imitation_cell(folder, 200, 0.47)
    imitation_cell(folder, 400, 0.45, done=False)
    choice, cell = expert_iteration.find_start(folder, 0, results)
    assert cell["demonstrations"] == choice["demonstrations"] == 200
    imitation_cell(folder, 400, 0.45)
    assert expert_iteration.find_start(folder, 0, results)[0] == choice
    with pytest.raises(SystemExit, match="cell of seed 1"):
        expert_iteration.find_start(folder, 1, results)


def test_the_table_of_expert_iteration_compares_arms_by_episode(tmp_path: Path) -> None:
    rounds = [{"real_steps": 1200}, {"real_steps": 800}]
    for arm, successes in (("start", 10), ("imitation", 20), ("ei", 40)):
        won = [number < successes for number in range(50)]
        store(tmp_path, arm, method=arm, rounds=rounds if arm == "ei" else [], unseen=[evaluation(won)])
    (tmp_path / "choice.json").write_text(json.dumps({"demonstrations": 200}))
    *_, ei, further, start = expert_iteration.table(tmp_path).splitlines()
    assert ei.startswith("| ei | 0 | 0.4 | 80.0% [")
    assert "| +60.0 [" in ei
    assert "| 2,000 | 0 | 2 |" in ei
    assert "| +20.0 [" in further
    assert "| – | -20.0 [" in start, "no difference to itself"


def test_sim_to_real_begins_where_a_finished_dream_ended(tmp_path: Path) -> None:
    plan, name = expert_iteration.Plan(rounds=6), "alfworld-ei-dream-0"
    for done in (False, None):
        if done is not None:
            store(tmp_path, name, run="runs/dream", done=done)
        with pytest.raises(SystemExit, match=name):
            expert_iteration.finished_dream(0, plan, tmp_path)
        (tmp_path / f"{name}.json").unlink(missing_ok=True)
    store(tmp_path, name, run="runs/dream", done=True)
    assert expert_iteration.finished_dream(0, plan, tmp_path) == "runs/dream@6"


def test_settings_of_a_plan_are_numbers_or_lists_of_them() -> None:
    plan = cells.change_plan(expert_iteration.Plan(), ["rounds=2", "temperatures=0.4", "learning_rate=1e-3"])
    assert (plan.rounds, plan.temperatures, plan.learning_rate) == (2, (0.4,), 1e-3)
    assert cells.change_plan(plan, ["temperatures=0.4,1"]).temperatures == (0.4, 1.0)


def test_the_table_by_family_has_a_column_for_each(tmp_path: Path) -> None:
    found = evaluation([True, False]) | {"by_family": {"heat": share(0.5), "cool": share(0.25)}}
    store(tmp_path, "ei", method="ei", rounds=[], unseen=[found])
    first, _, row = expert_iteration.family_table(tmp_path).splitlines()
    assert first == "| arm | seed | cool | heat |"
    assert row == "| ei | 0 | 25% of 100 | 50% of 100 |"


def test_every_published_table_is_that_of_the_stored_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["claim.py", "--check"])
    with pytest.raises(SystemExit) as ended:
        claim.main()
    assert not ended.value.code, capsys.readouterr().out
    published = check_results.DOCUMENT.read_text(encoding="utf-8")
    row = next(line for line in published.splitlines() if line.startswith("| alfworld | sft |"))
    other = tmp_path / "results.md"
    wrong = published.replace(row, row.replace("24.8%", "42.8%"))
    other.write_text(wrong.replace("| demonstrations | seed |", "| seed |"), encoding="utf-8")
    missing, unknown, no_table = check_results.disagreements(document=other)
    assert missing.endswith(row)
    assert "42.8%" in unknown
    assert "has no table that begins with | demonstrations" in no_table
