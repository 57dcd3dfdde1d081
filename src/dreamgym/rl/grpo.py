"""GRPO: the members of a rollout group are compared with one another, and no value head is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dreamgym.rl.learner import Lesson, PolicyLearner, PolicySettings, returns_of
from dreamgym.rl.objectives import advantage_unit, group_advantages, unanimous
from dreamgym.rl.strips import cut
from dreamgym.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings(PolicySettings):
    """Group relative policy optimisation."""

    scale_by_std: bool = True
    """Advantages in standard deviations of the group (GRPO), or as they are (Dr. GRPO)."""


class GRPOLearner(PolicyLearner):
    """A trajectory's tokens share the advantage of its return in its group, less the penalty of their turn if
    it was refused; unanimous groups are skipped."""

    settings: GRPOSettings

    def _prepare(self, groups: Sequence[RolloutGroup]) -> Lesson | None:
        scale = self.settings.scale_by_std
        torn = [group for group in groups if not unanimous(returns_of(group))]
        if not torn:
            return None
        trajectories = [trajectory for group in torn for trajectory in group.trajectories]
        of_each = torch.cat([group_advantages(returns_of(group), scale_by_std=scale) for group in torn])
        penalties = torch.cat([self._penalties_of(group) for group in torn])
        if not self.settings.negative_weight:  # what would count nothing need not be computed
            turns = torch.tensor([len(each.transitions) for each in trajectories])
            penalties = penalties[(of_each > 0).repeat_interleave(turns)]
            trajectories = [each for each, got in zip(trajectories, of_each.tolist(), strict=True) if got > 0]
            of_each = of_each[of_each > 0]
        strips = cut(trajectories)
        counts = torch.tensor([len(slots) for slots in strips.slots_of_trajectory])
        advantages = of_each.repeat_interleave(counts)
        advantages = advantages - penalties[torch.tensor(strips.turn_of_slot, dtype=torch.long)]
        behaviour = self._recorded(strips)
        once = self.settings.epochs == 1 and (self.settings.minibatch or len(counts)) >= len(counts)
        if behaviour is None and not once:
            behaviour = self._logprobs(self._scorer, strips)
        return Lesson(
            strips=strips,
            advantages=advantages.to(self._scorer.device),
            behaviour=behaviour,
        )

    def _penalties_of(self, group: RolloutGroup) -> Tensor:
        """Of each turn, in the unit that the group's advantages have."""
        found = torch.tensor([lost for each in group.trajectories for lost in self._penalties(each)])
        return found / advantage_unit(returns_of(group)) if self.settings.scale_by_std else found
