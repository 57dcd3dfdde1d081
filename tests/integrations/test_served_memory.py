"""A server has no end: what it keeps of episodes, replies and fresh transitions is bounded."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from dreamgym.experience.model import CachedModel, confidence
from dreamgym.integrations import served_results
from dreamgym.integrations.serving import ResetRequest, ServedEnvironment, Session
from dreamgym.types import Completion, CompletionRequest
from tests.integrations.served_corridor import served_dream


class Wordy:
    """Replies with as many tokens as an experience model reads and writes."""

    async def complete(self, request: CompletionRequest) -> Completion:
        tokens = tuple(range(1_000, 1_600))
        return Completion(
            text=request.prompt[-40:],
            token_ids=tokens[:100],
            logprobs=tuple(-0.001 * each for each in range(100)),
            prompt_token_ids=tuple(each + 10_000 for each in tokens),
        )


async def test_cached_replies_keep_neither_prompts_nor_tokens() -> None:
    cached, count = CachedModel(Wordy(), 10_000), 200
    requests = (CompletionRequest(prompt=f"{'x' * 3_000} {number}") for number in range(count))
    tracemalloc.start()
    try:
        for request in requests:
            await cached.complete(request)
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / count < 1_000
    first = CompletionRequest(prompt=f"{'x' * 3_000} 0 \ud800")
    again, fresh = await cached.complete(first), await Wordy().complete(first)
    assert (again.text, confidence(again)) == (fresh.text, confidence(fresh))


async def play(served: ServedEnvironment, seeds: range) -> Session:
    """Episodes that no other one is compared with: each has its own seed."""
    session = Session(served)
    for seed in seeds:
        await session.reset(ResetRequest(seed=seed, index=seed % 4))
        for _ in range(3):
            if (await session.step("go east")).done:
                break
    return session


async def test_of_an_episode_only_its_record_is_kept(tmp_path: Path) -> None:
    async with served_dream(tmp_path) as served:
        session = await play(served, range(3))
        assert served.results is not None
        held = [each for group in served.results._open.values() for each in group.finished]
        assert len(held) == 2
        assert not any(turn.outcome.info for each in held for turn in each.transitions)
        assert session.state.step_count > 0
        await session.aclose()


async def test_incomplete_groups_and_fresh_transitions_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served_results, "_MAX_OPEN", 8)
    async with served_dream(tmp_path) as served:
        assert served.dream is not None
        assert served.dream.buffer is not None
        assert served.results is not None
        served.dream.buffer.limit_synthetic(20)
        session = await play(served, range(60))
        await session.aclose()
        assert served.results.status()["open_groups"] <= 8
        await served.results.flush()
        stats = served.dream.buffer.stats()
        assert served.results.fresh_rows > 100
        assert stats.synthetic <= 20


async def test_a_capacity_that_was_set_is_kept(tmp_path: Path) -> None:
    from dreamgym.replay.buffer import ReplayBuffer

    with ReplayBuffer.open(tmp_path / "replay.sqlite", capacity=7) as buffer:
        buffer.limit_synthetic(100)
        assert buffer.stats().capacity == 7
