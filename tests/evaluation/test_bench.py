"""Benchmark panels: the same tasks everywhere, any policy, paired differences also with results of others."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamgym.cli import app
from dreamgym.config import Config, load_config
from dreamgym.errors import ConfigError, DataError
from dreamgym.evaluation.bench import NO_ACTION, Bench, bench
from dreamgym.evaluation.panels import PANELS
from tests.scripted_server import ScriptedServer


async def shop(out: Path, *policies: str, episodes: int | None = 12, overrides: Sequence[str] = ()) -> Bench:
    return await bench(
        "webshop", policies, load_config(overrides=list(overrides)), episodes=episodes, out=out
    )


async def test_the_tasks_of_a_panel_are_the_same_on_every_machine(tmp_path: Path) -> None:
    found = await shop(tmp_path, episodes=None)
    [panel] = found.panels
    assert panel.digest == PANELS["webshop"].digest
    assert len({task.id for task in panel.tasks}) == PANELS["webshop"].episodes
    assert not found.notes
    assert not list(tmp_path.iterdir())


async def test_other_tasks_have_another_hash_and_other_data_are_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, part = await shop(tmp_path), await shop(tmp_path, episodes=11)
    assert whole.panels[0].digest != part.panels[0].digest
    shown = await shop(tmp_path, overrides=["environment.options.view=elements"])
    assert shown.panels[0].digest != whole.panels[0].digest
    assert not [*whole.notes, *part.notes, *shown.notes]
    monkeypatch.setattr("dreamgym.evaluation.panels.first_tasks", reversed_tasks)
    changed = await bench("webshop", (), Config(), out=tmp_path)
    assert any(PANELS["webshop"].digest in note for note in changed.notes)


async def reversed_tasks(factory: object, split: str, count: int) -> list[object]:
    return list(reversed(await factory.tasks(split, count)))  # type: ignore[attr-defined]


async def test_two_policies_are_compared_on_the_same_tasks_at_once_or_by_a_result_file(
    tmp_path: Path,
) -> None:
    at_once = await shop(tmp_path, "expert", "random")
    [(first, second, difference)] = at_once.comparisons
    assert (first, second) == ("expert", "random")
    assert difference.difference.value == 1.0
    assert difference.first_only == 12
    file = at_once.results[1].file
    assert file is not None
    later = await shop(tmp_path / "elsewhere", "expert", str(file))
    assert later.comparisons == at_once.comparisons
    assert later.results[0].evaluation.mean_reward.value == 1.0


async def test_a_result_of_other_tasks_or_conditions_is_refused(tmp_path: Path) -> None:
    file = (await shop(tmp_path, "random")).results[0].file
    with pytest.raises(ConfigError, match="only the same tasks under the same conditions"):
        await shop(tmp_path, "expert", str(file), episodes=11)
    with pytest.raises(ConfigError, match="only the same tasks under the same conditions"):
        await shop(tmp_path, "expert", str(file), overrides=["environment.options.horizon=9"])
    (tmp_path / "other.json").write_text('{"policy": "random"}', encoding="utf-8")
    with pytest.raises(DataError, match="expected a result file of dreamgym bench"):
        await shop(tmp_path, "expert", str(tmp_path / "other.json"))


async def test_an_interrupted_call_plays_only_what_is_missing(tmp_path: Path) -> None:
    began = await shop(tmp_path, "random")
    file = began.results[0].file
    assert file is not None
    [shard] = file.with_suffix("").glob("*.jsonl*")
    lines = shard.read_bytes().splitlines(keepends=True)
    shard.write_bytes(b"".join(lines[:5]))
    again = await shop(tmp_path, "random")
    assert again.results[0].evaluation.episodes == began.results[0].evaluation.episodes
    assert len(shard.read_bytes().splitlines()) == len(lines)


async def test_a_reply_without_an_action_costs_a_turn_and_no_episode(tmp_path: Path) -> None:
    with ScriptedServer(lambda request: "I would rather talk.") as server:
        found = await shop(tmp_path, server.name, episodes=2, overrides=["environment.options.horizon=3"])
    [result] = found.results
    assert found.complete
    assert result.evaluation.success.value == 0.0
    assert result.lost_turns == sum(each.steps for each in result.evaluation.episodes) == 6
    assert any("6 replies had no action" in note for note in found.notes)
    assert result.file is not None
    assert NO_ACTION in next(result.file.with_suffix("").glob("*.jsonl*")).read_text(encoding="utf-8")


def test_an_episode_that_could_not_be_played_makes_the_result_incomplete(tmp_path: Path) -> None:
    replies = iter([json.dumps({"thought": "So.", "action": "click[search]"})] * 2)

    def breaks_down(request: object) -> str:
        return next(replies)  # then an error of the server

    with ScriptedServer(breaks_down) as server:
        config = tmp_path / "bench.toml"
        config.write_text(
            f'[endpoints.one]\nurl = "{server.url}"\nmodel = "scripted"\nmax_attempts = 1\n', encoding="utf-8"
        )
        words = ["bench", "webshop", "endpoint:one", "--episodes", "1", "--config", str(config), "--json"]
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert done.exit_code == 1, done.output
    [result] = json.loads(done.stdout)["results"]
    assert result["complete"] is False
    assert result["failures"] == {"server_down": 1}
    assert result["success"]["value"] is None
    assert "run the same command again" in done.stderr


def test_the_command_lists_the_tasks_and_their_hash_or_the_results_of_policies(tmp_path: Path) -> None:
    def run(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(
            app, ["bench", "webshop", "--episodes", "3", *words, "--out", str(tmp_path)]
        )
        return done.exit_code, done.output

    code, listed = run()
    assert code == 0
    assert listed.count("-text") == 3
    assert "hash of the tasks" in listed
    code, printed = run("expert", "--against", "random")
    assert code == 0
    assert "paired differences" in printed
    assert "+100.0" in printed
    assert run("expertt")[0] == 2
    assert run("mix")[0] == 2
    assert run("expert", "--wording", "both")[0] == 2
