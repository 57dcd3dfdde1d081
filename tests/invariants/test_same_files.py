"""Two runs of the loop with the same seed leave the same folder: every file, but for what the clock says."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.data.trajectories import read_trajectories
from dreamgym.replay.buffer import ReplayBuffer
from tests.training.training_run import record, run, settings

CLOCK = ("recorded_at", "seconds", "out")
"""Fields that differ, or end with a word that does."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("same")
    asyncio.run(record(home / "offline"))
    return home


def left(out: Path) -> dict[str, Any]:
    """What each file says, in a form that can be compared."""
    files = sorted(path for path in out.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(out)): _content(path) for path in files}


def _content(path: Path) -> Any:
    if path.parent.name == "trajectories":
        return [
            replace(each, provenance=replace(each.provenance, recorded_at=0.0))
            for each in read_trajectories(path)
        ]
    if path.suffix == ".pt":
        return _plain(torch.load(path, weights_only=True))
    if path.suffix == ".json":
        return _plain(json.loads(path.read_text(encoding="utf-8")))
    if path.suffix == ".jsonl":
        return [_plain(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    if ".sqlite" in path.name:
        if path.suffix != ".sqlite":
            return None  # its journal
        with ReplayBuffer.open(path) as buffer:
            return buffer.stats().holdings
    return path.read_bytes()


def _plain(value: Any) -> Any:
    """Tensors as bytes, and nothing of the clock; trajectories inside a checkpoint are lines of JSON."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items() if not str(key).endswith(CLOCK)}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, str) and value.startswith('{"'):
        return _plain(json.loads(value))
    return value


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_the_same_seed_leaves_the_same_files(home: Path, algorithm: str) -> None:
    words = (
        *(
            "train.mode=dream",
            f"learner.algorithm={algorithm}",
            "learner.epochs=2",
            "learner.minibatch_size=5",
        ),
        *("train.warm_start_steps=20", "train.steps=2", "train.checkpoint_every=2"),
    )
    found = []
    for name, seed in (("one", 0), ("two", 0), ("other", 1)):
        await run(settings(home / f"{algorithm} {name}", *words, f"seed={seed}"))
        found.append(left(home / f"{algorithm} {name}" / "run"))
    one, two, other = found
    assert {"checkpoint.pt", "metrics.jsonl", "replay.sqlite", "policies/000002.pt"} <= one.keys()
    assert one.keys() == two.keys()
    for name, content in one.items():
        assert content == two[name], name
    assert one["policies/000002.pt"] != other["policies/000002.pt"]
