"""Training with audits and resets, on workers and on a shared database: equal to one process with a file, and
not changed by the loss of the database's server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest
import torch

from dreamgym.config import Config, load_config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.wrappers import FactoryWrapper
from dreamgym.errors import ConfigError, DreamGymError, StoreError
from dreamgym.protocols import Environment
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.pgschema import create_schema
from dreamgym.replay.pgsession import PostgresSession
from dreamgym.replay.postgres import PostgresStore
from dreamgym.replay.sqlite import SqliteStore
from dreamgym.replay.store import TransitionStore
from dreamgym.training.audits import LOG
from dreamgym.training.dream_setup import run_store
from dreamgym.training.metrics import read_metrics
from dreamgym.training.progress import Progress
from dreamgym.training.run_dir import BUFFER, SCHEMA
from dreamgym.training.trainer import train
from dreamgym.types import Task
from tests.replay.household import episode
from tests.replay.postgres_server import Server
from tests.training.test_audits import audited
from tests.training.test_loop import learnt, practised
from tests.training.training_run import FACTORY, CorridorDream, settings

STEPS = 2
CHOSEN = (
    *("train.mode=dream", "train.gate=off", "train.monitors=off", "train.warm_start_steps=50"),
    *(f"train.steps={STEPS}", "train.save_policy_every=1", "train.save_groups=2"),
    *("train.audit_every=1", "train.audit_steps=20", "train.resets=backward"),
)


def chosen(folder: Path, *words: str) -> Config:
    experience = folder.parent / "experience"
    return settings(folder, *CHOSEN, f"train.experience={experience}", *words)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("shared")
    asyncio.run(prepare(home))
    return home


async def prepare(home: Path) -> None:
    """A fine-tuned experience model of corridors, and an undisturbed run of one process in its dream."""
    torch.set_num_threads(1)
    await audited(home, steps=120, batch=4, max_tokens=80, attempts=1)
    await train(chosen(home / "whole"), real=FACTORY)


def begun(home: Path, name: str) -> Path:
    """A folder whose run has its warm start behind it."""
    for part in ("base", "policies/000000.pt"):
        source, target = home / "whole" / "run" / part, home / name / "run" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return home / name


def rows(store: TransitionStore) -> list[Any]:
    """Every row in its order, without the time when it was recorded."""
    seqs = store.scan(0).seqs.tolist()
    found = store.get(seqs)
    store.close()
    return [(found[n].transition_id, found[n].provenance.source, found[n].transition) for n in seqs]


def in_file(folder: Path) -> list[Any]:
    return rows(SqliteStore(folder / "run" / BUFFER, embedder=None, read_only=True))


def in_database(address: str) -> list[Any]:
    return rows(PostgresStore(PostgresSession(address), embedder=None, create=False))


def same_run(home: Path, folder: Path) -> None:
    """The same was learnt by policy and experience model, from the same episodes."""
    one, other = home / "whole" / "run", folder / "run"
    for step in range(STEPS + 1):
        mine, theirs = learnt(one, step), learnt(other, step)
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert practised(one) == practised(other)
    assert audits(one) == audits(other)
    for version in ("000001.pt", "000002.pt"):
        mine, theirs = (torch.load(run / "experience" / version)["weights"] for run in (one, other))
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert episodes(one) == episodes(other)


def episodes(run: Path) -> dict[str, Any]:
    return {each.id: (each.transitions, each.given) for each in read_trajectories(run / "trajectories")}


def audits(run: Path) -> list[dict[str, Any]]:
    found = read_metrics(run / "metrics.jsonl", "audit")
    return [{name: row[name] for name in row if name not in ("seconds", "spent")} for row in found]


def test_the_run_to_compare_with_has_learnt_from_every_source(home: Path) -> None:
    run = home / "whole" / "run"
    steps = practised(run)
    assert any(row["learner"]["updates"] for row in steps)
    assert any(row["tasks"]["reset_groups"] for row in steps)
    assert [row["experience_model"]["kept"] for row in audits(run)] == [True, True]
    sources = [source for _, source, _ in in_file(home / "whole")]
    assert {"real", "synthetic"} == set(sources)


async def test_audits_and_resets_on_workers_give_what_one_process_gives_to_the_bit(home: Path) -> None:
    folder = begun(home, "workers")
    await train(chosen(folder, "train.workers=2"), real=FACTORY)
    same_run(home, folder)
    assert in_file(folder) == in_file(home / "whole")


class Deadly(FactoryWrapper):
    """Kills its process at the first step of one episode."""

    def __init__(self, once: Path) -> None:
        super().__init__(FACTORY)
        self.once = once

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        try:
            self.once.unlink()  # by one of the workers: two may look at the same moment
        except FileNotFoundError:
            return super().make(task, seed=seed)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")


async def test_a_worker_that_dies_in_an_audit_costs_its_real_episodes_and_they_are_counted(
    home: Path,
) -> None:
    (home / "once").touch()
    config = settings(begun(home, "deadly"), *CHOSEN, "train.steps=1", "train.workers=2", "train.resets=none")
    await train(config, real=Deadly(home / "once"), experience_model=CorridorDream())
    (row,) = read_metrics(config.train.out / "metrics.jsonl", "audit")
    ended = [json.loads(line) for line in (config.train.out / LOG).read_text().splitlines()]
    lost = [each for each in ended if "steps" in each and each["trajectory"] is None]
    reserved = {each["episode"]: each["reserved"] for each in ended if "reserved" in each}
    assert 1 <= row["left_out"] == len(lost)
    assert row["episodes"] + row["left_out"] == len(reserved)
    assert [each["steps"] for each in lost] == [reserved[each["episode"]] for each in lost]


async def test_workers_on_a_database_whose_server_crashes_and_returns_give_the_same(
    home: Path, postgres_server: Server
) -> None:
    config = chosen(begun(home, "database"), "train.workers=2", f"replay.store={postgres_server.address}")
    await train(config, real=FACTORY, on_progress=after_step(1, lambda: crash(postgres_server, 1.0)))
    same_run(home, home / "database")
    assert not (config.train.out / BUFFER).exists()
    assert in_database(run_store(config.train.out, config.replay)) == in_file(home / "whole")


async def test_a_run_ends_when_the_server_stays_away_and_resumes_to_the_same_end(
    home: Path, postgres_server: Server
) -> None:
    words = (f"replay.store={postgres_server.address}", "replay.reconnect_seconds=0.3")
    config = chosen(begun(home, "away"), *words)
    try:
        with pytest.raises(StoreError, match="check that the server is up"):
            await train(config, real=FACTORY, on_progress=after_step(1, postgres_server.stop))
    finally:
        postgres_server.start()
    assert len(practised(config.train.out)) == 1
    await train(config, real=FACTORY)
    same_run(home, home / "away")
    assert in_database(run_store(config.train.out, config.replay)) == in_file(home / "whole")


def after_step(number: int, does: Callable[[], None]) -> Callable[[Progress], None]:
    """Once, when this many steps are done."""
    waiting = [does]

    def on_progress(progress: Progress) -> None:
        if progress.row.get("kind") == "train" and progress.done == number and waiting:
            waiting.pop()()

    return on_progress


def crash(server: Server, seconds: float) -> None:
    """End the server as a crash would, and start it again so much later."""
    server.stop(signal.SIGQUIT)
    threading.Timer(seconds, server.start).start()


def test_runs_that_share_a_database_share_no_rows(postgres: str, tmp_path: Path) -> None:
    settings = load_config(overrides=[f"replay.store={postgres}"]).replay
    runs = tmp_path / "My Run", tmp_path / "other" / "My Run"
    with ReplayBuffer.open(postgres) as shared:
        stores = [run_store(run, settings) for run in runs]
        for number, store in enumerate(stores):
            with ReplayBuffer.open_configured(store, settings) as buffer:
                asyncio.run(buffer.add(episode(number)))
                assert buffer.stats().rows == 4
        assert shared.stats().rows == 0
    assert run_store(runs[0], settings) == stores[0], "a run finds its rows again"
    tables = "replay_store, replay_trajectories, replay_transitions, replay_keys, replay_next_keys"
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute(f"DROP TABLE {tables}")


def test_a_schema_without_a_buffer_is_an_error_and_not_the_buffer_of_another(postgres: str) -> None:
    with ReplayBuffer.open(postgres):
        address = create_schema(postgres, "dreamgym_empty", reconnect_seconds=0)
        with pytest.raises(StoreError, match="expected a replay buffer, found none"):
            ReplayBuffer.open(address, create=False)


@pytest.mark.parametrize(
    ("address", "kind", "message"),
    [
        (
            "postgresql://me@127.0.0.1:9/db",
            StoreError,
            "check that the server is up and the address is right",
        ),
        ("postgresql://me:hunter2@127.0.0.1:9/db", ConfigError, r"without a password.*\.pgpass"),
        ("postgresql://me:hunter2/x@127.0.0.1:9/db", ConfigError, r"without a password.*\.pgpass"),
        (
            "postgresql://127.0.0.1:9/db?user=me&password=hunter2",
            ConfigError,
            r"without a password.*\.pgpass",
        ),
        ("postgresql://me:hunter2@[bad/db", ConfigError, "an address like postgresql://user@host/database"),
        ("postgressql://me:hunter2@127.0.0.1:9/db", ConfigError, "a file, or an address postgresql://"),
    ],
)
async def test_a_wrong_address_is_refused_before_anything_starts_and_no_message_has_a_password(
    tmp_path: Path, address: str, kind: type[DreamGymError], message: str
) -> None:
    with pytest.raises(kind, match=message) as raised:
        await train(settings(tmp_path, f"replay.store={address}"), real=FACTORY)
    assert "hunter2" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_a_damaged_name_of_a_schema_is_refused(postgres: str, tmp_path: Path) -> None:
    settings = load_config(overrides=[f"replay.store={postgres}"]).replay
    (tmp_path / SCHEMA).write_text('{"schema": "public; DROP TABLE replay_store"}')
    with pytest.raises(DreamGymError, match="the schema of the replay buffer"):
        run_store(tmp_path, settings)
