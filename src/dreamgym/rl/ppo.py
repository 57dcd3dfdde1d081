"""PPO: each turn is compared with what a value head, reading along with the policy, had expected."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dreamgym.rl.logprobs import Scores
from dreamgym.rl.losses import clipped_value_loss, gae
from dreamgym.rl.optimizer_step import Updating
from dreamgym.rl.packing import After, PackedBatch, cut
from dreamgym.rl.policy_gradient import PolicyLearner, PolicySettings, TrainingBatch
from dreamgym.types import RolloutGroup, Trajectory

_TINY = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PPOSettings(PolicySettings):
    """Proximal policy optimisation."""

    discount: float = 0.95
    """Per turn."""
    decay: float = 0.95
    """The λ of GAE."""
    value_weight: float = 0.5
    value_clip: float | None = 0.2
    value_shapes_policy: bool = True
    """Whether the value loss also moves the policy's weights, or the value head alone."""
    normalise_advantages: bool = False
    """To a deviation of 1 over the batch. Off, since outcome rewards have a natural unit, and a batch that
    nearly always succeeds would have the errors of its values blown up."""


class PPOLearner(PolicyLearner):
    """Generalised advantages over turns; all tokens of a turn share its advantage."""

    settings: PPOSettings

    def __init__(
        self, model: Any, settings: PPOSettings, *, after: After, updating: Updating = nullcontext
    ) -> None:
        """
        Args:
            after: what the policy would have read next, in tokens, where an episode was truncated: the value
                there stands for all that would have followed (`agent.next_prompt_tokens`).
        """
        width = model.get_output_embeddings().weight
        head = nn.Linear(width.shape[1], 1, device=width.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        super().__init__(model, settings, value_head=head, updating=updating)
        self.value_head = head
        self._after = after

    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if not trajectories:
            return None
        strips = cut(trajectories, self._after)
        logprobs, values = self._before(strips)
        advantages = self._advantages(trajectories, strips, values)
        targets = values + advantages
        if self.settings.normalise_advantages:
            real = torch.tensor([turn for turns in strips.turns_of_trajectory for turn in turns])
            spread = advantages[real].std(correction=0)
            advantages = (advantages - advantages[real].mean()) / (spread + _TINY)
        recorded = self._recorded(strips)
        return TrainingBatch(
            strips=strips,
            advantages=advantages[torch.tensor(strips.turn_of_slot, dtype=torch.long)],
            behaviour=logprobs if recorded is None else recorded,
            values=values,
            value_targets=targets,
        )

    def _before(self, strips: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs `(tokens,)` and values `(turn slots,)` before the update."""
        logprobs = torch.zeros(strips.tokens, device=self._scorer.device)
        values = torch.zeros(strips.turn_slots, device=self._scorer.device)
        for scores in self._scorer.sweep(strips.all, micro_tokens=self.settings.micro_tokens, beyond=True):
            logprobs[scores.slots] = scores.logprobs
            values[scores.turn_slots] = self.value_head(scores.read.float())[:, 0].detach()
        return logprobs, values

    def _advantages(self, trajectories: Sequence[Trajectory], strips: PackedBatch, values: Tensor) -> Tensor:
        """`(turn slots,)`; 0 for turns that did not come."""
        expected = values.tolist()
        found = torch.zeros_like(values)
        for trajectory, turns, after in zip(
            trajectories, strips.turns_of_trajectory, strips.after_of_trajectory, strict=True
        ):
            advantages = gae(
                [
                    transition.outcome.reward - lost
                    for transition, lost in zip(
                        trajectory.transitions, self._penalties(trajectory), strict=True
                    )
                ],
                expected[turns.start : turns.stop],
                0.0 if after is None else expected[after],
                discount=self.settings.discount,
                decay=self.settings.decay,
            )
            found[turns.start : turns.stop] = torch.tensor(advantages, device=found.device)
        return found

    def _further_loss(
        self, lesson: TrainingBatch, scores: Scores, share: float, sums: dict[str, float]
    ) -> Tensor | float:
        assert lesson.values is not None
        assert lesson.value_targets is not None
        read = scores.read if self.settings.value_shapes_policy else scores.read.detach()
        values = self.value_head(read.float())[:, 0]
        turns = scores.turn_slots
        loss = clipped_value_loss(
            values, lesson.values[turns], lesson.value_targets[turns], clip=self.settings.value_clip
        )
        sums["value_loss"] += share * float(loss.detach().sum())
        sums["value_mean"] += share * float(values.detach().sum())
        return self.settings.value_weight * share * loss.sum()
