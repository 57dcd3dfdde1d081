"""Picks the fastest way to run a model that provably gives what the model itself gives.

Three ways: our own short pass for the families we know (`lean`), the model's modules with our attention
(`hosted`), and the model as it is, whole sequences one by one (`plain`: right for anything, slow). Before the
first two are trusted, their logits are compared with the model's own on its present weights.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dreamgym.models.local.fast_forward import FastForward
from dreamgym.models.local.hf_forward import HFForward, twin_of
from dreamgym.models.local.kv_cache import SavedRow
from dreamgym.models.local.packed_batch import PackedBackend, PackedForward

logger = logging.getLogger("dreamgym.models")


class Backend(Protocol):
    """What the engine needs: see `packed.PackedBackend` for the meaning of each."""

    device: torch.device

    @property
    def bytes_per_token(self) -> int: ...

    def enter(self, rows: Sequence[tuple[list[int], SavedRow | None]], columns: int) -> list[int]: ...

    def step(self, sequences: Sequence[list[int]]) -> Tensor: ...

    def save(self, row: int, tokens: list[int], into: SavedRow | None) -> SavedRow | None: ...

    def keep(self, order: Sequence[int]) -> None: ...

    def scrub(self, row: int) -> None: ...

    def refresh(self) -> None: ...


class PlainBackend:
    """Computes every sequence from its beginning, alone, with the model's own forward pass."""

    bytes_per_token = 0

    def __init__(self, model: Any) -> None:
        self._twin = twin_of(model)
        self.device = next(model.parameters()).device

    def enter(self, rows: Sequence[tuple[list[int], SavedRow | None]], columns: int) -> list[int]:
        return [0] * len(rows)

    def step(self, sequences: Sequence[list[int]]) -> Tensor:
        return torch.cat([_own_logits(self._twin, tokens) for tokens in sequences])

    def save(self, row: int, tokens: list[int], into: SavedRow | None) -> None:
        return None

    def keep(self, order: Sequence[int]) -> None: ...

    def scrub(self, row: int) -> None: ...

    def refresh(self) -> None: ...


def choose_backend(model: Any, only: str | None = None) -> tuple[str, Backend]:
    """The first of lean, hosted and plain that can run this model, with its name; if given, `only` that."""
    for name, build in _candidates(model):
        if only is not None and name != only:
            continue
        try:
            backend = build()
            if agrees(backend, model):
                return name, backend
        except (
            Exception
        ):  # not known here, or code of its own that fails in any way when its attention is replaced
            continue
    if only != "plain":
        logger.warning(
            "%s keeps a memory that we cannot hold: every token costs a pass over the whole text",
            type(model).__name__,
        )
    return "plain", PlainBackend(model)


def _candidates(model: Any) -> Iterator[tuple[str, Callable[[], PackedBackend]]]:
    def packed(forward: PackedForward) -> PackedBackend:
        return PackedBackend(forward, next(model.parameters()).device)

    yield "lean", lambda: packed(FastForward(model))
    yield "hosted", lambda: packed(HFForward(model))


@torch.inference_mode()
def agrees(backend: PackedBackend, model: Any) -> bool:
    """Whether logits are the model's own: of fresh rows, when decoding, and after what was saved."""
    twin = twin_of(model)
    size = twin.get_input_embeddings().weight.shape[0]
    drawn = torch.randint(size, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    first, second, third = drawn[:21], drawn[21:28], drawn[:17] + drawn[28:]
    rounds = []
    backend.enter([(first, None), (second, None)], 64)
    rounds.append((backend.step([first, second]), [first, second]))
    saved = backend.save(0, first, None)
    longer = [[*first, drawn[-1]], [*second, drawn[0]], third]
    backend.enter([(third, saved)], 64)
    rounds.append((backend.step(longer), longer))
    backend.keep([])
    for logits, sequences in rounds:
        own = torch.cat([_own_logits(twin, tokens) for tokens in sequences])
        # Weights that give no numbers cannot tell one way from another.
        tolerance = 1e-3 if logits.dtype == torch.float32 else 5e-2
        close = (logits - own).abs().max() <= tolerance * own.abs().max().clamp(min=1.0)
        if own.isfinite().all() and not close:
            return False
    return True


@torch.inference_mode()
def is_batch_invariant(model: Any, only: str | None = None) -> bool:
    """Whether a row's logits are the same to the bit alone and among others, on this processor."""
    _, backend = choose_backend(model, only)
    drawn = torch.randint(model.get_input_embeddings().weight.shape[0], (96,)).tolist()
    rows = [drawn[:5], drawn[5:60], drawn[60:61], drawn[61:]]

    def logits(chosen: Sequence[int]) -> Tensor:
        """Of two steps: the prompt, then one more token."""
        backend.enter([(rows[number], None) for number in chosen], 128)
        first = backend.step([rows[number] for number in chosen])
        second = backend.step([[*rows[number], drawn[number]] for number in chosen])
        backend.keep([])
        return torch.stack([first, second], 1)

    together = logits(range(len(rows)))
    return all(torch.equal(logits([number])[0], together[number]) for number in range(len(rows)))


def _own_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    inputs = torch.tensor([list(tokens)], device=next(model.parameters()).device)
    return model(input_ids=inputs, use_cache=False).logits[:, -1]  # type: ignore[no-any-return]
