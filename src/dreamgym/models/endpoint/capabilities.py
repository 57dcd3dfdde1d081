"""Finds out what an endpoint can do, with a few dozen small requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from dreamgym.config import EndpointConfig
from dreamgym.errors import BudgetSpentError, EndpointError, EpisodeFailedError
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.types import Completion, CompletionRequest, JsonValue

_PROMPT = "Name three things that stand in a kitchen, and say of each where it stands."
_STOP = ("\x00",)
"""Never written; with it, an empty reply is a valid one."""
_SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
_CONTEXT_FIELDS = ("max_model_len", "context_length", "context_window", "n_ctx_train", "n_ctx")

Log = Callable[[str], None]
_Check = Callable[[], Awaitable[tuple[bool | None, str]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The result of one check."""

    name: str
    good: bool | None
    """None if neither result is a problem."""
    detail: str


async def check_endpoint(
    name: str, settings: EndpointConfig, *, requests: int = 16, log: Log = lambda line: None
) -> list[Finding]:
    """Checks reachability, kinds, JSON schema, log-probs, seeds, determinism, context and speed."""
    kinds = ("chat", "completions")
    endpoints = {
        kind: Endpoint(name, settings.model_copy(update={"kind": kind, "logprobs": True})) for kind in kinds
    }
    own = endpoints[settings.kind]
    found: list[Finding] = []

    async def check(title: str, call: _Check, *, needed: bool = False) -> bool | None:
        log(f"checking {title} ...")
        try:
            good, detail = await call()
        except (EpisodeFailedError, EndpointError, BudgetSpentError) as error:
            good, detail = (False if needed else None), str(error)
        found.append(Finding(name=title, good=good, detail=detail))
        return good

    try:
        if await check("reachable", partial(_reachable, own, settings), needed=True) is False:
            return found
        for kind in kinds:
            await check(kind, partial(_answers, endpoints[kind]), needed=kind == settings.kind)
        if not next(each for each in found if each.name == settings.kind).good:
            return found
        await check("json schema", partial(_json_schema, own))
        await check("log-probs", partial(_logprobs, own))
        await check("seeds", partial(_seeds, own))
        await check("determinism", partial(_deterministic, own))
        await check("speed", partial(_speed, own, requests))
    finally:
        for endpoint in endpoints.values():
            await endpoint.aclose()
    return found


async def _reachable(endpoint: Endpoint, settings: EndpointConfig) -> tuple[bool | None, str]:
    problem, listed = await endpoint.probe()
    if problem is not None:
        return False, f"no reply from {endpoint.url}: {problem}"
    cards = [card for card in _cards(listed) if card.get("id") == settings.model]
    detail = endpoint.url
    if listed is not None:
        detail += ", model listed" if cards else f", which does not list the model {settings.model!r}"
    length = _context_length(cards[0]) if cards else None
    if length is None or length >= settings.context_length:
        return True, detail + (f", context length {length:,}" if length else "")
    detail += f", context length {length:,}, less than the configured {settings.context_length:,}"
    return None, f"{detail} (context_length)"


def _cards(listed: Any) -> list[dict[str, Any]]:
    data = listed.get("data") if isinstance(listed, dict) else None
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


def _context_length(card: dict[str, Any]) -> int | None:
    """From the field that vLLM, OpenRouter or llama.cpp (one level down) use."""
    meta = card.get("meta")
    for place in (card, meta if isinstance(meta, dict) else {}):
        for name in _CONTEXT_FIELDS:
            if isinstance(place.get(name), int):
                return int(place[name])
    return None


def _request(number: int = 0) -> CompletionRequest:
    return CompletionRequest(prompt=f"{_PROMPT} ({number})", max_tokens=24, stop=_STOP)


async def _complete(endpoint: Endpoint, request: CompletionRequest) -> Completion:
    return await endpoint.complete(request, role="check")


async def _answers(endpoint: Endpoint) -> tuple[bool | None, str]:
    started = time.perf_counter()
    reply = await _complete(endpoint, _request())
    return True, f"{time.perf_counter() - started:.2f} s for {len(reply.text)} characters"


async def _json_schema(endpoint: Endpoint) -> tuple[bool | None, str]:
    request = CompletionRequest(
        prompt="Is water wet? Answer in JSON: answer (yes or no) and sure (true or false).",
        max_tokens=200,
        schema=_SCHEMA,
        stop=_STOP,
    )
    reply = await _complete(endpoint, request)
    if not endpoint.features.json_schema:
        return None, "rejected; replies are parsed strictly all the same"
    try:
        value = json.loads(reply.text)
    except ValueError:
        value = None
    valid = (
        isinstance(value, dict)
        and value.get("answer") in ("yes", "no")
        and value.get("sure") in (True, False)
    )
    return (True, "followed") if valid else (None, f"accepted and not followed: {reply.text[:60]!r}")


async def _logprobs(endpoint: Endpoint) -> tuple[bool | None, str]:
    reply = await _complete(endpoint, _request(1))
    if not reply.logprobs:
        return None, "none"
    return True, f"for {len(reply.logprobs)} tokens" + (", with token ids" if reply.token_ids else "")


async def _seeds(endpoint: Endpoint) -> tuple[bool | None, str]:
    sampled = replace(_request(2), temperature=1.0, seed=1)
    first = await _complete(endpoint, sampled)
    second = await _complete(endpoint, sampled)
    others = [await _complete(endpoint, replace(sampled, seed=seed)) for seed in (2, 3)]
    if not endpoint.features.seed:
        return None, "rejected"
    if first.text != second.text:
        return None, "not followed: the same seed gave another reply (leave cache_sampled off)"
    if all(other.text == first.text for other in others):
        return None, "three seeds gave the same reply: the server may ignore the temperature"
    return True, "followed (cache_sampled may be set)"


async def _deterministic(endpoint: Endpoint) -> tuple[bool | None, str]:
    alone = [(await _complete(endpoint, _request(3))).text for _ in range(2)]
    batch = [_request(3), *(_request(number) for number in range(4, 11))]
    batched = (await asyncio.gather(*(_complete(endpoint, each) for each in batch)))[0].text
    if len({*alone, batched}) == 1:
        return True, "temperature 0 gives the same reply, alone and in a batch"
    return None, "temperature 0 gives different replies: expect replay spread (see the guide on fidelity)"


async def _speed(endpoint: Endpoint, requests: int) -> tuple[bool | None, str]:
    usage = endpoint.usage
    usage.latencies.clear()
    before = usage.total.reply_tokens
    started = time.perf_counter()
    await asyncio.gather(*(_complete(endpoint, _request(100 + number)) for number in range(requests)))
    seconds = time.perf_counter() - started
    concurrency = min(requests, endpoint.settings.concurrency)
    return None, (
        f"{requests / seconds:.1f} requests/s, {(usage.total.reply_tokens - before) / seconds:.0f} tokens/s "
        f"with {concurrency} in flight; median {usage.percentiles().get('p50_seconds', 0.0):.2f} s"
    )
