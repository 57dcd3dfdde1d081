"""Any OpenEnv server as an environment: ``openenv:URL``; a query (``?mode=real``) is sent with each reset.

Actions are texts where the server's action has one text field; otherwise they are JSON objects. The state
that an agent sees is the observation's text field, or the observation as JSON. A server without a task API
has numbered seeds as tasks.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import parse_qsl

from dreamgym.config import Section
from dreamgym.envs.adapters import HORIZON, SEEDED_TASKS
from dreamgym.envs.episode import Episode, check_split, select_tasks
from dreamgym.errors import ConfigError, EndpointError, EpisodeFailedError, MissingExtraError
from dreamgym.types import FailureKind, JsonValue, Outcome, State, Task

PREFIX = "openenv:"
_TEXTS = ("text", "observation", "message", "content", "output", "prompt")
"""Fields of an observation that hold what the agent reads, in this order."""
_INSTRUCTIONS = ("instruction", "prompt", "question", "goal", "description")
_OWN = frozenset({"metadata", "done", "reward"})


class OpenEnvOptions(Section):
    """Options of an OpenEnv server."""

    horizon: int = HORIZON
    """Actions after which an episode is truncated."""
    seconds: float = 120.0
    """The longest wait for one reply."""
    token_env: str | None = None
    """Environment variable with the token that the server expects."""


class OpenEnvError(EpisodeFailedError):
    """The server answered a message with an error."""

    def __init__(self, code: str, message: str) -> None:
        kind = message.partition(":")[0]
        known = kind in set(FailureKind)
        super().__init__(FailureKind(kind) if known else FailureKind.CRASHED, f"{code}: {message}")
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """One observation as it came."""

    observation: Mapping[str, Any]
    reward: float | None
    done: bool


class Connection:
    """One session: messages and their replies, in turn."""

    def __init__(self, socket: Any, seconds: float) -> None:
        self._socket, self._seconds = socket, seconds

    async def reset(self, **chosen: Any) -> Reply:
        return _reply(await self.ask({"type": "reset", "data": chosen}))

    async def step(self, action: Mapping[str, Any]) -> Reply:
        return _reply(await self.ask({"type": "step", "data": action}))

    async def state(self) -> dict[str, Any]:
        found: dict[str, Any] = await self.ask({"type": "state"})
        return found

    async def ask(self, message: Mapping[str, Any]) -> Any:
        """The data of the reply.

        Raises:
            EpisodeFailedError: the server sent an error, nothing in time, or closed the session.
        """
        try:
            async with asyncio.timeout(self._seconds):
                await self._socket.send_str(json.dumps(message))
                found = await self._socket.receive_json()
        except TimeoutError:
            raise EpisodeFailedError(
                FailureKind.TIMEOUT, f"no reply to {message['type']} within {self._seconds:g} seconds"
            ) from None
        except (TypeError, ValueError, OSError, RuntimeError) as error:
            raise EpisodeFailedError(
                FailureKind.SERVER_DOWN, f"the server closed the session: {type(error).__name__} {error}"
            ) from None
        if found.get("type") == "error":
            data = found.get("data", {})
            raise OpenEnvError(str(data.get("code")), str(data.get("message")))
        return found.get("data") or {}

    async def aclose(self) -> None:
        if not self._socket.closed:
            with contextlib.suppress(OSError):
                await self._socket.send_str('{"type": "close"}')
            await self._socket.close()


class OpenEnvServer:
    """The HTTP half of a server: what it offers."""

    def __init__(self, url: str, options: OpenEnvOptions | None = None) -> None:
        """`url` may have a query, whose fields are sent with each reset."""
        try:
            import aiohttp
        except ImportError:
            raise MissingExtraError("an OpenEnv server", "endpoint") from None
        self.options = options or OpenEnvOptions()
        address, _, query = url.removeprefix(PREFIX).partition("?")
        self.url = address.rstrip("/")
        if not self.url.startswith(("http://", "https://")):
            raise ConfigError(f"expected the http:// address of an OpenEnv server, got {url!r}")
        self.chosen: dict[str, str] = dict(parse_qsl(query))
        self.headers: dict[str, str] = {}
        if (name := self.options.token_env) is not None:
            if not (token := os.environ.get(name, "").strip()):
                raise ConfigError(f"token_env: expected a token in ${name}, which is not set")
            self.headers = {"Authorization": f"Bearer {token}"}
        self._aiohttp = aiohttp
        self._session: Any = None

    async def http(self, path: str, body: Any = None) -> Any:
        """The JSON reply; None for a route that the server does not have.

        Raises:
            EndpointError: it cannot be reached, or answers with an error.
        """
        method = "GET" if body is None else "POST"
        try:
            async with self._http().request(method, self.url + path, json=body) as reply:
                if reply.status in (404, 405, 501):
                    return None
                if reply.status != 200:
                    raise EndpointError(
                        f"{self.url}{path}: status {reply.status}: {(await reply.text())[:200]}"
                    )
                return await reply.json()
        except (self._aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise EndpointError(f"{self.url}{path}: {type(error).__name__}: {error}") from None

    async def connect(self) -> Connection:
        """A new session."""
        try:
            socket = await self._http().ws_connect(f"{self.url}/ws", max_msg_size=0, autoping=True)
        except (self._aiohttp.ClientError, OSError, TimeoutError) as error:
            raise EpisodeFailedError(FailureKind.SERVER_DOWN, f"{self.url}/ws: {error}") from None
        return Connection(socket, self.options.seconds)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _http(self) -> Any:
        if self._session is None:
            connector = self._aiohttp.TCPConnector(limit=0)
            timeout = self._aiohttp.ClientTimeout(total=self.options.seconds)
            self._session = self._aiohttp.ClientSession(
                connector=connector, headers=self.headers, timeout=timeout
            )
        return self._session


class OpenEnvFactory:
    """The episodes of an OpenEnv server."""

    def __init__(self, server: OpenEnvServer, name: str) -> None:
        self.name = name
        self.server = server
        self.description: Mapping[str, Any] = {}
        self.splits: tuple[str, ...] = tuple(SEEDED_TASKS)
        self.action_field: str | None = None
        self.environment: str | None = None
        """Its name in the task API; None if it has none."""
        self._tasks: dict[str, list[Task]] = {}

    @classmethod
    async def connect(cls, url: str, options: OpenEnvOptions | None = None) -> Self:
        """Read what the server offers.

        Raises:
            EndpointError: it cannot be reached.
        """
        factory = cls(OpenEnvServer(url, options), url if url.startswith(PREFIX) else f"{PREFIX}{url}")
        try:
            await factory._describe()
        except BaseException:
            await factory.aclose()
            raise
        return factory

    async def _describe(self) -> None:
        self.description = await self.server.http("/metadata") or {}
        schema = await self.server.http("/schema")
        if not isinstance(schema, dict) or not isinstance(schema.get("action"), dict):
            raise EndpointError(f"{self.server.url}/schema: expected the schemas of an OpenEnv server")
        self.action_field = text_field(schema["action"])
        names = await self.server.http("/list_environments")
        if names and (splits := await self.server.http(f"/{names[0]}/splits")):
            self.environment = names[0]
            self.splits = tuple(each["name"] if isinstance(each, dict) else str(each) for each in splits)

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        if split not in self._tasks:
            self._tasks[split] = await self._list(split)
        return select_tasks(self._tasks[split], split, count, seed)

    async def _list(self, split: str) -> list[Task]:
        about = str(self.description.get("description") or self.name)
        if self.environment is None:
            offset = 0 if split == "train" else SEEDED_TASKS["train"]
            return [
                self._task(split, f"{split}-{n}", about, {"seed": offset + n})
                for n in range(SEEDED_TASKS[split])
            ]
        found = await self.server.http(f"/{self.environment}/tasks", {"split": split})
        listed = (found or {}).get("tasks", [])
        rows = [each if isinstance(each, dict) else {"id": str(each)} for each in listed]
        return [
            self._task(
                split,
                str(row.get("id", f"{split}-{index}")),
                next((str(row[key]) for key in _INSTRUCTIONS if row.get(key)), about),
                {"split": split, "index": index},
            )
            for index, row in enumerate(rows)
        ]

    def _task(self, split: str, name: str, instruction: str, chosen: dict[str, JsonValue]) -> Task:
        return Task(id=name, instruction=instruction, environment=self.name, split=split, parameters=chosen)

    def make(self, task: Task, *, seed: int = 0) -> OpenEnvEpisode:
        chosen = {"seed": seed % 2**31, **task.parameters, **self.server.chosen}
        return OpenEnvEpisode(self.server, task, chosen, self.action_field)

    async def aclose(self) -> None:
        await self.server.aclose()


class OpenEnvEpisode(Episode):
    """One episode, in a session of its own."""

    def __init__(
        self, server: OpenEnvServer, task: Task, chosen: Mapping[str, JsonValue], action_field: str | None
    ) -> None:
        """`chosen` is sent with the reset."""
        super().__init__(task, server.options.horizon)
        self._server = server
        self._chosen = chosen
        self._action_field = action_field
        self._connection: Connection | None = None
        self._offered: dict[str, Any] = {}

    async def _start(self) -> State:
        self._connection = await self._server.connect()
        return await self._seen(await self._connection.reset(**self._chosen))

    async def _step(self, action: str) -> Outcome:
        assert self._connection is not None
        try:
            reply = await self._connection.step(as_action(action, self._action_field))
        except OpenEnvError as error:
            if error.code != "VALIDATION_ERROR":
                raise
            return Outcome(next_state=State(text=str(error)), reward=0.0, terminated=False)
        state = await self._seen(reply)
        reward = float(reply.reward or 0.0)
        if not reply.done:
            return Outcome(next_state=state, reward=reward, terminated=False)
        truncated = bool(self._offered.get("truncated"))
        success = bool(self._offered.get("success", reward > 0 and not truncated))
        return Outcome(
            next_state=state, reward=reward, terminated=not truncated, truncated=truncated, success=success
        )

    async def _seen(self, reply: Reply) -> State:
        """The state that the agent sees; the server's own state says how the episode stands."""
        assert self._connection is not None
        self._offered = await self._connection.state()
        listed = self._offered.get("admissible_actions") or reply.observation.get("admissible_actions")
        actions = tuple(map(str, listed)) if isinstance(listed, list) and not reply.done else None
        return State(text=observed_text(reply.observation), admissible_actions=actions)

    async def aclose(self) -> None:
        await super().aclose()
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.aclose()


