"""A language model is tried as an experience model before anybody practises in its dream."""

from __future__ import annotations

import itertools
import json

from dreamgym.testing.scripted_server import ScriptedServer
from dreamgym.training.smoke_test import sample_episode
from dreamgym.types import CompletionRequest
from tests.command import dreamgym


def reply(state: str) -> str:
    return json.dumps({"reasoning": "so it is.", "next_state": state, "terminated": False, "success": False})


def found(server: ScriptedServer) -> dict[str, object]:
    checked = dreamgym("models", "check", server.name, "--requests", 2, "--json")
    assert checked.returncode == 0, checked.stderr
    last = json.loads(checked.stdout)["findings"][-1]
    assert last["name"] == "as experience model"
    return dict(last)


def test_one_that_plays_the_episode_as_it_was_agrees_with_itself_and_with_reality() -> None:
    real = {turn.action: turn.outcome.next_state.text for turn in sample_episode().transitions}

    def script(request: CompletionRequest) -> str:
        named = [action for action in real if f'"{action}"' in request.prompt.rpartition("# Action")[2]]
        return reply(real[named[0]]) if named else "yes"

    with ScriptedServer(script) as server:
        told = found(server)
    assert told["good"] is True
    assert "12 of 12 replies readable; replays agree on 4 of 4 steps, 4 as in reality" in str(told["told"])


def test_one_that_says_something_else_each_time_is_told_by_its_spread() -> None:
    counted = itertools.count()
    with ScriptedServer(lambda request: reply(f"You see a mug {next(counted)}.")) as server:
        told = found(server)
    assert told["good"] is None
    assert "replays agree on 0 of 4 steps, 0 as in reality" in str(told["told"])
