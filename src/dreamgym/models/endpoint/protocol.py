"""Between our requests and the JSON of OpenAI-compatible servers: what is sent, and strictly what is read.

Servers differ in what they take. A `Dialect` starts with everything and loses what a server refuses by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dreamgym.config import EndpointConfig
from dreamgym.models.endpoint import bounds
from dreamgym.models.endpoint.retry import AttemptFailedError
from dreamgym.types import Completion, CompletionRequest, FailureKind

_VERSION = 2
"""Of the cache's keys: a request that is told to servers in another way is another one."""
_SEEDS = 2**31
"""What every server takes."""
_TEMPLATE_TOKENS = 64
"""What a chat template may add to a prompt."""

_Finite = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """What a server understands."""

    json_schema: bool
    logprobs: bool
    bounds: bool = True
    """Of a schema: how long and how many."""
    seed: bool = True
    token_ids: bool = True
    limit: str = "max_tokens"

    @classmethod
    def of(cls, settings: EndpointConfig) -> Dialect:
        return cls(json_schema=settings.json_schema != "no", logprobs=settings.logprobs)

    def without(self, complaint: str, settings: EndpointConfig) -> Dialect | None:
        """What is left of it after a server complained of a request; None where nothing of it is named.

        >>> settings = EndpointConfig(url="http://localhost", model="m")
        >>> plainer = Dialect.of(settings).without("response_format: 'maxLength' is not permitted", settings)
        >>> plainer.json_schema, plainer.bounds
        (True, False)
        >>> plainer.without("response_format is not supported", settings).json_schema
        False
        """
        text = complaint.lower()
        if "max_completion_tokens" in text and self.limit == "max_tokens":
            return replace(self, limit="max_completion_tokens")
        about_schema = any(word in text for word in ("response_format", "json_schema", "grammar", "guided"))
        about_bounds = about_schema or any(word.lower() in text for word in bounds.WORDS)
        if about_bounds and self.json_schema and self.bounds:
            return replace(self, bounds=False)
        if about_schema and self.json_schema and settings.json_schema == "auto":
            return replace(self, json_schema=False)
        for name in ("token_ids", "logprobs", "seed"):
            if name in text and getattr(self, name):
                left: dict[str, Any] = {name: False}
                return replace(self, **left)
        return None


def body(
    request: CompletionRequest, settings: EndpointConfig, dialect: Dialect, *, characters: int | None = None
) -> dict[str, Any]:
    """The JSON to send.

    Args:
        characters: that the whole reply may have, by its schema.
    """
    sent: dict[str, Any] = {"model": settings.model}
    if settings.kind == "chat":
        told = [{"role": "system", "content": request.system}] if request.system else []
        for question, answer in request.turns:
            told += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        sent["messages"] = [*told, {"role": "user", "content": request.prompt}]
    elif request.prompt_token_ids is not None:
        sent["prompt"] = list(request.prompt_token_ids)
    else:
        sent["prompt"] = "\n\n".join(_texts(request))
    sent |= {dialect.limit: request.max_tokens, "temperature": request.temperature}
    if request.top_p != 1.0:
        sent["top_p"] = request.top_p
    if request.stop:
        sent["stop"] = list(request.stop)
    if dialect.seed and request.temperature > 0:
        sent["seed"] = request.seed % _SEEDS
    if dialect.logprobs:
        sent["logprobs"] = True if settings.kind == "chat" else 0
        if dialect.token_ids:
            sent["return_token_ids"] = True
    schema = _schema(request, dialect, characters) if dialect.json_schema else None
    if schema is not None:
        named = {"name": "reply", "schema": schema, "strict": True}
        sent["response_format"] = {"type": "json_schema", "json_schema": named}
    return sent | settings.extra


def sameness(request: CompletionRequest) -> Hashable:
    """The same for requests to one endpoint that must get the same reply; quick, and of this process."""
    schema = request.schema and json.dumps(dict(request.schema), sort_keys=True, default=dict)
    return (
        *(request.system, request.turns, request.prompt, request.prompt_token_ids, request.max_tokens),
        *(request.temperature, request.top_p, request.stop, request.choices, schema),
        request.seed if request.temperature > 0 else 0,
    )


def key(request: CompletionRequest, settings: EndpointConfig) -> bytes:
    """The same for requests that must get the same reply, whatever server of this model answers."""
    asked = [
        *(_VERSION, settings.model, settings.kind, settings.logprobs, settings.extra),
        *(request.system, request.turns, request.prompt, request.prompt_token_ids, request.max_tokens),
        *(request.temperature, request.top_p, request.stop, request.choices, request.schema),
        request.seed if request.temperature > 0 else 0,
    ]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=dict).encode()).digest()


