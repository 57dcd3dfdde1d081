"""The OpenEnv protocol as a Starlette application: sessions over `/ws`, the task API, schemas.

Written against openenv 0.10; that package is not needed to serve. A message is answered before the next one
of its session is read, and the idle time counts only while the server waits for the client, so no session is
closed in the middle of a step.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from dreamgym import __version__
from dreamgym.data.schema import explain
from dreamgym.errors import ConfigError, DreamGymError, EpisodeOverError
from dreamgym.integrations.serving import (
    EpisodeState,
    Observation,
    ResetRequest,
    ServedEnvironment,
    Session,
    failure_kind,
)
from dreamgym.types import Task

logger = logging.getLogger("dreamgym.serve")
_MAX_BODY = 1 << 20
_LOCAL_HOSTS = ["localhost", "127.0.0.1", "[::1]"]


class TextAction(BaseModel):
    """One required text, so that clients can turn a plain reply into an action."""

    model_config = ConfigDict(extra="forbid")

    text: str = Field(description="The action, in the environment's own words.")
    metadata: dict[str, Any] = Field(default_factory=dict, description="Ignored.")


class _Split(BaseModel):
    split: str


class _Index(_Split):
    index: int


class _Range(_Split):
    start: int | None = None
    stop: int | None = None


class OpenEnvApp:
    """The routes of one served environment."""

    def __init__(
        self,
        served: ServedEnvironment,
        *,
        max_sessions: int = 256,
        idle_seconds: float = 900.0,
        token: str = "",
        local: bool = True,
    ) -> None:
        """
        Args:
            max_sessions: further clients get the error CAPACITY_REACHED.
            idle_seconds: a session whose client is silent for so long is closed.
            token: clients must send it as ``Authorization: Bearer TOKEN``; empty for none.
            local: accept only requests that name this machine as their host.
        """
        self.served = served
        self.sessions: dict[str, Session] = {}
        self._max_sessions, self._idle_seconds, self._token = max_sessions, idle_seconds, token
        self._started = time.time()
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=_LOCAL_HOSTS if local else ["*"])
        self.asgi = Starlette(
            routes=self._routes(), exception_handlers={HTTPException: _http_error}, middleware=[hosts]
        )

    def _routes(self) -> list[BaseRoute]:
        gets: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/health": self._health,
            "/metadata": self._metadata,
            "/schema": self._schema,
            "/state": self._state,
            "/status": self._status,
            "/openapi.json": self._openapi,
            "/list_environments": self._list_environments,
            "/{env}/splits": self._splits,
        }
        posts: dict[str, Callable[[Request], Awaitable[Any]]] = {
            "/reset": self._reset,
            "/step": self._step,
            "/mcp": self._mcp,
            "/{env}/tasks": self._tasks,
            "/{env}/num_tasks": self._num_tasks,
            "/{env}/task": self._task,
            "/{env}/task_range": self._task_range,
        }
        self._paths = dict.fromkeys(gets, "get") | dict.fromkeys(posts, "post")
        return [
            *(Route(path, self._answer(handler), methods=["GET"]) for path, handler in gets.items()),
            *(Route(path, self._answer(handler), methods=["POST"]) for path, handler in posts.items()),
            WebSocketRoute("/ws", self._session),
        ]

    def _answer(self, handler: Callable[[Request], Awaitable[Any]]) -> Callable[[Request], Awaitable[Any]]:
        async def answer(request: Request) -> JSONResponse:
            if request.url.path != "/health":
                self._check(request)
            if request.path_params.get("env", self.served.name).lower() != self.served.name.lower():
                raise HTTPException(404, f"unknown environment; this server has {self.served.name!r}")
            try:
                return JSONResponse(await handler(request))
            except ValidationError as error:
                raise HTTPException(422, explain(error)) from None
            except DreamGymError as error:
                status = 400 if isinstance(error, ConfigError | EpisodeOverError) else 500
                raise HTTPException(status, _message(error)) from None

        return answer

    def _check(self, connection: HTTPConnection) -> None:
        given = connection.headers.get("authorization", "").removeprefix("Bearer ")
        if self._token and not hmac.compare_digest(given.encode(errors="replace"), self._token.encode()):
            raise HTTPException(401, "expected a token: Authorization: Bearer TOKEN")
        if "origin" in connection.headers and not self._token:  # a page in a browser of this machine
            raise HTTPException(403, "requests from web pages need a token")

    async def _session(self, socket: WebSocket) -> None:
        try:
            self._check(socket)
        except HTTPException as refusal:
            await socket.close(code=4401, reason=str(refusal.detail))
            return
        await socket.accept()
        session = Session(self.served)
        if len(self.sessions) >= self._max_sessions:
            await _send_error(
                socket,
                "CAPACITY_REACHED",
                f"all {self._max_sessions} sessions are in use; close one, or start the server with more",
            )
            await socket.close()
            return
        self.sessions[session.id] = session
        try:
            while await self._message(socket, session):
                pass
        except WebSocketDisconnect as gone:
            await session.aclose(finished=gone.code == 1000)
        except (RuntimeError, OSError):  # gone while it was sent something
            pass
        finally:
            del self.sessions[session.id]
            await session.aclose()

    async def _message(self, socket: WebSocket, session: Session) -> bool:
        """Answer one message; False if it was the last."""
        try:
            async with asyncio.timeout(self._idle_seconds):
                raw = await socket.receive_text()
        except TimeoutError:
            seconds = f"{self._idle_seconds:g}"
            await _send_error(socket, "SESSION_ERROR", f"no message for {seconds} seconds: session closed")
            await socket.close()
            return False
        except KeyError:  # a binary message
            await _send_error(socket, "INVALID_JSON", "expected JSON text, got bytes")
            return True
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:
            await _send_error(socket, "INVALID_JSON", f"expected JSON: {error}")
            return True
        if not isinstance(message, dict):
            message = {}
        kind = message.get("type")
        if kind == "close":
            await session.aclose(finished=True)
            return False
        try:
            reply = await self._reply(session, kind, message.get("data") or {})
        except ValidationError as error:
            await _send_error(socket, "VALIDATION_ERROR", explain(error))
        except ConfigError as error:
            await _send_error(socket, "VALIDATION_ERROR", str(error))
        except Exception as error:
            if not isinstance(error, DreamGymError):
                logger.exception("session %s", session.id)
            await _send_error(socket, "EXECUTION_ERROR", _message(error), kind=_kind(error))
        else:
            await (socket.send_text(json.dumps(reply)) if reply else _unknown_type(socket, kind))
        return True

    async def _reply(self, session: Session, kind: object, data: Any) -> dict[str, Any] | None:
        if kind == "step":
            action = TextAction.model_validate(data)
            return {"type": "observation", "data": _wire(await session.step(action.text))}
        if kind == "reset":
            return {
                "type": "observation",
                "data": _wire(await session.reset(ResetRequest.model_validate(data))),
            }
        if kind == "state":
            return {"type": "state", "data": session.state.model_dump(mode="json")}
        if kind == "mcp":
            return {"type": "mcp", "data": _no_mcp(data if isinstance(data, dict) else {})}
        return None

    async def _health(self, request: Request) -> Any:
        return {"status": "healthy"}

    async def _metadata(self, request: Request) -> Any:
        return {
            "name": self.served.name,
            "description": f"DreamGym: {self.served.name}, mode {' or '.join(self.served.modes)}",
            "version": __version__,
        }

    async def _schema(self, request: Request) -> Any:
        observation = Observation.model_json_schema()
        return {
            "action": TextAction.model_json_schema(),
            "observation": observation,
            "reset_observation": observation,
            "state": EpisodeState.model_json_schema(),
        }

    async def _state(self, request: Request) -> Any:
        return EpisodeState().model_dump(mode="json")

    async def _status(self, request: Request) -> Any:
        """Not part of OpenEnv: what the server has done so far."""
        results, usage = self.served.results, self.served.usage
        return {
            "sessions": len(self.sessions),
            "max_sessions": self._max_sessions,
            "modes": self.served.modes,
            "mode": self.served.mode,
            "seconds": round(time.time() - self._started, 1),
            "counts": dict(self.served.counts),
            "results": None if results is None else results.status(),
            "endpoints": None if usage is None or not usage.rows else usage.to_dict(),
        }

    async def _openapi(self, request: Request) -> Any:
        answer: dict[str, Any] = {"responses": {"200": {}}}
        paths = {path: {method: answer} for path, method in self._paths.items()}
        return {"openapi": "3.1.0", "info": {"title": self.served.name, "version": "1.0.0"}, "paths": paths}

    async def _reset(self, request: Request) -> Any:
        """Without a session there is only the first observation."""
        session = Session(self.served)
        try:
            return _wire(await session.reset(ResetRequest.model_validate(await _body(request))))
        finally:
            await session.aclose()

    async def _step(self, request: Request) -> Any:
        TextAction.model_validate((await _body(request)).get("action", {}))
        raise EpisodeOverError("step: HTTP requests have no session; connect to /ws, reset there, then step")

    async def _mcp(self, request: Request) -> Any:
        try:
            return _no_mcp(await _body(request))
        except (ValidationError, HTTPException):
            return {"jsonrpc": "2.0", "id": None, "error": {"code": -32700, "message": "expected JSON"}}

    async def _list_environments(self, request: Request) -> Any:
        return [self.served.name]

    async def _splits(self, request: Request) -> Any:
        if "real" in self.served.modes:
            self.served.factory("real")
        return [{"name": each, "type": _split_type(each)} for each in self.served.splits]

    async def _tasks(self, request: Request) -> Any:
        asked = _Split.model_validate(await _body(request))
        found = await self.served.tasks(asked.split)
        return {"tasks": [_public(each) for each in found], "env_name": self.served.name}

    async def _num_tasks(self, request: Request) -> Any:
        asked = _Split.model_validate(await _body(request))
        return {"num_tasks": len(await self.served.tasks(asked.split))}

    async def _task(self, request: Request) -> Any:
        asked = _Index.model_validate(await _body(request))
        found = await self.served.tasks(asked.split)
        if not 0 <= asked.index < len(found):
            raise ConfigError(f"split {asked.split!r} has {len(found)} tasks, got index {asked.index}")
        return {"task": _public(found[asked.index])}

    async def _task_range(self, request: Request) -> Any:
        asked = _Range.model_validate(await _body(request))
        found = (await self.served.tasks(asked.split))[asked.start : asked.stop]
        return {"tasks": [_public(each) for each in found]}


def is_loopback(host: str) -> bool:
    """
    >>> is_loopback("127.0.0.1"), is_loopback("localhost"), is_loopback("0.0.0.0")
    (True, True, False)
    """
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _wire(observation: Observation) -> dict[str, Any]:
    return {
        "observation": {"text": observation.text, "instruction": observation.instruction, "metadata": {}},
        "reward": observation.reward,
        "done": observation.done,
    }


def _public(task: Task) -> dict[str, Any]:
    """Without the parameters, which may hold the solution."""
    return {
        "id": task.id,
        "instruction": task.instruction,
        "split": task.split,
        "family": task.family,
        "origin": task.origin,
    }


def _split_type(name: str) -> str:
    for kind in ("train", "test"):
        if kind in name:
            return kind
    return "validation"


def _kind(error: Exception) -> str:
    return "not_running" if isinstance(error, EpisodeOverError) else str(failure_kind(error))


def _message(error: Exception) -> str:
    """Starts with the kind: the OpenEnv client passes on no other field."""
    text = str(error) if isinstance(error, DreamGymError) else f"{type(error).__name__}: {error}"
    return f"{_kind(error)}: {text}"


def _no_mcp(message: Mapping[str, Any]) -> dict[str, Any]:
    error = {"code": -32601, "message": "this environment has no MCP tools; use reset and step over /ws"}
    return {"jsonrpc": "2.0", "id": message.get("id"), "error": error}


async def _body(request: Request) -> dict[str, Any]:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise HTTPException(413, f"expected a body of at most {_MAX_BODY} bytes")
    try:
        found = json.loads(bytes(body) or b"{}")
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise HTTPException(422, "expected a JSON object")
    return found


async def _send_error(socket: WebSocket, code: str, message: str, **more: Any) -> None:
    await socket.send_text(json.dumps({"type": "error", "data": {"message": message, "code": code, **more}}))


async def _unknown_type(socket: WebSocket, kind: object) -> None:
    expected = "reset, step, state or close"
    await _send_error(socket, "UNKNOWN_TYPE", f"expected a message of type {expected}, got {kind!r}")


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code)
