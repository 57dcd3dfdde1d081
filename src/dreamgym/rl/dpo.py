"""DPO: of two trajectories of one task, one that succeeded is preferred to one that failed.

The loss of a pair depends on both trajectories as wholes. So the pairs are first scored without gradients,
which gives what each trajectory's log-prob weighs; then the weighted log-probs have exactly the gradient of
the loss, and trajectories of any length are computed in lots of any size.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from dreamgym.errors import ConfigError
from dreamgym.rl.logprobs import Scores
from dreamgym.rl.losses import preference_loss
from dreamgym.rl.optimizer_step import Updater, Updating, same_settings
from dreamgym.rl.packing import cut
from dreamgym.rl.sft import SFTSettings, batch, schedule
from dreamgym.types import Trajectory

Pair = tuple[Trajectory, Trajectory]
"""(chosen, rejected)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOSettings(SFTSettings):
    """`batch` counts pairs."""

    beta: float = 0.1


def preference_pairs(
    trajectories: Sequence[Trajectory], *, most: int | None = None, seed: int = 0
) -> list[Pair]:
    """A success and a failure on the same task, drawn anew for each pair.

    Every task with both gives as many pairs as it has of the more frequent one; at most `most` in all.
    """
    by_task: dict[str, tuple[list[Trajectory], list[Trajectory]]] = defaultdict(lambda: ([], []))
    for trajectory in trajectories:
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
    return pairs[:most]


class DPOLearner:
    """Call `step` until `done`. The reference is the policy as it was when the learner was made."""

    def __init__(
        self,
        model: Any,
        pairs: Sequence[Pair],
        settings: DPOSettings,
        *,
        updating: Updating = nullcontext,
    ) -> None:
        if not pairs:
            raise ConfigError("expected pairs of a success and a failure on the same task, got none")
        self.settings = settings
        self.steps = 0
        self._pairs = len(pairs)
        self._updater = Updater(model, settings, updating=updating)
        # Trajectory 2i is the chosen one of pair i, 2i + 1 the rejected one.
        self._strips = cut([trajectory for pair in pairs for trajectory in pair])
        self._owner = torch.zeros(self._strips.tokens, dtype=torch.long, device=self._updater.scorer.device)
        for number, slots in enumerate(self._strips.slots_of_trajectory):
            self._owner[slots.start : slots.stop] = number
        self._reference = self._logprobs(range(2 * len(pairs)))

    @property
    def done(self) -> bool:
        return self.steps >= self.settings.steps

    def step(self) -> dict[str, float]:
        """One weight change; `preferred` is the share of the batch's pairs that were in order before it."""
        pairs = batch(self._pairs, self.steps, self.settings.batch, self.settings.seed)
        pairs = sorted(set(pairs))  # a batch that reaches into the next epoch may draw a pair twice
        members = [2 * pair + side for pair in pairs for side in (0, 1)]
        gains = (self._logprobs(members) - self._reference)[members].view(-1, 2).requires_grad_()
        losses = preference_loss(gains[:, 0], gains[:, 1], beta=self.settings.beta)
        (pull,) = torch.autograd.grad(losses.mean(), gains)
        weights = torch.zeros(len(self._reference), device=pull.device)
        weights[members] = pull.flatten()

        def loss_of(scores: Scores) -> Tensor:
            return (weights[self._owner[scores.slots]] * scores.logprobs).sum()

        norm = self._updater.apply(
            self._strips.of(members), loss_of, rate=schedule(self.steps, self.settings)
        )
        self.steps += 1
        in_order = (gains[:, 0] > gains[:, 1]).float().mean()
        return {"loss": losses.mean().item(), "preferred": in_order.item(), "grad_norm": norm}

    def _logprobs(self, members: Sequence[int]) -> Tensor:
        """`(trajectories,)`: of all replies of each of these; 0 for the others."""
        scorer = self._updater.scorer
        found = torch.zeros(len(self._strips.of_trajectory), device=scorer.device)
        for scores in scorer.sweep(self._strips.of(members), micro_tokens=self.settings.micro_tokens):
            found.index_add_(0, self._owner[scores.slots], scores.logprobs)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {
            "settings": asdict(self.settings),
            "steps": self.steps,
            "reference": self._reference.clone(),
            **self._updater.state_dict(),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: the state is of other settings, pairs or of another model.
        """
        same_settings(asdict(self.settings), stored["settings"])
        if stored["reference"].shape != self._reference.shape:
            raise ConfigError(
                f"this state was made with {len(stored['reference']) // 2} pairs, now there are {self._pairs}"
            )
        self._updater.load_state_dict(stored)
        self._reference = stored["reference"].clone()
        self.steps = stored["steps"]
