"""One session with an MCP server: a process of its own, or a connection to an address."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import IO, Any

from dreamgym.envs.tool_calls import Tool
from dreamgym.errors import EpisodeFailedError
from dreamgym.structured import one_line, valid_unicode
from dreamgym.types import FailureKind

_CLOSE_SECONDS = 15.0
"""The longest wait for a session to end; the SDK ends a process by force sooner."""
_PAGES = 100
"""Pages of a list of tools that are read; a server could send pages for ever."""
_LOG = 300
"""Characters of the server's last log lines in the message of a failure."""


class McpSession:
    """Lists and calls the tools of one server.

    A task of its own enters and leaves the SDK's context managers, which one and the same task has to do;
    `open`, `call` and `aclose` may be called by different tasks.
    """

    def __init__(self, target: str | Sequence[str], *, environ: Mapping[str, str], token: str | None) -> None:
        """`target` is an http address, or the words of a command."""
        self._target = target
        self._environ = dict(environ)
        self._token = token
        self._log: IO[bytes] | None = None
        self._last_words = ""
        self._owner: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()
        self._client: Any = None

    async def open(self, *, seconds: float) -> tuple[list[Tool], str]:
        """Start or connect to the server. Returns its tools, and its instructions for agents.

        Raises:
            EpisodeFailedError: it does not start, is not reachable, speaks no MCP, or takes too long.
        """
        logging.getLogger("mcp.client").setLevel(logging.CRITICAL)  # else tracebacks of a server's mistakes
        ready: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._owner = asyncio.create_task(self._own(ready))
        async with self._typed("starting", seconds):
            self._client = await asyncio.shield(ready)
            return await self._tools(), str(self._client.instructions or "")

    async def call(self, tool: str, arguments: dict[str, Any], *, seconds: float) -> tuple[str, bool]:
        """The text of the result, and whether the tool reports an error.

        Raises:
            EpisodeFailedError: the server is gone, takes too long, or replies with no valid result.
        """
        from mcp import MCPError
        from mcp_types import CONNECTION_CLOSED

        async with self._typed(f"calling {tool}", seconds):
            try:
                result = await self._client.call_tool(tool, arguments)
            except MCPError as error:
                if error.code == CONNECTION_CLOSED:
                    raise
                return valid_unicode(error.message), True  # the server's own answer to this call
        return result_text(result), bool(result.is_error)

    async def aclose(self) -> None:
        """End the session; a process is ended too, by force if it does not react. A caller that is cancelled
        meanwhile does not stop that."""
        self._closing.set()
        if self._owner is None:
            return
        if self._client is None:  # still starting
            self._owner.cancel()
        done, _ = await asyncio.wait({self._owner}, timeout=_CLOSE_SECONDS)
        if not done:
            self._owner.cancel()
            await asyncio.wait({self._owner}, timeout=_CLOSE_SECONDS)

    async def _own(self, ready: asyncio.Future[Any]) -> None:
        with tempfile.TemporaryFile() as self._log:
            try:
                async with self._connected() as client:
                    ready.set_result(client)
                    await self._closing.wait()
            except Exception as error:  # later ones reach the call that fails
                if not ready.done():
                    ready.set_exception(error)
                    ready.exception()  # retrieved, also if `open` was cancelled
            finally:
                self._last_words = self._said()

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Any]:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client
        from mcp.client.streamable_http import streamable_http_client

        async with AsyncExitStack() as stack:
            if isinstance(self._target, str):
                http = await stack.enter_async_context(self._http())
                transport = streamable_http_client(self._target, http_client=http)
            else:
                command, *words = self._target
                server = StdioServerParameters(command=command, args=words, env=self._environ)
                transport = stdio_client(server, errlog=self._log)  # type: ignore[arg-type]
            yield await stack.enter_async_context(Client(transport, cache=None))

    def _http(self) -> Any:
        import httpx2

        headers = {"Authorization": f"Bearer {self._token}"} if self._token else {}
        # `open` and `call` bound the time; a server may hold a stream of events open for longer.
        return httpx2.AsyncClient(headers=headers, timeout=None)

    async def _tools(self) -> list[Tool]:
        found: list[Tool] = []
        cursor: str | None = None
        for _ in range(_PAGES):
            page = await self._client.list_tools(cursor=cursor)
            found += [
                Tool(
                    name=valid_unicode(tool.name),
                    description=valid_unicode(tool.description or ""),
                    schema=tool.input_schema,
                )
                for tool in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                break
        return found

    @asynccontextmanager
    async def _typed(self, what: str, seconds: float) -> AsyncIterator[None]:
        """Turns everything that a server can do wrong into a failed episode."""
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise EpisodeFailedError(
                FailureKind.TIMEOUT,
                f"{self._name}: {what} took longer than {seconds:g} seconds{self._said()}",
            ) from None
        except EpisodeFailedError:
            raise
        except Exception as error:
            found = first_cause(error)
            invalid = isinstance(found, ValueError | RuntimeError) and not self._gone
            kind = FailureKind.PARSE_ERROR if invalid else FailureKind.SERVER_DOWN
            message = f"{self._name}: {what} failed: {type(found).__name__}: {one_line(str(found))[:_LOG]}"
            raise EpisodeFailedError(kind, f"{message}{self._said()}") from None

    @property
    def _gone(self) -> bool:
        return self._owner is None or self._owner.done()

    @property
    def _name(self) -> str:
        return self._target if isinstance(self._target, str) else Path(self._target[0]).name

    def _said(self) -> str:
        """The end of what the server has logged."""
        if self._log is None or self._log.closed:
            return self._last_words
        # Not `seek`: the server writes at the position that this file is at.
        size = os.fstat(self._log.fileno()).st_size
        text = one_line(os.pread(self._log.fileno(), _LOG, max(0, size - _LOG)).decode("utf-8", "replace"))
        return f"; it logged: {text}" if text else ""


def result_text(result: Any) -> str:
    """What an agent reads of a result: its texts, and a note for everything else.

    >>> from types import SimpleNamespace as Block
    >>> blocks = [Block(type="text", text="3 files"), Block(type="image", mime_type="image/png", data="aGk=")]
    >>> result_text(Block(content=blocks, structured_content=None))
    '3 files\\n[image image/png]'
    """
    parts = [_block_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts = [json.dumps(result.structured_content, ensure_ascii=False, default=str)]
    return valid_unicode("\n".join(parts)).strip() or "(no output)"


def _block_text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type == "resource":
        inside = block.resource
        return str(getattr(inside, "text", None) or f"[resource {inside.uri}]")
    if block.type == "resource_link":
        return f"[resource {block.uri}]"
    return f"[{block.type} {getattr(block, 'mime_type', '')}]"


def first_cause(error: BaseException) -> BaseException:
    """The first exception inside groups of them.

    >>> first_cause(ExceptionGroup("several", [ExceptionGroup("inner", [ValueError("wrong")])]))
    ValueError('wrong')
    """
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
