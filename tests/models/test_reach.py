"""Unreachable servers: a short wait for the first contact, a long one for a server that was up before."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path

import pytest

from dreamgym.agents import LanguageModelPolicy
from dreamgym.config import AgentConfig, EndpointConfig, load_config
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.errors import EndpointError
from dreamgym.models.endpoint.client import Endpoint, EndpointLanguageModel
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import Environment
from dreamgym.rollouts import CircuitBreaker, GroupSettings, run_groups
from dreamgym.testing import CorridorFactory
from dreamgym.types import CompletionRequest, FailureKind
from tests.chaos import ChaosProxy
from tests.command import dreamgym
from tests.models.scripted_endpoint import served

WALKING_SERVER = """
import asyncio, sys
from starlette.responses import JSONResponse
from tests.handler_server import HandlerServer

async def main():
    async def handle(request):
        return JSONResponse({"choices": [{"text": "go east", "finish_reason": "stop"}], "data": []})
    server = HandlerServer(handle)
    await server.start("127.0.0.1", int(sys.argv[1]))
    print("up", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def question(number: int) -> CompletionRequest:
    return CompletionRequest(prompt=f"You see a drawer {number}", max_tokens=4, stop=("\n",))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


async def test_a_server_that_was_never_there_fails_all_requests_soon_and_says_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    settings = EndpointConfig(url=url, model="m", start_seconds=2.0, backoff_seconds=0.05, concurrency=8)
    endpoint = Endpoint("x", settings)
    clock = asyncio.get_running_loop().time
    began = clock()
    asking = (endpoint.complete(question(n), role="agent") for n in range(30))
    problems = await asyncio.gather(*asking, return_exceptions=True)
    assert 2.0 <= clock() - began < 20  # deadline_seconds are 600
    assert all(isinstance(problem, EndpointError) for problem in problems)
    assert str(problems[0]) == (
        "expected a completion by 'm' from endpoint 'x', got no connection to "
        f"{url}/v1 in 2 s (start_seconds): connection failed: Connection refused; "
        "start the server, or check the url"
    )
    began = clock()
    with pytest.raises(EndpointError, match="no connection"):
        await endpoint.complete(question(31), role="agent")
    assert clock() - began < 1.8  # the time for a first sign is the endpoint's, and not each request's
    await endpoint.aclose()


async def test_a_server_that_starts_after_its_clients_is_found_and_nothing_is_lost() -> None:
    async with served() as server, ChaosProxy(server.url) as proxy, asyncio.timeout(20):
        await proxy.stop()
        endpoint = Endpoint("x", server.settings(url=proxy.url, backoff_seconds=0.05, concurrency=8))
        asking = asyncio.gather(*(endpoint.complete(question(n), role="agent") for n in range(20)))
        await asyncio.sleep(0.5)
        assert not asking.done()
        await proxy.start()
        right = [(await server.local.complete(question(n))).text for n in range(20)]
        assert [reply.text for reply in await asking] == right
        assert not endpoint.usage.total.failures
        await endpoint.aclose()


async def test_a_server_that_answers_with_errors_is_reachable() -> None:
    async with served() as server:
        config = load_config(
            overrides=[f"endpoints.near.url={server.url}", "endpoints.near.model=other", "seed=1"]
        )
        async with LanguageModels(config) as models:
            models.open("endpoint:near", role="judge")
            await models.check_reachable()


async def test_a_run_continues_when_a_killed_server_is_back() -> None:
    """The rollouts' breaker, a real process that is killed, and another one at the same address."""
    port, messages = free_port(), asyncio.Queue[str]()
    server = await walking_server(port)
    settings = EndpointConfig(
        url=f"http://127.0.0.1:{port}",
        model="m",
        kind="completions",
        deadline_seconds=0.3,
        backoff_seconds=0.05,
    )
    endpoint = Endpoint("x", settings)
    groups = GroupSettings(size=2, retries=0, failure_window=3, pause=2.0, pauses=6, concurrency=2)
    factory = CorridorFactory(length=4, horizon=4)
    tasks = [*await factory.tasks("train", 4)] * 6
    running = asyncio.create_task(
        run_groups(
            *(factory, walkers(endpoint), tasks),
            name="killed",
            settings=groups,
            breaker=CircuitBreaker(groups, messages.put_nowait),
        )
    )
    try:
        async with asyncio.timeout(60):
            while not endpoint.usage.total.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            server.kill()
            await server.wait()
            assert "server_down" in await messages.get()
            server = await walking_server(port)
            report = await running
    finally:
        server.kill()
        await server.wait()
        await endpoint.aclose()
    assert report.pauses >= 1
    assert set(report.failures) == {FailureKind.SERVER_DOWN}
    assert len(report.groups) + len(report.dropped) == len(tasks)
    assert len(report.groups) >= len(tasks) - 3 * (1 + report.pauses)


async def walking_server(port: int) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", WALKING_SERVER, str(port)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"up\n"
    return process


def walkers(endpoint: Endpoint) -> Callable[[Environment, str, int], LanguageModelPolicy]:
    model = EndpointLanguageModel(endpoint, role="agent")

    def member(environment: Environment, conversation: str, seed: int) -> LanguageModelPolicy:
        settings = AgentConfig(max_tokens=4)
        return LanguageModelPolicy(model, settings, conversation=conversation, seed=seed)

    return member


@pytest.mark.parametrize(
    "words",
    [
        ["play", "--env", "alfworld", "--trajectories", "builtin:alfworld", "--dream", "NAME"],
        ["evaluate", "NAME", "--env", "textworld", "--episodes", "2"],
        ["collect", "--env", "textworld", "--episodes", "2", "--policy", "NAME", "--out", "FOLDER"],
        ["train", "--experience", "NAME", "--data", "DATA", "--model", "nano", "--out", "FOLDER"],
    ],
    ids=lambda words: str(words[0]),
)
@pytest.mark.slow
def test_commands_fail_before_they_start_if_the_server_is_not_there(words: list[str], tmp_path: Path) -> None:
    name = "endpoint:near"
    near = [
        "--set",
        f"endpoints.near.url=http://127.0.0.1:{free_port()}",
        *("--set", "endpoints.near.model=m", "--set", "endpoints.near.start_seconds=0.2"),
    ]
    with TrajectoryWriter(tmp_path / "few") as few:
        few.append(islice(read_trajectories(builtin_dataset("alfworld")), 4))
    given = {"NAME": name, "FOLDER": str(tmp_path / "run"), "DATA": str(tmp_path / "few")}
    result = dreamgym(*(given.get(word, word) for word in words), *near)
    assert result.returncode == 7, result.stdout + result.stderr
    assert "in 0.2 s (start_seconds)" in " ".join(result.stderr.split())
