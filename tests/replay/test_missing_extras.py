"""A missing extra is named where it is needed; everything else works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def run_without(module: str, code: str, folder: Path) -> str:
    """Run `code` in a process in which `module` cannot be imported."""
    hidden = f"import sys; sys.modules[{module!r}] = None\n{code}"
    done = subprocess.run(
        [sys.executable, "-c", hidden], cwd=folder, capture_output=True, text=True, check=False, timeout=600
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "extra", "code"),
    [
        ("faiss", "faiss", "ReplayBuffer.open('replay.sqlite', index='approximate')"),
        ("psycopg", "postgres", "ReplayBuffer.open('postgresql://me@localhost/db')"),
        (
            "aiohttp",
            "endpoint",
            "ReplayBuffer.open('replay.sqlite', embedder='endpoint:m@http://localhost:9')",
        ),
        ("sentence_transformers", "embeddings", "ReplayBuffer.open('replay.sqlite', embedder='sentence:m')"),
    ],
)
def test_a_missing_extra_is_named(module: str, extra: str, code: str, tmp_path: Path) -> None:
    said = run_without(module, f"from dreamgym.replay.buffer import ReplayBuffer\n{code}", tmp_path)
    assert "MissingExtraError" in said
    assert f"pip install 'dreamgym[{extra}]'" in said


def test_a_partition_that_outgrows_exactness_is_still_scanned_without_faiss(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from tests.replay.household import episode
from dreamgym.replay.buffer import ReplayBuffer
with ReplayBuffer.open("replay.sqlite", exact_limit=3) as buffer:
    asyncio.run(buffer.add(episode(1)))
    print(buffer.stats().index)
"""
    said = run_without("faiss", code, tmp_path)
    assert "4 rows, 4 distinct keys, exact (NumPy)" in said
    assert "dreamgym[faiss]" in said
