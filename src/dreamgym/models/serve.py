"""A local model as an OpenAI-compatible server: a Starlette application with chat, completions and models.

Requests of all connections are computed together by the model's scheduler. A reply can be constrained to a
JSON schema that allows finitely many texts; any other schema is refused, as by a server without grammars.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import time
from collections.abc import Coroutine
from contextlib import nullcontext
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dreamgym.data.schema import explain
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.models.schema_choices import schema_choices
from dreamgym.models.weight_updates import ROUTES, WeightUpdates
from dreamgym.protocols import LanguageModel
from dreamgym.types import Completion, CompletionRequest, FailureKind

logger = logging.getLogger("dreamgym.serve")
_MAX_BODY = 32 << 20
_BODY_SECONDS = 60.0
_GREEDY = 1e-5
"""Below it, temperature and top_p mean greedy decoding: dividing by them overflows."""
_STATUS = {FailureKind.BUDGET: 400, FailureKind.SERVER_DOWN: 503}


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _SchemaFormat(BaseModel):
    schema_: dict[str, Any] = Field(alias="schema")


class _Format(BaseModel):
    type: Literal["text", "json_schema"] = "text"
    json_schema: _SchemaFormat | None = None


class _Body(BaseModel):
    """The body of both kinds of request. Unknown fields are ignored, as by other servers."""

    model: str = ""
    messages: list[_Message] = []
    prompt: str | list[int] = ""
    max_tokens: Annotated[int, Field(ge=1)] = 256
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    stop: str | list[str] | None = None
    seed: int | None = None
    n: Literal[1] = 1
    stream: Literal[False] = False
    logprobs: bool | int | None = None
    return_token_ids: bool = False
    response_format: _Format = _Format()

    def request(self, *, chat: bool) -> CompletionRequest:
        schema = self.response_format.json_schema
        greedy = self.temperature < _GREEDY or self.top_p < _GREEDY
        prompt = self.prompt if isinstance(self.prompt, str) else ""
        given = {"prompt": prompt, "prompt_token_ids": None if prompt == self.prompt else tuple(self.prompt)}
        return CompletionRequest(
            **(self._conversation() if chat else given),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            temperature=0.0 if greedy else self.temperature,
            top_p=1.0 if greedy else self.top_p,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            choices=None if schema is None else schema_choices(schema.schema_),
            seed=self.seed if self.seed is not None else time.time_ns() % 2**31,
        )

    def _conversation(self) -> dict[str, Any]:
        said = [each for each in self.messages if each.role in ("user", "assistant")]
        if [each.role for each in said] != ["user", "assistant"] * (len(said) // 2) + ["user"]:
            raise ConfigError("messages: expected user and assistant in turn, user last")
        texts = [each.content for each in said]
        system = "\n\n".join(each.content for each in self.messages if each not in said)
        return {"prompt": texts[-1], "system": system, "turns": tuple(zip(texts[:-1:2], texts[1::2]))}  # noqa: B905


def model_app(
    name: str,
    *,
    plain: LanguageModel,
    chat: LanguageModel,
    context: int | None = None,
    key: str = "",
    updates: WeightUpdates | None = None,
) -> Starlette:
    """`plain` answers completions, `chat` chats; clients must send the API key, if there is one. `updates`
    lets them replace the weights."""

    def served() -> str:
        return name if updates is None else updates.adapter or name

    async def complete(request: Request) -> JSONResponse:
        is_chat, started = request.url.path == "/v1/chat/completions", time.perf_counter()
        _check_key(request, key)
        try:
            async with asyncio.timeout(_BODY_SECONDS):
                body = _Body.model_validate_json(await _read_body(request))
            async with updates.request() if updates is not None else nullcontext():
                if body.model not in ("", served()):
                    raise HTTPException(404, f"this server has the model {served()!r} only")
                work = (chat if is_chat else plain).complete(body.request(chat=is_chat))
                completion = await _unless_disconnected(request, work)
        except ValidationError as error:
            raise HTTPException(400, explain(error)) from None
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None
        except TimeoutError:
            raise HTTPException(408, f"the body did not arrive within {_BODY_SECONDS:g} seconds") from None
        except EpisodeFailedError as error:
            code = "context_length_exceeded" if error.kind is FailureKind.BUDGET else str(error.kind)
            raise HTTPException(_STATUS.get(error.kind, 500), f"{code}: {error}") from None
        reply = _reply(body, completion, chat=is_chat)
        seconds = time.perf_counter() - started
        logger.info("POST %s: %s, %.2f s", request.url.path, reply["usage"], seconds)
        return JSONResponse({"model": name, **reply})

    async def models(request: Request) -> JSONResponse:
        _check_key(request, key)
        return JSONResponse({"object": "list", "data": [{"id": served(), "max_model_len": context}]})

    async def update(request: Request) -> JSONResponse:
        _check_key(request, key)
        assert updates is not None
        try:
            return JSONResponse(await updates.answer(request.url.path, await _read_body(request)))
        except ValidationError as error:
            raise HTTPException(400, explain(error)) from None
        except ConfigError as error:
            raise HTTPException(400, str(error)) from None

    async def health(request: Request) -> JSONResponse:
        return JSONResponse({"status": "ok"})

    posts = [Route(f"/v1/{path}", complete, methods=["POST"]) for path in ("chat/completions", "completions")]
    if updates is not None:
        posts += [Route(path, update, methods=["POST"]) for path in ROUTES]
        posts.append(Route("/weight_info", update))
    return Starlette(
        routes=[*posts, Route("/v1/models", models), Route("/health", health)],
        exception_handlers={HTTPException: _http_error},
    )


async def _read_body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise HTTPException(413, f"expected a body of at most {_MAX_BODY} bytes")
    return bytes(body)


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, Completion]) -> Completion:
    """Cancel the computation when the client closes the connection: the next message says so."""
    tasks = [asyncio.ensure_future(work), asyncio.ensure_future(request.receive())]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if not tasks[0].done():
            raise HTTPException(499, "the client closed the connection")
        return await tasks[0]  # type: ignore[return-value]
    finally:
        for task in tasks:
            task.cancel()


def _reply(body: _Body, completion: Completion, *, chat: bool) -> dict[str, Any]:
    finish_reason = "length" if completion.finish_reason == "length" else "stop"
    tokens = zip(completion.token_ids, completion.logprobs, strict=False)
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_reason, "logprobs": None}
    if chat:
        choice["message"] = {"role": "assistant", "content": completion.text}
        logprobs: dict[str, Any] = {"content": [{"token": str(t), "logprob": p} for t, p in tokens]}
    else:
        choice["text"], logprobs = completion.text, {"token_logprobs": list(completion.logprobs)}
    if body.logprobs is not None and body.logprobs is not False:
        choice["logprobs"] = logprobs
    if body.return_token_ids:
        choice |= {"token_ids": completion.token_ids, "prompt_token_ids": completion.prompt_token_ids}
    prompt, written = len(completion.prompt_token_ids), len(completion.token_ids)
    usage = {"prompt_tokens": prompt, "completion_tokens": written, "total_tokens": prompt + written}
    kind = "chat.completion" if chat else "text_completion"
    created = int(time.time())
    return {"id": f"cmpl-{created}", "object": kind, "created": created, "choices": [choice], "usage": usage}


def _check_key(request: Request, key: str) -> None:
    given = request.headers.get("authorization", "").removeprefix("Bearer ")
    if key and not hmac.compare_digest(given.encode(errors="replace"), key.encode()):
        raise HTTPException(401, "expected an API key")


async def _http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    logger.info("%s %s: status %d, %s", request.method, request.url.path, error.status_code, error.detail)
    return JSONResponse({"error": {"message": error.detail, "code": error.status_code}}, error.status_code)
