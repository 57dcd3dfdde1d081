"""The durable store of transitions: its role, and what SQLite and PostgreSQL share.

Rows are numbered in the order in which they became durable and never change, so an index catches up by asking
for the rows after number n. Eviction drops the oldest rows of one source; one number per source, the floor,
says up to where. Both stores validate, encode, number and evict rows with the functions of this file.
"""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Protocol, Self

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, ValidationError

from dreamgym.data.schema import ProvenanceRow, decode_transition, dump_json, encode_transition, explain
from dreamgym.errors import DataError, DreamGymError, StoreError
from dreamgym.protocols import Keys
from dreamgym.types import Demonstration, Provenance, Source, Trajectory, Transition, transition_id

MAX_ID_CHARACTERS: Final = 1000
SCHEMA_VERSION: Final = 1

CHUNK_ROWS: Final = 4096
"""Rows that a scan returns at once."""

EVICTION_ORDER: Final[tuple[Source, ...]] = ("synthetic", "real")
"""Real rows are evicted only when no synthetic row is left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A transition and where it belongs: what the replay buffer keeps."""

    transition: Transition
    environment: str
    task_id: str
    instruction: str
    trajectory_id: str
    position: int
    """How many transitions of the episode came before."""
    trajectory_reward: float
    """Total reward of the whole trajectory, by which retrieval may filter; -inf if it is unknown."""
    provenance: Provenance

    @property
    def id(self) -> str:
        return transition_id(self.trajectory_id, self.position)

    @property
    def group(self) -> tuple[str, str, str]:
        """Environment, source and task, which all rows of a trajectory share."""
        return self.environment, self.provenance.source, self.task_id


