"""Packed forward passes: `PackedBackend` runs them for a changing set of rows, `FastForward` is one of them.

At the size of models that a CPU trains in minutes, most of a step is the overhead of calling modules.
`FastForward` computes Llama, Qwen and LFM2 with about half as many calls as their Hugging Face modules. It
holds references to their parameters and copies none. Other models use `hf_forward.HFForward`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from dreamgym.models.local.kv_cache import CachedPrefix, KVCache, PrefillChunk, Step
from dreamgym.models.local.tokens import common_prefix

FAMILIES = ("llama", "qwen2", "qwen3", "lfm2")
_FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


class PackedForward(Protocol):
    """A causal language model over packed tokens that reads and writes a `KVCache`."""

    reach: int
    """Tokens that the convolutions of all layers look back together; 0 for attention only."""

    def __call__(self, tokens: Tensor, step: Step, cache: KVCache) -> Tensor:
        """Logits of each row's last token, then of padding: `(at least rows, vocabulary)`."""
        ...

    def refresh(self) -> None:
        """Look up parameters again after their storage was replaced."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def of(cls, module: nn.Module) -> _Linear:
        if type(module) is not nn.Linear:
            raise FastForwardUnsupportedError(f"a projection is a {type(module).__name__}")
        return cls(weight=module.weight, bias=module.bias)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)

    def added_to(self, residual: Tensor, x: Tensor) -> Tensor:
        mixed = torch.addmm(residual, x, self.weight.t())
        return mixed if self.bias is None else mixed + self.bias


@dataclass(frozen=True, slots=True, kw_only=True)
class _Norm:
    weight: Tensor
    epsilon: float

    @classmethod
    def of(cls, module: Any) -> _Norm:
        return cls(weight=module.weight, epsilon=module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight, self.epsilon)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Attention:
    layer: int
    q: _Linear
    k: _Linear
    v: _Linear
    out: _Linear
    q_norm: _Norm | None
    k_norm: _Norm | None
    size: int
    scale: float

    @classmethod
    def of(cls, module: Any) -> _Attention:
        q_norm = getattr(module, "q_layernorm", None) or getattr(module, "q_norm", None)
        k_norm = getattr(module, "k_layernorm", None) or getattr(module, "k_norm", None)
        return cls(
            layer=module.layer_idx,
            q=_Linear.of(module.q_proj),
            k=_Linear.of(module.k_proj),
            v=_Linear.of(module.v_proj),
            out=_Linear.of(module.out_proj if hasattr(module, "out_proj") else module.o_proj),
            q_norm=_Norm.of(q_norm) if q_norm is not None else None,
            k_norm=_Norm.of(k_norm) if k_norm is not None else None,
            size=module.head_dim,
            scale=module.scaling,
        )

    def __call__(self, residual: Tensor, x: Tensor, context: _StepContext) -> Tensor:
        tokens = x.shape[0]
        q, k, v = (part(x).view(tokens, -1, self.size) for part in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = context.rotate(q), context.rotate(k)
        mixed = context.cache.attend(self.layer, context.step, q, k, v, self.scale)
        return self.out.added_to(residual, mixed.reshape(tokens, -1))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ShortConvolution:
    layer: int
    inside: _Linear
    out: _Linear
    taps: list[Tensor]
    """One weight per channel for the token itself, then for each before it."""
    bias: Tensor | None

    @classmethod
    def of(cls, module: Any) -> _ShortConvolution:
        kernel = module.conv.weight.detach()
        return cls(
            layer=module.layer_idx,
            inside=_Linear.of(module.in_proj),
            out=_Linear.of(module.out_proj),
            taps=[kernel[:, 0, -1 - lag] for lag in range(kernel.shape[-1])],
            bias=module.conv.bias,
        )

    def __call__(self, residual: Tensor, x: Tensor, context: _StepContext) -> Tensor:
        entry, gate, value = self.inside(x).chunk(3, -1)
        now, *before = context.cache.shift(self.layer, context.step, entry * value, len(self.taps) - 1)
        mixed = now * self.taps[0]
        for past, tap in zip(before, self.taps[1:], strict=True):
            mixed.addcmul_(past, tap)
        if self.bias is not None:
            mixed += self.bias
        return self.out.added_to(residual, mixed.mul_(gate))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    norm: _Norm
    mixer: _Attention | _ShortConvolution
    wide_norm: _Norm
    gate: _Linear
    up: _Linear
    down: _Linear

    @classmethod
    def of(cls, module: Any) -> _Block:
        attends = getattr(module, "is_attention_layer", True)
        mixer = _Attention.of(module.self_attn) if attends else _ShortConvolution.of(module.conv)
        if hasattr(module, "feed_forward"):  # LFM2
            norms, wide = (module.operator_norm, module.ffn_norm), module.feed_forward
            gate, up, down = (_Linear.of(part) for part in (wide.w1, wide.w3, wide.w2))
        else:
            norms, wide = (module.input_layernorm, module.post_attention_layernorm), module.mlp
            gate, up, down = (_Linear.of(part) for part in (wide.gate_proj, wide.up_proj, wide.down_proj))
        norm, wide_norm = (_Norm.of(part) for part in norms)
        return cls(norm=norm, mixer=mixer, wide_norm=wide_norm, gate=gate, up=up, down=down)

    def __call__(self, x: Tensor, context: _StepContext) -> Tensor:
        x = self.mixer(x, self.norm(x), context)
        wide = self.wide_norm(x)
        return self.down.added_to(x, functional.silu(self.gate(wide)).mul_(self.up(wide)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _StepContext:
    """What all blocks of one step share."""

    step: Step
    cache: KVCache
    cosine: Tensor
    sine: Tensor
    """`(tokens, 1, size)`; the first half is negated, so that rotating needs no other sign."""

    def rotate(self, x: Tensor) -> Tensor:
        return torch.addcmul(x * self.cosine, x.roll(x.shape[-1] // 2, -1), self.sine)


class FastForwardUnsupportedError(Exception):
    """`FastForward` does not support this model."""


class FastForward:
    """Implements `PackedForward`; the caller checks it against the model."""

    def __init__(self, model: Any) -> None:
        """
        Raises:
            FastForwardUnsupportedError: architecture, projection (LoRA, quantised) or rotation not supported.
        """
        config = model.config
        if config.model_type not in FAMILIES or getattr(config, "use_sliding_window", False):
            raise FastForwardUnsupportedError(f"model type {config.model_type!r}")
        rotation = model.model.rotary_emb
        if rotation.rope_type not in _FIXED_ROTATIONS or getattr(config, "hidden_act", "silu") != "silu":
            raise FastForwardUnsupportedError(
                f"rotation {rotation.rope_type!r}, activation {config.hidden_act!r}"
            )
        if type(model.model.embed_tokens) is not nn.Embedding:
            raise FastForwardUnsupportedError("an embedding that is not plain")
        self._model = model
        self.refresh()
        self._cosine = self._sine = self._embedding.new_empty(0)

    def _rotations(self, step: Step) -> tuple[Tensor, Tensor]:
        """Rotary embeddings of the step's positions, from tables that grow on demand."""
        if step.end > len(self._cosine):
            rotation = self._model.model.rotary_emb
            places = torch.arange(max(1024, step.end * 3 // 2), device=rotation.inv_freq.device)
            angles = places[:, None] * rotation.inv_freq.float()
            sine = angles.sin()
            self._cosine, self._sine = (
                (torch.cat(halves, -1) * rotation.attention_scaling).to(self._embedding.dtype)[:, None]
                for halves in ([angles.cos()] * 2, [-sine, sine])
            )
        return self._cosine[step.positions], self._sine[step.positions]

    def refresh(self) -> None:
        inner = self._model.model
        self._embedding = inner.embed_tokens.weight
        self._blocks = [_Block.of(layer) for layer in inner.layers]
        self._norm = _Norm.of(inner.embedding_norm if hasattr(inner, "embedding_norm") else inner.norm)
        self._head = _Linear.of(self._model.lm_head)
        mixers = [block.mixer for block in self._blocks]
        self.reach = sum(len(mixer.taps) - 1 for mixer in mixers if isinstance(mixer, _ShortConvolution))

    def __call__(self, tokens: Tensor, step: Step, cache: KVCache) -> Tensor:
        cosine, sine = self._rotations(step)
        context = _StepContext(step=step, cache=cache, cosine=cosine, sine=sine)
        x = functional.embedding(tokens, self._embedding)
        for block in self._blocks:
            x = block(x, context)
        if step.last is not None:
            x = x[step.last]
        return self._head(self._norm(x))


class PackedBackend:
    """Rows of tokens and their logits, numbered in the order of `enter` until `keep` reorders them.

    A row that joins restores the keys and values of the longest prefix that its tokens share with its cached
    conversation. Short convolutions keep only their inputs at the end of that conversation. If the shared
    prefix ends earlier, a few tokens before its end are recomputed: after as many tokens as the convolutions
    of all layers look back together, their inputs are exact, since attention reads exact keys and values.
    """

    def __init__(self, forward: PackedForward, device: torch.device) -> None:
        self.forward = forward
        self.device = device
        self._cache = KVCache(device)
        self._lengths: list[int] = []
        """Cached tokens of each row."""
        self._entering: list[int] = []
        """Start of the prefill chunk of each row that has not yet taken part in a step."""

    @property
    def bytes_per_token(self) -> int:
        return self._cache.bytes_per_token

    def enter(self, rows: Sequence[tuple[Sequence[int], CachedPrefix | None]], columns: int) -> list[int]:
        """Add rows that may grow to `columns` tokens; returns the number of cached tokens of each."""
        first = len(self._lengths)
        self._cache.reserve(first + len(rows), columns)
        kept = []
        for tokens, saved in rows:
            shared = min(common_prefix(saved.tokens, tokens), len(tokens) - 1) if saved is not None else 0
            complete = saved is not None and shared == len(saved.tokens)
            begin = shared if complete or not self.forward.reach else max(0, shared - self.forward.reach)
            kept.append((shared, begin))
        self._cache.enter(first, [(row[1], shared) for row, (shared, _) in zip(rows, kept, strict=True)])
        self._lengths += [shared for shared, _ in kept]
        self._entering += [begin for _, begin in kept]
        return [begin for _, begin in kept]

    def step(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of each row, given all its tokens. State is unchanged if it raises."""
        decoding = len(self._lengths) - len(self._entering)
        packed = [tokens[-1] for tokens in sequences[:decoding]]
        chunks = []
        for row, begin in enumerate(self._entering, decoding):
            new = sequences[row][begin:]
            held = self._lengths[row]
            chunks.append(PrefillChunk(row=row, start=len(packed), size=len(new), position=begin, fresh=held))
            packed.extend(new)
        step = Step(self._lengths[:decoding], chunks, self.device)
        packed += [0] * step.padding
        logits = self.forward(torch.tensor(packed, device=self.device), step, self._cache)
        self._cache.commit()
        self._lengths = [len(tokens) for tokens in sequences]
        self._entering = []
        return logits[: len(sequences)]

    def save(self, row: int, tokens: Sequence[int], into: CachedPrefix | None) -> CachedPrefix:
        """Copy a row's cache for later batches; `into` is reused as far as its tokens are equal."""
        held = list(tokens[: self._lengths[row]])
        into = into or CachedPrefix()
        self._cache.save(row, held, into, common_prefix(into.tokens, held))
        return into

    def keep(self, order: Sequence[int]) -> None:
        """Reorder: row i becomes the former row ``order[i]``; the others are removed."""
        self._lengths = [self._lengths[old] for old in order]
        self._cache.keep(order, self._lengths)
        self._entering = []

    def zero_row(self, row: int) -> None:
        self._cache.zero_row(row)

    def refresh(self) -> None:
        self.forward.refresh()
