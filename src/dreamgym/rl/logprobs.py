"""Log-probs of trained tokens under the present weights, and what the policy has read before each turn.

Only positions that predict a trained token go through the output layer, which is most of a small model's work
and most of a large one's memory. A token that was drawn among certain choices is scored among them: that is
the distribution that chose it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dreamgym.rl.losses import entropy
from dreamgym.rl.packing import PackedSequence, micro_batches

_CLOSE = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Of one lot of strips, in their order."""

    logprobs: Tensor
    """`(tokens,)`"""
    entropies: Tensor
    """`(tokens,)`, of the distributions they were drawn from."""
    slots: Tensor
    read: Tensor
    """`(turns, hidden)`: the last hidden state before each turn."""
    turn_slots: Tensor


class Scorer:
    """Runs a transformers causal LM over strips, in whatever mode it is in."""

    def __init__(self, model: Any, *, temperature: float = 1.0) -> None:
        self.model = model
        self._temperature = temperature
        # PEFT puts adapters into the layers of the model itself: what it wraps is the adapted model.
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._body: nn.Module = self._causal.base_model
        self._head: Any = self._causal.get_output_embeddings()
        self._plain: bool | None = None
        """Whether logits are the output layer on the last hidden state; some models scale or cap them."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    @property
    def hidden_size(self) -> int:
        return int(self._head.weight.shape[1])

    def __call__(self, lot: Sequence[PackedSequence], *, beyond: bool = False) -> Scores:
        """
        Args:
            beyond: also read to the turn that did not come, where a strip has one.
        """
        rows = [strip.tokens + strip.after if beyond else strip.tokens for strip in lot]
        hidden, logits = self._run(_padded(rows, self.device), lot)
        targets = [target for strip in lot for target in strip.targets]
        logprobs, entropies = self._of(logits, targets, [among for strip in lot for among in strip.allowed])
        turns = [
            (row, place, slot)
            for row, strip in enumerate(lot)
            for place, slot in zip(strip.turn_places, strip.turn_slots, strict=True)
        ]
        if beyond:
            turns += [
                (row, len(rows[row]) - 1, strip.after_slot)
                for row, strip in enumerate(lot)
                if strip.after_slot is not None
            ]
        at = self._tensor([row for row, _, _ in turns]), self._tensor([place for _, place, _ in turns])
        return Scores(
            logprobs=logprobs,
            entropies=entropies,
            slots=self._tensor([slot for strip in lot for slot in strip.slots]),
            read=hidden[at],
            turn_slots=self._tensor([slot for _, _, slot in turns]),
        )

    @torch.no_grad()
    def sweep(
        self, strips: Sequence[PackedSequence], *, micro_tokens: int, beyond: bool = False
    ) -> Iterator[Scores]:
        """Scores of all strips, lot by lot, without gradients."""
        for lot in micro_batches([s for s in strips if s.tokens or beyond], micro_tokens):
            yield self(lot, beyond=beyond)

    def _run(self, tokens: Tensor, lot: Sequence[PackedSequence]) -> tuple[Tensor, Tensor]:
        """Hidden states `(B, T, hidden)`, and logits `(tokens, vocabulary)` at the predicting places.

        Padding is on the right, where nothing causal looks.
        """
        rows = self._tensor([row for row, strip in enumerate(lot) for _ in strip.places])
        places = self._tensor([place for strip in lot for place in strip.places])
        if self._plain is None:
            self._plain = self._is_plain(tokens)
        if self._plain:
            hidden = self._body(input_ids=tokens, use_cache=False).last_hidden_state
            return hidden, self._head(hidden[rows, places]).float()
        out = self._causal(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return out.hidden_states[-1], out.logits[rows, places].float()

    @torch.no_grad()
    def _is_plain(self, tokens: Tensor) -> bool:
        few = tokens[:1, :16]
        own = self._causal(input_ids=few, use_cache=False).logits.float()
        short = self._head(self._body(input_ids=few, use_cache=False).last_hidden_state).float()
        return bool((own - short).abs().max() <= _CLOSE * own.abs().max().clamp(min=1))

    def _of(
        self, logits: Tensor, targets: list[int], allowed: list[tuple[int, ...]]
    ) -> tuple[Tensor, Tensor]:
        """Log-probs of the targets and entropies, each `(tokens,)`."""
        logits = logits / self._temperature
        wanted = self._tensor(targets)[:, None]
        if not any(allowed):
            logprobs = logits.log_softmax(-1)
            spread = -(logprobs.exp() * logprobs).sum(-1)
            return logprobs.gather(1, wanted)[:, 0], spread
        open_to_all = self._tensor([place for place, among in enumerate(allowed) if not among])
        forbidden = torch.full_like(logits, -torch.inf)
        forbidden[open_to_all] = 0.0
        places = [place for place, among in enumerate(allowed) for _ in among]
        forbidden[places, [token for among in allowed for token in among]] = 0.0
        logits = logits + forbidden
        return logits.log_softmax(-1).gather(1, wanted)[:, 0], entropy(logits)

    def _tensor(self, numbers: Sequence[int | None]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


def _padded(rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
    """`(B, T)`"""
    width = max(map(len, rows))
    return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=device)
