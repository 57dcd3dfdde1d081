"""The arithmetic of learning, each formula once: advantages, clipped ratios, KL, values, preferences.

Pure functions of tensors. A loss is returned per token (or turn, or pair); a learner weighs and adds them, so
that a batch computed in pieces has the gradient of the whole. `docs/paper.md` names where each comes from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

LengthNormalisation: TypeAlias = Literal["token", "trajectory", "constant"]
"""What one token weighs: alike in the whole batch (DAPO), alike within its trajectory while trajectories
weigh alike (GRPO), or the same whatever else there is (Dr. GRPO)."""

_TINY = 1e-6


def group_advantages(returns: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """How much better than its group each rollout did, `(n,)`, in standard deviations or as it is.

    The deviation is that of the sample (n - 1). A unanimous group has no advantages.

    >>> group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0]), scale_by_std=False).tolist()
    [0.5, -0.5, -0.5, 0.5]
    >>> [round(a, 3) for a in group_advantages(torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist()]
    [0.866, -0.866, -0.866, 0.866]
    """
    centred = returns - returns.mean()
    if not scale_by_std or returns.numel() < 2:
        return centred
    return centred / advantage_unit(returns)


def advantage_unit(returns: Tensor) -> Tensor:
    """The standard deviation of a group, never nothing."""
    return returns.std() + _TINY


def discounted_returns(rewards: Sequence[float], discount: float) -> list[float]:
    """What is still to come at each turn of one episode, its own reward included.

    >>> discounted_returns([0.0, 0.0, 1.0], 0.5)
    [0.25, 0.5, 1.0]
    """
    found, running = list[float](), 0.0
    for reward in reversed(rewards):
        running = reward + discount * running
        found.append(running)
    return found[::-1]


def step_advantages(states: Sequence[Hashable], returns: Tensor, *, scale_by_std: bool = True) -> Tensor:
    """How much better each turn came out than others that began in the same state (GiGPO), `(turns,)`.

    Args:
        states: where each turn of a rollout group began.
        returns: what was still to come then, discounted. A state met once has nothing to compare with.

    >>> at = ["door", "hall", "door", "door"]
    >>> step_advantages(at, torch.tensor([1.0, 0.5, 0.0, 0.5]), scale_by_std=False).tolist()
    [0.5, 0.0, -0.5, 0.0]
    """
    places: dict[Hashable, list[int]] = defaultdict(list)
    for place, state in enumerate(states):
        places[state].append(place)
    found = torch.zeros_like(returns)
    for among in places.values():
        if len(among) > 1 and not unanimous(returns[among]):
            found[among] = group_advantages(returns[among], scale_by_std=scale_by_std)
    return found


def weigh_negative(advantages: Tensor, weight: float) -> Tensor:
    """
    >>> weigh_negative(torch.tensor([1.0, -2.0]), 0.5)
    tensor([ 1., -1.])
    """
    return torch.where(advantages < 0, advantages * weight, advantages)


def unanimous(returns: Tensor) -> bool:
    """Whether all did equally well, so that there is nothing to prefer.

    >>> unanimous(torch.tensor([1.0, 1.0])), unanimous(torch.tensor([1.0, 0.0]))
    (True, False)
    """
    return bool((returns.max() - returns.min()) < _TINY)


def gae(
    rewards: Sequence[float], values: Sequence[float], after: float, *, discount: float, decay: float
) -> list[float]:
    """Generalised advantage estimates of the turns of one episode.

    Args:
        values: of the state before each turn.
        after: the value of the state that the episode was left in: 0 if it terminated, what is still expected
            there if it was only truncated.
        decay: the λ of GAE.

    >>> gae([0.0, 1.0], [0.5, 0.5], 0.0, discount=1.0, decay=1.0)
    [0.5, 0.5]
    >>> gae([0.0, 0.0], [0.5, 0.5], 0.8, discount=1.0, decay=0.0)
    [0.0, 0.30000000000000004]
    """
    advantages = [0.0] * len(rewards)
    following, running = after, 0.0
    for turn in reversed(range(len(rewards))):
        surprise = rewards[turn] + discount * following - values[turn]
        running = surprise + discount * decay * running
        advantages[turn] = running
        following = values[turn]
    return advantages


def clipped_policy_loss(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """PPO's pessimistic loss per token, with separate bounds below and above (DAPO's clip-higher).

    Args:
        behaviour: log-probs under the policy that sampled the tokens.

    >>> sampled = torch.tensor([0.5, 0.5]).log()
    >>> now = torch.tensor([0.9, 0.9]).log()
    >>> better_and_worse = torch.tensor([1.0, -1.0])
    >>> loss = clipped_policy_loss(now, sampled, better_and_worse, clip_low=0.2, clip_high=0.3)
    >>> [round(value, 3) for value in loss.tolist()]
    [-1.3, 1.8]
    """
    ratio = (logprobs - behaviour).exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    return -torch.minimum(ratio * advantages, clipped * advantages)


def clipped(
    logprobs: Tensor, behaviour: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float
) -> Tensor:
    """Which tokens the clipping keeps from being learnt from further.

    >>> args = torch.tensor([0.9, 0.9]).log(), torch.tensor([0.5, 0.5]).log(), torch.tensor([1.0, -1.0])
    >>> clipped(*args, clip_low=0.2, clip_high=0.3).tolist()
    [True, False]
    """
    ratio = (logprobs - behaviour).exp()
    return ((advantages > 0) & (ratio > 1 + clip_high)) | ((advantages < 0) & (ratio < 1 - clip_low))


def kl_to_reference(logprobs: Tensor, reference: Tensor, behaviour: Tensor | None = None) -> Tensor:
    """Schulman's k3 estimate of KL(policy ‖ reference) per sampled token: unbiased and never negative.

    Args:
        behaviour: log-probs under the policy that sampled the tokens. If given, the estimate is weighted by
            the ratio to it (DeepSeek-V3.2), and then its gradient is unbiased too.

    >>> kl_to_reference(torch.tensor([-1.0]), torch.tensor([-1.0])).item()
    0.0
    >>> now, first, sampled = torch.tensor([-1.0]), torch.tensor([-2.0]), torch.tensor([0.0])
    >>> [round(kl_to_reference(now, first, by).item(), 4) for by in (None, sampled)]
    [0.3679, 0.1353]
    """
    gap = reference - logprobs
    estimate = gap.exp() - gap - 1
    return estimate if behaviour is None else (logprobs - behaviour).exp() * estimate


def clipped_value_loss(values: Tensor, before: Tensor, targets: Tensor, *, clip: float | None) -> Tensor:
    """Half the squared error per turn; the worse of the value and the value kept within `clip` of `before`.

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
    """Of each row's distribution, in nats; -inf marks what cannot come.

    >>> entropy(torch.tensor([[0.0, 0.0, float("-inf")]])).exp().round(decimals=4).tolist()
    [2.0]
    """
    logprobs = logits.log_softmax(-1)
    return -(logprobs.exp() * logprobs.masked_fill(logprobs.isneginf(), 0.0)).sum(-1)


