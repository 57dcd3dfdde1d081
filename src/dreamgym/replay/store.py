"""The durable store of transitions: its role, and the types that SQLite and PostgreSQL share.

Rows are numbered in the order in which they became durable and never change, so an index catches up by asking
for the rows after number n. Eviction drops the oldest rows of one source; one number per source, the floor,
says up to where.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol, Self

import numpy as np
import numpy.typing as npt

from dreamgym.errors import DreamGymError, StoreError
from dreamgym.protocols import Keys
from dreamgym.types import Provenance, Source, Trajectory, Transition, transition_id

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
    """Total reward of the whole trajectory, by which retrieval may filter."""
    provenance: Provenance

    @property
    def id(self) -> str:
        return transition_id(self.trajectory_id, self.position)


def records(trajectory: Trajectory) -> tuple[Record, ...]:
    """The transitions of a trajectory, each with what it needs to stand alone."""
    return tuple(
        Record(
            transition=transition,
            environment=trajectory.task.environment,
            task_id=trajectory.task.id,
            instruction=trajectory.task.instruction,
            trajectory_id=trajectory.id,
            position=position,
            trajectory_reward=trajectory.total_reward,
            provenance=trajectory.provenance,
        )
        for position, transition in enumerate(trajectory.transitions)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Addition:
    """What one caller adds: it becomes durable as a whole or not at all."""

    records: Sequence[Record]
    keys: Keys
    embedder: str
    """Identity of the embedder that made the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
        seqs, _, environments, sources, trajectories, tasks, rewards = (
            zip(*rows, strict=True) if rows else [()] * 7
        )
        return cls(
            seqs=np.array(seqs, np.int64),
            keys=keys,
            environments=environments,
            sources=sources,
            trajectories=trajectories,
            tasks=tasks,
            rewards=np.array(rewards, np.float64),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStatus:
    """The state of the store; cheap enough to read before every search."""

    embedder: str
    dimension: int
    generation: int
    """Grows when keys are replaced: an index then starts again."""
    last_seq: int
    rows: Mapping[Source, int]
    floors: Mapping[Source, int]
    """The number of the last evicted row, by source; 0 for none."""

    COLUMNS: ClassVar[str] = (
        "embedder, dimension, generation, last_seq, real_rows, synthetic_rows, real_floor, synthetic_floor"
    )

    @classmethod
    def of(cls, row: Sequence[Any]) -> Self:
        """From a row of `COLUMNS`."""
        embedder, dimension, generation, last_seq, real, synthetic, real_floor, synthetic_floor = row
        return cls(
            embedder=embedder,
            dimension=dimension,
            generation=generation,
            last_seq=last_seq,
            rows={"real": real, "synthetic": synthetic},
            floors={"real": real_floor, "synthetic": synthetic_floor},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Holding:
    """How much of one environment and source the store holds."""

    environment: str
    source: Source
    rows: int
    trajectories: int


class TransitionStore(Protocol):
    """Stores transitions durably. Every method may be called from any thread.

    Raises:
        StoreError: the store is locked, full, damaged or was made by another embedder.
    """

    @property
    def name(self) -> str:
        """The store's name for messages, without a password."""
        ...

    def status(self) -> StoreStatus: ...

    def append(self, additions: Sequence[Addition], *, capacity: int | None) -> list[int | DreamGymError]:
        """Make the additions durable in one transaction and evict down to `capacity`.

        Returns:
            For each addition the count of rows that were new, or why it alone was refused.
        """
        ...

    def scan(self, after: int) -> Chunk:
        """The next rows (at most `CHUNK_ROWS`, fewer only at the end) numbered above `after`, in order."""
        ...

    def get(self, seqs: Sequence[int]) -> dict[int, Record]:
        """The records with these numbers; those evicted meanwhile are left out."""
        ...

    def known(self, trajectory_ids: Sequence[str]) -> dict[str, set[int]]:
        """The stored positions of these trajectories."""
        ...

    def holdings(self) -> list[Holding]: ...

    def size_bytes(self) -> int: ...

    def rekey_start(self, embedder: str, dimension: int) -> None:
        """Prepare for the keys of another embedder, or resume an interrupted change."""
        ...

    def rekey_next(self, limit: int) -> list[tuple[int, str, str]]:
        """(number, state text, action) of rows that still lack the new key."""
        ...

    def rekey_put(self, seqs: Sequence[int], keys: Keys) -> None: ...

    def rekey_finish(self) -> bool:
        """Switch to the new keys at once if every row has one; False if rows have arrived meanwhile."""
        ...

    def compact(self) -> None:
        """Free the space of evicted rows."""
        ...

    def close(self) -> None: ...


def other_embedder(store: str, stored: str, given: str) -> StoreError:
    """Keys of two embedders cannot be compared, so the store is left alone."""
    names = {"lexical": "lexical", "sentence": "sentence:PATH_OR_NAME", "endpoint": "endpoint:MODEL@URL"}
    name = names.get(given.partition("-")[0], "NAME")
    return StoreError(
        f"{store}: its keys were made by the embedder {stored!r}, and this is {given!r}; open it with the "
        f"former, or make new keys: dreamgym buffer compact {store} --embedder {name}"
    )


def nothing_there(store: str) -> StoreError:
    return StoreError(
        f"{store}: expected a replay buffer, found none; make one: dreamgym buffer build DIR --store {store}"
    )
