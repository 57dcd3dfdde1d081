"""How many tokens a forward and backward pass may have, from measured bytes per token and free memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamgym.rl.logprobs import LogProbModel
from dreamgym.rl.packing import PackedSequence

_PROBE = 64
"""Tokens of the measured pass."""
_SHARE = 0.5
"""Of the free memory: temporary results and fragmentation take the rest."""
_FEWEST, _MOST = 64, 1 << 16
_OPTIMIZER_COPIES = 3
"""Gradient and two moments of AdamW for each trained weight."""


def tokens_that_fit(parameters: Sequence[Tensor], needs: PassMemory, free: int) -> int:
    """Tokens per pass for this much free memory in bytes, as a power of two.

    >>> tokens_that_fit([], PassMemory(per_token=2e6, fixed=0), free=16 * 10**9)
    2048
    """
    # Gradients and moments are allocated by the first update.
    later = sum(_OPTIMIZER_COPIES * 4 * each.numel() for each in parameters)
    fitting = int(max(_FEWEST, min(_MOST, _SHARE * (free - later - needs.fixed) / needs.per_token)))
    return 1 << (fitting.bit_length() - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassMemory:
    """Bytes that a forward pass keeps for its backward pass."""

    per_token: float
    fixed: float
    """Such as weights that autocast has converted."""


def measure_pass(model: LogProbModel, sequences: Sequence[PackedSequence]) -> PassMemory:
    """Measured on the first tokens of a sequence and on half of them, with as many trained tokens as these
    sequences have on average."""
    tokens = max((each.tokens for each in sequences), key=len)[:_PROBE]
    share = sum(len(each.positions) for each in sequences) / sum(len(each.tokens) for each in sequences)
    if len(tokens) < 2:
        return PassMemory(per_token=max(1.0, float(_kept(model, tokens, share))), fixed=0.0)
    half = len(tokens) // 2
    whole, part = _kept(model, tokens, share), _kept(model, tokens[:half], share)
    per_token = max(1.0, (whole - part) / (len(tokens) - half))
    return PassMemory(per_token=per_token, fixed=max(0.0, whole - per_token * len(tokens)))


def _kept(model: LogProbModel, tokens: list[int], share: float) -> int:
    """Bytes of what a forward pass saves, apart from the weights themselves."""
    trained = range(len(tokens))[-max(1, round(share * len(tokens))) :]
    kept = {parameter.untyped_storage().data_ptr(): 0 for parameter in model.model.parameters()}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    probe = PackedSequence(
        tokens=tokens,
        positions=list(trained),
        targets=[tokens[place] for place in trained],
        allowed=[()] * len(trained),
        token_ids=list(range(len(trained))),
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model([probe])
    return sum(kept.values())


def free_memory(device: torch.device) -> int:
    """Bytes that a pass could still allocate."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory()) - int(torch.mps.driver_allocated_memory())
    import psutil

    return int(psutil.virtual_memory().available)
