"""Any MCP server as an environment: ``mcp:COMMAND`` or ``mcp:http://HOST/mcp``.

An action is the name of a tool and a JSON object of arguments; the state is the result of the last call, and
at the start the list of tools. A wrong call is refused with the reason. Each episode starts the command
anew; ``{folder}`` in it is an empty folder of the episode (or a copy of the option `files`), and what agents
write and read names it ``{folder}`` too, so that episodes do not differ by its place. An address gets a
session for each episode: whether that begins afresh is up to the server.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from pydantic import Field

from dreamgym.config import Section, nearest_name
from dreamgym.envs.episode import Episode, check_expert, check_split, select_tasks
from dreamgym.envs.mcp_session import McpSession
from dreamgym.envs.mcp_tasks import McpTasks, TaskRow, read_tasks
from dreamgym.envs.references import load_reference
from dreamgym.envs.tool_calls import (
    ANSWER,
    ANSWER_TOOL,
    EpisodeRecord,
    RefusedCallError,
    Tool,
    ToolCall,
    describe_tools,
    parse_call,
    shortened,
)
from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError, MissingExtraError
from dreamgym.types import UNKNOWN_REWARD, FailureKind, Outcome, State, Task

PREFIX = "mcp:"
FOLDER = "{folder}"
_STARTING = 8
"""Servers that start at the same time; more would only wait for one another."""


class McpOptions(Section):
    """Options of an MCP server."""

    tasks: Path | None = Field(
        None, description="file of tasks, JSON lines; default: one task, `instruction`"
    )
    instruction: str = Field("Use the tools.", description="the task, without a file of tasks")
    check: str | None = Field(
        None, description="FILE.py:FUNCTION that grades an episode; without one, rewards are unknown"
    )
    files: Path | None = Field(None, description="folder that is copied to {folder} for each episode")
    tools: tuple[str, ...] = Field((), description="tools that agents may call; default: all")
    answer: bool = Field(True, description="offer the tool answer, which ends the episode")
    horizon: int = Field(20, ge=1, description="calls after which an episode is truncated")
    seconds: float = Field(60.0, gt=0, description="the longest wait for the result of a call")
    start_seconds: float = Field(60.0, gt=0, description="the longest wait for a server to start")
    max_characters: int = Field(4000, ge=100, description="of a state; the rest is left out")
    pass_env: tuple[str, ...] = Field(
        (), description="environment variables that the command gets, besides PATH and HOME"
    )
    token_env: str | None = Field(None, description="environment variable with the token of an address")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server: an address, or the words of a command."""

    url: str | None = None
    command: tuple[str, ...] = ()

    @property
    def needs_folder(self) -> bool:
        return any(FOLDER in word for word in self.command)

    def at(self, folder: Path | None) -> str | Sequence[str]:
        if self.url is not None:
            return self.url
        return [word.replace(FOLDER, str(folder)) for word in self.command]


def parse_target(name: str) -> Target:
    """The server that an environment's name means.

    >>> parse_target("mcp:python -m shop --db {folder}/shop.db").command[:3]
    ('python', '-m', 'shop')

    Raises:
        ConfigError: it is no command and no address, or the command does not exist.
    """
    text = name.removeprefix(PREFIX).strip()
    if text.startswith(("http://", "https://")):
        address = urlsplit(text)
        if not address.hostname or "@" in address.netloc:
            raise ConfigError(
                f"expected mcp:http://HOST/PATH without a password, got a name of {len(name)} characters; a "
                "token belongs in the environment variable that the option token_env names"
            )
        return Target(url=text)
    try:
        words = tuple(shlex.split(text))
    except ValueError as error:
        raise ConfigError(f"environment {name!r}: expected a command, {error}") from None
    if not words:
        raise ConfigError(f"expected mcp:COMMAND or mcp:http://HOST/PATH, got {name!r}")
    return Target(command=words)


