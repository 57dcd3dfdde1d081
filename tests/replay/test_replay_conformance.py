"""What every store must do, SQLite and PostgreSQL alike."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence

import pytest

from dreamgym.errors import DataError, StoreError
from dreamgym.protocols import Keys
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.replay.store import records
from dreamgym.types import Demonstration, RetrievalFilter, Trajectory
from tests.replay.household import episode

HOUSEHOLD = RetrievalFilter(environment="household")


async def find(
    buffer: ReplayBuffer, trajectory: Trajectory, position: int, k: int = 1
) -> list[Demonstration]:
    step = trajectory.transitions[position]
    return (await buffer.search([(step.state.text, step.action)], k=k, filters=[HOUSEHOLD]))[0]


async def test_what_was_added_is_found_at_once_and_after_reopening(store: str) -> None:
    trajectory = episode(1)
    with ReplayBuffer.open(store) as buffer:
        assert await buffer.add(trajectory) == 4
        first = (await find(buffer, trajectory, 2))[0]
    with ReplayBuffer.open(store) as buffer:
        assert (await find(buffer, trajectory, 2))[0] == first
    assert first.similarity == pytest.approx(1.0, abs=1e-6)
    assert first.transition_id == "household-real-1:2"


@pytest.mark.parametrize("source", ["real", "synthetic"])
async def test_a_transition_comes_back_whole_with_its_provenance(store: str, source: str) -> None:
    trajectory = episode(3, source="real" if source == "real" else "synthetic")
    with ReplayBuffer.open(store) as buffer:
        await buffer.add(trajectory)
        for position, transition in enumerate(trajectory.transitions):
            found = (await find(buffer, trajectory, position))[0]
            assert found.transition == transition
            assert found.provenance == trajectory.provenance
            assert (found.trajectory_id, found.task_id) == (trajectory.id, trajectory.task.id)
            assert found.position == position


async def test_adding_again_changes_nothing(store: str) -> None:
    trajectory = episode(1)
    with ReplayBuffer.open(store) as buffer:
        assert await buffer.add(records(trajectory)[:2]) == 2
        assert await buffer.add(trajectory) == 2
        assert await buffer.add(trajectory) == 0
        assert buffer.stats().rows == 4


async def test_one_id_cannot_mean_real_and_synthetic_experience(store: str) -> None:
    real = episode(1)
    twin = dataclasses.replace(real, provenance=dataclasses.replace(real.provenance, source="synthetic"))
    with ReplayBuffer.open(store) as buffer:
        await buffer.add(real)
        results = await asyncio.gather(buffer.add(twin), buffer.add(episode(2)), return_exceptions=True)
        assert isinstance(results[0], DataError)
        assert real.id in str(results[0])
        assert results[1] == 4  # a neighbour in the same commit is not harmed
        assert buffer.stats().synthetic == 0


async def test_keys_computed_once_can_be_passed_on(store: str) -> None:
    trajectory = episode(1)
    with ReplayBuffer.open(store) as buffer:
        pairs = [(step.state.text, step.action) for step in trajectory.transitions]
        keys = await buffer.embed(pairs)
        await buffer.add(trajectory, keys=keys)
        found = await buffer.nearest(keys, k=1, filters=[HOUSEHOLD] * 4)
        assert [hits[0].position for hits in found] == [0, 1, 2, 3]
        with pytest.raises(DataError, match="expected keys of shape"):
            await buffer.add(episode(2), keys=keys[:3])
        with pytest.raises(DataError, match="unit vectors"):
            await buffer.add(episode(2), keys=keys * 2)
        with pytest.raises(DataError, match="expected keys of shape"):
            await buffer.nearest(keys, k=1, filters=[HOUSEHOLD])


async def test_text_that_no_store_can_hold_is_refused_alone(store: str) -> None:
    good, bad, odd = episode(1), episode(2), episode(3)
    broken = dataclasses.replace(bad.transitions[0], action="\ud800")
    bad = dataclasses.replace(bad, transitions=(broken, *bad.transitions[1:]))
    strange = dataclasses.replace(odd.transitions[0], action="nul \x00 bell \x07 \u2028 emoji 🫖")
    odd = dataclasses.replace(odd, transitions=(strange,))
    with ReplayBuffer.open(store) as buffer:
        outcomes = await asyncio.gather(
            buffer.add(good), buffer.add(bad), buffer.add(odd), return_exceptions=True
        )
        assert [outcomes[0], outcomes[2]] == [4, 1]
        assert isinstance(outcomes[1], DataError)
        assert (await find(buffer, odd, 0))[0].transition == strange
        for unprintable in ("", "a\x00b", "x" * 2000):
            with pytest.raises(DataError, match="printable"):
                await buffer.add(dataclasses.replace(episode(9), id=unprintable))


async def test_another_embedder_is_refused_with_the_command_that_reembeds(store: str) -> None:
    with ReplayBuffer.open(store) as buffer:
        await buffer.add(episode(1))
    with pytest.raises(StoreError, match=r"dreamgym buffer compact .* --embedder lexical"):
        ReplayBuffer.open(store, embedder=LexicalEmbedder(state_slots=64, action_slots=64))


async def test_reembedding_replaces_every_key_and_survives_an_interruption(store: str) -> None:
    class Interrupted(LexicalEmbedder):
        calls = 0

        async def embed(self, pairs: Sequence[tuple[str, str]]) -> Keys:
            self.calls += 1
            if self.calls == 2:
                raise KeyboardInterrupt
            return await super().embed(pairs)

    other = LexicalEmbedder(state_slots=96, action_slots=32)
    trajectories = [episode(number, steps=10) for number in range(40)]
    with ReplayBuffer.open(store) as buffer:
        await asyncio.gather(*(buffer.add(each) for each in trajectories))
    with ReplayBuffer.open(store, embedder=None) as buffer:
        with pytest.raises(KeyboardInterrupt):
            await buffer.reembed(Interrupted(state_slots=96, action_slots=32))
        assert buffer.stats().embedder == LexicalEmbedder().identity
        progress: list[int] = []
        await buffer.reembed(other, on_progress=progress.append)
        assert progress[-1] == 400 - 256  # what the first attempt did was not done again
        await buffer.add(episode(99))
        assert (await find(buffer, trajectories[7], 3))[0].transition_id == "household-real-7:3"
    with ReplayBuffer.open(store, embedder=other) as buffer:
        assert (await find(buffer, trajectories[7], 3))[0].transition_id == "household-real-7:3"
        assert buffer.stats().rows == 404
        await buffer.reembed(LexicalEmbedder())
        assert (await find(buffer, trajectories[7], 3))[0].transition_id == "household-real-7:3"


async def test_rows_that_are_added_and_searched_while_a_reembedding_ends_get_keys_of_the_new_embedder(
    store: str,
) -> None:
    class Slow(LexicalEmbedder):
        """Embeds once `go` is set; the other embedder has keys of the same length."""

        def __init__(self) -> None:
            super().__init__()
            self.begun, self.go = asyncio.Event(), asyncio.Event()

        async def embed(self, pairs: Sequence[tuple[str, str]]) -> Keys:
            self.begun.set()
            await self.go.wait()
            return await super().embed(pairs)

    old, other = Slow(), LexicalEmbedder(state_slots=128, action_slots=256)
    assert old.dimension == other.dimension
    assert old.identity != other.identity
    with ReplayBuffer.open(store, embedder=old) as buffer:
        old.go.set()
        await buffer.add(episode(1))
        old.go.clear()
        old.begun.clear()
        adding = asyncio.create_task(buffer.add(episode(2)))
        searching = asyncio.create_task(find(buffer, episode(1), 2))
        await old.begun.wait()
        await buffer.reembed(other)
        old.go.set()
        assert await adding == 4
        assert (await searching)[0].similarity == pytest.approx(1.0, abs=1e-6)
        assert (await find(buffer, episode(2), 1))[0].similarity == pytest.approx(1.0, abs=1e-6)


async def test_a_buffer_opened_before_a_reembedding_is_refused_with_advice(store: str) -> None:
    with ReplayBuffer.open(store) as before, ReplayBuffer.open(store) as buffer:
        await before.add(episode(1))
        await buffer.reembed(LexicalEmbedder(state_slots=96, action_slots=32))
        with pytest.raises(StoreError, match="--embedder"):
            await find(before, episode(1), 0)
        with pytest.raises(StoreError, match="--embedder"):
            await before.add(episode(2))
        assert buffer.stats().rows == 4


async def test_eviction_takes_the_oldest_synthetic_rows_first_and_real_ones_last(store: str) -> None:
    with ReplayBuffer.open(store, capacity=12) as buffer:
        for number in range(2):
            await buffer.add(episode(number, source="synthetic"))
        await buffer.add(episode(2))
        await buffer.add(episode(3))
        about = buffer.stats()
        assert (about.rows, about.real, about.synthetic) == (12, 8, 4)
        left = await find(buffer, episode(0, source="synthetic"), 0, k=20)
        assert {each.trajectory_id for each in left} == {
            "household-synthetic-1",
            "household-real-2",
            "household-real-3",
        }
        await buffer.add(episode(4, steps=6))
        about = buffer.stats()
        assert (about.real, about.synthetic) == (12, 0)
        left = await find(buffer, episode(2), 0, k=20)
        assert {each.transition_id for each in left if each.trajectory_id.endswith("-2")} == {
            "household-real-2:2",
            "household-real-2:3",
        }
        await buffer.add(episode(5, source="synthetic"))  # no room for it: real rows stay
        assert buffer.stats().synthetic == 0
    with ReplayBuffer.open(store) as buffer:
        assert len(await find(buffer, episode(2), 0, k=20)) == 12


async def test_another_view_of_the_store_sees_additions_and_evictions(store: str) -> None:
    with ReplayBuffer.open(store, capacity=8) as writer, ReplayBuffer.open(store) as reader:
        await writer.add(episode(1, source="synthetic"))
        assert (await find(reader, episode(1), 0))[0].trajectory_id == "household-synthetic-1"
        await writer.add(episode(2))
        await writer.add(episode(3))
        found = await find(reader, episode(1), 0, k=20)
        assert {each.trajectory_id for each in found} == {"household-real-2", "household-real-3"}
        await reader.add(episode(4))
        assert (await find(writer, episode(4), 0))[0].trajectory_id == "household-real-4"


async def test_a_row_that_was_found_before_is_not_found_after_its_eviction(store: str) -> None:
    with ReplayBuffer.open(store, capacity=4) as buffer:
        await buffer.add(episode(1))
        before = await find(buffer, episode(1), 0, k=20)
        assert before == await find(buffer, episode(1), 0, k=20)
        await buffer.add(episode(2))
        after = await find(buffer, episode(1), 0, k=20)
        assert {each.trajectory_id for each in after} == {"household-real-2"}


async def test_only_the_most_recently_found_rows_stay_in_memory(
    store: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamgym.replay.buffer._DECODED_ROWS", 6)
    with ReplayBuffer.open(store) as buffer:
        for number in range(4):
            await buffer.add(episode(number))
        everything = await find(buffer, episode(0), 0, k=20)
        assert len(everything) == 16
        assert len(buffer._decoded) == 6
        assert await find(buffer, episode(0), 0, k=20) == everything


async def test_writers_in_many_tasks_and_threads_lose_nothing(store: str) -> None:
    def in_thread(buffer: ReplayBuffer, start: int) -> None:
        for number in range(start, start + 5):
            asyncio.run(buffer.add(episode(number)))

    with ReplayBuffer.open(store) as buffer, ReplayBuffer.open(store) as second:
        threads = [
            threading.Thread(target=in_thread, args=(each, start))
            for each, start in [(buffer, 100), (buffer, 200), (second, 300), (second, 400)]
        ]
        for thread in threads:
            thread.start()
        results = await asyncio.gather(*(buffer.add(episode(number)) for number in range(30)))
        for thread in threads:
            await asyncio.to_thread(thread.join)
        assert results == [4] * 30
        for each in (buffer, second):
            assert each.stats().rows == 4 * 50
            assert len(await find(each, episode(7), 0, k=500)) == 4 * 50


async def test_a_cancelled_add_happens_wholly_or_not_at_all(store: str) -> None:
    with ReplayBuffer.open(store) as buffer:
        doomed = [asyncio.ensure_future(buffer.add(episode(number))) for number in range(40)]
        kept = [asyncio.ensure_future(buffer.add(episode(number))) for number in range(100, 110)]
        await asyncio.sleep(0)
        for number, task in enumerate(doomed):
            await asyncio.sleep(0.001 if number % 8 == 0 else 0)
            task.cancel()
        await asyncio.gather(*doomed, return_exceptions=True)
        assert await asyncio.gather(*kept) == [4] * 10
        stored = await buffer.known([episode(number).id for number in range(40)])
        assert all(positions == {0, 1, 2, 3} for positions in stored.values())
        assert await buffer.add(episode(500)) == 4


async def test_compacting_keeps_every_row_and_forgets_what_was_evicted(store: str) -> None:
    with ReplayBuffer.open(store) as buffer:
        for number in range(30):
            await buffer.add(episode(number, source="synthetic", steps=8))
    with ReplayBuffer.open(store, capacity=40) as buffer:
        await buffer.compact()
        assert buffer.stats().rows == 40
        assert list(await buffer.known([episode(n, source="synthetic").id for n in range(30)])) == [
            f"household-synthetic-{number}" for number in range(25, 30)
        ]
        assert (await find(buffer, episode(27, steps=8), 5))[0].transition_id == "household-synthetic-27:5"
        assert await buffer.add(episode(99)) == 4


async def test_a_closed_buffer_says_so_after_finishing_what_it_took(store: str) -> None:
    buffer = ReplayBuffer.open(store)
    pending = [asyncio.ensure_future(buffer.add(episode(number))) for number in range(10)]
    await asyncio.sleep(0)
    buffer.close()
    assert await asyncio.gather(*pending) == [4] * 10
    with pytest.raises(StoreError, match="closed"):
        await buffer.add(episode(11))


async def test_a_store_that_is_not_there_is_not_made_by_looking(store: str) -> None:
    for embedder in (None, "lexical"):
        with pytest.raises(StoreError, match="dreamgym buffer build"):
            ReplayBuffer.open(store, embedder=embedder, create=False)


async def test_one_batch_of_64_answers_like_64_single_searches(store: str) -> None:
    trajectories = [episode(number, steps=8) for number in range(16)]
    with ReplayBuffer.open(store) as buffer:
        await asyncio.gather(*(buffer.add(each) for each in trajectories))
        pairs = [(step.state.text, step.action) for each in trajectories for step in each.transitions][:64]
        keys = await buffer.embed(pairs)
        filters = [
            RetrievalFilter(environment="household", exclude_trajectory=f"household-real-{number // 8}")
            for number in range(64)
        ]
        together = await buffer.nearest(keys, k=5, filters=filters)
        singles = [
            (await buffer.nearest(keys[n : n + 1], k=5, filters=[filters[n]]))[0] for n in range(len(pairs))
        ]
        assert together == singles
        waiting = [buffer.nearest(keys[n : n + 1], k=1 + n % 5, filters=[filters[n]]) for n in range(64)]
        gathered = await asyncio.gather(*waiting)
        assert [each[0] for each in gathered] == [hits[: 1 + n % 5] for n, hits in enumerate(together)]


async def test_a_buffer_limits_synthetic_rows_unless_the_filter_has_a_limit(store: str) -> None:
    with ReplayBuffer.open(store, max_synthetic=1) as buffer:
        for number in range(3):
            await buffer.add(episode(number, source="synthetic"))
            await buffer.add(episode(number))
        found = await find(buffer, episode(0), 0, k=6)
        assert [each.provenance.source for each in found].count("synthetic") == 1
        step = episode(0).transitions[0]
        own = dataclasses.replace(HOUSEHOLD, max_synthetic=3)
        (found,) = await buffer.search([(step.state.text, step.action)], k=6, filters=[own])
        assert [each.provenance.source for each in found].count("synthetic") == 3
