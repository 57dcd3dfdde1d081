"""GRPO: the members of a rollout group are compared with one another, and no value head is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamgym.rl.losses import (
    advantage_unit,
    discounted_returns,
    group_advantages,
    step_advantages,
    unanimous,
)
from dreamgym.rl.packing import cut
from dreamgym.rl.policy_gradient import PolicyLearner, PolicySettings, TrainingBatch, returns_of
from dreamgym.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings(PolicySettings):
    """Group relative policy optimisation."""

    scale_by_std: bool = True
    """Advantages in standard deviations of the group (GRPO), or as they are (Dr. GRPO)."""
    step_weight: float = 0.0
    """What a turn's own advantage weighs beside its episode's (the ω of GiGPO): what came after it, against
    what came after other turns of the group that began in the same state. 0 for plain GRPO."""
    discount: float = 0.95
    """Per turn, of what came after it; only for that."""


class GRPOLearner(PolicyLearner):
    """A trajectory's tokens share the advantage of its return in its group. A turn's own part is added: its
    step advantage, if asked for, and its penalty less the group's mean. Unanimous groups are skipped."""

    settings: GRPOSettings

    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        scale = self.settings.scale_by_std
        torn = [group for group in groups if not unanimous(returns_of(group))]
        if not torn:
            return None
        trajectories = [trajectory for group in torn for trajectory in group.trajectories]
        of_each = torch.cat([group_advantages(returns_of(group), scale_by_std=scale) for group in torn])
        of_turn = torch.cat([self._of_turns(group) for group in torn])
        if not self.settings.negative_weight:  # what would count nothing need not be computed
            turns = torch.tensor([len(each.transitions) for each in trajectories])
            of_turn = of_turn[(of_each > 0).repeat_interleave(turns)]
            trajectories = [each for each, got in zip(trajectories, of_each.tolist(), strict=True) if got > 0]
            of_each = of_each[of_each > 0]
        strips = cut(trajectories)
        counts = torch.tensor([len(slots) for slots in strips.slots_of_trajectory])
        advantages = of_each.repeat_interleave(counts)
        advantages = advantages + of_turn[torch.tensor(strips.turn_of_slot, dtype=torch.long)]
        behaviour = self._recorded(strips)
        once = self.settings.epochs == 1 and (self.settings.minibatch or len(counts)) >= len(counts)
        if behaviour is None and not once:
            behaviour = self._logprobs(self._scorer, strips)
        return TrainingBatch(
            strips=strips,
            advantages=advantages.to(self._scorer.device),
            behaviour=behaviour,
        )

    def _of_turns(self, group: RolloutGroup) -> Tensor:
        """What each turn has of its own, in the unit that the group's advantages have."""
        settings = self.settings
        lost = torch.tensor([lost for each in group.trajectories for lost in self._penalties(each)])
        found = lost.mean() - lost  # whoever loses less than others has done better
        if settings.scale_by_std:
            found = found / advantage_unit(returns_of(group))
        if settings.step_weight:
            turns = [turn for each in group.trajectories for turn in each.transitions]
            rewards = ([turn.outcome.reward for turn in each.transitions] for each in group.trajectories)
            to_come = [each for of in rewards for each in discounted_returns(of, settings.discount)]
            found = found + settings.step_weight * step_advantages(
                [turn.state.text for turn in turns],
                torch.tensor(to_come),
                scale_by_std=settings.scale_by_std,
            )
        return found
