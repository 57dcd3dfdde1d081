"""A packed forward pass through a model's own Hugging Face modules with our attention.

transformers selects attention by name; under our name, its modules pass queries, keys and values of packed
tokens to the KV cache. All else in a layer (norms, experts, adapters, rotary embeddings) is unchanged.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from dreamgym.models.local.kv_cache import KVCache, Step

_ATTENTION = "dreamgym_packed"
_now = threading.local()


class HFForwardUnsupportedError(Exception):
    """This model has state other than attention and short convolutions."""


class HFForward:
    """Implements `fast_forward.PackedForward`; the caller checks it against the model."""

    def __init__(self, model: Any) -> None:
        """
        Raises:
            HFForwardUnsupportedError: attention cannot be replaced, or unknown kinds of layers.
        """
        kinds = set(getattr(model.config, "layer_types", None) or ())
        if unknown := kinds - {"full_attention", "sliding_attention", "conv"}:
            raise HFForwardUnsupportedError(f"layers of kind {sorted(unknown)!r}")
        self._copy = shared_copy(model)
        self.reach = 0
        for module in list(self._copy.modules()):
            for name, child in module.named_children():
                if type(child).__name__.endswith("ShortConv"):
                    setattr(module, name, _PackedShortConvolution(child))
                    self.reach += child.conv.weight.shape[-1] - 1
        inner = self._copy.get_base_model() if hasattr(self._copy, "get_base_model") else self._copy
        inner.set_attn_implementation(_ATTENTION)
        if inner.config._attn_implementation != _ATTENTION:
            raise HFForwardUnsupportedError(f"{type(inner).__name__} does not support a custom attention")

    def refresh(self) -> None:
        """Nothing to do: the copy shares the model's parameters."""

    def __call__(self, tokens: Tensor, step: Step, cache: KVCache) -> Tensor:
        _now.step, _now.cache = step, cache
        try:
            output = self._copy(
                input_ids=tokens[None],
                position_ids=step.positions[None],
                use_cache=False,
                logits_to_keep=step.last if step.last is not None else 0,
            )
        finally:
            del _now.step, _now.cache
        return output.logits[0]  # type: ignore[no-any-return]


def shared_copy(model: Any) -> Any:
    """New modules over the same parameters and buffers, in evaluation mode."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


def _attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **settings: Any,
) -> tuple[Tensor, None]:
    """Called by transformers with `(1, heads, tokens, size)`; returns `(1, tokens, heads, size)`."""
    if settings.get("softcap") is not None or settings.get("s_aux") is not None:
        raise HFForwardUnsupportedError("attention with capped scores or sinks")
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    mixed = _now.cache.attend(module.layer_idx, _now.step, q, k, v, scale, sliding_window)
    return mixed[None], None


AttentionInterface.register(_ATTENTION, _attend)


class _PackedShortConvolution(nn.Module):
    """LFM2's gated short convolution for rows of any length; the original needs rows of equal length."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        entry, gate, value = self.inner.in_proj(hidden_states[0]).chunk(3, -1)
        kernel = self.inner.conv.weight
        shifted = _now.cache.shift(self.inner.layer_idx, _now.step, entry * value, kernel.shape[-1] - 1)
        mixed = sum(x * kernel[:, 0, -1 - lag] for lag, x in enumerate(shifted))
        if self.inner.conv.bias is not None:
            mixed = mixed + self.inner.conv.bias
        return self.inner.out_proj(gate * mixed)[None]  # type: ignore[no-any-return]
