"""A local model as an OpenAI-compatible server: chat, completions, models, health.

Requests of all connections are computed together by the model's own engine. Replies can be held to a JSON
schema as far as it allows finitely many of them (enumerations, small integers, booleans, objects of these):
these are spelt out and become choices. Any other schema is refused, as a server without grammars does.
"""

from __future__ import annotations

import hmac
import itertools
import json
import time
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.models.http_server import Answer, Asked
from dreamgym.protocols import LanguageModel
from dreamgym.types import Completion, CompletionRequest, FailureKind

_MOST_CHOICES = 2_000
_STATUS = {
    FailureKind.BUDGET: (400, "context_length_exceeded"),
    FailureKind.SERVER_DOWN: (503, "server_down"),
}


class _Message(BaseModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: str


class _SchemaFormat(BaseModel):
    name: str = "reply"
    schema_: dict[str, Any] = Field(alias="schema")


class _Format(BaseModel):
    type: Literal["text", "json_schema", "json_object"] = "text"
    json_schema: _SchemaFormat | None = None


class _Wish(BaseModel):
    """What both kinds of request may hold. Fields that nobody knows are ignored, as other servers do."""

    model_config = ConfigDict(extra="ignore")

    model: str = ""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
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


class _Chat(_Wish):
    messages: Annotated[list[_Message], Field(min_length=1)]


class _Text(_Wish):
    prompt: str | list[int]


class ModelServer:
    """The handler of an `HttpServer` over two views of one model: as it is, and asked by its template."""

    def __init__(
        self,
        name: str,
        *,
        plain: LanguageModel,
        chat: LanguageModel,
        context: int | None = None,
        key: str = "",
    ) -> None:
        """
        Args:
            chat: asked for chats. It sees the messages as one prompt.
            key: what clients must bring, if anything.
        """
        self.name = name
        self._plain = plain
        self._chat = chat
        self._context = context
        self._key = key.encode()
        self._count = itertools.count()
        self._began = int(time.time())

    async def __call__(self, asked: Asked) -> Answer:
        if asked.path == "/health":
            return Answer.json({"status": "ok"})
        given = asked.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1", "replace")
        if self._key and not hmac.compare_digest(given, self._key):
            return _error(401, "a key is needed", "invalid_api_key")
        if asked.path == "/v1/models" and asked.method == "GET":
            return Answer.json({"object": "list", "data": [self._card()]})
        if asked.path == "/v1/chat/completions":
            return await self._completed(asked, chat=True)
        if asked.path == "/v1/completions":
            return await self._completed(asked, chat=False)
        return _error(404, f"no such path: {asked.path[:100]!r}", "not_found")

    def _card(self) -> dict[str, Any]:
        return {
            "id": self.name,
            "object": "model",
            "created": self._began,
            "owned_by": "dreamgym",
            "max_model_len": self._context,
        }

    async def _completed(self, asked: Asked, *, chat: bool) -> Answer:
        if asked.method != "POST":
            return _error(405, "expected POST", "method_not_allowed")
        try:
            wish = (_Chat if chat else _Text).model_validate_json(asked.body)
            request = _request(wish)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False, include_context=False)[0]
            return _error(400, f"{'.'.join(map(str, first['loc'])) or 'body'}: {first['msg']}")
        except ConfigError as error:
            return _error(400, str(error))
        if wish.model and wish.model != self.name:
            return _error(404, f"this server has the model {self.name!r} alone", "model_not_found")
        try:
            completion = await (self._chat if chat else self._plain).complete(request)
        except EpisodeFailedError as error:
            status, code = _STATUS.get(error.kind, (500, str(error.kind)))
            return _error(status, str(error), code)
        except ConfigError as error:
            return _error(400, str(error))
        return Answer.json(self._reply(wish, completion, chat=chat))

    def _reply(self, wish: _Wish, completion: Completion, *, chat: bool) -> dict[str, Any]:
        prompt, written = len(completion.prompt_token_ids), len(completion.token_ids)
        ended = "length" if completion.finish_reason == "length" else "stop"
        choice: dict[str, Any] = {"index": 0, "finish_reason": ended, "logprobs": None}
        if chat:
            choice["message"] = {"role": "assistant", "content": completion.text}
            if wish.logprobs:
                told = [{"token": str(t), "logprob": p} for t, p in zip_tokens(completion)]
                choice["logprobs"] = {"content": told}
        else:
            choice["text"] = completion.text
            if wish.logprobs is not None and wish.logprobs is not False:
                choice["logprobs"] = {"token_logprobs": list(completion.logprobs)}
        if wish.return_token_ids:
            choice |= {
                "token_ids": list(completion.token_ids),
                "prompt_token_ids": list(completion.prompt_token_ids),
            }
        return {
            "id": f"cmpl-{next(self._count)}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.name,
            "choices": [choice],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": written,
                "total_tokens": prompt + written,
            },
        }


