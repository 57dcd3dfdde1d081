"""PPO: generalised advantages over turns, with a value head on the policy's hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dreamgym.config import LearnerConfig
from dreamgym.errors import ConfigError
from dreamgym.rl.gradients import Loss
from dreamgym.rl.logprobs import TokenLogProbs
from dreamgym.rl.losses import clipped_value_loss, gae
from dreamgym.rl.optimizers import Trainable
from dreamgym.rl.packing import NextPrompt, PackedBatch, pack
from dreamgym.rl.policy_gradient import PolicyGradient, PolicyLoss, TrainingBatch
from dreamgym.types import RolloutGroup, Trajectory


class PPOLoss(PolicyLoss):
    """With the loss of the value head."""

    def __call__(self, found: TokenLogProbs) -> Loss:
        policy_loss, metrics = super().__call__(found)
        batch, config = self.batch, self.config
        assert batch.values is not None
        assert batch.value_targets is not None
        assert found.values is not None
        turns = found.turn_ids
        loss = clipped_value_loss(
            found.values, batch.values[turns], batch.value_targets[turns], clip=config.value_clip
        )
        metrics["value_loss"] = self.turn_share * float(loss.detach().sum())
        metrics["value_mean"] = self.turn_share * float(found.values.detach().sum())
        return policy_loss + config.value_coef * self.turn_share * loss.sum(), metrics


class PPO(PolicyGradient):
    """All tokens of a turn share its advantage. The value head starts at 0 and trains with the policy.

    Example::

        learner = dg.PPO(agent, learning_rate=2e-4, epochs=2)
        metrics = learner.update(groups)
    """

    value_head: nn.Linear
    _loss = PPOLoss

    def __init__(
        self,
        agent: Trainable,
        config: LearnerConfig | None = None,
        *,
        next_prompt: NextPrompt | None = None,
        seed: int = 0,
        refusals: Sequence[str] = (),
        recorded: Sequence[Trajectory] = (),
        **overrides: Any,
    ) -> None:
        """`next_prompt` gives the prompt of the bootstrap value; by default `agent.next_prompt_tokens`."""
        super().__init__(agent, config, seed=seed, refusals=refusals, **overrides)
        if recorded or self.config.recorded_successes or self.config.own_successes:
            raise ConfigError(
                "PPO: expected learner.recorded_successes=0 and learner.own_successes=0, since imitated "
                "episodes have no values; use grpo or expert_iteration"
            )
        found: NextPrompt | None = next_prompt or getattr(agent, "next_prompt_tokens", None)
        if found is None:
            raise ConfigError("PPO: expected an agent with next_prompt_tokens, or next_prompt, got neither")
        self._next_prompt = found

    def _make_value_head(self, model: Any) -> nn.Linear:
        weight = model.get_output_embeddings().weight
        head = nn.Linear(weight.shape[1], 1, device=weight.device)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        return head

    def _prepare(self, groups: Sequence[RolloutGroup]) -> TrainingBatch | None:
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if not trajectories:
            return None
        packed = pack(trajectories, next_prompt=self._next_prompt)
        logprobs, values = self._before(packed)
        advantages = self._advantages(trajectories, packed, values)
        recorded = self._recorded(packed)
        return TrainingBatch(
            packed=packed,
            advantages=advantages[torch.tensor(packed.turn_of_token, dtype=torch.long)],
            old_logprobs=logprobs if recorded is None else recorded,
            values=values,
            value_targets=values + advantages,
            refused=self._refused_tokens(trajectories, packed),
        )

    def _before(self, packed: PackedBatch) -> tuple[Tensor, Tensor]:
        """Log-probs `(tokens,)` and values `(turns,)` before the update."""
        logprobs = torch.zeros(packed.tokens, device=self._logprobs.device)
        values = torch.zeros(packed.turn_count, device=self._logprobs.device)
        limit = self._optimizer.micro_tokens(packed.all)
        for found in self._logprobs.sweep(packed.all, micro_tokens=limit, bootstrap=True):
            assert found.hidden is not None
            logprobs[found.token_ids] = found.logprobs
            values[found.turn_ids] = self.value_head(found.hidden.float())[:, 0].detach()
        return logprobs, values

    def _advantages(self, trajectories: Sequence[Trajectory], packed: PackedBatch, values: Tensor) -> Tensor:
        """`(turns,)`; 0 for bootstrap values."""
        known = values.tolist()
        advantages = torch.zeros_like(values)
        for trajectory, turns, bootstrap in zip(
            trajectories, packed.turn_ranges, packed.bootstrap_ids, strict=True
        ):
            penalties = self._penalties(trajectory)
            of_turns = gae(
                [
                    transition.outcome.reward - penalty
                    for transition, penalty in zip(trajectory.chosen, penalties, strict=True)
                ],
                known[turns.start : turns.stop],
                0.0 if bootstrap is None else known[bootstrap],
                gamma=self.config.gamma,
                gae_lambda=self.config.gae_lambda,
            )
            advantages[turns.start : turns.stop] = torch.tensor(of_turns, device=values.device)
        return advantages
