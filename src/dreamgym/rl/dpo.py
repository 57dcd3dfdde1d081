"""DPO: of two trajectories of one task, one that succeeded is preferred to one that failed.

The loss of a pair depends on both trajectories as wholes. So the pairs are first scored without gradients,
which gives the derivative by each trajectory's log-prob; log-probs weighted by it have exactly the gradient
of the loss, and micro-batches can be of any size.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from dreamgym.config import LearnerConfig
from dreamgym.errors import ConfigError
from dreamgym.rl.gradients import Loss
from dreamgym.rl.logprobs import TokenLogProbs
from dreamgym.rl.losses import preference_loss
from dreamgym.rl.optimizers import ModelOptimizer, Trainable, check_same_settings
from dreamgym.rl.packing import pack
from dreamgym.rl.policy_gradient import learner_config
from dreamgym.rl.sft import batch_indices, learning_rate_scale
from dreamgym.types import Trajectory

Pair = tuple[Trajectory, Trajectory]
"""(chosen, rejected)"""
_DECAY_FRACTION = 0.5


def preference_pairs(
    trajectories: Sequence[Trajectory], *, max_pairs: int | None = None, seed: int = 0
) -> list[Pair]:
    """Pairs of a success and a failure on the same task, as many as a task has of the more frequent one.

    Trajectories of unknown success are left out.
    """
    by_task: dict[str, tuple[list[Trajectory], list[Trajectory]]] = defaultdict(lambda: ([], []))
    for trajectory in (each for each in trajectories if each.graded):
        by_task[trajectory.task.id][0 if trajectory.success else 1].append(trajectory)
    rng = Random(f"pairs/{seed}")
    pairs: list[Pair] = []
    for successes, failures in by_task.values():
        if not successes or not failures:
            continue
        rng.shuffle(successes)
        rng.shuffle(failures)
        pairs += [
            (successes[number % len(successes)], failures[number % len(failures)])
            for number in range(max(len(successes), len(failures)))
        ]
    rng.shuffle(pairs)
    return pairs[:max_pairs]


class DPO:
    """Call `step` until `done`. The reference is the policy at construction.

    Example::

        dpo = dg.DPO(agent, preference_pairs(agent.tokenize(trajectories)), steps=100)
        while not dpo.done:
            metrics = dpo.step()
    """

    def __init__(
        self,
        agent: Trainable,
        pairs: Sequence[Pair],
        config: LearnerConfig | None = None,
        *,
        steps: int = 100,
        batch_size: int = 8,
        warmup_steps: int = 10,
        seed: int = 0,
        **overrides: Any,
    ) -> None:
        """`overrides` are settings of `LearnerConfig`, such as ``beta=0.2``."""
        if not pairs:
            raise ConfigError("expected pairs of a success and a failure on the same task, got none")
        self.config = learner_config(config, overrides | {"warmup_steps": warmup_steps})
        self.total_steps = steps
        self.steps = 0
        self._batch_size = batch_size
        self._seed = seed
        self._pairs = len(pairs)
        self._optimizer = ModelOptimizer(agent, self.config, temperature=1.0)
        # Trajectory 2i is the chosen one of pair i, 2i + 1 the rejected one.
        self._packed = pack([trajectory for pair in pairs for trajectory in pair])
        self._owner = torch.zeros(
            self._packed.tokens, dtype=torch.long, device=self._optimizer.logprobs.device
        )
        for number, tokens in enumerate(self._packed.token_ranges):
            self._owner[tokens.start : tokens.stop] = number
        self._reference = self._logprobs(range(2 * len(pairs)))

    @property
    def done(self) -> bool:
        return self.steps >= self.total_steps

    def step(self) -> dict[str, float]:
        """One weight update; ``accuracy`` is the share of pairs that were in order before it."""
        pairs = batch_indices(self._pairs, self.steps, self._batch_size, self._seed)
        pairs = sorted(set(pairs))  # a batch that reaches into the next epoch may hold a pair twice
        members = [2 * pair + side for pair in pairs for side in (0, 1)]
        gains = (self._logprobs(members) - self._reference)[members].view(-1, 2).requires_grad_()
        losses = preference_loss(gains[:, 0], gains[:, 1], beta=self.config.beta)
        (derivatives,) = torch.autograd.grad(losses.mean(), gains)
        weights = torch.zeros(len(self._reference), device=derivatives.device)
        weights[members] = derivatives.flatten()
        loss_of = functools.partial(weighted_logprobs, weights=weights[self._owner])
        lr_scale = learning_rate_scale(
            self.steps, self.total_steps, self.config.warmup_steps, _DECAY_FRACTION
        )
        metrics = self._optimizer.apply(self._packed.of(members), loss_of, lr_scale=lr_scale)
        self.steps += 1
        accuracy = (gains[:, 0] > gains[:, 1]).float().mean()
        return metrics | {"loss": losses.mean().item(), "accuracy": accuracy.item()}

    def _logprobs(self, members: Sequence[int]) -> Tensor:
        """`(trajectories,)`: summed over all replies of these trajectories; 0 for the others."""
        model = self._optimizer.logprobs
        sums = torch.zeros(len(self._packed.sequences), device=model.device)
        packed = self._packed.of(members)
        for found in model.sweep(packed, micro_tokens=self._optimizer.micro_tokens(packed)):
            sums.index_add_(0, self._owner[found.token_ids], found.logprobs)
        return sums

    def _settings(self) -> dict[str, Any]:
        names = {"learning_rate", "muon_lr", "warmup_steps", "max_grad_norm", "beta"}
        return self.config.model_dump(include=names) | {
            "steps": self.total_steps,
            "batch_size": self._batch_size,
            "seed": self._seed,
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": self._settings(),
            "steps": self.steps,
            "reference": self._reference,
            **self._optimizer.state_dict(),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        check_same_settings(self._settings(), stored["settings"])
        if stored["reference"].shape != self._reference.shape:
            raise ConfigError(
                f"this state was made with {len(stored['reference']) // 2} pairs, now there are {self._pairs}"
            )
        self._optimizer.load_state_dict(stored)
        self._reference = stored["reference"].clone()
        self.steps = stored["steps"]


def weighted_logprobs(found: TokenLogProbs, *, weights: Tensor) -> Loss:
    """`weights` are `(tokens,)` of the whole batch."""
    return (weights[found.token_ids] * found.logprobs).sum(), {}
