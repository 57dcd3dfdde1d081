"""The benchmark of the claim: cells share stages, keep their budgets, and become a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import claim
from claim import METHODS, PLACES, SHARE, Budget, Cell, Stage
from dreamgym.cli import app

BUDGET = Budget(minutes=1.0, real_steps=1600, steps=3)


def stages(method: str, env: str = "textworld", **more: Any) -> dict[str, Stage]:
    planned = claim.plan(Cell(env=env, method=method, seed=0, **more), Path("runs"), BUDGET)
    return {stage.folder.name: stage for stage in planned}


def word_after(stage: Stage, option: str) -> str:
    return stage.command[stage.command.index(option) + 1]


def test_sim_to_real_continues_from_the_dream_with_a_sixteenth_of_the_real_steps() -> None:
    dream, carried, real = stages("grpo-dream"), stages("grpo-s2r"), stages("grpo-real")
    assert {**carried, **dream} == carried
    last = carried["grpo-s2r-0"]
    assert word_after(last, "--sim-to-real") == str(dream["grpo-dream-0"].folder)
    most = int(word_after(real["grpo-real-0"], "--real-steps"))
    assert int(word_after(last, "--real-steps")) * SHARE == most == BUDGET.real_steps
    assert "--real-steps" not in dream["grpo-dream-0"].command


@pytest.mark.parametrize("env", PLACES)
def test_all_methods_of_a_seed_start_with_the_same_warm_start(env: str) -> None:
    starts = [stages(method, env)["sft-0"] for method in METHODS]
    assert all(start == starts[0] for start in starts)
    for method in METHODS[1:]:
        *_, last = stages(method, env).values()
        assert f"train.seconds={60 * BUDGET.minutes:g}" in last.command
        if not method.endswith("-s2r"):
            assert f"train.init_from={starts[0].folder}" in last.command


def test_an_ablation_has_an_experience_model_or_a_setting_of_its_own() -> None:
    assert "--without" in stages("grpo-dream", ablation="no-sheet")["experience-0-no-sheet"].command
    own = stages("grpo-dream", ablation="own-word")
    assert "train.reward=model" in own["grpo-dream-0-own-word"].command
    assert own["experience-0"] == stages("grpo-dream")["experience-0"]


def test_long_sft_is_a_policy_of_its_own() -> None:
    long, usual = stages("sft", ablation="long")["sft-0-long"], stages("sft")["sft-0"]
    counts = [
        int(each.partition("=")[2])
        for stage in (long, usual)
        for each in stage.command
        if each.startswith("train.warm_start_steps=")
    ]
    assert counts == [
        claim.LONGER * PLACES["textworld"].warm_start_steps,
        PLACES["textworld"].warm_start_steps,
    ]


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo-real", "ppo-real"])
def test_the_command_line_understands_the_commands(method: str) -> None:
    *_, last = stages(method, "alfworld").values()
    done = CliRunner().invoke(app, [*last.command, "--dry-run"])
    assert done.exit_code == 0, done.output


def test_our_own_catalogue_is_played_also_where_another_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEBSHOP_DATA", "catalogue")
    own, given = (Cell(env=env, method="sft", seed=0) for env in ("webshop", "webshop-1000"))
    assert "WEBSHOP_DATA" not in own.variables
    assert given.variables["WEBSHOP_DATA"] == "catalogue"
    assert own.environment == given.environment == "webshop"


def stand_in(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    monkeypatch.setattr(claim, "DREAMGYM", (sys.executable, "-c", code))


def test_a_stage_is_resumed_until_it_is_done_and_every_attempt_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = Stage(folder=tmp_path / "long", command=("train",))
    (tmp_path / "long.seconds.json").write_text('{"seconds": 58.5, "cpu_seconds": 3}')
    stand_in(monkeypatch, "import time; time.sleep(0.2)")
    claim.carry_out(stage)
    timing = json.loads(stage.marker.read_text())
    assert timing["seconds"] > 58.6
    assert timing["cpu_seconds"] >= 3
    stand_in(monkeypatch, "raise SystemExit('is not run again')")
    claim.carry_out(stage)


def test_a_stage_that_fails_is_not_taken_for_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, "raise SystemExit(3)")
    stage = Stage(folder=tmp_path / "broken", command=("train",))
    with pytest.raises(SystemExit, match="exit code 3"):
        claim.carry_out(stage)
    assert not stage.marker.exists()


def result(folder: Path, method: str, seed: int, won: list[bool], **spent: float) -> None:
    cell = Cell(env="textworld", method=method, seed=seed)
    outcomes = [{"number": n, "task": f"t{n}", "success": success} for n, success in enumerate(won)]
    found = {
        "cell": cell.name,
        "environment": cell.env,
        "method": method,
        "seed": seed,
        "ablation": "",
        "spent": spent,
        "stages": {"sft-0": {"seconds": 5}, "own": {"seconds": 120}},
        "evaluation": {"success": {"value": sum(won) / len(won)}, "outcomes": outcomes},
    }
    folder.mkdir(exist_ok=True)
    (folder / f"{cell.name}.json").write_text(json.dumps(found))


def test_table_and_plot_are_made_of_what_is_there(tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert len(claim.table(results).splitlines()) == 2
    for seed in (0, 1):
        result(results, "sft", seed, [True] * 40 + [False] * 60)
        result(results, "grpo-dream", seed, [True] * 70 + [False] * 30, synthetic_steps=9000)
    result(results, "grpo-real", 2, [True] * 50 + [False] * 50, real_steps=80000)
    *_, imitation, real, dream = claim.table(results).splitlines()
    assert "| sft | 2 (40%, 40%) | 40.0% [" in imitation
    assert "+30.0 points [+23" in dream
    assert "| 0 | 9,000 | 2 |" in dream
    assert "| – | 80,000 | 0 | 2 |" in real, "no start of that seed to compare with"
    drawn = ElementTree.fromstring(claim.plot(results))
    labels = [str(each.text).partition(":")[0] for each in drawn if each.get("class") == "legend"]
    assert labels == ["1  textworld sft", "2  textworld grpo-real", "3  textworld grpo-dream"]


def test_a_cell_whose_result_is_there_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, "raise SystemExit('is not run')")
    result(tmp_path, "sft", 0, [True])
    cell = Cell(env="textworld", method="sft", seed=0)
    claim.measure(cell, tmp_path / "runs", tmp_path, BUDGET, episodes=200)
    assert not (tmp_path / "runs").exists()
