"""GRPO: advantages relative to the other rollouts of a group, without a value head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dreamgym.rl.losses import advantage_scale, group_advantages, zero_std
from dreamgym.rl.packing import pack
from dreamgym.rl.policy_gradient import PolicyGradient, TrainingBatch, group_returns
from dreamgym.types import RolloutGroup


class GRPO(PolicyGradient):
    """All tokens of a trajectory share the advantage of its return in its group.

    A turn adds the group's mean penalty less its own. Groups whose returns are all equal are skipped.

    Example::

        learner = dg.GRPO(agent, learning_rate=2e-4)
        metrics = learner.update(groups)
    """

    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        config = self.config
        kept = [group for group in groups if not zero_std(self._returns(group))]
        if not kept:
            return None
        trajectories = [trajectory for group in kept for trajectory in group.trajectories]
        of_trajectory = torch.cat(
            [group_advantages(self._returns(group), scale_by_std=config.scale_by_std) for group in kept]
        )
        of_turn = torch.cat([self._turn_advantages(group) for group in kept])
        if not config.negative_advantage_weight:  # tokens of weight 0 need not be computed
            turns = torch.tensor([len(each.chosen) for each in trajectories])
            positive = of_trajectory > 0
            of_turn = of_turn[positive.repeat_interleave(turns)]
            trajectories = [each for each, keep in zip(trajectories, positive.tolist(), strict=True) if keep]
            of_trajectory = of_trajectory[positive]
        packed = pack(trajectories)
        counts = torch.tensor([len(tokens) for tokens in packed.token_ranges])
        advantages = of_trajectory.repeat_interleave(counts)
        advantages = advantages + of_turn[torch.tensor(packed.turn_of_token, dtype=torch.long)]
        old_logprobs = self._recorded(packed)
        one_update = config.epochs == 1 and (config.minibatch_size or len(counts)) >= len(counts)
        if old_logprobs is None and not one_update:
            old_logprobs = self._all_logprobs(self._logprobs, packed)
        return TrainingBatch(
            packed=packed,
            advantages=advantages.to(self._logprobs.device),
            old_logprobs=old_logprobs,
            refused=self._refused_tokens(trajectories, packed),
        )

    def _returns(self, group: RolloutGroup) -> Tensor:
        return group_returns(group, self.config.return_gamma)

    def _turn_advantages(self, group: RolloutGroup) -> Tensor:
        """`(turns,)`: what each turn adds to its trajectory's advantage, on the same scale."""
        penalties = torch.tensor([lost for each in group.trajectories for lost in self._penalties(each)])
        advantages = penalties.mean() - penalties
        if self.config.scale_by_std:
            advantages = advantages / advantage_scale(self._returns(group))
        return advantages