def most_prompt_tokens(request: CompletionRequest) -> int:
    """No tokenizer makes more tokens than there are bytes."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return sum(len(text.encode(errors="replace")) + _TEMPLATE_TOKENS for text in _texts(request))


def _texts(request: CompletionRequest) -> list[str]:
    before = [request.system] if request.system else []
    return [*before, *(text for turn in request.turns for text in turn), request.prompt]


class _Lenient(BaseModel):
    """Servers add fields of their own; those that we read must be right."""

    model_config = ConfigDict(extra="ignore", strict=True)


class _Usage(_Lenient):
    prompt_tokens: Annotated[int, Field(ge=0)] = 0
    completion_tokens: Annotated[int, Field(ge=0)] | None = None


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
class Answer:
    """A reply that was read, with what it took."""

    completion: Completion
    prompt_tokens: int
    reply_tokens: int


def read(raw: bytes, request: CompletionRequest, *, enforced: bool) -> Answer:
    """
    Args:
        enforced: whether the server was asked to hold its reply to a schema.

    Raises:
        AttemptFailedError: it is not the JSON of a completion, says nothing, or refuses.
    """
    try:
        reply = _Reply.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "reply"
        raise _malformed(f"{place}: {first['msg']}, in {len(raw)} bytes", broken=True) from None
    choice = reply.choices[0]
    text = choice.text if choice.message is None else choice.message.content
    if choice.finish_reason == "content_filter" or (choice.message and choice.message.refusal):
        raise AttemptFailedError(FailureKind.REFUSED, "the model declined to answer", again=False)
    if text is None:
        raise _malformed("a choice without text")
    if not text.strip() and not request.stop:
        raise _malformed(f"no text (finish_reason {choice.finish_reason!r})")
    completion = _completion(choice, reply, _cut(text, request.stop))
    if request.choices is not None:
        completion = replace(completion, text=_chosen(completion.text, request.choices, enforced=enforced))
    usage = reply.usage or _Usage()
    written = usage.completion_tokens
    return Answer(
        completion=completion,
        # A server that does not count is taken at four characters a token.
        prompt_tokens=usage.prompt_tokens or len(completion.prompt_token_ids) or len(request.prompt) // 4,
        reply_tokens=(len(completion.token_ids) or len(text) // 4 + 1) if written is None else written,
    )


def _completion(choice: _Choice, reply: _Reply, text: str) -> Completion:
    found = choice.logprobs
    logprobs: list[float] = []
    if found is not None:
        logprobs = found.token_logprobs or [each.logprob for each in found.content or ()]
    return Completion(
        text=text,
        token_ids=tuple(choice.token_ids or ()),
        logprobs=tuple(logprobs),
        prompt_token_ids=tuple(choice.prompt_token_ids or reply.prompt_token_ids or ()),
        finish_reason="length" if choice.finish_reason == "length" else "stop",
    )


def _cut(text: str, stops: tuple[str, ...]) -> str:
    """Before the first stop string, for servers that do not."""
    places = [place for stop in stops if (place := text.find(stop)) >= 0]
    return text[: min(places)] if places else text


def _schema(
    request: CompletionRequest, dialect: Dialect, characters: int | None = None
) -> dict[str, Any] | None:
    """The schema that the reply is held to: the one asked for, or one that spells out the choices."""
    if request.choices is None:
        if request.schema is None:
            return None
        asked: Any = dict(request.schema)
        if characters is not None:
            asked = bounds.bounded(asked, characters) or asked
        return _closed(bounds.exact(asked) if dialect.bounds else bounds.plain(asked))  # type: ignore[no-any-return]
    return {
        "type": "object",
        "properties": {"choice": {"type": "string", "enum": list(request.choices)}},
        "required": ["choice"],
        "additionalProperties": False,
    }


def _closed(schema: Any) -> Any:
    """The schema in the form that strict servers ask for: every property required, no others, no defaults."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: _closed(each) for name, each in schema.items() if name != "default"}
    if isinstance(closed.get("properties"), dict):
        # Here names are the user's own: one of them may well be "default".
        closed["properties"] = {name: _closed(each) for name, each in schema["properties"].items()}
        closed |= {"required": list(closed["properties"]), "additionalProperties": False}
    return closed


class _Chosen(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    choice: str


def _chosen(text: str, choices: tuple[str, ...], *, enforced: bool) -> str:
    if enforced:
        try:
            text = _Chosen.model_validate_json(text).choice
        except ValidationError:
            raise _malformed("not the choice that was asked for") from None
    for choice in choices:
        if text == choice or text.strip() == choice.strip():
            return choice
    raise AttemptFailedError(
        FailureKind.PARSE_ERROR,
        f"expected one of {len(choices)} choices, got {text[:100]!r}",
        again=False,
    )


def _malformed(problem: str, *, broken: bool = False) -> AttemptFailedError:
    """`broken`: not even the form of a reply, which is the server's fault and not the model's."""
    return AttemptFailedError(
        FailureKind.PARSE_ERROR,
        f"a malformed reply: {problem}",
        perhaps_paid=True,
        server_at_fault=broken,
    )
