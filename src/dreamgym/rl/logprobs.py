"""Log-probs of trained tokens under the current weights, and hidden states for a value head. Only positions
that predict a trained token go through the output layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from dreamgym.rl.losses import entropy
from dreamgym.rl.packing import PackedSequence, micro_batches

Precision: TypeAlias = Literal["fp32", "bf16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogProbs:
    """Of the trained tokens of one micro-batch, sequence by sequence."""

    logprobs: Tensor
    """`(tokens,)`"""
    logits: Tensor
    """`(tokens, vocabulary)`; -inf where constrained decoding forbade a token."""
    token_ids: Tensor
    """`(tokens,)`: places in the flat tensors of the batch."""
    hidden: Tensor | None
    """`(turns, hidden)`: the last hidden state before each turn, if asked for."""
    turn_ids: Tensor
    values: Tensor | None = None
    """`(turns,)`: of the value head, if there is one."""

    def entropies(self) -> Tensor:
        """`(tokens,)`, in nats."""
        return entropy(self.logits)


class LogProbModel:
    """Runs a transformers causal LM, with or without PEFT adapters, over packed sequences."""

    def __init__(
        self,
        model: Any,
        *,
        temperature: float = 1.0,
        precision: Precision = "fp32",
        hidden_states: bool = False,
    ) -> None:
        """With `hidden_states`, also those that predict each turn's first token (for a value head)."""
        self.model = model
        self.temperature = temperature
        self.precision = precision
        self._hidden_states = hidden_states
        # PEFT puts adapters into the layers of the model itself: what it wraps is the adapted model.
        self._causal = model.get_base_model() if hasattr(model, "get_base_model") else model
        body = getattr(self._causal, "base_model", self._causal)
        self._body: Any = None if body is self._causal else body
        self._needs_mask: bool | None = None

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device  # type: ignore[no-any-return]

    def __call__(self, sequences: Sequence[PackedSequence], *, bootstrap: bool = False) -> TokenLogProbs:
        """With `bootstrap`, also reads the prompts after truncated episodes, for their values."""
        rows = [each.tokens + each.next_prompt if bootstrap else each.tokens for each in sequences]
        at = (
            self._tensor([row for row, each in enumerate(sequences) for _ in each.positions]),
            self._tensor([position for each in sequences for position in each.positions]),
        )
        hidden, logits = self._forward(rows, at)
        targets = self._tensor([target for each in sequences for target in each.targets])
        logits = self._constrained(logits / self.temperature, sequences)
        turns = [
            (row, position, number)
            for row, each in enumerate(sequences)
            for position, number in zip(each.turn_positions, each.turn_ids, strict=True)
        ]
        if bootstrap:
            turns += [
                (row, len(rows[row]) - 1, each.bootstrap_id)
                for row, each in enumerate(sequences)
                if each.bootstrap_id is not None
            ]
        turn_rows, turn_positions, turn_ids = (
            self._tensor([turn[part] for turn in turns]) for part in range(3)
        )
        return TokenLogProbs(
            logprobs=-torch.nn.functional.cross_entropy(logits, targets, reduction="none"),
            logits=logits,
            token_ids=self._tensor([number for each in sequences for number in each.token_ids]),
            hidden=hidden[turn_rows, turn_positions] if hidden is not None else None,
            turn_ids=turn_ids,
        )

    @torch.no_grad()
    def sweep(
        self, sequences: Sequence[PackedSequence], *, micro_tokens: int, bootstrap: bool = False
    ) -> Iterator[TokenLogProbs]:
        """Log-probs of all sequences, one micro-batch after the other, without gradients."""
        for part in micro_batches([s for s in sequences if s.tokens or bootstrap], micro_tokens):
            yield self(part, bootstrap=bootstrap)

    @torch.no_grad()
    def exact_matches(self, sequences: Sequence[PackedSequence], *, micro_tokens: int) -> int:
        """Sequences that greedy decoding would reproduce: each token is the likeliest given those before
        it."""
        matches = 0
        for part in micro_batches(sequences, micro_tokens):
            found = self(part)
            targets = self._tensor([target for each in part for target in each.targets])
            rows = self._tensor([row for row, each in enumerate(part) for _ in each.targets])
            matches += len(part) - len(set(rows[found.logits.argmax(-1) != targets].tolist()))
        return matches

    def _forward(
        self, rows: Sequence[Sequence[int]], at: tuple[Tensor, Tensor]
    ) -> tuple[Tensor | None, Tensor]:
        """Hidden states `(B, T, hidden)` if asked for, and logits `(tokens, vocabulary)` at `at`."""
        if self._needs_mask is None:
            self._probe(min(rows, key=len))
        width = max(map(len, rows))
        tokens = torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows], device=self.device)
        mask = None
        if self._needs_mask:
            lengths = self._tensor([len(row) for row in rows])
            mask = (torch.arange(width, device=self.device) < lengths[:, None]).long()
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.precision == "bf16"):
            if self._body is not None:
                hidden = self._body(input_ids=tokens, attention_mask=mask, use_cache=False).last_hidden_state
                logits = self._causal.get_output_embeddings()(hidden[at])
                return hidden if self._hidden_states else None, logits.float()
            more = {"output_hidden_states": True} if self._hidden_states else {}
            out = self._causal(input_ids=tokens, attention_mask=mask, use_cache=False, **more)
        return out.hidden_states[-1] if self._hidden_states else None, out.logits[at].float()

    def probe_once(self, sequences: Sequence[PackedSequence]) -> None:
        """Call it before several threads call the model."""
        if self._needs_mask is None:
            self._probe(sequences[-1].tokens)

    @torch.no_grad()
    def _probe(self, row: Sequence[int]) -> None:
        """Tests two shortcuts: body and output layer alone (some models scale logits behind it), and no
        attention mask (in some, padding on the right changes the row before it)."""
        training = self._causal.training
        self._causal.eval()
        alone = self._tensor(row)[None]
        padded = torch.nn.functional.pad(alone, (0, 8))
        own = self._causal(input_ids=alone, use_cache=False).logits
        with_padding = self._causal(input_ids=padded, use_cache=False).logits[:, : alone.shape[1]]
        self._needs_mask = not _close(with_padding, own, 1e-3)
        if self._body is not None:
            try:
                hidden = self._body(input_ids=alone, attention_mask=None, use_cache=False).last_hidden_state
                # The same products: a difference means that something follows the output layer.
                if not _close(self._causal.get_output_embeddings()(hidden), own, 1e-6):
                    self._body = None
            except (AttributeError, TypeError, NotImplementedError, RuntimeError):
                self._body = None
        self._causal.train(training)

    def _constrained(self, logits: Tensor, sequences: Sequence[PackedSequence]) -> Tensor:
        allowed = [tokens for each in sequences for tokens in each.allowed]
        if not any(allowed):
            return logits
        mask = torch.full_like(logits, -torch.inf)
        mask[self._tensor([place for place, tokens in enumerate(allowed) if not tokens])] = 0.0
        places = [place for place, tokens in enumerate(allowed) for _ in tokens]
        mask[places, [token for tokens in allowed for token in tokens]] = 0.0
        return logits + mask

    def _tensor(self, numbers: Sequence[int | None]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.long, device=self.device)


def _close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    coarser = 1 if right.dtype == torch.float32 else 50
    return bool((left - right).abs().max() <= coarser * tolerance * right.abs().max())
