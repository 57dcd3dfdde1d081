"""The task pool: what is sampled, what is kept, and that nothing acknowledged is ever lost."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.curriculum.task_pool import Lineage, TaskPool, lineage, read_pool
from dreamgym.errors import ConfigError, DataError, StoreError
from dreamgym.types import Task
from tests.curriculum.pool_examples import group, seed_task


def generated_task(number: int, parent: str = "seed-0") -> Task:
    origin = Lineage(parent=parent, generator="writer", seed=number, reason="harder")
    return Task(
        id=f"generated/{number}",
        instruction=f"paint it {number}",
        environment="studio",
        origin="generated",
        parameters={"lineage": asdict(origin)},
    )


def filled(
    path: Path, seeds: int = 6, generated: int = 4, seed: int = 0, generated_fraction: float = 0.5
) -> TaskPool:
    tasks = [seed_task(number) for number in range(seeds)]
    pool = TaskPool(tasks, path, seed=seed, generated_fraction=generated_fraction)
    pool.add_generated([generated_task(number) for number in range(generated)], step=0, counts={"known": 2})
    return pool


@pytest.mark.parametrize(("fraction", "most"), [(0.0, 0), (0.25, 2), (0.29, 2), (0.5, 4), (1.0, 4)])
def test_a_step_never_has_more_generated_tasks_than_the_fraction_allows(
    tmp_path: Path, fraction: float, most: int
) -> None:
    with filled(tmp_path / "pool.jsonl", seed=1, generated_fraction=fraction) as pool:
        for step in range(20):
            drawn = pool.sample(8, step=step)
            assert len(drawn) == 8
            assert sum(task.origin == "generated" for task in drawn) == most


def test_the_same_seed_and_step_give_the_same_tasks_and_others_give_others(tmp_path: Path) -> None:
    with filled(tmp_path / "a.jsonl") as one, filled(tmp_path / "b.jsonl") as other:
        first = [one.sample(5, step=step) for step in range(5)]
        assert first == [other.sample(5, step=step) for step in range(5)]
        other.seed = 4
        assert first != [other.sample(5, step=step) for step in range(5)]
        assert first[0] != first[1]


def test_every_seed_task_gets_its_turn_and_comes_twice_only_when_there_are_too_few(tmp_path: Path) -> None:
    with filled(tmp_path / "pool.jsonl", seeds=6, generated=0) as pool:
        seen = Counter(task.id for step in range(200) for task in pool.sample(3, step=step))
        assert len(seen) == 6
        assert min(seen.values()) > 60
        twice = Counter(task.id for task in pool.sample(13, step=0))
        assert sorted(twice.values()) == [2, 2, 2, 2, 2, 3]


def test_a_generated_task_that_goes_both_ways_is_drawn_more_often_than_one_that_never_does(
    tmp_path: Path,
) -> None:
    with filled(tmp_path / "pool.jsonl", generated=2) as pool:
        pool.record([group(generated_task(0), [1, 0]), group(generated_task(1), [0, 0])], step=1)
        drawn = Counter(
            task.id for step in range(300) for task in pool.sample(2, step=step) if task.origin == "generated"
        )
        assert drawn["generated/0"] > 5 * drawn["generated/1"] > 0


def test_without_seed_tasks_there_is_nothing_to_sample(tmp_path: Path) -> None:
    with TaskPool(path=tmp_path / "pool.jsonl") as pool, pytest.raises(ConfigError, match="seed tasks"):
        pool.sample(1, step=0)


def test_what_is_varied_has_the_highest_reward_entropy_and_never_none(tmp_path: Path) -> None:
    with filled(tmp_path / "pool.jsonl") as pool:
        assert pool.most_informative(3) == []
        pool.record(
            [
                group(seed_task(0), [1, 1, 1, 1]),
                group(seed_task(1), [1, 0, 0, 0]),
                group(seed_task(2), [1, 1, 0, 0]),
                group(generated_task(3), [0, 0, 0, 1]),
            ],
            step=2,
        )
        assert [task.id for task in pool.most_informative(9)] == ["seed-2", "generated/3", "seed-1"]
        assert [task.id for task in pool.most_informative(1)] == ["seed-2"]


def test_statistics_and_lineage_survive_on_disk(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    with filled(path) as pool:
        pool.add_generated(
            [generated_task(9, parent="generated/1")], step=3, counts={"known": 1, "accepted": 1}
        )
        pool.record([group(seed_task(0), [1, 0, 0, 0])], step=3)
        pool.record([group(seed_task(0), [1, 1, 1, 1])], step=4, entropy={"seed-0": 0.2})
        tasks = pool.tasks
    view = read_pool(path)
    assert view.tasks == tasks
    assert (view["seed-0"].episodes, view["seed-0"].successes, view["seed-0"].entropy) == (8, 5, 0.2)
    assert [step for step, _ in view["seed-0"].history] == [3, 4]
    assert view["generated/9"].step == 3
    assert lineage(view["generated/9"].task) == Lineage(
        parent="generated/1", generator="writer", seed=9, reason="harder"
    )
    assert [task.id for task in view.ancestry("generated/9")] == ["generated/9", "generated/1", "seed-0"]
    assert view.counts == {"known": 3, "accepted": 1}


def test_a_lineage_that_bites_its_own_tail_is_reported_once(tmp_path: Path) -> None:
    with TaskPool(path=tmp_path / "pool.jsonl") as pool:
        pool.add_generated([generated_task(1, "generated/2"), generated_task(2, "generated/1")], step=0)
        assert [task.id for task in pool.ancestry("generated/1")] == ["generated/1", "generated/2"]
    nonsense = replace(generated_task(1), parameters={"lineage": {"parent": 3}})
    assert lineage(nonsense) is None


def test_going_on_from_a_step_takes_back_what_it_and_later_ones_did(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    with filled(path) as pool:
        pool.record([group(seed_task(0), [1, 0])], step=0)
        before = [pool.sample(4, step=1), pool.most_informative(4)]
        pool.record([group(seed_task(1), [1, 0]), group(generated_task(0), [1, 1])], step=1)
        pool.add_generated([generated_task(7)], step=1)
    with TaskPool(path=path, generated_fraction=0.5) as pool:
        pool.rewind(1)
        assert "generated/7" not in pool
        assert [pool.sample(4, step=1), pool.most_informative(4)] == before
        pool.record([group(seed_task(2), [1, 0])], step=1)
        size = path.stat().st_size
        pool.rewind(2)
        assert path.stat().st_size == size, "nothing was taken back, so nothing is to be said"
    again = read_pool(path)
    assert (again["seed-1"].episodes, again["seed-2"].episodes) == (0, 2)


def test_adding_again_adds_nothing(tmp_path: Path) -> None:
    with filled(tmp_path / "pool.jsonl") as pool:
        assert pool.add_seeds([seed_task(0), seed_task(99), seed_task(99)]) == 1
        assert pool.add_generated([generated_task(0)], step=5) == 0
        with pytest.raises(ValueError, match="expected seed tasks"):
            pool.add_seeds([generated_task(50)])
        with pytest.raises(ValueError, match="add it first"):
            pool.record([group(seed_task(1234), [1.0])], step=0)


@pytest.mark.parametrize("cut", [2, 10, 60])
def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "pool.jsonl"
    with filled(path, seeds=3, generated=0) as pool:
        pool.record([group(seed_task(0), [1, 0])], step=0)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert read_pool(path)["seed-0"].episodes == 0
    with TaskPool(path=path) as pool:
        assert pool["seed-0"].episodes == 0
        pool.record([group(seed_task(0), [1, 0])], step=0)
    assert path.read_bytes() == whole


def test_a_damaged_line_in_the_middle_is_named_and_nothing_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    filled(path).close()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[2] = b'{"event": "seed", "task": 7}\n'
    path.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"pool\.jsonl:3: expected a row of a task pool"):
        TaskPool(path=path)
    assert path.read_bytes() == b"".join(lines)


def test_only_one_process_writes_a_pool_and_others_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    with filled(path) as pool:
        with pytest.raises(StoreError, match="another process is writing"):
            TaskPool(path=path)
        assert len(read_pool(path)) == len(pool)


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_whatever_an_instruction_says_it_is_kept_word_for_word_or_refused(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("pool") / "pool.jsonl"
    task = seed_task(1, text or " ")
    with TaskPool(path=path) as pool:
        pool.add_seeds([task])
    assert read_pool(path).tasks == [task]


def test_text_that_no_file_can_hold_is_refused_before_it_is_written(tmp_path: Path) -> None:
    with TaskPool(path=tmp_path / "pool.jsonl") as pool:
        for task in (seed_task(1, "\ud800"), replace(seed_task(2), parameters={"x": float("nan")})):
            with pytest.raises(ValueError, match=r"\S"):
                pool.add_seeds([task])
        assert (tmp_path / "pool.jsonl").read_bytes() == b""


def test_where_no_more_can_be_written_it_is_said_and_what_was_acknowledged_stays(tmp_path: Path) -> None:
    """A process whose files may not grow beyond 2,000 bytes, as on a full disk."""
    path = tmp_path / "pool.jsonl"
    script = (
        "import resource, signal, sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from dreamgym.curriculum.task_pool import TaskPool; from pool_examples import seed_task;"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); pool = TaskPool(path=Path(sys.argv[1]))\n"
        "for number in range(1000): pool.add_seeds([seed_task(number)]); print(number, flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "StoreError" in done.stderr
    assert "free some space and run again" in done.stderr
    kept = [task.id for task in read_pool(path).tasks]
    assert kept == [f"seed-{number}" for number in range(len(done.stdout.split()))]
    assert len(kept) > 5
    assert path.read_bytes().endswith(b"\n")


def test_a_writer_killed_at_any_moment_has_kept_what_it_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "pool.jsonl"
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[2]);"
        "from dreamgym.curriculum.task_pool import TaskPool; from pool_examples import group, seed_task;"
        "pool = TaskPool(path=Path(sys.argv[1])); pool.add_seeds([seed_task(0)]);\n"
        "for step in range(100000): pool.record([group(seed_task(0), [1.0, 0.0])], step=step);"
        " print(step, flush=True)"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", script, str(path), str(Path(__file__).parent)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert writer.stdout is not None
    assert writer.stdout.readline() == "0\n"
    time.sleep(0.1)
    writer.send_signal(signal.SIGKILL)
    acknowledged = [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    with TaskPool(path=path) as pool:
        steps = [step for step, _ in pool["seed-0"].history]
    assert steps == list(range(len(steps)))
    assert len(steps) >= max(acknowledged, default=0) + 1
    assert all(json.loads(line) for line in path.read_text(encoding="utf-8").splitlines())


def test_a_pool_without_a_file_counts_its_own_steps() -> None:
    pool = TaskPool([seed_task(number) for number in range(4)], seed=1)
    assert pool.path is None
    first = pool.sample(2)
    assert pool.sample(2) == first, "the same until the step is recorded"
    entropy = pool.record([group(task, [1.0, 0.0]) for task in first])
    assert entropy == {task.id: 0.25 for task in first}
    assert pool.step == 1
    assert [pool.sample(2) for _ in range(2)] == [pool.sample(2, step=1)] * 2
    assert {task.id for task in pool.most_informative(4)} == {task.id for task in first}
    pool.add_generated([generated_task(7)])
    pool.rewind(0)
    assert (pool.step, len(pool), pool.generated) == (0, 4, [])


def test_a_pool_in_a_file_resumes_where_it_stopped(tmp_path: Path) -> None:
    tasks = [seed_task(number) for number in range(4)]
    with TaskPool(tasks, tmp_path / "pool.jsonl") as pool:
        pool.record([group(task, [1.0]) for task in pool.sample(2)])
        expected = pool.sample(3)
    with TaskPool(tasks, tmp_path / "pool.jsonl") as again:
        assert (again.step, len(again), again.sample(3)) == (1, 4, expected)
