"""Who dreams and who grades, by name: what is refused before it starts, and what an environment adds."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import pytest

from dreamgym.config import Config, PromptedConfig, load_config
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld import SPEC
from dreamgym.errors import ConfigError
from dreamgym.experience.prompt_formats import PromptContext
from dreamgym.models.registry import LanguageModels
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.experience_loading import (
    check_prompted_model,
    choose_grader,
    demonstrations_shown,
    json_format,
    load_experience_model,
    make_grader,
    open_prompted_model,
)
from dreamgym.training.settings_check import check
from tests.scripted_server import ScriptedServer

EPISODE = next(iter(islice(read_trajectories(builtin_dataset()), 1)))


def test_an_environment_adds_its_rules_its_refusal_and_only_the_facts_that_are_touched() -> None:
    assert EPISODE.sheet is not None
    step = EPISODE.transitions[0]
    asked = json_format(PromptedConfig(), "alfworld", SPEC).request(
        PromptContext(
            task=EPISODE.task,
            sheet=EPISODE.sheet,
            history=(),
            state=step.state.text,
            action=step.action,
        )
    )
    assert "A household in text" in asked.system
    assert SPEC.refusals[0] in asked.system
    reported = asked.prompt.split("# Facts")[1].split("# Present state")[0].strip().splitlines()
    assert 0 < len(reported) < len(EPISODE.sheet.facts)
    assert any(SPEC.actor in line for line in reported if SPEC.actor)


def test_the_grader_is_the_sheet_where_there_is_one_unless_another_is_named() -> None:
    assert choose_grader("auto", SPEC) == "sheet"
    assert choose_grader(None, None) == "model"
    assert choose_grader("endpoint:strong", SPEC) == "endpoint:strong"
    for wrong in ("sheet", "judge", "endpoint:"):
        with pytest.raises(ConfigError, match=f"expected a grader .*got '{wrong}'"):
            choose_grader(wrong, None)
    models = LanguageModels(Config())
    assert make_grader("model", SPEC, models) is None
    assert make_grader("sheet", SPEC, models) is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.experience=endpoint:missing"], "no endpoint 'missing'"),
        (["train.experience=endpoint:m@http://localhost:1", "train.reward=endpoint:missing"], "no endpoint"),
        (["train.experience=endpoint:m@http://localhost:1", "train.reward=strong"], "got 'strong'"),
    ],
)
def test_a_training_that_could_not_dream_is_refused_before_it_starts(
    settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load_config(overrides=settings))


async def test_a_prompt_of_yours_takes_the_place_of_ours(tmp_path: Path) -> None:
    own = tmp_path / "shop.md"
    own.write_text("A shop that sells mugs.\n", encoding="utf-8")
    with ScriptedServer(lambda request: '{"first_state": "A street."}') as server:
        config = load_config(overrides=["environment.name=shop", f'prompted.prompt="{own}"'])
        check_prompted_model(server.name, config, "model")
        assert EPISODE.sheet is not None
        async with LanguageModels(config) as models:
            dreamer = open_prompted_model(server.name, models, config, None, grader=None)
            assert (await dreamer.imagine_start(EPISODE.task, EPISODE.sheet)).text == "A street."
    assert "A shop that sells mugs." in server.requests[0].system
    assert "works with tools" not in server.requests[0].system


async def test_replay_k_is_the_number_of_demonstrations_in_a_prompt(tmp_path: Path) -> None:
    reply = {"reasoning": "", "next_state": "A room.", "terminated": False, "success": False}
    step = EPISODE.transitions[0]
    assert EPISODE.sheet is not None
    with (
        ScriptedServer(lambda request: json.dumps(reply)) as server,
        ReplayBuffer.open(tmp_path / "replay.sqlite") as buffer,
    ):
        for each in islice(read_trajectories(builtin_dataset()), 1, 12):
            await buffer.add(each)
        for k in (0, 3):
            config = load_config(overrides=[f"replay.k={k}"])
            assert demonstrations_shown(server.name, config) == k
            async with LanguageModels(config) as models:
                loaded = load_experience_model(server.name, config, retriever=buffer, models=models)
                found = await loaded.model.predict(EPISODE.task, EPISODE.sheet, (), step.state, step.action)
            assert len(found.demonstrations) == k
            assert server.requests[-1].prompt.count("- in ") == k
