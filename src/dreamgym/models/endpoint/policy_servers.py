"""A policy that servers sample: exact tokens in and out, and weights with a version.

The routes are those of vLLM. A LoRA adapter is loaded under the name of its version, so that a request names
the weights that answer it. Whole weights are read from a directory into the running model, and the server
keeps the version's name; it is asked for after every reply, since a server that was restarted has others.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym.config import EndpointConfig
from dreamgym.errors import EpisodeFailedError
from dreamgym.http_client import HttpClient, RequestFailedError, decode_json, retry_delay
from dreamgym.models.endpoint import protocol
from dreamgym.models.endpoint.client import api_key, base_url
from dreamgym.types import Completion, CompletionRequest, FailureKind

if TYPE_CHECKING:
    from dreamgym.models.local.tokens import TextCodec, TokenHistory

_AVOIDED_SECONDS = 60.0
"""After a failure a server gets only the requests that no other one answers."""
_ROUTE_SECONDS = 30.0
_UNCHANGED = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""vLLM takes these from the model's generation_config.json where a request leaves them out: the policy that
is sampled would not be the one that learns."""


class PolicyServer:
    """One replica. Its methods raise `RequestFailedError`."""

    def __init__(self, name: str, settings: EndpointConfig, *, adapter: bool) -> None:
        """`adapter`: versions are LoRA adapters; else whole weights."""
        self.name = name
        self.settings = settings
        self.avoided_until = 0.0
        self._adapter = adapter
        self._v1 = base_url(settings.url)
        self._root = self._v1.removesuffix("/v1")
        self._http = HttpClient(self._v1, max_connections=settings.concurrency + 4)

    async def sample(self, request: CompletionRequest, version: str) -> Completion:
        """A completion of `request.prompt_token_ids` by exactly these weights, as the server sent it."""
        body = {
            "model": version if self._adapter else self.settings.model,
            "prompt": list(request.prompt_token_ids or ()),
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "stop": list(request.stop),
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
            **_UNCHANGED,
        }
        reply = await self._call("/v1/completions", body, seconds=self.settings.timeout_seconds)
        decoded = decode_json(reply, api_key(self.settings))
        completion = protocol.parse_reply(decoded, request, enforced=False).completion
        if not self._adapter and (found := await self._weights()) != version:
            raise RequestFailedError(
                FailureKind.CONTRADICTION,
                f"expected weights {version!r}, it has {found!r}: it was restarted, or another run uses it",
            )
        return completion

    async def has(self, version: str) -> bool:
        """Whether it serves these weights."""
        if not self._adapter:
            return await self._weights() == version
        _, listed = await self._http.get(
            f"{self._v1}/models", key=api_key(self.settings), seconds=_ROUTE_SECONDS
        )
        cards = listed.get("data") if isinstance(listed, dict) else None
        return isinstance(cards, list) and any(
            isinstance(each, dict) and each.get("id") == version for each in cards
        )

    async def load(self, version: str, folder: Path) -> None:
        """Read the weights in `folder`, which the server must find under the same path. One that fails to
        read whole weights stays paused: it may have a part of them."""
        seconds = self.settings.deadline_seconds
        if self._adapter:
            adapter = {"lora_name": version, "lora_path": str(folder)}
            await self._call("/v1/load_lora_adapter", adapter, seconds=seconds)
            return
        await self._call("/pause?mode=wait", {}, seconds=seconds)
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self._call("/collective_rpc", reload, seconds=seconds)
        cleared = decode_json(await self._call("/reset_prefix_cache", {}))
        if not isinstance(cleared, dict) or cleared.get("success") is not True:
            raise RequestFailedError(
                FailureKind.CONTRADICTION, "it kept the prefix cache of its old weights: restart it"
            )
        await self._call("/update_weight_version", {"new_version": version})
        await self._call("/resume", {})

    async def unload(self, version: str) -> None:
        """Forget an adapter that no request names any more."""
        if self._adapter:
            await self._call("/v1/unload_lora_adapter", {"lora_name": version})

    async def aclose(self) -> None:
        await self._http.aclose()

    async def _weights(self) -> str:
        """The version of whole weights."""
        url, key = f"{self._root}/weight_info", api_key(self.settings)
        status, found = await self._http.get(url, key=key, seconds=_ROUTE_SECONDS)
        if status != 200 or not isinstance(found, dict) or not isinstance(found.get("weight_version"), str):
            raise RequestFailedError(
                FailureKind.REFUSED,
                f"GET /weight_info: expected a weight_version, got status {status}: start vLLM (0.32) with "
                "VLLM_SERVER_DEV_MODE=1, or dreamgym models serve with --weight-updates",
                retry=False,
                fatal=True,
            )
        return str(found["weight_version"])

    async def _call(self, route: str, body: dict[str, Any], *, seconds: float = _ROUTE_SECONDS) -> bytes:
        url, key = f"{self._root}{route}", api_key(self.settings)
        return await self._http.send(url, body, key=key, seconds=seconds)