def zip_tokens(completion: Completion) -> Iterator[tuple[int, float]]:
    yield from zip(completion.token_ids, completion.logprobs, strict=False)


def _request(wish: _Wish) -> CompletionRequest:
    """
    Raises:
        ConfigError: it asks for what this server cannot do.
    """
    prompt, system, ids = "", "", None
    turns: tuple[tuple[str, str], ...] = ()
    if isinstance(wish, _Chat):
        system = "\n\n".join(m.content for m in wish.messages if m.role in ("system", "developer"))
        said = [m for m in wish.messages if m.role in ("user", "assistant")]
        if [m.role for m in said] != ["user", "assistant"] * (len(said) // 2) + ["user"]:
            raise ConfigError(
                "messages: expected those of user and assistant in turn, the user's last, got "
                f"{', '.join(m.role for m in said)[:200]}"
            )
        prompt = said[-1].content
        turns = tuple((q.content, a.content) for q, a in zip(said[:-1:2], said[1::2], strict=True))
    elif isinstance(wish, _Text):
        if isinstance(wish.prompt, str):
            prompt = wish.prompt
        else:
            ids = tuple(wish.prompt)
    choices = None
    if wish.response_format.type == "json_object":
        raise ConfigError("response_format: json_object is not supported, json_schema is")
    if wish.response_format.json_schema is not None:
        choices = finite_choices(wish.response_format.json_schema.schema_)
    stop = (wish.stop,) if isinstance(wish.stop, str) else tuple(wish.stop or ())
    return CompletionRequest(
        prompt=prompt,
        system=system,
        turns=turns,
        prompt_token_ids=ids,
        max_tokens=wish.max_completion_tokens or wish.max_tokens or 256,
        temperature=wish.temperature,
        top_p=wish.top_p,
        stop=stop,
        choices=choices,
        seed=wish.seed if wish.seed is not None else time.time_ns() % 2**31,
    )


def finite_choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """Every JSON text that a schema allows.

    >>> finite_choices({"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]})
    ('{"done": false}', '{"done": true}')

    Raises:
        ConfigError: they are not finitely many, or too many.
    """
    values = _values(schema, schema.get("$defs", {}), 0)
    found = tuple(
        json.dumps(value, ensure_ascii=False) for value in itertools.islice(values, _MOST_CHOICES + 1)
    )
    if not 0 < len(found) <= _MOST_CHOICES:
        raise ConfigError(
            f"response_format: expected a json_schema that allows at most {_MOST_CHOICES} replies"
        )
    return found


def _values(schema: Mapping[str, Any], named: Mapping[str, Any], depth: int) -> Iterator[Any]:
    if "$ref" in schema and depth < 16:
        target = named.get(str(schema["$ref"]).rpartition("/")[2])
        if isinstance(target, Mapping):
            yield from _values(target, named, depth + 1)
            return
    kind = schema.get("type")
    if "const" in schema:
        yield schema["const"]
    elif isinstance(schema.get("enum"), list):
        yield from schema["enum"]
    elif kind == "boolean":
        yield from (False, True)
    elif kind == "null":
        yield None
    elif (
        kind == "integer"
        and isinstance(schema.get("minimum"), int)
        and isinstance(schema.get("maximum"), int)
    ):
        yield from range(schema["minimum"], schema["maximum"] + 1)
    elif kind == "object" and isinstance(schema.get("properties"), Mapping) and depth < 16:
        properties: Mapping[str, Any] = schema["properties"]
        if set(schema.get("required", ())) != set(properties):
            raise ConfigError("response_format: expected a json_schema whose properties are all required")
        every = [_some(each, named, depth + 1) for each in properties.values()]
        for values in itertools.product(*every):
            yield dict(zip(properties, values, strict=True))
    else:
        raise ConfigError(
            "response_format: this server holds replies to a json_schema of finitely many only "
            f"(enum, const, boolean, bounded integer, object of these), got {json.dumps(dict(schema))[:200]}"
        )


def _some(schema: Any, named: Mapping[str, Any], depth: int) -> list[Any]:
    if not isinstance(schema, Mapping):
        raise ConfigError("response_format: expected a json_schema of objects")
    return list(itertools.islice(_values(schema, named, depth), _MOST_CHOICES + 1))


def _error(status: int, message: str, code: str = "invalid_request_error") -> Answer:
    return Answer.json({"error": {"message": message, "type": code, "code": code}}, status)
