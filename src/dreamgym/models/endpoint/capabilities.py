"""Asks an endpoint what it can do, in a few dozen small requests, and tells what it found."""

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
"""Never written; with it, a model that says nothing is an answer and no failure."""
_SCHEMA: dict[str, JsonValue] = {
    "type": "object",
    "properties": {"answer": {"type": "string", "enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}
_CONTEXT_NAMES = ("max_model_len", "context_length", "context_window", "n_ctx_train", "n_ctx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """What one question came to."""

    name: str
    good: bool | None
    """None where there is nothing to hope for either way."""
    told: str


async def check_endpoint(name: str, settings: EndpointConfig, *, requests: int = 16) -> list[Finding]:
    """Reachability, kinds, structured output, log-probs, seeds, determinism, context, speed.

    Args:
        requests: sent at the configured concurrency to measure speed.

    Raises:
        ConfigError: its key is missing.
    """
    found: list[Finding] = []
    kinds = ("chat", "completions")
    endpoints = {
        kind: Endpoint(name, settings.model_copy(update={"kind": kind, "logprobs": True})) for kind in kinds
    }
    own = endpoints[settings.kind]
    try:
        found.append(await _reachable(own, settings))
        if found[0].good is False:
            return found
        for kind in kinds:
            needed = kind == settings.kind
            found.append(await _asked(kind, partial(_speaks, endpoints[kind]), optional=not needed))
        if not next(each for each in found if each.name == settings.kind).good:
            return found
        found.append(await _asked("json schema", lambda: _structured(own), optional=True))
        found.append(await _asked("log-probs", lambda: _logprobs(own), optional=True))
        found.append(await _asked("seeds", lambda: _seeds(own), optional=True))
        found.append(await _asked("determinism", lambda: _deterministic(own), optional=True))
        found.append(await _asked("speed", lambda: _speed(own, requests), optional=True))
    finally:
        for endpoint in endpoints.values():
            await endpoint.aclose()
    return found


async def _asked(
    name: str, ask: Callable[[], Awaitable[tuple[bool | None, str]]], *, optional: bool
) -> Finding:
    try:
        good, told = await ask()
    except (EpisodeFailedError, EndpointError, BudgetSpentError) as error:
        good, told = (None if optional else False), str(error)
    return Finding(name=name, good=good, told=told)


async def _reachable(endpoint: Endpoint, settings: EndpointConfig) -> Finding:
    addresses = endpoint.replicas.up
    answers = await asyncio.gather(*(endpoint.answers(url) for url in addresses))
    silent = [url for url, answered in zip(addresses, answers, strict=True) if not answered]
    if len(silent) == len(addresses):
        return Finding(name="reachable", good=False, told=f"nobody answers at {', '.join(silent)}")
    told = f"{len(addresses) - len(silent)} of {len(addresses)} replicas"
    listed = await endpoint.models()
    cards = [card for card in _cards(listed) if card.get("id") == settings.model]
    if listed is not None:
        told += ", model listed" if cards else f", which do not list the model {settings.model!r}"
    length = _context(cards[0]) if cards else None
    if length is not None:
        told += f", reads {length:,} tokens"
        if length < settings.context:
            told += f" and not {settings.context:,} as configured (context)"
    if silent:
        told += f"; silent: {', '.join(silent)}"
    fits = not silent and (length is None or length >= settings.context)
    return Finding(name="reachable", good=True if fits else None, told=told)


def _cards(listed: Any) -> list[dict[str, Any]]:
    data = listed.get("data") if isinstance(listed, dict) else None
    return [card for card in data if isinstance(card, dict)] if isinstance(data, list) else []


def _context(card: dict[str, Any]) -> int | None:
    """What servers call it: vLLM, OpenRouter, llama.cpp (one level down)."""
    meta = card.get("meta")
    for place in (card, meta if isinstance(meta, dict) else {}):
        for name in _CONTEXT_NAMES:
            if isinstance(place.get(name), int):
                return int(place[name])
    return None


def _question(number: int = 0) -> CompletionRequest:
    return CompletionRequest(prompt=f"{_PROMPT} ({number})", max_tokens=24, stop=_STOP)


async def _ask(endpoint: Endpoint, request: CompletionRequest) -> Completion:
    return await endpoint.ask(request, role="check")


async def _speaks(endpoint: Endpoint) -> tuple[bool | None, str]:
    began = time.perf_counter()
    reply = await _ask(endpoint, _question())
    return True, f"{time.perf_counter() - began:.2f} s for {len(reply.text)} characters"


async def _structured(endpoint: Endpoint) -> tuple[bool | None, str]:
    request = CompletionRequest(
        prompt="Is water wet? Answer in JSON: answer (yes or no) and sure (true or false).",
        max_tokens=200,
        schema=_SCHEMA,
        stop=_STOP,
    )
    reply = await _ask(endpoint, request)
    if not endpoint.dialect.json_schema:
        return None, "refused; replies are parsed strictly all the same"
    try:
        value = json.loads(reply.text)
    except ValueError:
        return None, f"accepted and not kept to: {reply.text[:60]!r}"
    fits = (
        isinstance(value, dict)
        and value.get("answer") in ("yes", "no")
        and value.get("sure") in (True, False)
    )
    return (True, "kept to") if fits else (None, f"accepted and not kept to: {reply.text[:60]!r}")


async def _logprobs(endpoint: Endpoint) -> tuple[bool | None, str]:
    reply = await _ask(endpoint, _question(1))
    if not reply.logprobs:
        return None, "none offered"
    return True, f"of {len(reply.logprobs)} tokens" + (", with token ids" if reply.token_ids else "")


async def _seeds(endpoint: Endpoint) -> tuple[bool | None, str]:
    warm = replace(_question(2), temperature=1.0, seed=1)
    if not endpoint.dialect.seed:
        return None, "refused"
    one = await _ask(endpoint, warm)
    same = await _ask(endpoint, warm)
    others = [await _ask(endpoint, replace(warm, seed=seed)) for seed in (2, 3)]
    if one.text != same.text:
        return None, "not kept to: the same seed gave another reply (leave seeded off)"
    if all(other.text == one.text for other in others):
        return None, "three seeds gave the same reply: is the temperature ignored?"
    return True, "kept to (seeded may be set)"


async def _deterministic(endpoint: Endpoint) -> tuple[bool | None, str]:
    alone = [(await _ask(endpoint, _question(3))).text for _ in range(2)]
    crowd = [_question(3), *(_question(number) for number in range(4, 11))]
    beside = (await asyncio.gather(*(_ask(endpoint, each) for each in crowd)))[0].text
    if len({*alone, beside}) == 1:
        return True, "temperature 0 gives the same reply, alone and beside others"
    return None, "temperature 0 gives different replies: expect replay spread (see the guide on fidelity)"


async def _speed(endpoint: Endpoint, requests: int) -> tuple[bool | None, str]:
    spending = endpoint.spending
    spending.latencies.clear()
    before = spending.total
    began = time.perf_counter()
    await asyncio.gather(*(_ask(endpoint, _question(100 + number)) for number in range(requests)))
    seconds = time.perf_counter() - began
    after = spending.total
    written = after.reply_tokens - before.reply_tokens
    at_once = min(requests, endpoint.settings.concurrency)
    half = spending.percentiles().get("p50_seconds", 0.0)
    return None, (
        f"{requests / seconds:.1f} requests/s, {written / seconds:.0f} tokens/s with {at_once} at once; "
        f"half within {half:.2f} s"
    )
