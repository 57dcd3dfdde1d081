"""Our server with OpenEnv's own client and validator, and our checker with OpenEnv's own server."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from openenv import GenericEnvClient

LAMP = Path(__file__).parent.parent / "trl" / "lamp.py"
DREAMGYM = [sys.executable, "-m", "dreamgym"]


@contextmanager
def running(*command: str, **environ: str) -> Iterator[str]:
    """The address that a server prints."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | environ) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[-1]
        finally:
            process.terminate()
            process.wait(30)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(*DREAMGYM, "serve", f"{LAMP}:Lamp", "--port", "0", "--max-sessions", "64") as found:
        yield found


async def play(client: GenericEnvClient, index: int) -> float:
    result = await client.reset(index=index)
    result = await client.step({"text": "read label"})
    colour = result.observation["text"].removesuffix(".").split()[-1]
    result = await client.step({"text": f"press {colour}"})
    assert result.done
    return float(result.reward or 0.0)


async def test_64_sessions_of_the_real_client(url: str) -> None:
    async def session(number: int) -> float:
        async with GenericEnvClient(base_url=url) as client:
            rewards = [await play(client, 4 * number + each) for each in range(4)]
            state = await client.state()
            assert (state["terminated"], state["truncated"], state["failure"]) == (True, False, None)
            return sum(rewards)

    assert await asyncio.gather(*map(session, range(64))) == [4.0] * 64


def test_the_synchronous_client_and_errors(url: str) -> None:
    with GenericEnvClient(base_url=url).sync() as client:
        with pytest.raises(RuntimeError, match="reset first"):
            client.step({"text": "read label"})
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            client.reset(index=10**9)
        assert client.reset(seed=3).observation["instruction"] == "Switch on the lamp."
        with pytest.raises(RuntimeError, match="VALIDATION_ERROR"):
            client.step({"words": "read label"})
        assert client.step({"text": "read label"}).observation["metadata"] == {}


def test_openenv_validate_passes(url: str) -> None:
    command = [str(Path(sys.executable).parent / "openenv"), "validate", "--url", url]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "PASS" in done.stdout) == (0, True), done.stdout + done.stderr


async def test_a_token_travels_in_the_clients_headers() -> None:
    command = [*DREAMGYM, "serve", f"{LAMP}:Lamp", "--port", "0", "--token-env", "LAMP_TOKEN"]
    with running(*command, LAMP_TOKEN="secret") as address:
        with pytest.raises(ConnectionError):
            async with GenericEnvClient(base_url=address):
                pass
        headers = {"Authorization": "Bearer secret"}
        async with GenericEnvClient(base_url=address, headers=headers) as client:
            assert await play(client, 0) == 1.0


def test_the_checker_understands_openenvs_own_server() -> None:
    with running(sys.executable, str(Path(__file__).parent / "their_server.py")) as address:
        actions = ["--action", '{"number": 1}', "--action", '{"number": 2}', "--action", '{"number": 3}']
        words = [
            "envs",
            "check",
            "--url",
            address,
            *actions,
            "--episodes",
            "60",
            "--concurrency",
            "8",
            "--json",
        ]
        done = subprocess.run([*DREAMGYM, *words], capture_output=True, text=True, check=False)
    report = {each["name"]: each for each in json.loads(done.stdout)["checks"]}
    failed = {name.partition(":")[0] for name, each in report.items() if each["status"] == "fail"}
    assert not failed, done.stdout
    learnt = [each for name, each in report.items() if name.startswith("learnable")]
    assert "tabular learner" in learnt[0]["detail"]
