"""The JSON of OpenAI-compatible servers: builds request bodies, and validates replies strictly.

Servers differ in the request fields that they accept. `Features` starts with all of them and drops the ones
that a server rejects by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dreamgym.config import EndpointConfig
from dreamgym.http_client import RequestFailedError
from dreamgym.types import Completion, CompletionRequest, FailureKind

_CACHE_VERSION = 4
"""Part of the cache key: raise it when the same request is sent in another form."""
_MAX_SEED = 2**31
"""All servers accept smaller seeds."""
_TEMPLATE_TOKENS = 64
"""Upper bound of what a chat template adds per message."""
_CHARACTERS_PER_TOKEN = 4
"""Estimate for servers that do not report usage."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]
_TokenCount = Annotated[int, Field(ge=0, le=2**40)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Optional request fields that a server accepts."""

    json_schema: bool
    logprobs: bool
    seed: bool = True
    token_ids: bool = True
    max_tokens_field: str = "max_tokens"

    @classmethod
    def of(cls, settings: EndpointConfig) -> Features:
        return cls(json_schema=settings.json_schema != "no", logprobs=settings.logprobs)

    def without_rejected(self, complaint: str, settings: EndpointConfig) -> Features | None:
        """The features that remain after the server's error message; None if it names none of them.

        >>> settings = EndpointConfig(url="http://localhost", model="m")
        >>> Features.of(settings).without_rejected("response_format is unknown", settings).json_schema
        False
        """
        text = complaint.lower()
        if "max_completion_tokens" in text and self.max_tokens_field == "max_tokens":
            return replace(self, max_tokens_field="max_completion_tokens")
        about_schema = any(word in text for word in ("response_format", "json_schema", "grammar", "guided"))
        if about_schema and self.json_schema and settings.json_schema == "auto":
            return replace(self, json_schema=False)
        for name in ("token_ids", "logprobs", "seed"):
            if name in text and getattr(self, name):
                rejected: dict[str, Any] = {name: False}
                return replace(self, **rejected)
        return None


def request_body(request: CompletionRequest, settings: EndpointConfig, features: Features) -> dict[str, Any]:
    body: dict[str, Any] = {"model": settings.model}
    if settings.kind == "chat":
        messages = [{"role": "system", "content": request.system}] if request.system else []
        for user, assistant in request.turns:
            messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
        body["messages"] = [*messages, {"role": "user", "content": request.prompt}]
    elif request.prompt_token_ids is not None:
        body["prompt"] = list(request.prompt_token_ids)
    else:
        body["prompt"] = "\n\n".join(_texts(request))
    body |= {features.max_tokens_field: request.max_tokens, "temperature": request.temperature}
    if request.top_p != 1.0:
        body["top_p"] = request.top_p
    if request.stop:
        body["stop"] = list(request.stop)
    if features.seed and request.temperature > 0:
        body["seed"] = request.seed % _MAX_SEED
    if features.logprobs:
        body["logprobs"] = True if settings.kind == "chat" else 0
        if features.token_ids:
            body["return_token_ids"] = True
    schema = _schema(request) if features.json_schema else None
    if schema is not None:
        named = {"name": "reply", "schema": schema, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": named}
    return body | settings.extra_body


def request_key(request: CompletionRequest) -> Hashable:
    """Equal for requests that must get the same reply from one endpoint; cheap, for this process only."""
    return (
        *_parts(request),
        request.schema and json.dumps(dict(request.schema), sort_keys=True, default=dict),
    )


def cache_key(request: CompletionRequest, settings: EndpointConfig) -> bytes:
    """Equal for requests that must get the same reply from any server of this model."""
    parts = [
        *(_CACHE_VERSION, settings.model, settings.kind, settings.logprobs, settings.extra_body),
        *(*_parts(request), request.schema),
    ]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=dict).encode()).digest()


def _parts(request: CompletionRequest) -> tuple[Hashable, ...]:
    return (
        *(request.system, request.turns, request.prompt, request.prompt_token_ids, request.max_tokens),
        *(request.temperature, request.top_p, request.stop, request.choices),
        request.seed if request.temperature > 0 else 0,
    )


def max_prompt_tokens(request: CompletionRequest) -> int:
    """An upper bound: no tokenizer makes more tokens than there are bytes."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return sum(len(text.encode(errors="replace")) + _TEMPLATE_TOKENS for text in _texts(request))


def _texts(request: CompletionRequest) -> list[str]:
    system = [request.system] if request.system else []
    return [*system, *(text for turn in request.turns for text in turn), request.prompt]


class _Lenient(BaseModel):
    """Unknown fields are ignored; known ones must have the right type."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Usage(_Lenient):
    prompt_tokens: _TokenCount = 0
    completion_tokens: _TokenCount | None = None


class _Message(_Lenient):
    content: str | None = None
    refusal: str | None = None


class _TokenLogprob(_Lenient):
    logprob: _Finite


class _Logprobs(_Lenient):
    content: list[_TokenLogprob] | None = None
    token_logprobs: list[_Finite] | None = None


class _Choice(_Lenient):
    message: _Message | None = None
    text: str | None = None
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class _Reply(_Lenient):
    choices: Annotated[list[_Choice], Field(min_length=1)]
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    completion: Completion
    prompt_tokens: int
    reply_tokens: int


def parse_reply(value: Any, request: CompletionRequest, *, enforced: bool) -> ParsedReply:
    """The completion in decoded JSON; `enforced` if the server was asked to follow a schema."""
    try:
        reply = _Reply.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "reply"
        raise _malformed(f"{place}: {first['msg']}") from None
    choice = reply.choices[0]
    text = choice.text if choice.message is None else choice.message.content
    if choice.finish_reason == "content_filter" or (choice.message and choice.message.refusal):
        raise RequestFailedError(FailureKind.REFUSED, "the model declined to answer", retry=False)
    if text is None or (not text.strip() and not request.stop):
        raise _malformed(f"no text (finish_reason {choice.finish_reason!r})", empty_reply=True)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _malformed("text with a lone surrogate") from None
    completion = _completion(choice, reply, _before_stop(text, request.stop))
    if request.choices is not None:
        completion = replace(completion, text=_chosen(completion.text, request.choices, enforced=enforced))
    usage = reply.usage or _Usage()
    estimate = len(text) // _CHARACTERS_PER_TOKEN + 1
    return ParsedReply(
        completion=completion,
        # A server that reports 0 does not count: estimated, so that the budget holds.
        prompt_tokens=usage.prompt_tokens
        or len(completion.prompt_token_ids)
        or len(request.prompt) // _CHARACTERS_PER_TOKEN,
        reply_tokens=usage.completion_tokens or len(completion.token_ids) or (estimate if text else 0),
    )


def _completion(choice: _Choice, reply: _Reply, text: str) -> Completion:
    logprobs: list[float] = []
    if choice.logprobs is not None:
        content = choice.logprobs.content or ()
        logprobs = choice.logprobs.token_logprobs or [each.logprob for each in content]
    return Completion(
        text=text,
        token_ids=tuple(choice.token_ids or ()),
        logprobs=tuple(logprobs),
        prompt_token_ids=tuple(choice.prompt_token_ids or reply.prompt_token_ids or ()),
        finish_reason="length" if choice.finish_reason == "length" else "stop",
    )


def _before_stop(text: str, stops: tuple[str, ...]) -> str:
    """The text before the first stop string, for servers that return it."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def _schema(request: CompletionRequest) -> dict[str, Any] | None:
    """The schema that the reply must follow: the request's own, or one that lists its choices."""
    if request.choices is None:
        return None if request.schema is None else _strict(dict(request.schema))
    return {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(request.choices)}},
        "required": ["choice"],
        "additionalProperties": False,
    }


