"""Parquet holds every transition and gives the trajectories back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet as pq

from dreamgym.data.ingest import Defaults, detect, export, parquet, read_foreign
from dreamgym.errors import DataError
from dreamgym.types import Trajectory
from tests.data.trajectory_examples import episode, trajectories

int64 = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(trajectories(min_turns=1, whole=int64), max_size=4, unique_by=lambda each: each.id))
@settings(max_examples=40, deadline=None)
def test_what_was_written_is_read_back(tmp_path_factory: Any, several: list[Trajectory]) -> None:
    file = tmp_path_factory.getbasetemp() / "any.parquet"
    assert export(several, file, format="parquet") == len(several)
    assert [trajectory for _, trajectory in parquet.read(file)] == several


def test_one_row_is_one_transition(tmp_path: Path) -> None:
    file = tmp_path / "out.parquet"
    assert (
        export([episode("a", turns=3), episode("b", turns=2), episode("c", turns=0)], file, format="parquet")
        == 2
    )
    table = pq.read_table(file).to_pylist()
    assert [(row["trajectory_id"], row["position"]) for row in table] == [
        ("a", 0), ("a", 1), ("a", 2), ("b", 0), ("b", 1),
    ]  # fmt: skip
    assert [row["reward"] for row in table] == [0, 0, 1, 0, 1]
    assert table[1]["state"] == table[0]["next_state"]
    assert pq.ParquetFile(file).metadata.row_group(0).column(0).compression == "ZSTD"


def test_a_trajectory_over_two_row_groups_stays_whole(tmp_path: Path) -> None:
    file = tmp_path / "out.parquet"
    several = [episode("a", turns=parquet.ROW_GROUP - 1), episode("b", turns=5), episode("c", turns=5)]
    export(several, file, format="parquet")
    assert detect(file).name == "parquet"
    assert [trajectory for _, trajectory in read_foreign(file, Defaults())] == several


def test_a_number_too_large_for_its_column_is_refused_and_leaves_no_file(tmp_path: Path) -> None:
    huge = episode("a")
    object.__setattr__(huge, "seed", 2**70)
    with pytest.raises(DataError, match="fit the columns"):
        export([huge], tmp_path / "out.parquet", format="parquet")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"position": [0, 2, 1]}, "expected position 1"),
        ({"state": ["a", "b", "c"]}, "start in the state before it"),
        ({"source": ["dream"] * 3}, "'real' or 'synthetic'"),
        ({"parameters": ["{"] * 3}, "expected JSON"),
        ({"reward": [None] * 3}, "outcome.reward"),
    ],
)
def test_rows_that_make_no_trajectory_are_refused(
    tmp_path: Path, change: dict[str, list[Any]], message: str
) -> None:
    file = tmp_path / "out.parquet"
    export([episode("a", turns=3)], file, format="parquet")
    columns = pq.read_table(file).to_pydict() | change
    pq.write_table(pa.table(columns), file)
    with pytest.raises(DataError, match=r"out\.parquet:1: ") as refusal:
        list(parquet.read(file))
    assert message in str(refusal.value)


def test_a_file_that_is_no_parquet_or_lacks_a_column_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.parquet"
    file.write_bytes(b"PAR1 nonsense")
    with pytest.raises(DataError, match="expected a Parquet file"):
        list(parquet.read(file))
    pq.write_table(pa.table({"trajectory_id": ["a"]}), file)
    with pytest.raises(DataError, match="expected the column 'schema_version'"):
        list(parquet.read(file))


def test_without_pyarrow_the_extra_is_named(tmp_path: Path) -> None:
    script = "import sys; sys.modules['pyarrow'] = None; from dreamgym.data.ingest import export, Path"
    finished = subprocess.run(
        [sys.executable, "-c", f"{script}; export([], Path({str(tmp_path / 'x')!r}), format='parquet')"],
        capture_output=True, text=True, check=False, timeout=600,
    )  # fmt: skip
    assert "pip install 'dreamgym[parquet]'" in finished.stderr
