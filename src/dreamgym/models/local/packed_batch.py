"""Runs packed forward passes for a changing set of rows: the backend of every model that can be packed.

A row that enters brings back the keys and values of the longest prefix that its tokens share with what was
saved. Short convolutions remember only the end of what was saved. If the shared prefix stops earlier, a few
tokens before its end are computed again: after as many tokens as the convolutions of all layers reach back
together, their inputs are exact, since attention reads exact keys and values all along.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dreamgym.models.local.kv_cache import Chunk, SavedRow, Step, Workspace


class PackedForward(Protocol):
    """A causal language model that computes packed tokens and leaves what it remembers to the workspace."""

    @property
    def reach(self) -> int:
        """How many tokens the convolutions of all layers look back together; 0 for attention alone."""
        ...

    def __call__(self, tokens: Tensor, step: Step, workspace: Workspace) -> Tensor:
        """Logits of each row's last token, then of padding: `(at least rows, vocabulary)`."""
        ...

    def refresh(self) -> None:
        """A parameter's storage was exchanged: look it up again."""
        ...


class PackedBackend:
    """Rows of tokens and their logits. Rows are numbered as they enter, until `keep` reorders them."""

    def __init__(self, forward: PackedForward, device: torch.device) -> None:
        self.forward = forward
        self.device = device
        self._workspace = Workspace(device)
        self._lengths: list[int] = []
        """Tokens of each row whose keys and values are held."""
        self._entering: list[int] = []
        """For rows that have not yet taken part in a step: where their first chunk begins."""

    @property
    def bytes_per_token(self) -> int:
        return self._workspace.bytes_per_token

    def enter(self, rows: Sequence[tuple[Sequence[int], SavedRow | None]], columns: int) -> list[int]:
        """Adds rows that may grow to `columns` tokens; returns how many tokens of each need no computing."""
        first = len(self._lengths)
        self._workspace.make_room(first + len(rows), columns)
        kept = []
        for tokens, saved in rows:
            shared = min(common_prefix(saved.tokens, tokens), len(tokens) - 1) if saved is not None else 0
            complete = saved is not None and shared == len(saved.tokens)
            begin = shared if complete or not self.forward.reach else max(0, shared - self.forward.reach)
            kept.append((shared, begin))
        self._workspace.enter(first, [(row[1], shared) for row, (shared, _) in zip(rows, kept, strict=True)])
        self._lengths += [shared for shared, _ in kept]
        self._entering += [begin for _, begin in kept]
        return [begin for _, begin in kept]

    def step(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of each row, given all its tokens. If it raises, nothing changes."""
        decoding = len(self._lengths) - len(self._entering)
        packed = [tokens[-1] for tokens in sequences[:decoding]]
        chunks = []
        for row, begin in enumerate(self._entering, decoding):
            new = sequences[row][begin:]
            held = self._lengths[row]
            chunks.append(Chunk(row=row, start=len(packed), size=len(new), position=begin, fresh=held))
            packed.extend(new)
        step = Step(self._lengths[:decoding], chunks, self.device)
        packed += [0] * step.padding
        logits = self.forward(torch.tensor(packed, device=self.device), step, self._workspace)
        self._workspace.commit()
        self._lengths = [len(tokens) for tokens in sequences]
        self._entering = []
        return logits[: len(sequences)]

    def save(self, row: int, tokens: Sequence[int], into: SavedRow | None) -> SavedRow:
        """Keeps what a row holds beyond this batch; `into` is reused where it agrees."""
        held = list(tokens[: self._lengths[row]])
        into = into or SavedRow()
        self._workspace.save(row, held, into, common_prefix(into.tokens, held))
        return into

    def keep(self, order: Sequence[int]) -> None:
        """Row i becomes what row ``order[i]`` was; the others are gone."""
        self._lengths = [self._lengths[old] for old in order]
        self._workspace.keep(order, self._lengths)
        self._entering = []

    def scrub(self, row: int) -> None:
        self._workspace.scrub(row)

    def refresh(self) -> None:
        self.forward.refresh()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """How many tokens two sequences share from the start.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5]), common_prefix([1, 2], [1, 2, 3])
    (2, 2)
    """
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(n for n in range(shorter) if left[n] != right[n])
