"""GRPO: the members of a rollout group are compared with one another, and no value head is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from dreamgym.rl.learner import Lesson, PolicyLearner, PolicySettings, returns_of
from dreamgym.rl.objectives import group_advantages, unanimous
from dreamgym.rl.strips import cut
from dreamgym.types import RolloutGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOSettings(PolicySettings):
    """Group relative policy optimisation."""

    scale_by_std: bool = True
    """Advantages in standard deviations of the group (GRPO), or as they are (Dr. GRPO)."""


class GRPOLearner(PolicyLearner):
    """A trajectory's tokens share the advantage of its return in its group; unanimous groups are skipped."""

    settings: GRPOSettings

    def _prepare(self, groups: Sequence[RolloutGroup]) -> Lesson | None:
        scale = self.settings.scale_by_std
        torn = [group for group in groups if not unanimous(returns_of(group))]
        if not torn:
            return None
        strips = cut([trajectory for group in torn for trajectory in group.trajectories])
        of_each = torch.cat([group_advantages(returns_of(group), scale_by_std=scale) for group in torn])
        counts = torch.tensor([len(slots) for slots in strips.slots_of_trajectory])
        behaviour = self._recorded(strips)
        once = self.settings.epochs == 1 and (self.settings.minibatch or len(counts)) >= len(counts)
        if behaviour is None and not once:
            behaviour = self._logprobs(self._scorer, strips)
        return Lesson(
            strips=strips,
            advantages=of_each.repeat_interleave(counts).to(self._scorer.device),
            behaviour=behaviour,
        )
