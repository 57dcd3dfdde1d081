"""GRPO: advantages relative to the other rollouts of a group, without a value head."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dreamgym.rl.losses import advantage_scale, group_advantages, zero_std
from dreamgym.rl.packing import exact_tokens, pack_turns
from dreamgym.rl.policy_gradient import PolicyGradient, TrainingBatch, group_returns
from dreamgym.types import RolloutGroup, Trajectory


class GRPO(PolicyGradient):
    """All tokens of a trajectory share the advantage of its return in its group.

    A turn adds the group's mean penalty less its own. Groups whose returns are all equal are skipped.

    Example::

        learner = dg.GRPO(agent, learning_rate=2e-4)
        metrics = learner.update(groups)
    """

    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        config, imitated = self.config, self._imitated_now(groups)
        kept = [group for group in groups if not zero_std(self._returns(group))]
        trajectories, of_trajectory, of_turn = self._advantages(kept)
        if not trajectories and not imitated:
            return None
        packed = pack_turns(
            [*([(each, True) for each in exact_tokens(trajectory)] for trajectory in trajectories), *imitated]
        )
        # An imitated episode has the advantage of a success that one of n rollouts has: about 1.
        of_trajectory = torch.cat([of_trajectory, torch.ones(len(imitated))])
        of_turn = torch.cat([of_turn, torch.zeros(packed.turn_count - len(of_turn))])
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

    def _advantages(self, groups: Sequence[RolloutGroup]) -> tuple[list[Trajectory], Tensor, Tensor]:
        """Trajectories to train on, the advantage of each, and what each of their turns adds."""
        if not groups:
            return [], torch.zeros(0), torch.zeros(0)
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        scaled = self.config.scale_by_std
        of_trajectory = torch.cat([group_advantages(self._returns(g), scale_by_std=scaled) for g in groups])
        of_turn = torch.cat([self._turn_advantages(group) for group in groups])
        if not self.config.negative_advantage_weight:  # tokens of weight 0 need not be computed
            turns = torch.tensor([len(each.chosen) for each in trajectories])
            positive = of_trajectory > 0
            of_turn = of_turn[positive.repeat_interleave(turns)]
            trajectories = [each for each, keep in zip(trajectories, positive.tolist(), strict=True) if keep]
            of_trajectory = of_trajectory[positive]
        return trajectories, of_trajectory, of_turn

    def _returns(self, group: RolloutGroup) -> Tensor:
        return group_returns(group, self.config.return_gamma)

    def _turn_advantages(self, group: RolloutGroup) -> Tensor:
        """`(turns,)`: what each turn adds to its trajectory's advantage, on the same scale."""
        penalties = torch.tensor([lost for each in group.trajectories for lost in self._penalties(each)])
        advantages = penalties.mean() - penalties
        if self.config.scale_by_std:
            advantages = advantages / advantage_scale(self._returns(group))
        return advantages
