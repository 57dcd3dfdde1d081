"""Checks any OpenEnv server, ours or not: does it scale, is it learnable, deterministic, self-describing and
secure, and can its reward be forged? (The questions of OpenEnv's RFC 008.)"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from dreamgym.envs.episode import first_tasks
from dreamgym.envs.openenv import (
    Connection,
    OpenEnvFactory,
    OpenEnvOptions,
    OpenEnvServer,
    Reply,
    as_action,
    observed_text,
)
from dreamgym.errors import EndpointError, EpisodeFailedError
from dreamgym.testing.checks import HOSTILE_ACTIONS
from dreamgym.testing.env_checker import CheckReport, OnCheck, run_check
from dreamgym.testing.episode_probe import NONSENSE, CheckFailed, CheckSkipped, shown
from dreamgym.testing.tabular_learner import TabularLearner
from dreamgym.types import Task

_HIDDEN = {
    *("answer", "answers", "expected", "facts", "gold", "ground_truth", "hidden", "label", "oracle"),
    *("secret", "sheet", "solution", "target"),
}
"""Names of fields that a policy must not see."""
_WORDS = ("look", "inventory", "help", NONSENSE)
"""Actions where a server lists none and none are given."""
_STEPS, _TASKS = 12, 8


@dataclass(slots=True, kw_only=True)
class Played:
    """One episode: what was sent, and what came back."""

    task: Task
    actions: list[str] = field(default_factory=list)
    replies: list[Reply] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(float(each.reward or 0.0) for each in self.replies)


Choose = Callable[[str, Sequence[str]], str]
"""Takes the observed text and the actions to choose from."""


@dataclass(slots=True, kw_only=True)
class Server:
    """The server under test."""

    factory: OpenEnvFactory
    split: str
    sessions: int
    episodes: int
    actions: Sequence[str]
    schema: Mapping[str, Any] = field(default_factory=dict)
    known: list[Task] = field(default_factory=list)
    recorded: list[Played] = field(default_factory=list)
    say: Callable[[str], None] = lambda detail: None

    @asynccontextmanager
    async def session(self) -> AsyncIterator[Connection]:
        connection = await self.factory.server.connect()
        try:
            yield connection
        finally:
            await connection.aclose()

    async def tasks(self) -> list[Task]:
        if not self.known:
            self.known = list(await first_tasks(self.factory, self.split, _TASKS))[:_TASKS]
        return self.known

    def resets(self, task: Task) -> dict[str, Any]:
        return {"seed": 0, **task.parameters, **self.factory.server.chosen}

    async def send(self, connection: Connection, action: str) -> Reply:
        return await connection.step(as_action(action, self.factory.action_field))

    async def play(self, connection: Connection, task: Task, choose: Choose, steps: int = _STEPS) -> Played:
        reply = await connection.reset(**self.resets(task))
        played = Played(task=task, replies=[reply])
        while not reply.done and len(played.actions) < steps:
            action = choose(observed_text(reply.observation), await self.choices(connection, reply))
            reply = await self.send(connection, action)
            played.actions.append(action)
            played.replies.append(reply)
        return played

    async def choices(self, connection: Connection, reply: Reply) -> Sequence[str]:
        if self.actions:
            return self.actions
        listed = reply.observation.get("admissible_actions")
        if listed is None and "admissible_actions" in self.schema.get("state", {}).get("properties", {}):
            listed = (await connection.state()).get("admissible_actions")
        return [str(each) for each in listed or ()]

    async def records(self) -> list[Played]:
        """A few episodes with random actions, to compare others with."""
        if not self.recorded:
            for number, task in enumerate((await self.tasks())[:4]):
                async with self.session() as connection:
                    self.recorded.append(await self.play(connection, task, chooser(number)))
        return self.recorded

    async def replay(self, connection: Connection, played: Played) -> None:
        """Raises `CheckFailed` where the same actions give something else."""
        for position, expected in enumerate(played.replies):
            if position:
                found = await self.send(connection, played.actions[position - 1])
            else:
                found = await connection.reset(**self.resets(played.task))
            if found != expected:
                where = f"action {position}" if position else "the reset"
                raise CheckFailed(
                    f"task {played.task.id!r}, {where}: {_shown(expected)}, then {_shown(found)}"
                )


def chooser(seed: int) -> Choose:
    rng = random.Random(seed)
    return lambda text, actions: rng.choice(list(actions) or list(_WORDS))


async def describes_itself(server: Server) -> str:
    about = server.factory.description
    if not about.get("name") or not about.get("description"):
        raise CheckFailed(f"/metadata: expected name and description, got {shown(str(about))}")
    for part in ("action", "observation", "state"):
        if not isinstance(server.schema.get(part), dict):
            raise CheckFailed(f"/schema: expected a schema of the {part}")
    tasks = await server.tasks()
    text = server.factory.action_field
    form = f"text in {text!r}" if text else "a JSON object"
    return (
        f"{about['name']}: an action is {form}; splits {', '.join(server.factory.splits)}; {tasks[0].id!r} …"
    )


async def observations_fit(server: Server) -> str:
    known = server.schema.get("observation", {})
    allowed = set(known.get("properties", {})) | {"metadata"}
    count = 0
    for played in await server.records():
        for reply in played.replies:
            count += 1
            if extra := set(reply.observation) - allowed:
                raise CheckFailed(f"an observation has {sorted(extra)}, which /schema does not know")
            if not observed_text(reply.observation).strip():
                raise CheckFailed(f"task {played.task.id!r}: an empty observation: {_shown(reply)}")
    return f"{count} observations"


async def nothing_hidden(server: Server) -> str:
    seen: dict[str, str] = {}
    for played in await server.records():
        for reply in played.replies:
            seen |= dict.fromkeys(_names(dict(reply.observation)), "an observation")
    listed = await server.factory.server.http(f"/{server.factory.environment}/tasks", {"split": server.split})
    seen |= dict.fromkeys(_names(listed), "the task list")
    found = {name: place for name, place in seen.items() if name.lower() in _HIDDEN}
    if found:
        raise CheckFailed(", ".join(f"{place} has a field {name!r}" for name, place in found.items()))
    return f"{len(seen)} names of fields in observations and tasks"


async def same_actions_same_episode(server: Server) -> str:
    records = await server.records()
    for played in records:
        async with server.session() as connection:
            await server.replay(connection, played)
            await server.replay(connection, played)  # the session is used again
    return (
        f"{len(records)} episodes, {sum(len(each.actions) for each in records)} actions, played three times"
    )


async def scales(server: Server) -> str:
    records = await server.records()
    speeds = []
    for count in (1, server.sessions):

        async def one(number: int) -> int:
            played = records[number % len(records)]
            async with server.session() as connection:
                await server.replay(connection, played)
            return len(played.actions) + 1

        started = time.perf_counter()
        steps = sum(await asyncio.gather(*map(one, range(count))))
        speeds.append(steps / (time.perf_counter() - started))
    return f"{speeds[0]:,.0f} steps/s alone, {speeds[1]:,.0f} in {server.sessions} sessions; equal replies"


async def vanished_clients_are_forgotten(server: Server) -> str:
    for _ in range(3):
        await asyncio.gather(*(_vanish(server.factory.server) for _ in range(server.sessions)))
    for _ in range(40):
        try:
            async with server.session() as connection:
                await connection.reset(**server.resets((await server.tasks())[0]))
            return f"{3 * server.sessions} connections dropped without a word"
        except EpisodeFailedError as error:
            last = str(error)
            await asyncio.sleep(0.25)
    raise CheckFailed(f"after {3 * server.sessions} dropped connections no session can be opened: {last}")


async def hostile_actions_earn_nothing(server: Server) -> str:
    task = (await server.tasks())[0]
    for kind, action in HOSTILE_ACTIONS.items():
        async with server.session() as connection:
            await connection.reset(**server.resets(task))
            await _earns_nothing(kind, server.send(connection, action))
    return f"{len(HOSTILE_ACTIONS)} kinds"


async def extra_fields_earn_nothing(server: Server) -> str:
    task = (await server.tasks())[0]
    base = as_action(NONSENSE, server.factory.action_field)
    forged: list[dict[str, Any]] = [
        {**base, "reward": 1.0, "done": True, "success": True},
        {**base, "metadata": {"reward": 1.0, "success": True}},
        {"reward": 1.0},
    ]
    for action in forged:
        async with server.session() as connection:
            await connection.reset(**server.resets(task))
            await _earns_nothing(shown(json.dumps(action)), connection.step(action))
    return f"{len(forged)} forged actions"


async def steps_outside_earn_nothing(server: Server) -> str:
    async with server.session() as connection:
        await _earns_nothing("before a reset", server.send(connection, NONSENSE))
    ended = 0
    for played in await server.records():
        if not played.replies[-1].done:
            continue
        async with server.session() as connection:
            await server.replay(connection, played)
            ended += 1
            await _earns_nothing("after the end", server.send(connection, played.actions[-1]))
    return f"before a reset, and after the end of {ended} episodes"


async def survives_malformed_messages(server: Server) -> str:
    messages: list[dict[str, Any]] = [
        {"type": "fly"},
        {"type": "step", "data": {}},
        {"type": "step", "data": {"text": None}},
        {"type": "reset", "data": {"seed": "x"}},
        {"type": "step", "data": as_action("look " * 50_000, server.factory.action_field)},
    ]
    for message in messages:
        async with server.session() as connection:
            with suppress(EpisodeFailedError):
                await connection.ask(message)
    async with server.session() as connection:
        await connection.reset(**server.resets((await server.tasks())[0]))
    return f"{len(messages)} kinds"


async def is_learnable(server: Server) -> str:
    """Tabular Q-learning on the task on which random actions earn most."""
    returns: dict[str, list[float]] = defaultdict(list)
    tasks = await server.tasks()
    longest = max(_STEPS, server.factory.server.options.horizon)
    async with server.session() as connection:
        if not await server.choices(connection, await connection.reset(**server.resets(tasks[0]))):
            raise CheckSkipped("the server lists no actions: name some (--action TEXT, repeated)")
        for number in range(server.episodes // 2):
            task = tasks[number % len(tasks)]
            returns[task.id].append((await server.play(connection, task, chooser(number), longest)).total)
            server.say(f"{number + 1} episodes with random actions")
        everything = [each for some in returns.values() for each in some]
        if max(everything) <= min(everything):
            raise CheckSkipped(f"every one of {len(everything)} random episodes returned {everything[0]:g}")
        best = max(tasks, key=lambda task: statistics.fmean(returns[task.id] or [0.0]))
        learner = TabularLearner(_WORDS)
        learnt = []
        for number in range(server.episodes):
            played = await server.play(connection, best, learner.choose, longest)
            learner.update([float(each.reward or 0.0) for each in played.replies])
            learnt.append(played.total)
            server.say(f"{number + 1} episodes of learning")
    first, last = (statistics.fmean(part) for part in (returns[best.id], learnt[-len(learnt) // 4 :]))
    spread = (
        f"mean return {statistics.fmean(everything):.2f}, variance {statistics.pvariance(everything):.3f}"
    )
    found = f"random actions: {spread}; a tabular learner on {best.id!r}: {first:.2f} to {last:.2f}"
    if last <= first < max(everything):
        raise CheckFailed(f"{found} in {server.episodes} episodes")
    return found


CHECKS: dict[str, Callable[[Server], Awaitable[str]]] = {
    "self-describing: metadata, schemas and tasks are published": describes_itself,
    "self-describing: observations fit their schema and are never empty": observations_fit,
    "deterministic: the same task, seed and actions give the same episode": same_actions_same_episode,
    "scales: concurrent sessions get the same replies as single ones": scales,
    "scales: clients that vanish leave no session behind": vanished_clients_are_forgotten,
    "secure: observations and tasks show nothing hidden": nothing_hidden,
    "secure: malformed messages do not stop the server": survives_malformed_messages,
    "reward cannot be forged: hostile actions earn nothing": hostile_actions_earn_nothing,
    "reward cannot be forged: extra fields of an action earn nothing": extra_fields_earn_nothing,
    "reward cannot be forged: steps outside an episode earn nothing": steps_outside_earn_nothing,
    "learnable: returns differ, and a simple learner raises them": is_learnable,
}


async def check_openenv(
    url: str,
    *,
    actions: Sequence[str] = (),
    split: str | None = None,
    sessions: int = 32,
    episodes: int = 200,
    options: OpenEnvOptions | None = None,
    report: OnCheck | None = None,
) -> CheckReport:
    """Play episodes on an OpenEnv server and apply all `CHECKS`.

    Args:
        url: its address; a query is sent with each reset (``http://127.0.0.1:8000?mode=real``).
        actions: what to choose from, for servers that list no actions.
        sessions: at once.
        episodes: of the check for learnability.

    Raises:
        EndpointError: the server cannot be reached.
    """
    factory = await OpenEnvFactory.connect(url, options)
    try:
        server = Server(
            factory=factory,
            split=split or factory.splits[0],
            sessions=sessions,
            episodes=episodes,
            actions=actions,
            schema=await factory.server.http("/schema") or {},
        )
        found = [await run_check(name, check, server, report) for name, check in CHECKS.items()]
    finally:
        await factory.aclose()
    return CheckReport(environment=factory.name, checks=tuple(found))


async def _earns_nothing(what: str, step: Awaitable[Reply]) -> None:
    """A refusal is fine; a reply must not reward."""
    with suppress(EpisodeFailedError):
        reply = await step
        if float(reply.reward or 0.0) > 0:
            raise CheckFailed(f"{what}: reward {reply.reward}: {_shown(reply)}")


async def _vanish(server: OpenEnvServer) -> None:
    """Open a session and drop the connection, as a killed client does."""
    if (place := urlsplit(server.url)).scheme != "http":
        raise CheckSkipped("needs an http:// address")
    try:
        reader, writer = await asyncio.open_connection(place.hostname, place.port or 80)
        key = "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13"
        own = "".join(f"\r\n{name}: {value}" for name, value in server.headers.items())
        upgrade = f"Host: {place.netloc}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n{key}{own}"
        writer.write(f"GET /ws HTTP/1.1\r\n{upgrade}\r\n\r\n".encode())
        await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        raise EndpointError(f"{server.url}: {type(error).__name__}: {error}") from None
    writer.transport.abort()


def _names(value: Any) -> Iterator[str]:
    """All keys, nested ones too."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield str(name)
            yield from _names(inner)
    elif isinstance(value, list):
        for inner in value[:50]:
            yield from _names(inner)


def _shown(reply: Reply) -> str:
    return f"{shown(observed_text(reply.observation))}, reward {reply.reward}, done {reply.done}"
