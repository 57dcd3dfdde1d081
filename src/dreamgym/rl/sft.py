"""Supervised learning of what recorded trajectories did: the usual start of an agent, and a baseline.

The trajectories carry the tokens of their turns (`agents.tokenize`), so an episode is read once, and the loss
is on the replies alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from torch import Tensor

from dreamgym.errors import ConfigError
from dreamgym.rl.logprobs import Scores
from dreamgym.rl.optimizer_step import Updater, UpdateSettings, Updating, same_settings
from dreamgym.rl.packing import PackedSequence, Untaught, cut
from dreamgym.types import Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class SFTSettings(UpdateSettings):
    """The learning rate rises for `warmup` updates, holds, and falls to nothing over the last part."""

    steps: int = 300
    """Weight changes in all."""
    batch: int = 16
    """Trajectories per weight change."""
    warmup: int = 10
    falling_share: float = 0.5
    exchanged: float = 0.7
    """Share of trajectories whose exchangeable names are exchanged: names as they really come must be seen,
    too."""


class SFTLearner:
    """Call `step` until `done`. A step depends on the settings, the data and its number alone."""

    def __init__(
        self,
        model: Any,
        trajectories: Sequence[Trajectory],
        settings: SFTSettings,
        *,
        exchangeable: Sequence[int] = (),
        untaught: Untaught | None = None,
        updating: Updating = nullcontext,
    ) -> None:
        """
        Args:
            untaught: turns that are read and not imitated: mistakes, after which the next turn is a lesson.
            trajectories: those worth imitating, with tokens; failures are the caller's to leave out.
            exchangeable: tokens of names that mean nothing by themselves, such as the number of a drawer.
                They are exchanged for each other at random, the same way throughout an episode, so that the
                model must copy what it reads and cannot learn by heart where things are.
        """
        if not trajectories:
            raise ConfigError("expected at least one trajectory to learn from, got none")
        self.settings = settings
        self._updater = Updater(model, settings, updating=updating)
        self._strips = cut(trajectories, untaught=untaught)
        self._exchangeable = sorted(exchangeable)
        self.steps = 0

    @property
    def done(self) -> bool:
        return self.steps >= self.settings.steps

    def step(self) -> dict[str, float]:
        """One weight change; `loss` is the mean negative log-prob of the batch's tokens before it."""
        members = batch(len(self._strips.of_trajectory), self.steps, self.settings.batch, self.settings.seed)
        tokens = max(1, sum(len(self._strips.slots_of_trajectory[member]) for member in members))
        total = 0.0

        def loss_of(scores: Scores) -> Tensor:
            nonlocal total
            loss = -scores.logprobs.sum() / tokens
            total += float(loss.detach())
            return loss

        strips = [strip for place, member in enumerate(members) for strip in self._exchanged(place, member)]
        norm = self._updater.apply(strips, loss_of, rate=schedule(self.steps, self.settings))
        self.steps += 1
        return {"loss": total, "grad_norm": norm, "tokens": tokens}

    def _exchanged(self, place: int, member: int) -> list[PackedSequence]:
        """The strips of a trajectory, with other names or as they are; a batch may hold it twice."""
        strips = self._strips.of_trajectory[member]
        chance = Random(f"{self.settings.seed}/{self.steps}/{place}/names")
        if len(self._exchangeable) < 2 or chance.random() >= self.settings.exchanged:
            return strips
        shuffled = chance.sample(self._exchangeable, len(self._exchangeable))
        other = dict(zip(self._exchangeable, shuffled, strict=True))
        return [
            replace(
                strip,
                tokens=[other.get(token, token) for token in strip.tokens],
                targets=[other.get(token, token) for token in strip.targets],
            )
            for strip in strips
        ]

    def state_dict(self) -> dict[str, Any]:
        return {"settings": asdict(self.settings), "steps": self.steps, **self._updater.state_dict()}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: the state is of other settings or of another model.
        """
        same_settings(asdict(self.settings), stored["settings"])
        self._updater.load_state_dict(stored)
        self.steps = stored["steps"]


def schedule(step: int, settings: SFTSettings) -> float:
    """What the learning rate is multiplied with.

    >>> usual = SFTSettings(steps=100, warmup=2, falling_share=0.5)
    >>> [schedule(step, usual) for step in (0, 1, 50, 75, 99)]
    [0.5, 1.0, 1.0, 0.5, 0.02]
    """
    rising = min(1.0, (step + 1) / max(1, settings.warmup))
    left = (settings.steps - step) / settings.steps
    return rising * min(1.0, left / settings.falling_share if settings.falling_share else 1.0)


def batch(count: int, step: int, size: int, seed: int) -> list[int]:
    """Members of the batch of a step: every epoch is shuffled anew, and its rest begins the next batch.

    >>> sorted(batch(4, 0, 2, seed=0) + batch(4, 1, 2, seed=0))
    [0, 1, 2, 3]
    """
    members: list[int] = []
    epoch, offset = divmod(step * size, count)
    while len(members) < size:
        order = list(range(count))
        Random(f"{seed}/{epoch}").shuffle(order)
        members += order[offset : offset + size - len(members)]
        epoch, offset = epoch + 1, 0
    return members
