"""MCP servers as environments: calls, refusals, results, servers that fail, the whole loop."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

import dreamgym as dg
from dreamgym.envs.registry import make
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.errors import EpisodeFailedError, EpisodeOverError
from dreamgym.protocols import Environment
from dreamgym.rollouts import run_episode
from dreamgym.types import FailureKind, Trajectory
from tests.envs.mcp_servers import BAD, EXAMPLES, SHIPPED, WAREHOUSE, episode, play


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """The tasks that the example prints."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "warehouse_tasks.py")], capture_output=True, text=True, check=True
    )
    path = tmp_path / "tasks.jsonl"
    path.write_text(done.stdout)
    return path


def children() -> list[psutil.Process]:
    return list(psutil.Process().children(recursive=True))


async def test_tools_are_called_and_their_results_are_states(tasks: Path) -> None:
    factory = make(WAREHOUSE, tasks=tasks, check=SHIPPED, tools=["find", "ship"])
    assert factory.splits == ("train", "test")
    [task] = [each for each in await factory.tasks("train") if each.id == "train-0"]
    environment = factory.make(task)
    start = await environment.start()
    assert 'find {"item": string} - Tell the shelf of an item.' in start.text
    assert "put" not in start.text  # the setup may call it, the agent may not
    assert task.instruction == "Ship the lamp." or task.instruction.startswith("Ship the ")
    item = str(task.parameters["item"])
    found = await environment.step(f'find {{"item": "{item}"}}')
    shelf = found.next_state.text.removesuffix(".").split()[-1]
    assert (found.next_state.text, found.over) == (f"{item} is on shelf {shelf}.", False)
    refused = await environment.step('put {"item": "lamp", "shelf": 3}')
    assert refused.next_state.text.startswith("Refused: unknown tool 'put'; tools: find, ship, answer")
    last = await environment.step(f'ship {{"shelf": {shelf}}}')
    assert (last.reward, last.success, last.terminated) == (1.0, True, True)
    with pytest.raises(EpisodeOverError):
        await environment.step("find")
    await environment.aclose()
    await environment.aclose()


async def test_the_solution_of_a_task_is_an_expert_and_errors_delay_it(tasks: Path) -> None:
    factory = make(WAREHOUSE, tasks=tasks, check=SHIPPED, tools=["find", "ship"], horizon=8)
    [task] = await factory.tasks("test", 1)
    for policy, turns in (("expert", 2), ("noisy:0.4", None)):

        def chosen(environment: Environment, policy: str = policy) -> dg.Policy:
            return make_policy(policy, environment, seed=3)

        found = await run_episode(lambda: factory.make(task), chosen, trajectory_id=policy, task=task, seed=0)
        assert isinstance(found, Trajectory), found
        assert turns is None or (found.success, len(found)) == (True, turns)
        assert found.transitions[0].action.startswith(("find ", "ship ", "answer")) or turns is None


async def test_each_episode_has_a_server_of_its_own_which_ends_with_it() -> None:
    before = children()
    async with episode(BAD) as one, episode(BAD) as two:
        await one.start()
        await two.start()
        assert len(children()) == len(before) + 2
        await one.step('count {"n": 3}')
        assert (await two.step('count {"n": 2}')).next_state.text == "The count is 2."
    assert children() == before


async def test_an_episode_that_is_cancelled_leaves_no_server() -> None:
    before = children()
    async with episode(BAD) as environment:
        await environment.start()
        hanging = asyncio.create_task(environment.step("hang"))
        await asyncio.sleep(0)
        hanging.cancel()
        with pytest.raises(asyncio.CancelledError):
            await hanging
    assert children() == before


async def test_wrong_calls_are_refused_with_the_reason() -> None:
    wrong = {
        "": "unknown tool ''",
        "count": "'n' is a required property",
        "count{}": "expected a space between count and its arguments",
        "count 3": "expected a JSON object of arguments, got '3'",
        "count {n: 3}": "expected JSON",
        'count {"n": "three"}': "argument 'n': 'three' is not of type 'integer'",
        'count {"n": -1}': "argument 'n': -1 is less than the minimum of 0",
        'count {"n": NaN}': "expected JSON",
        'count {"n": 1e999}': "count:",
        'echo {"text": "\ud800"}': "expected JSON",
        'echo {"text": "\\ud800"}': "expected JSON",
        "[" * 100_000: "unknown tool",
        "count " + "[" * 100_000: "expected JSON",
    }
    for outcome, (action, reason) in zip(await play(*wrong), wrong.items(), strict=True):
        assert outcome.next_state.text.startswith("Refused: ")
        assert reason in outcome.next_state.text, action[:80]
        assert (outcome.reward, outcome.terminated, outcome.info["refused"]) == (0.0, False, True)


async def test_a_schema_that_cannot_be_used_leaves_the_decision_to_the_server() -> None:
    outcomes = await play('elsewhere {"a": 1}', 'broken {"a": 1}')
    assert [outcome.next_state.text for outcome in outcomes] == ["done", "done"]


async def test_errors_of_tools_are_states() -> None:
    failed, refused, picture, silent = await play("fail", "refuse", "picture", "silent")
    assert failed.next_state.text == "Error: it did not work"
    assert refused.next_state.text == "Error: not like this"
    assert picture.next_state.text == "[image image/png]"
    assert silent.next_state.text == "(no output)"


async def test_the_text_of_a_state_is_bounded() -> None:
    long = json.dumps({"text": "x" * 300_000})
    [outcome] = await play(f"echo {long}", max_characters=100)
    assert outcome.next_state.text == "x" * 100 + "… (299900 more characters)"
    async with episode(BAD, max_characters=100) as environment:
        assert len((await environment.start()).text) < 150


