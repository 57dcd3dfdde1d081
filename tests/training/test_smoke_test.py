"""`models check` tries a language model as experience model."""

from __future__ import annotations

import itertools
import json

from dreamgym.training.smoke_test import sample_episode
from dreamgym.types import CompletionRequest
from tests.command import dreamgym
from tests.scripted_server import ScriptedServer


def reply(state: str) -> str:
    return json.dumps({"reasoning": "so it is.", "next_state": state, "terminated": False, "success": False})


def found(server: ScriptedServer) -> dict[str, object]:
    checked = dreamgym("models", "check", server.name, "--requests", 2, "--json")
    assert checked.returncode == 0, checked.stderr
    last = json.loads(checked.stdout)["findings"][-1]
    assert last["name"] == "as experience model"
    return dict(last)


def test_a_model_that_predicts_the_real_episode_agrees_with_itself_and_with_reality() -> None:
    real = {turn.action: turn.outcome.next_state.text for turn in sample_episode().transitions}

    def script(request: CompletionRequest) -> str:
        named = [action for action in real if f'"{action}"' in request.prompt.rpartition("# Action")[2]]
        return reply(real[named[0]]) if named else "yes"

    with ScriptedServer(script) as server:
        finding = found(server)
    assert finding["good"] is True
    expected = "12 of 12 replies readable; replays agree on 4 of 4 steps, 4 equal to the real step"
    assert expected in str(finding["detail"])


def test_a_model_whose_replies_differ_is_reported() -> None:
    counted = itertools.count()
    with ScriptedServer(lambda request: reply(f"You see a mug {next(counted)}.")) as server:
        finding = found(server)
    assert finding["good"] is None
    assert "replays agree on 0 of 4 steps, 0 equal to the real step" in str(finding["detail"])
