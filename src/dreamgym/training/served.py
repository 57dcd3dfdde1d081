"""A policy that servers sample: new weights go to all of them before the groups of a step are played."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dreamgym.agents import policy_factory
from dreamgym.config import HF_PREFIX, AgentConfig, Config
from dreamgym.distributed.player import GroupPlayer, GroupRequest
from dreamgym.errors import EndpointError
from dreamgym.http_client import RequestFailedError
from dreamgym.models.endpoint.policy_servers import PolicyServer, ServedPolicy
from dreamgym.models.registry import find_endpoint
from dreamgym.rollouts import GroupReport, PolicyFactory
from dreamgym.training.agent import Agent, weights_source
from dreamgym.types import Completion, CompletionRequest, FailureKind

SERVED = "served"
"""In the run directory: the weights that servers read."""
_PROBE, _PROBE_SAMPLES, _PROBE_TOKENS = "task: look around.\nstate: You are in a room.\naction:", 8, 16
_TOLERANCE, _TOLERANCE_OF_EQUALS, _EQUAL = 0.1, 5e-3, 1e-4
"""In nats. vLLM in bf16 was 0.04 away from a learner in fp32 (SmolLM2-135M), in fp32 1e-6 (docs/log.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedAgent:
    """What a driver or a worker needs of an agent in order to play: a tokenizer and servers, no weights."""

    config: AgentConfig
    policy: ServedPolicy

    def policy_factory(self, name: str) -> PolicyFactory:
        """Makes the policy of each episode."""
        return policy_factory(self.policy, self.config, name)

    def restore(self, weights: Mapping[str, Any]) -> None:
        """Sample the version that `ServedPlayer` has published."""
        self.policy.version = weights["version"]

    async def aclose(self) -> None:
        await self.policy.aclose()


def open_served_agent(config: Config, folder: Path, agent: Agent | None = None) -> ServedAgent:
    """Of the run in `folder`; `agent` is the one that learns, which workers do not have."""
    from transformers import AutoConfig, AutoTokenizer

    from dreamgym.models.local.tokens import TextCodec, TokenHistory

    if agent is not None:
        tokenizer, vocabulary = agent.tokenizer, agent.model.get_input_embeddings().weight.shape[0]
    else:
        source = weights_source(config, folder).removeprefix(HF_PREFIX)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        vocabulary = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config().vocab_size
    codec = TextCodec(tokenizer)
    adapter = config.agent.adapter == "lora"
    servers = [
        PolicyServer(name, find_endpoint(name, config.endpoints), adapter=adapter)
        for name in config.train.policy_servers
    ]
    policy = ServedPolicy(servers, codec, TokenHistory(codec), vocabulary=vocabulary)
    return ServedAgent(config=config.agent, policy=policy)


class ServedPlayer:
    """The role `GroupPlayer`: gives new weights to the servers, then lets another player play.

    A server that does not answer is left out with a warning; it gets the weights when it answers again. One
    that refuses them, or samples from others, ends the run.
    """

    def __init__(
        self,
        player: GroupPlayer,
        agent: Agent,
        served: ServedAgent,
        folder: Path,
        *,
        tolerance: float | None,
        warn: Callable[[str], None],
    ) -> None:
        """
        Args:
            folder: the run directory; servers read it under the same path.
            tolerance: largest mean difference of log-probs between server and learner; None: by the first.
        """
        self._player, self._agent, self._served = player, agent, served
        self._folder = folder / SERVED
        self._run = f"{folder.name}-{secrets.token_hex(4)}"
        """Part of each version: weights of an earlier start of this run are not those of this one."""
        self._tolerance = tolerance
        self._warn = warn
        self._gap = 0.0
        self._first_gaps: dict[str, float] = {}

    async def publish(self, version: int, weights: Callable[[], Mapping[str, Any]]) -> None:
        """
        Raises:
            EndpointError: a server refuses the weights or samples from others, or none answers.
        """
        policy, before = self._served.policy, self._served.policy.version
        name = f"{self._run}-{version:06d}"
        folder = self._folder / name
        if not folder.exists():
            shutil.rmtree(self._folder, ignore_errors=True)  # older ones: no group names them again
            await asyncio.to_thread(self._agent.save, folder, merge=False)
        updates = (self._update(server, name, folder) for server in policy.servers)
        gaps, lost = list[float](), list[str]()
        for server, found in zip(
            policy.servers, await asyncio.gather(*updates, return_exceptions=True), strict=True
        ):
            if isinstance(found, RequestFailedError):
                lost.append(f"{server.name}: {found}")
            elif isinstance(found, BaseException):
                raise found
            else:
                gaps.append(found)
        if not gaps:
            raise EndpointError(
                f"no server of train.policy_servers takes new weights ({'; '.join(lost)}): start one"
            )
        if lost:
            servers = len(policy.servers)
            self._warn(f"{len(gaps)} of {servers} policy servers have the new weights ({'; '.join(lost)})")
        self._gap = max(gaps)
        self._served.restore({"version": name})
        await self._player.publish(version, lambda: {"version": name})
        if before != name:
            await self._unload(before)

    async def play(self, request: GroupRequest) -> GroupReport:
        report = await self._player.play(request)
        report.metrics["sampling_gap"] = self._gap
        return report

    async def aclose(self) -> None:
        await self._unload(self._served.policy.version)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _update(self, server: PolicyServer, name: str, folder: Path) -> float:
        """How far its log-probs are from the learner's.

        Raises:
            RequestFailedError: it does not answer.
        """
        try:
            if not await server.has(name):
                await server.load(name, folder)
            samples = (self._served.policy.sample(server, probe, name) for probe in self._probes())
            gap = self._difference(await asyncio.gather(*samples))
        except RequestFailedError as error:
            silent = error.kind in (FailureKind.TIMEOUT, FailureKind.SERVER_DOWN)
            if silent and (error.not_connected or error.maybe_billed):
                raise
            raise EndpointError(
                f"{server.name} did not take the weights in {folder}: {error}; it must serve the same model "
                "and read this path (docs/guides/distributed.md)"
            ) from None
        equal = self._first_gaps.setdefault(server.name, gap) < _EQUAL
        most = self._tolerance or (_TOLERANCE_OF_EQUALS if equal else _TOLERANCE)
        if not gap <= most:  # NaN, too
            raise EndpointError(
                f"{server.name} has taken the weights in {folder} and samples from others: its log-probs "
                f"differ from the learner's by {gap:.2g} nats on average, expected at most {most:g} "
                "(train.sampling_tolerance); is it the same model, not quantized?"
            )
        return gap

    def _probes(self) -> list[CompletionRequest]:
        prompt = CompletionRequest(
            prompt=_PROBE,
            prompt_token_ids=tuple(self._served.policy.codec.start(_PROBE)),
            max_tokens=_PROBE_TOKENS,
            temperature=1.0,
            stop=("\0",),
        )
        return [replace(prompt, seed=seed) for seed in range(_PROBE_SAMPLES)]

    def _difference(self, replies: Sequence[Completion]) -> float:
        """Mean absolute difference per token."""
        import torch

        gaps = list[torch.Tensor]()
        for reply in replies:
            prompt = len(reply.prompt_token_ids)
            device = next(self._agent.model.parameters()).device
            tokens = torch.tensor([[*reply.prompt_token_ids, *reply.token_ids]], device=device)
            with torch.inference_mode():
                logits = self._agent.model(input_ids=tokens, use_cache=False).logits[0, prompt - 1 : -1]
            own = logits.float().log_softmax(-1).gather(1, tokens[0, prompt:, None])[:, 0].cpu()
            gaps.append((own - torch.tensor(reply.logprobs)).abs())
        return float(torch.cat(gaps).mean())

    async def _unload(self, name: str) -> None:
        for server in self._served.policy.servers if name else ():
            with contextlib.suppress(RequestFailedError):  # it has others already, or is gone
                await server.unload(name)