def records(trajectory: Trajectory) -> tuple[Record, ...]:
    """The transitions of a trajectory, each with what it needs to stand alone; given turns are left out."""
    return tuple(
        Record(
            transition=transition,
            environment=trajectory.task.environment,
            task_id=trajectory.task.id,
            instruction=trajectory.task.instruction,
            trajectory_id=trajectory.id,
            position=position,
            trajectory_reward=trajectory.total_reward if trajectory.graded else -math.inf,
            provenance=trajectory.provenance,
        )
        for position, transition in enumerate(trajectory.transitions)
        if position >= trajectory.given
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """What one caller adds: it becomes durable as a whole or not at all."""

    records: Sequence[Record]
    keys: Keys
    embedder: str
    """Identity of the embedder that made the keys."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows of the store as columns, for an index."""

    seqs: npt.NDArray[np.int64]
    keys: Keys
    environments: Sequence[str]
    sources: Sequence[str]
    trajectories: Sequence[str]
    tasks: Sequence[str]
    rewards: npt.NDArray[np.float64]

    @classmethod
    def of(cls, rows: Sequence[tuple[Any, ...]], keys: Keys) -> Self:
        """From rows of (seq, key, environment, source, trajectory, task, reward) and their decoded keys."""
        seqs, _, places, sources, names, tasks, rewards = zip(*rows, strict=True) if rows else [()] * 7
        numbers, values = np.array(seqs, np.int64), np.array(rewards, np.float64)
        return cls(numbers, keys, places, sources, names, tasks, values)


@dataclass(frozen=True, slots=True)
class StoreStatus:
    """The one row of the table `store`; cheap enough to read before every search."""

    embedder: str
    dimension: int
    generation: int
    """Grows when keys are replaced: an index then starts again."""
    last_seq: int
    real_rows: int
    synthetic_rows: int
    real_floor: int
    """The number of the last evicted row of this source; 0 for none."""
    synthetic_floor: int


STATUS_COLUMNS: Final = ", ".join(StoreStatus.__slots__)


@dataclass(frozen=True, slots=True)
class Holding:
    """How much of one environment and source the store holds."""

    environment: str
    source: Source
    rows: int
    trajectories: int


class TransitionStore(Protocol):
    """Stores transitions durably. Every method may be called from any thread and may raise `StoreError`."""

    @property
    def name(self) -> str:
        """The store's name for messages, without a password."""

    def status(self) -> StoreStatus: ...

    def append(self, additions: Sequence[Addition], *, capacity: int | None) -> list[int | DreamGymError]:
        """Make the additions durable in one transaction and evict down to `capacity`.

        Returns for each addition the count of rows that were new, or why it alone was refused.
        """

    def scan(self, after: int) -> Chunk:
        """The next rows (at most `CHUNK_ROWS`, fewer only at the end) numbered above `after`, in order."""

    def get(self, seqs: Sequence[int]) -> dict[int, Demonstration]:
        """The rows with these numbers, of similarity 0; those evicted meanwhile are left out."""

    def known(self, trajectory_ids: Sequence[str]) -> dict[str, set[int]]:
        """The stored positions of these trajectories."""

    def holdings(self) -> list[Holding]: ...
    def size_bytes(self) -> int: ...

    def rekey_start(self, embedder: str, dimension: int) -> None:
        """Prepare for the keys of another embedder, or resume an interrupted change."""

    def rekey_next(self, limit: int) -> list[tuple[int, str, str]]:
        """(number, state text, action) of rows that still lack the new key."""

    def rekey_put(self, seqs: Sequence[int], keys: Keys) -> None: ...

    def rekey_finish(self) -> bool:
        """Switch to the new keys at once if every row has one; False if rows have arrived meanwhile."""

    def compact(self) -> None:
        """Free the space of evicted rows."""

    def close(self) -> None: ...


def other_embedder(store: str, stored: str, given: str) -> StoreError:
    """Keys of two embedders cannot be compared, so the store is left alone."""
    names = {"lexical": "lexical", "sentence": "sentence:PATH_OR_NAME", "endpoint": "endpoint:MODEL@URL"}
    name = names.get(given.partition("-")[0], "NAME")
    return StoreError(
        f"{store}: its keys were made by the embedder {stored!r}, and this is {given!r}; open it with the "
        f"former, or make new keys: dreamgym buffer compact {store} --embedder {name}"
    )


def other_version(store: str, version: int) -> StoreError:
    return StoreError(
        f"{store}: expected schema version {SCHEMA_VERSION}, found {version}; "
        "use the DreamGym version that made it, or build it again from its trajectories"
    )


def nothing_there(store: str) -> StoreError:
    return StoreError(
        f"{store}: expected a replay buffer, found none; make one: dreamgym buffer build DIR --store {store}"
    )


def check_addition(records: Sequence[Record], keys: Keys, dimension: int) -> None:
    """Refuse rows that no store should hold, before they are queued with the rows of other callers."""
    if keys.shape != (len(records), dimension):
        raise DataError(f"expected keys of shape {(len(records), dimension)}, got {keys.shape}")
    if not np.allclose(np.linalg.norm(keys, axis=1), 1.0, atol=1e-2):
        raise DataError("expected keys of length 1 (unit vectors), as an Embedder returns them")
    groups: dict[str, tuple[str, str, str]] = {}
    for record in records:
        for name in ("environment", "task_id", "trajectory_id"):
            value, most = getattr(record, name), MAX_ID_CHARACTERS
            if not value or len(value) > most or not value.isprintable():
                raise DataError(f"expected {name} of 1 to {most} printable characters, got {value[:80]!r}")
        if groups.setdefault(record.trajectory_id, record.group) != record.group:
            raise DataError(f"expected one environment, source and task in {record.trajectory_id!r}")
        if record.provenance.source not in ("real", "synthetic"):
            raise DataError(f"expected the source 'real' or 'synthetic', got {record.provenance.source!r}")
        if record.position < 0:
            raise DataError(f"expected a position of at least 0, got {record.position}")
        rewards = (record.trajectory_reward, record.transition.outcome.reward)
        if not (rewards[0] < math.inf and math.isfinite(rewards[1])):
            raise DataError(f"{record.id!r}: expected finite rewards, got {rewards}")


def round_keys(keys: Keys) -> npt.NDArray[np.float16]:
    """Keys as they are stored. Half precision halves the file; recall@8 stays at 1.000 (measured)."""
    return keys.astype(np.float16)


def restore_keys(rounded: npt.NDArray[np.float16]) -> Keys:
    """Stored keys as unit vectors again, so that a row's similarity to itself is 1."""
    keys = rounded.astype(np.float32)
    keys /= np.maximum(np.sqrt(np.einsum("ij,ij->i", keys, keys)), np.finfo(np.float32).tiny)[:, None]
    return keys


class _Details(BaseModel):
    """What is stored once per trajectory and never filtered by."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    instruction: str
    provenance: ProvenanceRow


def encode_payload(transition: Transition) -> bytes:
    """A compressed JSON row: texts and admissible actions repeat, so it shrinks to a quarter."""
    return zlib.compress(encode_transition(transition).encode(), 1)


def decode_payload(payload: bytes) -> Transition:
    try:
        return decode_transition(zlib.decompress(payload))
    except (zlib.error, DataError) as error:
        raise DataError(f"expected a stored transition, got {len(payload)} damaged bytes: {error}") from None


def decode_rows(rows: Iterable[tuple[Any, ...]]) -> dict[int, Demonstration]:
    """Demonstrations by number, from rows of (seq, position, payload, trajectory, task, details)."""
    return {
        seq: Demonstration(
            transition=decode_payload(payload),
            similarity=0.0,
            transition_id=transition_id(trajectory, position),
            trajectory_id=trajectory,
            task_id=task,
            position=position,
            provenance=_decode_provenance(details),
        )
        for seq, position, payload, trajectory, task, details in rows
    }


@functools.lru_cache(maxsize=4096)
def _decode_provenance(details: str) -> Provenance:
    try:
        return Provenance(**dict(_Details.model_validate_json(details).provenance))
    except ValidationError as error:
        raise DataError(f"expected the details of a stored trajectory, got {explain(error)}") from None


@dataclass(slots=True, kw_only=True)
class KnownTrajectory:
    """What the store holds of a trajectory."""

    code: int
    group: tuple[str, str, str]
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


def known_trajectories(
    rows: Iterable[tuple[Any, ...]], positions: Callable[[list[int]], Iterable[tuple[int, int]]]
) -> dict[str, KnownTrajectory]:
    """By id, from rows of (id, code, environment, source, task) and a query for (code, position)."""
    known = {key: KnownTrajectory(code=code, group=tuple(group)) for key, code, *group in rows}
    by_code = {trajectory.code: trajectory for trajectory in known.values()}
    for code, position in positions(list(by_code)):
        by_code[code].positions.add(position)
    return known


def evict(
    status: StoreStatus,
    plan: AppendPlan,
    capacity: int | None,
    oldest: Callable[[Source, int, int], list[tuple[int]]],
) -> tuple[list[tuple[int]], tuple[int, ...] | None]:
    """(Rows to delete, new counts: last_seq, real_rows, synthetic_rows, real_floor, synthetic_floor).

    `oldest` gives the oldest n rows of a source above a floor, new rows included. A row is (seq,).
    """
    added, gone = plan.added, []
    rows = {"real": status.real_rows + added["real"], "synthetic": status.synthetic_rows + added["synthetic"]}
    floors = {"real": status.real_floor, "synthetic": status.synthetic_floor}
    for source in EVICTION_ORDER:
        excess = min(sum(rows.values()) - capacity, rows[source]) if capacity else 0
        if excess > 0:
            dropped = oldest(source, floors[source], excess)
            floors[source] = dropped[-1][0]
            rows[source] -= len(dropped)
            gone += dropped
    if not plan.keys and not gone:
        return [], None
    return gone, (plan.last_seq, rows["real"], rows["synthetic"], floors["real"], floors["synthetic"])


def texts_of(rows: Iterable[tuple[int, bytes]]) -> list[tuple[int, str, str]]:
    """(seq, state text, action) of (seq, payload) rows."""
    decoded = ((seq, decode_payload(payload)) for seq, payload in rows)
    return [(seq, transition.state.text, transition.action) for seq, transition in decoded]


def plan_append(
    additions: Sequence[Addition], known: dict[str, KnownTrajectory], status: StoreStatus
) -> AppendPlan:
    """Number the new rows. The caller holds the store's write lock, so numbers have no gaps."""
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
            name, group = record.trajectory_id, record.group
            if name not in known:
                # The number of its first row names a trajectory: no number is used twice.
                known[name] = KnownTrajectory(code=plan.last_seq + 1, group=group)
                plan.trajectories.append((plan.last_seq + 1, name, *group, record.trajectory_reward, details))
            if record.position not in known[name].positions:
                known[name].positions.add(record.position)
                plan.last_seq += 1
                plan.transitions.append((plan.last_seq, known[name].code, record.position, payload))
                plan.keys.append(key)
                plan.added[record.provenance.source] += 1
        plan.results.append(plan.last_seq - before)
    return plan


def _encode(record: Record, known: Mapping[str, KnownTrajectory]) -> tuple[bytes, str]:
    stored = known.get(record.trajectory_id)
    if stored is not None and stored.group != record.group:
        raise DataError(
            f"expected a new id for another trajectory, got {record.trajectory_id!r}, which is stored "
            f"with environment, source, task {stored.group!r} and came with {record.group!r}"
        )
    try:
        about = {"instruction": record.instruction, "provenance": asdict(record.provenance)}
        return encode_payload(record.transition), dump_json(about, what="details")
    except DataError as error:
        raise DataError(f"{record.id!r}: {error}") from None
