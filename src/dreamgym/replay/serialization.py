"""How transitions become rows of a log: checked, encoded, and numbered if they are new.

Both engines share this file, so that the same rows are accepted, refused and found known in either.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from pydantic_core import PydanticSerializationError

from dreamgym.errors import DataError, DreamGymError, StoreError
from dreamgym.protocols import Keys
from dreamgym.replay.store import Addition, LogStatus, Record
from dreamgym.types import Provenance, Source, Transition

MAX_ID_CHARACTERS: Final = 1000

_transition = TypeAdapter(Transition)


def check_addition(records: Sequence[Record], keys: Keys, dimension: int) -> None:
    """Refuse what no store should hold, before it is queued together with the rows of others."""
    if keys.shape != (len(records), dimension):
        raise DataError(f"expected keys of shape {(len(records), dimension)}, got {keys.shape}")
    if not np.allclose(np.linalg.norm(keys, axis=1), 1.0, atol=1e-2):
        raise DataError("expected keys of length 1 (unit vectors), as an Embedder returns them")
    belonging: dict[str, tuple[str, str, str]] = {}
    for record in records:
        for name in ("environment", "task_id", "trajectory_id"):
            _check_id(name, getattr(record, name))
        ours = (record.environment, record.provenance.source, record.task_id)
        if belonging.setdefault(record.trajectory_id, ours) != ours:
            raise DataError(f"expected one environment, source and task in {record.trajectory_id!r}")
        if record.provenance.source not in ("real", "synthetic"):
            raise DataError(f"expected the source 'real' or 'synthetic', got {record.provenance.source!r}")
        if record.position < 0:
            raise DataError(f"expected a position of at least 0, got {record.position}")
        for value in (record.trajectory_reward, record.transition.outcome.reward):
            if not math.isfinite(value):
                raise DataError(f"{record.id!r}: expected a finite reward, got {value}")


def _check_id(name: str, value: str) -> None:
    if not value or len(value) > MAX_ID_CHARACTERS or not value.isprintable():
        raise DataError(
            f"expected {name} to have 1 to {MAX_ID_CHARACTERS} printable characters, got {value[:80]!r}"
        )


def round_keys(keys: Keys) -> npt.NDArray[np.float16]:
    """Keys as they are stored. Half precision halves the file; recall@8 stays at 1.000 (measured)."""
    return keys.astype(np.float16)


def restore_keys(rounded: npt.NDArray[np.float16]) -> Keys:
    """Stored keys as unit vectors again, so that a row's similarity to itself is 1."""
    keys = rounded.astype(np.float32)
    keys /= np.maximum(np.sqrt(np.einsum("ij,ij->i", keys, keys)), np.finfo(np.float32).tiny)[:, None]
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class _Details:
    """What is stored once per trajectory and never filtered by."""

    instruction: str
    provenance: Provenance


_details = TypeAdapter(_Details)


def encode_payload(transition: Transition) -> bytes:
    """A compressed JSON document: texts and admissible actions repeat, so it shrinks to a quarter."""
    return zlib.compress(_transition.dump_json(transition, exclude={"outcome": {"info"}}), 1)


def decode_payload(payload: bytes) -> Transition:
    try:
        return _transition.validate_json(zlib.decompress(payload))
    except (zlib.error, ValidationError) as error:
        raise DataError(f"expected a stored transition, got {len(payload)} damaged bytes: {error}") from None


def decode_record(row: tuple[int, bytes, str, str, str, float, str]) -> Record:
    """A record from its columns: position, payload, trajectory, environment, task, reward, details."""
    position, payload, trajectory, environment, task, reward, details = row
    about = _details.validate_json(details)
    return Record(
        transition=decode_payload(payload),
        environment=environment,
        task_id=task,
        instruction=about.instruction,
        trajectory_id=trajectory,
        position=position,
        trajectory_reward=reward,
        provenance=about.provenance,
    )


@dataclass(slots=True, kw_only=True)
class KnownTrajectory:
    """What the log holds of a trajectory already."""

    code: int
    environment: str
    source: str
    task: str
    positions: set[int] = field(default_factory=set)


@dataclass(slots=True, kw_only=True)
class AppendPlan:
    """The rows a transaction will insert, as tuples in the order of the tables' columns."""

    last_seq: int
    results: list[int | DreamGymError] = field(default_factory=list)
    trajectories: list[tuple[int, str, str, str, str, float, str]] = field(default_factory=list)
    """code, id, environment, source, task, reward, details"""
    transitions: list[tuple[int, int, int, bytes]] = field(default_factory=list)
    """seq, trajectory code, position, payload"""
    keys: list[npt.NDArray[np.float16]] = field(default_factory=list)
    """One per transition."""
    added: dict[Source, int] = field(default_factory=lambda: {"real": 0, "synthetic": 0})


def plan_append(
    additions: Sequence[Addition], known: dict[str, KnownTrajectory], status: LogStatus
) -> AppendPlan:
    """Decide what is new, and number it. The caller holds the store's write lock, so numbers have no gaps."""
    plan = AppendPlan(last_seq=status.last_seq)
    for addition in additions:
        if addition.embedder != status.embedder:
            plan.results.append(
                StoreError("the store was re-embedded meanwhile; make new keys and add again")
            )
            continue
        try:
            encoded = [_encode(record, known) for record in addition.records]
        except DreamGymError as error:
            plan.results.append(error)
            continue
        before = plan.last_seq
        rounded = round_keys(addition.keys)
        for record, (payload, details), key in zip(addition.records, encoded, rounded, strict=True):
            trajectory = known.get(record.trajectory_id) or _plan_trajectory(plan, record, details)
            known[record.trajectory_id] = trajectory
            if record.position not in trajectory.positions:
                _plan_transition(plan, record, trajectory, payload, key)
        plan.results.append(plan.last_seq - before)
    return plan


def _encode(record: Record, known: Mapping[str, KnownTrajectory]) -> tuple[bytes, str]:
    stored = known.get(record.trajectory_id)
    if stored is not None:
        ours = (record.environment, record.provenance.source, record.task_id)
        theirs = (stored.environment, stored.source, stored.task)
        if ours != theirs:
            raise DataError(
                f"expected a new id for another trajectory, got {record.trajectory_id!r}, which is stored "
                f"with environment, source, task {theirs!r} and came with {ours!r}"
            )
    try:
        about = _Details(instruction=record.instruction, provenance=record.provenance)
        return encode_payload(record.transition), _details.dump_json(about).decode()
    except (PydanticSerializationError, ValueError) as error:
        raise DataError(f"{record.id!r}: expected text that UTF-8 can hold, {error}") from None


def _plan_trajectory(plan: AppendPlan, record: Record, details: str) -> KnownTrajectory:
    # The number of its first row names a trajectory: unique for ever, since no number is used twice.
    trajectory = KnownTrajectory(
        code=plan.last_seq + 1,
        environment=record.environment,
        source=record.provenance.source,
        task=record.task_id,
    )
    about = (trajectory.environment, trajectory.source, trajectory.task, record.trajectory_reward, details)
    plan.trajectories.append((trajectory.code, record.trajectory_id, *about))
    return trajectory


def _plan_transition(
    plan: AppendPlan,
    record: Record,
    trajectory: KnownTrajectory,
    payload: bytes,
    key: npt.NDArray[np.float16],
) -> None:
    trajectory.positions.add(record.position)
    plan.last_seq += 1
    plan.transitions.append((plan.last_seq, trajectory.code, record.position, payload))
    plan.keys.append(key)
    plan.added[record.provenance.source] += 1