class ServedPolicy:
    """The role `LanguageModel` on several servers. Prompts are tokenized here, and a sampled token is never
    tokenized again, as in `LocalLanguageModel`.

    An episode stays with one server, which has its prefix cached; where this fails, another one answers.
    """

    def __init__(
        self,
        servers: Sequence[PolicyServer],
        codec: TextCodec,
        histories: TokenHistory,
        *,
        vocabulary: int,
    ) -> None:
        self.servers = tuple(servers)
        self.codec = codec
        self.version = ""
        """The weights that the next request names."""
        self._histories = histories
        self._vocabulary = vocabulary
        self._context = min(each.settings.context_length for each in servers)

    async def complete(self, request: CompletionRequest) -> Completion:
        """
        Raises:
            EpisodeFailedError: no server has given a sample of this version (the last problem's kind), or the
                prompt is longer than the context (`budget`).
        """
        tokens = self._histories.tokens_of(request.prompt, request.conversation)
        room = self._context - len(tokens)
        if room < 1:
            raise EpisodeFailedError(
                FailureKind.BUDGET,
                f"the model reads at most {self._context} tokens, the prompt has {len(tokens)}: shorten the "
                "history, or raise context_length of the policy's servers",
            )
        exact = replace(request, prompt_token_ids=tuple(tokens), max_tokens=min(request.max_tokens, room))
        completion = await self._first_answer(exact)
        if request.conversation is not None:
            self._histories.record(request.conversation, request.prompt, tokens, list(completion.token_ids))
        return completion

    async def sample(self, server: PolicyServer, request: CompletionRequest, version: str) -> Completion:
        """One attempt; the completion is what this server sampled, and nothing else."""
        return self._checked(await server.sample(request, version), request)

    async def aclose(self) -> None:
        await asyncio.gather(*(server.aclose() for server in self.servers))

    async def _first_answer(self, request: CompletionRequest) -> Completion:
        clock, version = asyncio.get_running_loop().time, self.version
        start = zlib.crc32((request.conversation or "").encode()) % len(self.servers)
        order = [*self.servers[start:], *self.servers[:start]]
        rounds = max(server.settings.max_attempts for server in self.servers)
        deadline = clock() + max(server.settings.deadline_seconds for server in self.servers)
        for number in range(1, rounds + 1):
            for server in sorted(order, key=lambda each: each.avoided_until > clock()):
                try:
                    return await self.sample(server, request, version)
                except RequestFailedError as error:
                    if not error.retry and not error.fatal:  # of the request, not of the server
                        raise EpisodeFailedError(error.kind, f"{server.name}: {error}") from None
                    server.avoided_until = clock() + _AVOIDED_SECONDS
                    last, problem = server, error
            if number == rounds or clock() > deadline:
                break
            await asyncio.sleep(retry_delay(number, problem.retry_after, first=last.settings.backoff_seconds))
        raise EpisodeFailedError(
            problem.kind,
            f"expected a sample of {version!r} from one of {len(order)} servers, got none in {number} "
            f"rounds; the last one asked, {last.name}: {problem}",
        )

    def _checked(self, reply: Completion, request: CompletionRequest) -> Completion:
        """The completion with the text of its tokens."""
        ids, prompt = reply.token_ids, request.prompt_token_ids or ()
        if not ids or len(reply.logprobs) != len(ids):
            raise _unexpected(
                f"one log-prob per token id, got {len(ids)} ids and {len(reply.logprobs)} log-probs"
            )
        if min(ids) < 0 or max(ids) >= self._vocabulary or len(ids) > request.max_tokens:
            raise _unexpected(
                f"at most {request.max_tokens} tokens below {self._vocabulary}, got {ids!r:.200}"
            )
        if reply.prompt_token_ids and reply.prompt_token_ids != prompt:
            raise _unexpected("a reply to the tokens of the prompt, got one to others")
        text = self.codec.decode(ids, after=prompt[-1])
        ends = [place for stop in request.stop if (place := text.find(stop)) >= 0]
        stopped = bool(ends) or not self.codec.decode(ids[-1:])  # special tokens have no text
        if reply.finish_reason != "length" and not stopped:
            raise _unexpected(f"a stop string or an end token, got {text[-40:]!r}: was the request aborted?")
        return replace(
            reply,
            text=text[: min(ends, default=None)],
            prompt_token_ids=prompt,
            finish_reason="stop" if stopped else "length",
        )


def _unexpected(expected: str) -> RequestFailedError:
    return RequestFailedError(FailureKind.PARSE_ERROR, f"expected {expected}")
