"""Changes weights: gradients added up over lots of strips, clipped, applied, and all of it resumable.

The weights are those that a language model may be serving at this moment, so they change in place, and only
within `updating`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dreamgym.errors import ConfigError
from dreamgym.muon import Muon
from dreamgym.rl.logprobs import Scorer, Scores
from dreamgym.rl.packing import PackedSequence, micro_batches

Updating = Callable[[], AbstractContextManager[None]]
"""Entered while weights change: `LocalLanguageModel.updating`, where one serves them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """How gradients become weights."""

    learning_rate: float = 3e-4
    muon_lr: float | None = None
    """If given, weight matrices learn by Muon at this rate: for models from scratch, where 0.02 is usual."""
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    micro_tokens: int = 8192
    """Tokens, with padding, of one forward and backward pass: memory, not meaning."""
    temperature: float = 1.0
    """At which the policy's tokens are drawn."""
    seed: int = 0


class Updater:
    """A model's trainable weights, and whatever else learns with them, under AdamW (and Muon, by setting)."""

    def __init__(
        self,
        model: Any,
        settings: UpdateSettings,
        *,
        beside: nn.Module | None = None,
        updating: Updating = nullcontext,
    ) -> None:
        """
        Args:
            beside: learns with the model and is not part of it (a value head).
        """
        self.scorer = Scorer(model, temperature=settings.temperature)
        self._settings = settings
        self._updating = updating
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if not self._weights:
            raise ConfigError(
                "expected a model with weights that learn, got one whose weights are all frozen"
            )
        self._beside = dict(beside.named_parameters()) if beside is not None else {}
        self._parameters = [*self._weights.values(), *self._beside.values()]
        self._optimisers = self._make_optimisers()
        self.updates = 0
        """Weight changes so far."""

    def apply(
        self, strips: Sequence[PackedSequence], loss_of: Callable[[Scores], Tensor], *, rate: float = 1.0
    ) -> float:
        """One weight change by the gradient of the sum of `loss_of` over all lots; returns its norm.

        A gradient that is not finite changes nothing.

        Args:
            rate: times the learning rate.
        """
        strips = [strip for strip in strips if strip.tokens]
        for lot in micro_batches(strips, self._settings.micro_tokens):
            loss_of(self.scorer(lot)).backward()  # type: ignore[no-untyped-call]
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._settings.gradient_clip))
        if norm < float("inf"):
            with self._updating():
                for optimiser, usual in self._optimisers:
                    for group in optimiser.param_groups:
                        group["lr"] = usual * rate
                    optimiser.step()
            self.updates += 1
        for parameter in self._parameters:
            parameter.grad = None
        return norm

    def _make_optimisers(self) -> list[tuple[torch.optim.Optimizer, float]]:
        """Each with its learning rate."""
        settings = self._settings
        turned: list[Tensor] = []
        if settings.muon_lr is not None:
            turned = [p for name, p in self._weights.items() if p.ndim == 2 and "embed" not in name]
        known = set(map(id, turned))
        rest = [parameter for parameter in self._parameters if id(parameter) not in known]
        made: list[tuple[torch.optim.Optimizer, float]] = []
        if rest:
            adam = torch.optim.AdamW(rest, betas=settings.betas, weight_decay=settings.weight_decay)
            made.append((adam, settings.learning_rate))
        if turned and settings.muon_lr is not None:
            made.append((Muon(turned), settings.muon_lr))
        return made

    def state_dict(self) -> dict[str, Any]:
        return {
            "model": _copied(self._weights),
            "beside": _copied(self._beside),
            "optimisers": [copy.deepcopy(optimiser.state_dict()) for optimiser, _ in self._optimisers],
            "updates": self.updates,
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        with self._updating():
            restore(self._weights, stored["model"])
            restore(self._beside, stored["beside"])
        for (optimiser, _), state in zip(self._optimisers, stored["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.updates = stored["updates"]


@torch.no_grad()
def restore(weights: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> None:
    """In place.

    Raises:
        ConfigError: they are not weights of the same model.
    """
    if weights.keys() != stored.keys():
        odd = sorted(weights.keys() ^ stored.keys())
        raise ConfigError(
            f"expected a checkpoint of the same model, these weights are not in both: {odd[:5]}"
        )
    for name, weight in weights.items():
        if weight.shape != stored[name].shape:
            raise ConfigError(
                f"expected a checkpoint of the same model, {name!r} has the shape {tuple(weight.shape)}, "
                f"in the checkpoint {tuple(stored[name].shape)}"
            )
        weight.copy_(stored[name])


def same_settings(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: a state was made with other settings, so going on from it would be neither run.
    """
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"this state was made with {name}={theirs.get(name)!r}, now {value!r} is asked for; "
                "start anew, or use the same settings to go on"
            )


def _copied(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in weights.items()}