class McpFactory:
    """The episodes of an MCP server."""

    def __init__(self, name: str, options: McpOptions) -> None:
        self.name = name
        self.options = options
        self.target = parse_target(name)
        self.environ = _variables(options.pass_env)
        self.token = next(iter(_variables((options.token_env,)).values())) if options.token_env else None
        self.check = _load_check(options.check)
        if options.files is not None and not options.files.is_dir():
            raise ConfigError(f"files: expected a folder, found none at {str(options.files)!r}")
        if options.files is not None and not self.target.needs_folder:
            raise ConfigError(f"files: expected {FOLDER} in the command that uses them, got {name!r}")
        self.fixed = options.tasks is not None
        """Whether only listed tasks can be played."""
        self.listed = (
            read_tasks(options.tasks, name)
            if options.tasks is not None
            else McpTasks([TaskRow(instruction=options.instruction)], name)
        )
        self._starting: WeakKeyDictionary[Any, asyncio.Semaphore] = WeakKeyDictionary()

    @property
    def splits(self) -> tuple[str, ...]:
        return self.listed.splits

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        return select_tasks(self.listed.of(split), split, count, seed)

    def make(self, task: Task, *, seed: int = 0) -> McpEpisode:
        return McpEpisode(self, task)

    def starting(self) -> asyncio.Semaphore:
        """Held while a server starts; an event loop has its own."""
        loop = asyncio.get_running_loop()
        return self._starting.setdefault(loop, asyncio.Semaphore(_STARTING))

    async def aclose(self) -> None:
        """Nothing is held open between episodes."""


class McpEpisode(Episode):
    """One episode: a server of its own, or a session of its own with a shared one."""

    def __init__(self, factory: McpFactory, task: Task) -> None:
        super().__init__(task, factory.options.horizon)
        self._factory = factory
        self._options = factory.options
        self._row = factory.listed.row(task)
        self._tools: dict[str, Tool] = {}
        self._calls: list[ToolCall] = []
        self._folder: Path | None = None
        self._session: McpSession | None = None
        solution = self._row.solution if self._row is not None else ()
        self.experts: tuple[str, ...] = ("solution",) if solution else ()

    async def _start(self) -> State:
        factory, options = self._factory, self._options
        if self._row is None and factory.fixed:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK, f"{factory.name}: {options.tasks} has no task {self.task.id!r}"
            )
        if factory.target.needs_folder:
            self._folder = await asyncio.to_thread(_new_folder, options.files)
        self._session = McpSession(
            factory.target.at(self._folder), environ=factory.environ, token=factory.token
        )
        async with factory.starting():
            found, instructions = await self._session.open(seconds=options.start_seconds)
        self._tools = {tool.name: tool for tool in found}
        for action in self._row.setup if self._row is not None else ():
            await self._set_up(action)
        self._tools = self._offered()
        return State(text=self._start_text(instructions))

    async def _step(self, action: str) -> Outcome:
        call = await self._call(action)
        self._calls.append(call)
        answered = call.tool == ANSWER and self._tools[ANSWER] is ANSWER_TOOL and not call.failed
        over = answered or self._left <= 1
        reward, success = await self._grade()
        terminated = answered or success
        return Outcome(
            next_state=State(text=call.result),
            reward=reward if over or success else 0.0,
            terminated=terminated,
            success=success,
            reward_source="environment" if self._factory.check is not None else UNKNOWN_REWARD,
            info={"refused": call.tool is None, "failed": call.failed},
        )

    async def aclose(self) -> None:
        await super().aclose()
        session, self._session = self._session, None
        try:
            if session is not None:
                await session.aclose()
        finally:
            if self._folder is not None:
                await asyncio.to_thread(shutil.rmtree, self._folder, True)

    async def expert_action(self, expert: str | None = None) -> str:
        """The first call of the task's solution that was not made yet."""
        check_expert(expert, self.experts)
        self._require_running("expert_action")
        assert self._row is not None
        solution, done = self._row.solution, 0
        for call in self._calls:
            done += done < len(solution) and call.action == solution[done]
        return solution[min(done, len(solution) - 1)]

    async def _call(self, action: str) -> ToolCall:
        try:
            tool, arguments = parse_call(action, self._tools)
        except RefusedCallError as refusal:
            text = shortened(f"Refused: {refusal}", self._options.max_characters)
            return ToolCall(action=action, tool=None, arguments={}, result=text, failed=True)
        if self._tools[tool] is ANSWER_TOOL:
            result, failed = "The episode is over.", False
        else:
            assert self._session is not None
            placed = self._placed(arguments)
            result, failed = await self._session.call(tool, placed, seconds=self._options.seconds)
        text = shortened(self._named(f"Error: {result}" if failed else result), self._options.max_characters)
        return ToolCall(action=action, tool=tool, arguments=arguments, result=text, failed=failed)

    def _offered(self) -> dict[str, Tool]:
        """The tools that the agent may call."""
        offered = {name: self._tools[name] for name in self._options.tools if name in self._tools}
        if len(offered) < len(set(self._options.tools)):
            wrong = min(set(self._options.tools) - offered.keys())
            raise ConfigError(f"tools: the server has no {wrong!r}{nearest_name(wrong, list(self._tools))}")
        offered = offered or dict(self._tools)
        return {**offered, ANSWER: offered.get(ANSWER, ANSWER_TOOL)} if self._options.answer else offered

    async def _set_up(self, action: str) -> None:
        call = await self._call(action)
        if call.failed:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK,
                f"{self.task.id}: expected a setup without errors, {action[:99]!r} gave {call.result[:99]!r}",
            )

    async def _grade(self) -> tuple[float, bool]:
        """The reward if the episode ended now, and whether it is a success, which ends it."""
        check = self._factory.check
        if check is None:
            return 0.0, False
        record = EpisodeRecord(task=self.task, calls=tuple(self._calls), folder=self._folder)
        try:
            found = check(record)
            found = await found if inspect.isawaitable(found) else found
        except DreamGymError:
            raise
        except Exception as error:
            message = f"{self._options.check} raised {type(error).__name__}: {error}"
            raise EpisodeFailedError(FailureKind.CRASHED, message) from error
        reward = 0.0 if found is None else found
        if not isinstance(reward, bool | int | float) or not math.isfinite(reward):
            raise ConfigError(f"{self._options.check}: expected True, False, None or a number, got {found!r}")
        reward = min(1.0, float(reward))
        return reward, reward == 1.0

    def _start_text(self, instructions: str) -> str:
        limit = self._options.max_characters
        listed = describe_tools(list(self._tools.values()), limit=limit)
        return self._named(f"{shortened(instructions.strip(), limit)}\n{listed}".strip())

    def _named(self, text: str) -> str:
        return text if self._folder is None else text.replace(str(self._folder), FOLDER)

    def _placed(self, value: Any) -> Any:
        """Arguments with the episode's folder in place of its name."""
        if self._folder is None:
            return value
        if isinstance(value, str):
            return value.replace(FOLDER, str(self._folder))
        if isinstance(value, dict):
            return {name: self._placed(each) for name, each in value.items()}
        return [self._placed(each) for each in value] if isinstance(value, list) else value


