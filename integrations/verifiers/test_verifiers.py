"""The package `dreamgym-vf` in verifiers' own evaluation (`vf-eval`), against models on loopback.

Training by prime-rl needs CUDA and is not started; it plays the same package.
"""

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dreamgym.http_server import HttpServer
from dreamgym.models.local.chat_template import with_chat_template
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.serve import model_app
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.protocols import LanguageModel
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import CompletionRequest

HERE = Path(__file__).parent
LAMP = f"{HERE.parent / 'trl' / 'lamp.py'}:Lamp"
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@contextmanager
def served(model: LanguageModel) -> Iterator[str]:
    """A language model as an OpenAI-compatible server in a thread."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = HttpServer(model_app("policy", plain=model, chat=model))
    asyncio.run_coroutine_threadsafe(server.start(), loop).result(30)
    try:
        yield f"{server.url}/v1"
    finally:
        asyncio.run_coroutine_threadsafe(server.aclose(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)


def evaluate(url: str, out: Path, *words: str, environment: str = LAMP) -> list[dict[str, Any]]:
    """The traces that `vf-eval` writes."""
    command = [sys.executable, "-c", "from verifiers.v1.cli.eval.main import main; main()", "dreamgym-vf"]
    command += ["--env.taskset.environment", environment, "--client.base-url", url, "--model", "policy"]
    command += ["--client.api-key-var", "NO_KEY", "--no-push", "--no-rich", "-o", str(out), *words]
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environ = {**os.environ, "PYTHONPATH": path, "HOME": str(out)}
    done = subprocess.run(
        command, cwd=HERE.parent.parent, env=environ, capture_output=True, text=True, check=False, timeout=400
    )
    found = list(out.glob("*/traces.jsonl"))
    assert found, done.stdout[-3000:] + done.stderr[-3000:]
    return [json.loads(line) for line in found[0].read_text().splitlines()]


def solve(request: CompletionRequest) -> str:
    """Reads the label, then presses."""
    said = request.prompt.partition("The label says ")[2]
    return f"press {said.split('.')[0]}" if said else "read label"


def test_vf_eval_plays_tasks_in_groups(tmp_path: Path) -> None:
    with served(ScriptedLanguageModel(solve)) as url:
        episodes = evaluate(url, tmp_path, "-n", "4", "-r", "2")
    assert [episode["ok"] for episode in episodes] == [True] * 8
    assert len({episode["task"]["data"]["id"] for episode in episodes}) == 4
    traces = [trace for episode in episodes for trace in episode["traces"]]
    assert [trace["rewards"]["dreamgym_reward"]["score"] for trace in traces] == [1.0] * 8
    assert {(trace["metrics"]["turns"], trace["metrics"]["success"]) for trace in traces} == {(2.0, 1.0)}
    first, label, said, press = (node["message"] for node in traces[0]["nodes"])
    assert first["content"].startswith("Switch on the lamp.\n\nYou see a lamp")
    assert (label["content"], said["role"], press["role"]) == ("read label", "user", "assistant")
    assert said["content"].startswith("The label says ")


def test_a_tiny_language_model_is_evaluated(tmp_path: Path) -> None:
    """One of 30 thousand random parameters: it plays, and hardly ever does anything that counts."""
    tokenizer = make_tokenizer(["read label, press the red, green, blue or white button", TEMPLATE])
    tokenizer.chat_template = TEMPLATE
    model = LocalLanguageModel(make_model("nano", tokenizer, family="llama"), tokenizer)
    with served(with_chat_template(model)) as url:
        episodes = evaluate(url, tmp_path, "-n", "3", "--sampling.max-tokens", "8")
    assert [episode["ok"] for episode in episodes] == [True] * 3
    for episode in episodes:
        [trace] = episode["traces"]
        assert trace["rewards"]["dreamgym_reward"]["score"] in (0.0, 1.0)
        assert 1 <= trace["metrics"]["turns"] <= 5  # the horizon of the lamp


BROKEN = """class Broken:
    tried = 0
    def start(self): return "hello"
    def step(self, action):
        Broken.tried += 1
        if Broken.tried < {failures}: raise OSError("gone")
        return "done", 1.0, True
"""


@pytest.mark.parametrize("failures", [3, 9])
def test_a_failed_episode_is_an_error_that_verifiers_can_retry(tmp_path: Path, failures: int) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text(BROKEN.format(failures=failures))
    words = ("-n", "1", "--env.retries.max-retries", "2")
    with served(ScriptedLanguageModel(solve)) as url:
        [episode] = evaluate(url, tmp_path, *words, environment=f"{broken}:Broken")
    rewards = [trace["rewards"] for trace in episode["traces"] if trace.get("rewards")]
    if failures == 3:
        assert episode["ok"]
        assert rewards[-1]["dreamgym_reward"]["score"] == 1.0
    else:
        assert not episode["ok"]
        assert "gone" in episode["errors"][-1]["message"]
        assert not rewards