def text_field(schema: Mapping[str, Any]) -> str | None:
    """The one required text field of an action; None if an action is more than a text.

    >>> text_field({"properties": {"text": {"type": "string"}, "metadata": {}}, "required": ["text"]})
    'text'
    >>> text_field({"properties": {"x": {"type": "integer"}}, "required": ["x"]}) is None
    True
    """
    properties = schema.get("properties", {})
    required = [name for name in schema.get("required", ()) if name not in _OWN]
    if len(required) == 1 and properties.get(required[0], {}).get("type") == "string":
        return str(required[0])
    return None


def as_action(text: str, field: str | None) -> dict[str, Any]:
    """The action of a text; without a text field the text must be a JSON object.

    >>> as_action("look", "text"), as_action('{"x": 1}', None), as_action("look", None)
    ({'text': 'look'}, {'x': 1}, {'text': 'look'})
    """
    if field is not None:
        return {field: text}
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"text": text}


def observed_text(observation: Mapping[str, Any]) -> str:
    """
    >>> observed_text({"text": "A door.", "metadata": {}}), observed_text({"board": [1, 2]})
    ('A door.', '{"board": [1, 2]}')
    """
    for name in _TEXTS:
        if isinstance(observation.get(name), str) and observation[name].strip():
            return str(observation[name])
    return json.dumps({name: value for name, value in observation.items() if name not in _OWN})


def open_openenv(name: str, options: OpenEnvOptions) -> OpenEnvFactory:
    """Connect from synchronous code, also while an event loop runs in this thread."""

    async def described() -> OpenEnvFactory:
        factory = await OpenEnvFactory.connect(name, options)
        await factory.aclose()  # the connection belongs to this loop; the next request opens another
        return factory

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, described()).result()


def _reply(data: Mapping[str, Any]) -> Reply:
    observation = data.get("observation")
    return Reply(
        observation=observation if isinstance(observation, dict) else {"text": str(observation)},
        reward=data.get("reward"),
        done=bool(data.get("done")),
    )