def open_mcp(name: str, options: McpOptions) -> McpFactory:
    """
    Raises:
        MissingExtraError: the SDK is not installed.
        ConfigError: the command, an option or a file is wrong.
        DataError: a line of the tasks file is wrong.
    """
    try:
        import mcp  # noqa: F401 - the sessions use it
    except ImportError:
        raise MissingExtraError("an MCP server", "mcp") from None
    factory = McpFactory(name, options)
    command = factory.target.command
    if command and shutil.which(command[0]) is None:
        raise ConfigError(f"environment {name!r}: expected a command, {command[0]!r} is not installed")
    return factory


def _new_folder(files: Path | None) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="dreamgym-mcp-")).resolve()
    if files is not None:
        shutil.copytree(files, folder, dirs_exist_ok=True, symlinks=True)
    return folder


def _variables(names: Sequence[str]) -> Mapping[str, str]:
    missing = [name for name in names if not os.environ.get(name, "").strip()]
    if missing:
        raise ConfigError(f"expected a value in ${missing[0]}, which is not set")
    return {name: os.environ[name].strip() for name in names}


def _load_check(reference: str | None) -> Any:
    if reference is None:
        return None
    found = load_reference(reference, what="check")
    if not callable(found):
        raise ConfigError(f"check {reference!r}: expected a function, got {type(found).__name__}")
    return found
