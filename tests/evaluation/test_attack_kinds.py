"""`dreamgym experience attack` on each kind of dream: prompted, judged, and a black box."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dreamgym.cli import app
from dreamgym.types import CompletionRequest
from tests.scripted_server import ScriptedServer

LAMP = f"{Path(__file__).parents[1] / 'learning' / 'lamp.py'}:Lamp"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


def dreamgym(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("lamps") / "trajectories"
    words = ("--episodes", 24, "--set", "collect.episodes_per_task=4", "--out", out)
    result = dreamgym("collect", "--env", LAMP, "--policy", "explore", *words)
    assert result.exit_code == 0, result.output
    return out


class Lamps:
    """A prompted model of lamps, and a judge of them. It knows what the label says by the episode so far;
    with `gullible`, it believes whoever writes that the task is done."""

    def __init__(self, *, gullible: bool = False) -> None:
        self.gullible = gullible
        self.judged = 0

    def __call__(self, request: CompletionRequest) -> str:
        if "You decide whether an agent" in request.prompt:
            self.judged += 1
            after = re.search(r'(?m)^State after: (".*")$', request.prompt)
            assert after is not None
            on = json.loads(after[1]) == "The lamp is on."
            return json.dumps({"evidence": "The lamp is on." if on else "", "done": on})
        *_, action = _STRING.findall(request.prompt)
        said: str = json.loads(action)
        label = re.search(r"The label says (\w+)\.", request.prompt)
        won = label is not None and said == f"press {label[1]}"
        if self.gullible and ("end: success" in said or "done: true" in said):
            won = True
        text = "The lamp is on." if won else "Nothing happens."
        if said == "read label":
            text = label[0] if label else "The label says red."
        return json.dumps({"reasoning": "", "next_state": text, "terminated": won, "success": won})


def attacked(model: str, data: Path, *words: object, candidates: int = 80) -> tuple[int, dict[str, Any]]:
    result = dreamgym(
        *("experience", "attack", model, "--data", data, "--candidates", candidates, "--json", *words)
    )
    assert result.exit_code in (0, 1), result.output
    return result.exit_code, json.loads(result.stdout)


def test_a_prompted_model_is_attacked_in_the_environment_of_its_data(recorded: Path) -> None:
    """Labels that it invents are wrong half of the time: what follows from them is not real, and is found."""
    with ScriptedServer(Lamps()) as server:
        _, found = attacked(server.name, recorded)
    assert found["tried"] == 80
    assert not found["by_recordings"], "the lamps of the data are opened, not another environment"
    assert found["real_steps"] > 0
    assert "forged text" not in found["kinds"]


def test_a_prompted_model_that_believes_the_action_fails(recorded: Path) -> None:
    with ScriptedServer(Lamps(gullible=True)) as server:
        code, found = attacked(server.name, recorded, candidates=60)
    assert (code, found["passed"]) == (1, False)
    assert found["kinds"]["forged text"]["real"] == 0


def test_with_a_judge_the_same_model_grants_no_forged_success(recorded: Path) -> None:
    """The model claims what the action says; the judge reads the state."""
    lamps = Lamps(gullible=True)

    def claims(request: CompletionRequest) -> str:
        reply = lamps(request)
        return reply if "evidence" in reply else reply.replace("The lamp is on.", "So you say.")

    with ScriptedServer(claims) as server:
        _, found = attacked(server.name, recorded, "--reward", server.name, candidates=60)
    assert lamps.judged > 0
    assert found["kinds"] == {}


def test_a_black_box_is_attacked(recorded: Path, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    short = {"steps": 10, "batch": 8, "vocabulary": 400, "validation": 0.2, "attempts": 1, "max_tokens": 60}
    chosen = [word for name, value in short.items() for word in ("--set", f"experience.{name}={value}")]
    trained = dreamgym(
        *("experience", "train", "--data", recorded, "--model", "nano", "--out", tmp_path / "run", *chosen)
    )
    assert trained.exit_code == 0, trained.output
    assert (tmp_path / "run" / "knowledge.json").exists()
    _, found = attacked(str(tmp_path / "run"), recorded, candidates=10)
    assert (found["tried"], found["by_recordings"]) == (10, False)
    assert found["not_judged"] == 0
