"""Advantages and losses, each formula once: GRPO, PPO, GAE, KL, entropy, DPO.

Pure functions of tensors. A loss is returned per token (or turn, or pair); a learner weights and sums them,
so that micro-batches add up to the gradient of the whole batch. `docs/paper.md` names the source of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

LossNormalization: TypeAlias = Literal["token", "trajectory", "constant"]
"""The weight of a token: equal in the batch (DAPO), equal per trajectory (GRPO), or a constant (Dr. GRPO)."""
CONSTANT_LENGTH = 100.0
"""Tokens per trajectory that the constant normalisation assumes; AdamW cancels most of its scale."""

_TINY = 1e-6


def group_advantages(returns: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """Returns less the group's mean, `(n,)`, divided by its standard deviation (of the sample, n - 1) or not.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), scale_by_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    >>> [round(a, 3) for a in group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist()]
    [0.866, -0.866, -0.866, 0.866]
    """
    centred = returns - returns.mean()
    if not scale_by_std or returns.numel() < 2:
        return centred
    return centred / advantage_scale(returns)


def advantage_scale(returns: Tensor) -> Tensor:
    """The standard deviation of a group, never 0."""
    return returns.std() + _TINY


def weigh_negative(advantages: Tensor, weight: float) -> Tensor:
    """
    >>> weigh_negative(torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 1., -1.])
    """
    return torch.where(advantages < 0, advantages * weight, advantages)


def zero_std(returns: Tensor) -> bool:
    """Whether all returns are equal: such a group has no advantages.

    >>> zero_std(torch.tensor([1.0, 1.0])), zero_std(torch.tensor([1.0, 0.0]))
    (True, False)
    """
    return bool((returns.max() - returns.min()) < _TINY)


def gae(
    rewards: Sequence[float], values: Sequence[float], last_value: float, *, gamma: float, gae_lambda: float
) -> list[float]:
    """Generalised advantage estimates over the turns of one episode.

    Args:
        values: of the state before each turn.
        last_value: of the state after the last turn if the episode was truncated, 0 if it terminated.

    >>> gae([0.0, 1.0], [0.5, 0.5], 0.0, gamma=1.0, gae_lambda=1.0)
    [0.5, 0.5]
    >>> gae([0.0, 0.0], [0.5, 0.5], 0.8, gamma=1.0, gae_lambda=0.0)
    [0.0, 0.30000000000000004]
    """
    advantages = [0.0] * len(rewards)
    following, running = last_value, 0.0
    for turn in reversed(range(len(rewards))):
        delta = rewards[turn] + gamma * following - values[turn]
        running = delta + gamma * gae_lambda * running
        advantages[turn] = running
        following = values[turn]
    return advantages


def clipped_policy_loss(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's pessimistic loss per token, with separate bounds below and above (DAPO's clip-higher).

    Args:
        old_logprobs: log-probs under the policy that sampled the tokens.

    >>> sampled = torch.tensor([0.5, 0.5]).log()
    >>> now = torch.tensor([0.9, 0.9]).log()
    >>> better_and_worse = torch.tensor([1.0, -1.0])
    >>> loss = clipped_policy_loss(now, sampled, better_and_worse, clip_low=0.2, clip_high=0.3)
    >>> [round(value, 3) for value in loss.tolist()]
    [-1.3, 1.8]
    """
    ratio = (logprobs - old_logprobs).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Which tokens the clipping excludes from the gradient.

    >>> args = torch.tensor([0.9, 0.9]).log(), torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, -1.0])
    >>> clipped(*args, clip_low=0.2, clip_high=0.3).tolist()
    [True, False]
    """
    ratio = (logprobs - old_logprobs).exp()
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


def kl_estimate(logprobs: Tensor, reference: Tensor, old_logprobs: Tensor | None = None) -> Tensor:
    """Schulman's k3 estimate of KL(policy ‖ reference) per sampled token: unbiased and never negative.

    Args:
        old_logprobs: under the policy that sampled the tokens. If given, the estimate is weighted by the
            importance ratio (DeepSeek-V3.2), and then its gradient is unbiased too.

    >>> kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.0])).item()
    0.0
    >>> now, first, sampled = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([0.0])
    >>> [round(kl_estimate(now, first, by).item(), 4) for by in (None, sampled)]
    [0.3679, 0.1353]
    """
    gap = reference - logprobs
    estimate = gap.exp() - gap - 1
    return estimate if old_logprobs is None else (logprobs - old_logprobs).exp() * estimate


def clipped_value_loss(values: Tensor, before: Tensor, targets: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error per turn: the larger of that of the value and of the value clipped to `before`.

    >>> zero, one = torch.tensor([0.0]), torch.tensor([1.0])
    >>> round(clipped_value_loss(one, before=zero, targets=one, clip=0.2).item(), 4)
    0.32
    """
    loss = (values - targets).square()
    if clip is not None:
        near = before + (values - before).clamp(-clip, clip)
        loss = torch.maximum(loss, (near - targets).square())
    return loss / 2


def entropy(logits: Tensor) -> Tensor:
    """Of each row's distribution, in nats; logits of -inf have probability 0.

    >>> entropy(torch.tensor([[0.0, 0.0, float("-inf")]])).exp().round(decimals=4).tolist()
    [2.0]
    """
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)


def token_weights(
    lengths: Sequence[int], normalization: LossNormalization, *, constant: float = CONSTANT_LENGTH
) -> list[float]:
    """The weight of each trajectory's tokens, such that the weighted sum is the loss of the batch.

    Args:
        lengths: trained tokens of each trajectory of the batch.
        constant: tokens per trajectory that ``constant`` assumes.

    >>> token_weights([1, 3], "token"), token_weights([1, 4], "trajectory")
    ([0.25, 0.25], [0.5, 0.125])
    >>> token_weights([1, 3], "constant", constant=10)
    [0.05, 0.05]
    """
    if normalization == "token":
        return [1 / max(1, sum(lengths))] * len(lengths)
    if normalization == "trajectory":
        return [1 / (len(lengths) * max(1, length)) for length in lengths]
    return [1 / (len(lengths) * constant)] * len(lengths)


def preference_loss(chosen_gain: Tensor, rejected_gain: Tensor, *, beta: float) -> Tensor:
    """DPO per pair. A gain is the log-prob of a trajectory's replies less that under the reference policy.

    >>> round(preference_loss(torch.tensor([0.0]), torch.tensor([0.0]), beta=0.1).item(), 4)
    0.6931
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen_gain - rejected_gain))