async def test_an_answer_ends_the_episode_and_without_a_check_its_reward_is_unknown() -> None:
    _, last = await play('count {"n": 1}', 'answer {"text": "one"}')
    assert (last.terminated, last.success, last.reward, last.graded) == (True, False, 0.0, False)
    [refused] = await play('answer {"text": "one"}', answer=False)
    assert not refused.over


async def test_an_episode_is_truncated_at_its_horizon() -> None:
    outcomes = await play(*['count {"n": 1}'] * 3, horizon=3)
    assert [outcome.truncated for outcome in outcomes] == [False, False, True]


@pytest.mark.parametrize(
    ("action", "kind", "message"),
    [
        ("die", FailureKind.SERVER_DOWN, "it logged: out of order"),
        ("hang", FailureKind.TIMEOUT, "calling hang took longer than 0.5 seconds"),
        ("garble", FailureKind.PARSE_ERROR, "calling garble failed"),
    ],
)
async def test_a_server_that_fails_in_a_call_is_a_typed_failure(
    action: str, kind: FailureKind, message: str
) -> None:
    before = children()
    with pytest.raises(EpisodeFailedError, match=message) as caught:
        await play(action, seconds=0.5 if action == "hang" else 60)
    assert caught.value.kind == kind
    assert children() == before


@pytest.mark.parametrize(
    ("mistake", "kind", "message"),
    [
        ("crash", FailureKind.SERVER_DOWN, "it logged: no database"),
        ("mute", FailureKind.TIMEOUT, "starting took longer than 0.5 seconds"),
    ],
)
async def test_a_server_that_does_not_start_is_a_typed_failure(
    mistake: str, kind: FailureKind, message: str
) -> None:
    before = children()
    async with episode(f"{BAD} {mistake}", start_seconds=0.5 if mistake == "mute" else 60) as environment:
        with pytest.raises(EpisodeFailedError, match=message) as caught:
            await environment.start()
        assert caught.value.kind == kind
    assert children() == before


@pytest.mark.parametrize("mistake", ["chatty", "endless"])
async def test_a_server_may_print_other_lines_and_list_its_tools_without_end(mistake: str) -> None:
    async with episode(f"{BAD} {mistake}") as environment:
        await environment.start()
        assert (await environment.step('count {"n": 2}')).next_state.text == "The count is 2."


async def test_a_server_at_an_address() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen(  # noqa: ASYNC220 - does not wait
        [sys.executable, str(EXAMPLES / "warehouse_server.py"), str(port)], stderr=subprocess.DEVNULL
    ) as process:
        try:
            name = f"mcp:http://127.0.0.1:{port}/mcp"
            found = ""
            for _ in range(100):
                async with episode(name, start_seconds=10) as environment:
                    try:
                        await environment.start()
                    except EpisodeFailedError:  # not listening yet
                        await asyncio.sleep(0.1)
                        continue
                    await environment.step('put {"item": "rope", "shelf": 2}')
                    found = (await environment.step('find {"item": "rope"}')).next_state.text
                    break
            assert found == "rope is on shelf 2."
        finally:
            process.terminate()
    async with episode(name, start_seconds=10) as environment:
        with pytest.raises(EpisodeFailedError) as caught:
            await environment.start()
        assert caught.value.kind == FailureKind.SERVER_DOWN


async def test_the_folder_of_an_episode_has_the_same_name_in_all_of_them(tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    (files / "note.txt").write_text("hello")
    seen: list[Path] = []
    check = tmp_path / "check.py"
    check.write_text(
        "seen = []\n"
        "def written(episode):\n"
        "    seen.append(episode.folder)\n"
        "    return (episode.folder / 'note.txt').read_text() == 'hello' and len(episode.calls) == 2\n"
    )
    for _ in range(2):
        async with episode(f"{BAD} {{folder}}", files=files, check=f"{check}:written") as environment:
            await environment.start()
            one = await environment.step('echo {"text": "{folder}/note.txt"}')
            assert (one.next_state.text, one.reward, one.graded) == ("{folder}/note.txt", 0.0, True)
            two = await environment.step('echo {"text": "again"}')
            assert (two.success, two.terminated, two.reward) == (True, True, 1.0)
            assert environment._folder is not None
            seen.append(environment._folder)
            assert (environment._folder / "note.txt").exists()
    assert seen[0] != seen[1]
    assert not any(folder.exists() for folder in seen)


@pytest.mark.slow
async def test_record_dream_train_and_evaluate(tasks: Path, tmp_path: Path) -> None:
    """The whole loop, barely trained: a recorded server is dreamt of, and a check judges in reality."""
    options: dict[str, Any] = {
        "tasks": str(tasks),
        "check": SHIPPED,
        "tools": ["find", "ship"],
        "horizon": 3,
    }
    await dg.collect(WAREHOUSE, tmp_path / "data", episodes=3, policy="expert", options=options)
    assert all(each.success and each.graded for each in dg.read_trajectories(tmp_path / "data"))
    await dg.fine_tune(
        tmp_path / "data",
        tmp_path / "experience",
        environment=WAREHOUSE,
        options=options,
        model="nano",
        steps=2,
    )
    await dg.train(
        experience=str(tmp_path / "experience"),
        out=tmp_path / "agent",
        warm_start_steps=2,
        steps=1,
        tasks_per_step=1,
        group_size=2,
        gate="off",
        agent={"model": "nano", "max_tokens": 8},
    )
    async with dg.Agent.load(tmp_path / "agent") as agent:
        found = await dg.evaluate(agent, make(WAREHOUSE, **options), split="test", episodes=2)
    assert (found.environment, len(found.episodes), found.failures) == (WAREHOUSE, 2, {})