def token_weights(
    lengths: Sequence[int], normalisation: LengthNormalisation, *, constant: float = 1.0
) -> list[float]:
    """What a token of each trajectory weighs, so that the weighted sum is the loss of the batch.

    Args:
        lengths: trained tokens of each trajectory of the batch.
        constant: for ``constant``: the number of tokens that a trajectory is taken to have.

    >>> token_weights([1, 3], "token"), token_weights([1, 4], "trajectory")
    ([0.25, 0.25], [0.5, 0.125])
    >>> token_weights([1, 3], "constant", constant=10)
    [0.05, 0.05]
    """
    if normalisation == "token":
        return [1 / max(1, sum(lengths))] * len(lengths)
    if normalisation == "trajectory":
        return [1 / (len(lengths) * max(1, length)) for length in lengths]
    return [1 / (len(lengths) * constant)] * len(lengths)


def preference_loss(chosen_gain: Tensor, rejected_gain: Tensor, *, beta: float) -> Tensor:
    """DPO per pair. A gain is the log-prob of a trajectory's replies less that under the reference.

    >>> round(preference_loss(torch.tensor([0.0]), torch.tensor([0.0]), beta=0.1).item(), 4)
    0.6931
    """
    return -torch.nn.functional.logsigmoid(beta * (chosen_gain - rejected_gain))
