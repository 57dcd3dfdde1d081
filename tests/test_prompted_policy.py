"""A language model that was not trained here as the agent: over real HTTP, in an environment of doors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dreamgym.collection import collect
from dreamgym.config import AgentConfig, Config, load_config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.evaluation.evaluate import evaluate
from dreamgym.models.registry import LanguageModels
from dreamgym.prompted_policy import PromptedPolicy, prompted_policy_factory
from dreamgym.testing import CorridorFactory
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import CompletionRequest, FailureKind, State, Task
from tests.scripted_server import ScriptedServer

TASK = Task(id="t", instruction="leave", environment="corridor")
SHOWN = AgentConfig(show_actions="now").at_temperature(0.0)


def walker(request: CompletionRequest) -> str:
    """Tries the door of every place, on the way to one end of the corridor and back to the other."""
    done = [
        line.removeprefix("action: ") for line in request.prompt.splitlines() if line.startswith("action: ")
    ]
    now = request.prompt.splitlines()[-1].removeprefix("actions: ").split("; ")
    if not done or done[-1] != "open door":
        action = "open door"
    else:
        moves = [each for each in now if each != "open door"]
        last = next((each for each in reversed(done) if each != "open door"), moves[0])
        action = last if last in moves else moves[0]
    return json.dumps({"thought": "One of them opens.", "action": action})


async def test_an_endpoint_plays_real_episodes_and_is_evaluated_like_any_policy() -> None:
    with ScriptedServer(walker) as server:
        async with LanguageModels(Config()) as models:
            members = prompted_policy_factory(models.open(server.name, role="agent"), SHOWN, name=server.name)
            found = await evaluate(
                CorridorFactory(length=3), members, split="train", episodes=6, policy=server.name
            )
            [(place, row)] = models.usage.rows.items()
    assert found.success.value == 1.0
    assert not found.failures
    assert place[1] == "agent"
    assert row.requests + row.cache_hits + row.shared == found.real_steps
    assert 'You act in the environment "corridor"' in server.requests[0].system


async def test_what_an_endpoint_plays_is_recorded_as_its_own(tmp_path: Path) -> None:
    with ScriptedServer(walker) as server:
        out = f"collect.out={tmp_path / 'played'}"
        asked = [f"collect.policy={server.name}", "collect.episodes=3", out, "agent.show_actions=now"]
        config = load_config(overrides=[*asked, "environment.name=corridor"])
        report = await collect(config, CorridorFactory(length=3))
    assert (report.episodes, report.successes) == (3, 3)
    played = list(read_trajectories(tmp_path / "played"))
    assert {each.provenance.policy for each in played} == {server.name}
    assert played[0].transitions[0].thought == "One of them opens."


async def test_an_unknown_endpoint_is_refused_before_the_folder_is_touched(tmp_path: Path) -> None:
    config = load_config(overrides=["collect.policy=endpoint:missing", f"collect.out={tmp_path / 'played'}"])
    with pytest.raises(ConfigError, match="no endpoint 'missing'"):
        await collect(config, CorridorFactory(length=3))
    assert not (tmp_path / "played").exists()


@pytest.mark.parametrize("text", ["go left", '{"action": "go left"}', '{"thought": "", "action": " \\n "}'])
async def test_what_holds_no_action_is_asked_for_again_and_then_a_typed_failure(text: str) -> None:
    spoken = ScriptedLanguageModel(lambda request: text)
    with pytest.raises(EpisodeFailedError, match="agent, 3 attempts") as caught:
        await PromptedPolicy(spoken, SHOWN).act(TASK, [], State(text="A door."))
    assert caught.value.kind is FailureKind.PARSE_ERROR
    assert len({request.seed for request in spoken.requests}) == 3


async def test_where_actions_are_enforced_the_schema_lists_them() -> None:
    spoken = ScriptedLanguageModel(lambda request: '{"thought": "", "action": "open door"}')
    agent = PromptedPolicy(spoken, AgentConfig(enforce_actions=True))
    state = State(text="A door.", admissible_actions=("open door", "go left"))
    assert (await agent.act(TASK, [], state)).action == "open door"
    [asked] = spoken.requests
    assert asked.schema is not None
    properties = asked.schema["properties"]
    assert isinstance(properties, dict)
    assert properties["action"] == {"type": "string", "enum": ["open door", "go left"]}
