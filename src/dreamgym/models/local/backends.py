"""Chooses the fastest backend whose logits match the model's own.

Three backends: our own forward pass for known families (`fast`), the model's modules with our attention
(`hf`), and the unchanged model on whole sequences one by one (`plain`: works for any model, slow). The first
two are compared with the model's own logits before they are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dreamgym.models.local.fast_forward import FastForward, PackedBackend, PackedForward
from dreamgym.models.local.hf_forward import HFForward, shared_copy
from dreamgym.models.local.kv_cache import CachedPrefix

logger = logging.getLogger("dreamgym.models")


class Backend(Protocol):
    """What the scheduler needs; `fast_forward.PackedBackend` documents each method."""

    device: torch.device

    @property
    def bytes_per_token(self) -> int: ...

    def enter(self, rows: Sequence[tuple[list[int], CachedPrefix | None]], columns: int) -> list[int]: ...

    def step(self, sequences: Sequence[list[int]]) -> Tensor: ...

    def save(self, row: int, tokens: list[int], into: CachedPrefix | None) -> CachedPrefix | None: ...

    def keep(self, order: Sequence[int]) -> None: ...

    def zero_row(self, row: int) -> None: ...

    def refresh(self) -> None: ...


class PlainBackend:
    """Recomputes every sequence from its first token, alone, with the model's own forward pass."""

    bytes_per_token = 0

    def __init__(self, model: Any) -> None:
        self._copy = shared_copy(model)
        self.device = next(model.parameters()).device

    def enter(self, rows: Sequence[tuple[list[int], CachedPrefix | None]], columns: int) -> list[int]:
        return [0] * len(rows)

    def step(self, sequences: Sequence[list[int]]) -> Tensor:
        return torch.cat([_own_logits(self._copy, tokens) for tokens in sequences])

    def save(self, row: int, tokens: list[int], into: CachedPrefix | None) -> None:
        return None

    def keep(self, order: Sequence[int]) -> None: ...

    def zero_row(self, row: int) -> None: ...

    def refresh(self) -> None: ...


def choose_backend(model: Any, only: str | None = None) -> tuple[str, Backend]:
    """The first of fast, hf and plain that can run this model, with its name; only `only` if given."""
    for name, build in _candidates(model):
        if only is not None and name != only:
            continue
        try:
            backend = build()
            if matches_model(backend, model):
                return name, backend
        except Exception:  # unsupported, or remote code that fails with replaced attention
            continue
    if only != "plain":
        logger.warning(
            "%s cannot use the KV cache of this engine: every token costs a pass over the whole text",
            type(model).__name__,
        )
    return "plain", PlainBackend(model)


def _candidates(model: Any) -> Iterator[tuple[str, Callable[[], PackedBackend]]]:
    def packed(forward: PackedForward) -> PackedBackend:
        return PackedBackend(forward, next(model.parameters()).device)

    yield "fast", lambda: packed(FastForward(model))
    yield "hf", lambda: packed(HFForward(model))


@torch.inference_mode()
def matches_model(backend: PackedBackend, model: Any) -> bool:
    """Whether logits equal the model's own: after prefill, while decoding, and after a cached prefix."""
    copied = shared_copy(model)
    size = copied.get_input_embeddings().weight.shape[0]
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
        own = torch.cat([_own_logits(copied, tokens) for tokens in sequences])
        # Weights that give NaN cannot be compared.
        tolerance = 1e-3 if logits.dtype == torch.float32 else 5e-2
        close = (logits - own).abs().max() <= tolerance * own.abs().max().clamp(min=1.0)
        if own.isfinite().all() and not close:
            return False
    return True


@torch.inference_mode()
def is_batch_invariant(model: Any, only: str | None = None) -> bool:
    """Whether a row's logits are bit-equal alone and in a batch, on this processor."""
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
