"""Who dreams and who grades, by name: what is refused before it starts, and what an environment adds."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from dreamgym.config import Config, PromptedConfig, load_config
from dreamgym.envs.alfworld import SPEC
from dreamgym.errors import ConfigError
from dreamgym.experience.forms import Situation
from dreamgym.models.named import LanguageModels
from dreamgym.replay.builtin import builtin_dataset
from dreamgym.replay.offline import read_trajectories
from dreamgym.testing.served import ScriptedServer
from dreamgym.training.dreamers import check_dreamer, form_of, make_grader, open_dreamer, who_grades
from dreamgym.training.train import check

EPISODE = next(iter(islice(read_trajectories(builtin_dataset()), 1)))


def test_an_environment_adds_its_rules_its_refusal_and_only_the_facts_that_are_touched() -> None:
    assert EPISODE.sheet is not None
    step = EPISODE.transitions[0]
    asked = form_of(PromptedConfig(), "alfworld", SPEC).question(
        Situation(
            task=EPISODE.task,
            sheet=EPISODE.sheet,
            history=(),
            state=step.state.text,
            action=step.action,
        )
    )
    assert "A household in text" in asked.system
    assert SPEC.refusals[0] in asked.system
    told = asked.prompt.split("# Facts")[1].split("# Present state")[0].strip().splitlines()
    assert 0 < len(told) < len(EPISODE.sheet.facts)
    assert any(SPEC.actor in line for line in told if SPEC.actor)


def test_the_grader_is_the_sheet_where_there_is_one_unless_another_is_named() -> None:
    assert who_grades("auto", SPEC, setting="train.reward") == "sheet"
    assert who_grades(None, None, setting="--reward") == "model"
    assert who_grades("endpoint:strong", SPEC, setting="train.reward") == "endpoint:strong"
    for wrong in ("sheet", "judge", "endpoint:"):
        with pytest.raises(ConfigError, match=f"expected train.reward model, sheet.*got '{wrong}'"):
            who_grades(wrong, None, setting="train.reward")
    models = LanguageModels(Config())
    assert make_grader("model", SPEC, models) is None
    assert make_grader("sheet", SPEC, models) is not None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["train.experience=endpoint:nobody"], "no endpoint 'nobody'"),
        (["train.experience=endpoint:m@http://localhost:1", "train.reward=endpoint:nobody"], "no endpoint"),
        (["train.experience=endpoint:m@http://localhost:1", "train.reward=strong"], "got 'strong'"),
        (
            [
                "train.experience=endpoint:m@http://localhost:1",
                "prompted.form=agentworld",
                "train.reward=model",
            ],
            "tells states and no success",
        ),
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
        check_dreamer(server.name, config, "model")
        assert EPISODE.sheet is not None
        async with LanguageModels(config) as models:
            dreamer = open_dreamer(server.name, models, config, None, rewarder=None)
            assert (await dreamer.imagine_start(EPISODE.task, EPISODE.sheet)).text == "A street."
    assert "A shop that sells mugs." in server.requests[0].system
    assert "works with tools" not in server.requests[0].system
