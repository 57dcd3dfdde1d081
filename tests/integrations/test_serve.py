"""The OpenEnv server: episodes of many clients, in dream and reality, whatever the clients do."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.openenv import OpenEnvFactory
from dreamgym.errors import EndpointError, EpisodeFailedError
from dreamgym.integrations.serving import ServedEnvironment
from dreamgym.testing import check_environment
from dreamgym.types import FailureKind, Prediction, State, Task, Transition, WorldSheet
from tests.command import INTERRUPTIBLE, dreamgym
from tests.integrations.served_corridor import Client, served_dream, serving, session
from tests.training.training_run import FACTORY, CorridorDream

ASK = {"type": "step", "data": {"text": "open door"}}


def real() -> ServedEnvironment:
    return ServedEnvironment("corridor", open_real=lambda: FACTORY)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def http(url: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    async with (
        aiohttp.ClientSession(headers=headers) as client,
        client.request("GET" if body is None else "POST", url + path, json=body) as reply,
    ):
        return reply.status, await reply.json()


async def test_a_served_environment_keeps_the_contract_of_environments() -> None:
    async with serving(real()) as (app, url):
        factory = await OpenEnvFactory.connect(url)
        assert (factory.splits, factory.action_field) == (("train", "test"), "text")
        report = await check_environment(factory, episodes=24, concurrency=8)
        await factory.aclose()
        assert report.passed, [each for each in report.checks if each.status == "fail"]
        await until(lambda: not app.sessions)


async def test_dream_and_reality_differ_by_one_word_of_the_reset(tmp_path: Path) -> None:
    async with served_dream(tmp_path) as served, serving(served) as (_, url), session(url) as client:
        for index in (0, 3):
            task = (await served.tasks("train"))[index]
            start, way_out = (int(each) for each in task.id.split("-")[1:])
            east = way_out - start
            actions = [*["go east"] * east, *["go west"] * -east, "open door"]
            dreamt = await client.play(*actions, index=index, mode="dream")
            assert (await client.state())["mode"] == "dream"
            happened = await client.play(*actions, index=index, mode="real")
            state = await client.state()
            assert (state["mode"], state["experience_model"], state["success"]) == ("real", None, True)
            assert dreamt == happened
            assert happened[-1]["done"]
            assert happened[-1]["reward"] == 1.0
        await client.reset(mode="real", split="test", index=0)
        refused = await client.error({"type": "reset", "data": {"split": "test"}})
        assert refused["code"] == "VALIDATION_ERROR"
        assert "tasks of 'train'" in refused["message"]


async def test_a_policy_sees_nothing_that_is_hidden_and_the_trainer_sees_where_a_reply_is_from(
    tmp_path: Path,
) -> None:
    async with served_dream(tmp_path) as served, serving(served) as (_, url), session(url) as client:
        first, second = await client.play("open door", task_id="4-1-4", seed=7)
        assert set(first["observation"]) == {"text", "instruction", "metadata"}
        assert set(second) == {"observation", "reward", "done"}
        assert second["observation"]["metadata"] == {}
        state = await client.state()
        assert "way_out" not in json.dumps([first, second, state])
        assert "unlocked" not in json.dumps([first, second, state])
        known = (
            "task_id",
            "seed",
            "experience_model",
            "reward_source",
            "step_count",
            "terminated",
            "failure",
        )
        assert [state[name] for name in known] == [
            *("4-1-4", 7, "corridor dream", "environment", 1, False, None),
        ]
        assert state["cost"]["seconds"] > 0
        _, listed = await http(url, "/corridor/tasks", {"split": "train"})
        assert len(listed["tasks"]) == len(await FACTORY.tasks("train"))
        assert all("parameters" not in each for each in listed["tasks"])
        _, schema = await http(url, "/schema")
        assert schema["action"]["required"] == ["text"]
        assert set(state) == set(schema["state"]["properties"])


async def test_results_reach_the_task_pool_the_replay_buffer_and_the_disk(tmp_path: Path) -> None:
    async with served_dream(tmp_path, keep=True) as served, serving(served) as (_, url):
        assert served.results is not None
        assert served.dream is not None
        seeds = set()
        async with session(url) as client:
            for task, episodes in (("4-3-4", 4), ("4-1-4", 4)):
                for number in range(episodes):
                    way = ("go east", "open door") if number % 2 else ("open door",)
                    await client.play(*way, task_id=task, policy="theirs", policy_version=3)
                    seeds.add((await client.state())["seed"])
        await until(lambda: served.results is not None and served.results.steps == 1)
        assert len(seeds) == 2, "the episodes of a group have one seed"
        pool = served.results.pool
        assert (pool["4-3-4"].entropy, pool["4-1-4"].entropy) == (0.25, 0.0)
        assert served.dream.buffer is not None
        assert served.dream.buffer.stats().rows == served.results.fresh_rows > 0
        _, status = await http(url, "/status")
        assert status["results"]["groups"] == 2
        assert status["counts"]["successes"] == 2
    kept = list(read_trajectories(tmp_path / "trajectories"))
    assert len(kept) == 8
    assert {(each.provenance.policy, each.provenance.policy_version) for each in kept} == {("theirs", 3)}
    assert all(each.transitions[-1].outcome.over for each in kept)
    async with served_dream(tmp_path, keep=True) as again:
        assert again.results is not None
        assert again.results.pool["4-3-4"].entropy == 0.25


async def test_without_a_choice_the_curriculum_chooses_each_task_for_a_whole_group(tmp_path: Path) -> None:
    async with served_dream(tmp_path) as served, serving(served) as (_, url), session(url) as client:
        chosen = []
        for _ in range(8):
            await client.play("open door")
            state = await client.state()
            chosen.append((state["task_id"], state["seed"]))
        assert [len(set(chosen[:4])), len(set(chosen[4:])), len(set(chosen))] == [1, 1, 2]
        assert served.results is not None
        assert served.results.pool.sample(2, step=0) == [
            served.results.pool[name].task for name, _ in chosen[::4]
        ]


class Slow(CorridorDream):
    """Takes its time, or fails."""

    def __init__(self, seconds: float = 0.0, failure: FailureKind | None = None) -> None:
        self.seconds, self.failure = seconds, failure

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        await asyncio.sleep(self.seconds)
        if self.failure is not None:
            raise EpisodeFailedError(self.failure, "the model's server is gone")
        found = await super().predict(task, sheet, history, state, action)
        return replace(found, outcome=replace(found.outcome, confidence=0.9, reasoning="as it was"))


async def test_a_step_longer_than_the_idle_time_is_answered_and_a_silent_client_is_not_kept(
    tmp_path: Path,
) -> None:
    async with (
        served_dream(tmp_path, Slow(1.0)) as served,
        serving(served, idle_seconds=0.3) as (app, url),
        session(url) as client,
    ):
        await client.play("open door", index=0)
        assert (await client.state())["support"] == 0.9
        closed = json.loads(await client.socket.recv())
        assert closed["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            await client.socket.recv()
        assert not app.sessions


async def test_clients_beyond_the_limit_are_told_and_vanished_ones_free_their_place(tmp_path: Path) -> None:
    async with (
        served_dream(tmp_path, Slow(0.2)) as served,
        serving(served, max_sessions=2) as (app, url),
        session(url) as first,
        session(url) as second,
    ):
        await asyncio.gather(first.reset(index=0), second.reset(index=0))
        async with session(url) as third:
            assert json.loads(await third.socket.recv())["data"]["code"] == "CAPACITY_REACHED"
        await second.socket.send(json.dumps(ASK))
        second.socket.transport.abort()  # killed while the server computes its step
        await until(lambda: len(app.sessions) == 1)
        async with session(url) as third:
            await third.reset(index=0)
        await until(lambda: len(app.sessions) == 1)
        assert served.counts["dropped_dream"] == 2, "neither episode was finished"


async def test_a_failure_has_a_kind_and_is_never_an_observation(tmp_path: Path) -> None:
    model = Slow(failure=FailureKind.SERVER_DOWN)
    async with served_dream(tmp_path, model) as served, serving(served) as (_, url), session(url) as client:
        await client.reset(index=0)
        error = await client.error(ASK)
        assert (error["code"], error["kind"]) == ("EXECUTION_ERROR", "server_down")
        assert "the model's server is gone" in error["message"]
        state = await client.state()
        assert (state["failure"], state["terminated"], state["truncated"]) == ("server_down", False, False)
        assert "this one failed (server_down); reset first" in (await client.error(ASK))["message"]
        model.failure = None
        assert len(await client.play("open door", index=0)) == 2
        assert (await client.state())["failure"] is None
        factory = await OpenEnvFactory.connect(url)
        model.failure = FailureKind.TIMEOUT
        episode = factory.make((await factory.tasks("train", 1))[0])
        await episode.start()
        with pytest.raises(EpisodeFailedError, match="gone") as raised:
            await episode.step("open door")
        assert raised.value.kind is FailureKind.TIMEOUT
        await episode.aclose()
        await factory.aclose()


@pytest.mark.parametrize(
    ("message", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("3", "UNKNOWN_TYPE"),
        ({"type": "fly"}, "UNKNOWN_TYPE"),
        ({"type": "step", "data": {}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"text": 3}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": {"text": "look", "reward": 1}}, "VALIDATION_ERROR"),
        ({"type": "step", "data": [1]}, "VALIDATION_ERROR"),
        (ASK, "EXECUTION_ERROR"),
        ({"type": "reset", "data": {"index": 10**6}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"task_id": "4-1-5"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"mode": "lucid"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"mode": "dream"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"split": "none"}}, "VALIDATION_ERROR"),
        ({"type": "reset", "data": {"seed": -1}}, "VALIDATION_ERROR"),
    ],
)
async def test_a_wrong_message_gets_an_error_and_the_session_goes_on(message: object, code: str) -> None:
    async with serving(real()) as (_, url), session(url) as client:
        assert (await client.error(message))["code"] == code
        assert (await client.reset(index=0, unknown="ignored"))["observation"]["text"]


async def test_routes_of_the_protocol_without_a_session() -> None:
    async with serving(real()) as (_, url):
        assert await http(url, "/health") == (200, {"status": "healthy"})
        assert (await http(url, "/metadata"))[1]["name"] == "corridor"
        assert await http(url, "/list_environments") == (200, ["corridor"])
        _, splits = await http(url, "/corridor/splits")
        assert splits == [{"name": "train", "type": "train"}, {"name": "test", "type": "test"}]
        _, count = await http(url, "/corridor/num_tasks", {"split": "test"})
        _, some = await http(url, "/corridor/task_range", {"split": "test", "start": 1, "stop": 3})
        _, one = await http(url, "/corridor/task", {"split": "test", "index": 1})
        assert (count["num_tasks"], some["tasks"][0]) == (len(await FACTORY.tasks("test")), one["task"])
        assert (await http(url, "/corridor/task", {"split": "test", "index": 99}))[0] == 400
        assert (await http(url, "/other/splits"))[0] == 404
        status, first = await http(url, "/reset", {"index": 0})
        assert (status, first["done"], bool(first["observation"]["text"])) == (200, False, True)
        assert (await http(url, "/step", {"action": {"text": "look"}}))[0] == 400
        assert (await http(url, "/step", {"action": {}}))[0] == 422
        assert (await http(url, "/mcp", {}))[1]["jsonrpc"] == "2.0"
        assert {"/reset", "/step", "/state"} <= set((await http(url, "/openapi.json"))[1]["paths"])


async def test_a_token_is_needed_where_there_is_one_and_web_pages_are_refused() -> None:
    async with serving(real(), token="secret") as (_, url):
        assert (await http(url, "/health"))[0] == 200
        assert (await http(url, "/metadata"))[0] == 401
        assert (await http(url, "/metadata", Authorization="Bearer secret"))[0] == 200
        for wrong in ({}, {"Authorization": "Bearer other"}):
            with pytest.raises(InvalidStatus):
                async with session(url, **wrong):
                    pass
        async with session(url, Authorization="Bearer secret") as client:
            await client.reset(index=0)
        with pytest.raises(EndpointError, match="401"):
            await OpenEnvFactory.connect(url)
    async with serving(real()) as (_, url):
        assert (await http(url, "/metadata", Origin="http://evil.example"))[0] == 403
        async with aiohttp.ClientSession() as http_client:
            got = await http_client.get(f"{url}/health", headers={"Host": "evil"})
            assert got.status == 400


def test_another_machine_needs_a_token_and_a_wrong_name_is_explained() -> None:
    open_to_all = dreamgym("serve", "textworld", "--host", "0.0.0.0")
    assert open_to_all.returncode == 2
    assert "--token-env" in open_to_all.stderr
    unknown = dreamgym("serve", "textwrld")
    assert unknown.returncode == 2
    assert "did you mean 'textworld'" in unknown.stderr


def test_the_command_serves_until_it_is_interrupted(tmp_path: Path) -> None:
    lamp = tmp_path / "lamp.py"
    lamp.write_text(
        "class Lamp:\n"
        "    instruction = 'Switch it on.'\n"
        "    def start(self): return 'It is dark.'\n"
        "    def step(self, action):\n"
        "        return ('Light!', 1.0, True) if action == 'switch' else ('Dark.', 0.0, False)\n"
    )
    command = [*INTERRUPTIBLE, "serve", f"{lamp}:Lamp", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout is not None
            line = run.stdout.readline()
            assert "serving" in line
            asyncio.run(_switch(line.split()[-1]))
            run.send_signal(signal.SIGINT)
            assert run.wait(20) == 0
        finally:
            run.kill()


async def _switch(url: str) -> None:
    async with session(url) as client:
        seen = await client.play("wait", "switch", index=3)
        assert [each["reward"] for each in seen] == [None, 0.0, 1.0]
        assert isinstance(client, Client)