def _strict(schema: Any) -> Any:
    """The form that strict servers require: every property required, no others, no defaults."""
    if isinstance(schema, list):
        return [_strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    # Some servers look at either `items` or `prefixItems`, not at both.
    dropped = {"default", "items"} if isinstance(schema.get("prefixItems"), list) else {"default"}
    strict = {name: _strict(each) for name, each in schema.items() if name not in dropped}
    if isinstance(strict.get("properties"), dict):
        # Here the names are the user's own: one of them may be "default".
        strict["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
        strict |= {"required": list(strict["properties"]), "additionalProperties": False}
    return strict


class _Chosen(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    choice: str


def _chosen(text: str, choices: tuple[str, ...], *, enforced: bool) -> str:
    if enforced:
        try:
            text = _Chosen.model_validate_json(text).choice
        except ValidationError:
            raise _malformed("not one of the choices", empty_reply=True) from None
    for choice in choices:
        if text == choice or text.strip() == choice.strip():
            return choice
    raise RequestFailedError(
        FailureKind.PARSE_ERROR,
        f"expected one of {len(choices)} choices, got {text[:100]!r}",
        retry=False,
    )


def _malformed(problem: str, *, empty_reply: bool = False) -> RequestFailedError:
    return RequestFailedError(
        FailureKind.PARSE_ERROR, f"malformed reply: {problem}", maybe_billed=True, empty_reply=empty_reply
    )
