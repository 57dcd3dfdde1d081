"""Through the chaos proxy: no reply is lost, wrong or counted twice, and nothing hangs."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from dreamgym.agents import LanguageModelPolicy
from dreamgym.config import AgentConfig
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.models.endpoint.client import Endpoint, EndpointLanguageModel
from dreamgym.models.usage import Usage
from dreamgym.protocols import Environment
from dreamgym.rollouts import GroupSettings, run_groups
from dreamgym.testing import CorridorFactory
from dreamgym.types import CompletionRequest, Trajectory
from tests.chaos import ChaosPlan, ChaosProxy
from tests.models.scripted_endpoint import served

STORM = ChaosPlan(
    seed=3,
    limited=0.05,
    failing=0.05,
    dropped=0.05,
    slow=0.03,
    drip=0.03,
    truncated=0.04,
    cut_json=0.02,
    empty=0.02,
    not_json=0.02,
    wrong_shape=0.02,
    silent=0.02,
    delay=0.05,
    retry_after=0.02,
)


def question(number: int) -> CompletionRequest:
    return CompletionRequest(prompt=f"You see a drawer {number}", max_tokens=4, stop=("\n",))


def test_a_plan_is_the_same_every_time_and_has_its_shares() -> None:
    faults = Counter(STORM.fault(number)[0] for number in range(5000))
    assert faults == Counter(STORM.fault(number)[0] for number in range(5000))
    for name, share in STORM.shares.items():
        assert abs(faults[name] / 5000 - share) < 0.015
    with pytest.raises(ConfigError, match="add up to at most 1"):
        ChaosPlan(dropped=0.7, limited=0.7)


async def test_every_reply_through_the_chaos_proxy_is_right_and_counted_once() -> None:
    count = 200
    async with served() as server, ChaosProxy(server.url, STORM) as proxy, asyncio.timeout(60):
        usage = Usage()
        settings = server.settings(url=proxy.url, max_attempts=12, timeout_seconds=5, backoff_seconds=0.02)
        endpoint = Endpoint("x", settings, usage=usage)

        async def ask(number: int) -> str:
            return (await endpoint.complete(question(number), role="agent")).text

        replies = await asyncio.gather(*(ask(n) for n in range(count)), return_exceptions=True)
        right = [(await server.local.complete(question(n))).text for n in range(count)]
        lost = [reply for reply in replies if isinstance(reply, BaseException)]
        assert all(isinstance(reply, EpisodeFailedError) for reply in lost)
        assert len(lost) < 0.01 * count  # three malformed replies in a row to one request
        assert all(
            reply == text
            for reply, text in zip(replies, right, strict=True)
            if not isinstance(reply, BaseException)
        )
        total = usage.total
        assert (total.requests, total.failures) == (count - len(lost), len(lost))
        assert set(proxy.faults) == set(STORM.shares)
        harmful = sum(proxy.faults.values()) - proxy.faults["slow"] - proxy.faults["drip"]
        assert total.sent - total.requests <= harmful
        assert endpoint.usage.latencies
        await endpoint.aclose()


async def test_rollouts_through_the_chaos_proxy_equal_those_without() -> None:
    """The data that a policy learns from does not depend on the network."""

    async def play(url: str, attempts: int) -> list[Trajectory]:
        endpoint = Endpoint("x", server.settings(url=url, max_attempts=attempts, timeout_seconds=5))
        model = EndpointLanguageModel(endpoint, role="agent")
        settings = AgentConfig(max_tokens=4)

        def member(environment: Environment, conversation: str, seed: int) -> LanguageModelPolicy:
            return LanguageModelPolicy(model, settings, conversation=conversation, seed=seed)

        factory = CorridorFactory(horizon=12)
        tasks = await factory.tasks("train", 2)
        report = await run_groups(
            factory, member, tasks, name="storm", settings=GroupSettings(size=3, retries=2)
        )
        await endpoint.aclose()
        assert not report.dropped
        return [each for group in report.groups for each in group.trajectories]

    async with served() as server, ChaosProxy(server.url, STORM) as proxy, asyncio.timeout(60):
        direct, proxied = await play(server.url, 1), await play(proxy.url, 12)
        assert [[turn.action for turn in each.transitions] for each in direct] == [
            [turn.action for turn in each.transitions] for each in proxied
        ]
        assert sum(proxy.faults.values()) > 10
        assert all(turn.outcome.next_state.text for each in proxied for turn in each.transitions)
