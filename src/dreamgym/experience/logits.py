"""Logits of a causal LM at chosen positions only: in a model with a large vocabulary, most of the memory.

Whether a model's body and head, called one after the other, give what the model itself gives is tried on its
present weights, because some scale or cap their logits on the way; those are run whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class ChosenLogits:
    """Runs a transformers causal LM, with or without PEFT adapters in it."""

    def __init__(self, model: Any) -> None:
        # PEFT puts adapters into the layers of the model itself: what it wraps is the adapted model.
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        body = getattr(self._model, "base_model", self._model)
        self._body = None if body is self._model else body
        self._masked: bool | None = None

    def __call__(self, tokens: Tensor, lengths: Tensor, chosen: Tensor) -> Tensor:
        """
        Args:
            tokens: `(B, T)`, padded on the right.
            lengths: `(B,)`, tokens of each row that are none of the padding.
            chosen: `(B, T)`, true where logits are wanted.

        Returns:
            One row of logits per chosen position, row by row.
        """
        if self._masked is None:
            self._try(tokens, lengths)
        mask = _mask(tokens, lengths) if self._masked else None
        if self._body is None:
            return self._whole(tokens, mask)[chosen]
        hidden = self._body(input_ids=tokens, attention_mask=mask).last_hidden_state
        return self._model.get_output_embeddings()(hidden[chosen])  # type: ignore[no-any-return]

    def _whole(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        return self._model(input_ids=tokens, attention_mask=mask, use_cache=False).logits  # type: ignore[no-any-return]

    @torch.no_grad()
    def _try(self, tokens: Tensor, lengths: Tensor) -> None:
        """Finds out whether the short way is right, and whether padding behind a row changes the row."""
        training = self._model.training
        self._model.eval()
        row = int(lengths.argmin())
        alone = tokens[row : row + 1, : int(lengths[row])]
        own = self._whole(alone, None)
        # One token more than the row has, at least, so that there is padding even in a batch of equals.
        padded = torch.nn.functional.pad(alone, (0, 8))
        self._masked = not _close(self._whole(padded, None)[:, : alone.shape[1]], own, 1e-3)
        if self._body is not None:
            try:
                hidden = self._body(input_ids=alone, attention_mask=None).last_hidden_state
                # The same products: what differs at all is done to the logits behind the head.
                if not _close(self._model.get_output_embeddings()(hidden), own, 1e-6):
                    self._body = None
            except (AttributeError, TypeError, NotImplementedError, RuntimeError):
                self._body = None
        self._model.train(training)


def _mask(tokens: Tensor, lengths: Tensor) -> Tensor:
    return (torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]).long()


def _close(left: Tensor, right: Tensor, tolerance: float) -> bool:
    coarser = 1 if right.dtype == torch.float32 else 50
    return bool((left - right).abs().max() <= coarser * tolerance * right.abs().max())
