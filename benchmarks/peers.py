"""Our objectives against verl's, formula by formula: how much they differ, and values for a test to keep.

    python benchmarks/peers.py [--write tests/rl/verl_values.json]

verl pins another transformers than ours and brings Ray along, so it gets an environment of its own:

    python -m venv peers
    peers/bin/pip install torch transformers accelerate ray tensordict omegaconf codetiming orjson dill
    peers/bin/pip install --no-deps verl==0.9.1
    PYTHONPATH=src peers/bin/python benchmarks/peers.py

Inputs are random tensors with padding and words of the environment among the trained tokens; what verl makes
of them, gradients included, is stored with them. TRL fits our pins, and tests compare with it directly.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dreamgym.rl import losses

ROWS, LONGEST, VOCABULARY = 8, 12, 11
LENGTHS = (12, 1, 7, 3, 12, 5, 9, 2)
GROUPS = (0, 0, 0, 1, 1, 1, 1, 1)
LOW, HIGH, VALUE_CLIP, GAMMA, GAE_LAMBDA = 0.2, 0.28, 0.3, 0.95, 0.9
MODES: dict[losses.LossNormalization, str] = {
    "token": "token-mean",
    "trajectory": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
"""verl's names of what a token weighs."""

Values = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", type=Path, help="keep inputs and verl's values in this file")
    arguments = parser.parse_args()
    given = inputs()
    theirs, mine = verl_values(given), our_values(given)
    for name, value in theirs.items():
        largest = max(map(abs, differences(mine[name], value)), default=0.0)
        print(f"{name:<28} largest difference {largest:.2e}")
    if arguments.write:
        from importlib.metadata import version

        stored = {"verl": version("verl"), "inputs": given, "values": rounded(theirs)}
        arguments.write.write_text(json.dumps(stored) + "\n", encoding="utf-8")


def inputs() -> Values:
    """Random, fixed by a seed, as plain lists."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int, mean: float = 0.0, spread: float = 1.0) -> Any:
        return rounded((mean + spread * torch.randn(shape, generator=random)).tolist())

    written = torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]
    sampled = torch.rand((ROWS, LONGEST), generator=random) < 0.7
    sampled[:, 0] = True
    return {
        "mask": (written & sampled).int().tolist(),
        "logprobs": normal(ROWS, LONGEST, mean=-2.0, spread=0.5),
        "old_logprobs": normal(ROWS, LONGEST, mean=-2.0, spread=0.5),
        "reference": normal(ROWS, LONGEST, mean=-2.0, spread=0.5),
        "advantages": normal(ROWS),
        "returns": [1.0, 0.0, 0.3, 1.0, 0.0, 0.0, 1.0, 0.5],
        "rewards": normal(ROWS, LONGEST),
        "values": normal(ROWS, LONGEST),
        "values_before": normal(ROWS, LONGEST),
        "value_targets": normal(ROWS, LONGEST),
        "left_at": normal(ROWS),
        "logits": normal(ROWS, LONGEST, VOCABULARY),
    }


def tensors(given: Values) -> dict[str, Tensor]:
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}


def with_gradient(loss_of: Callable[[Tensor], Tensor], at: Tensor) -> list[Any]:
    """The loss, and its gradient."""
    here = at.clone().requires_grad_()
    loss = loss_of(here)
    loss.backward()  # type: ignore[no-untyped-call]
    assert here.grad is not None
    return [loss.item(), here.grad.tolist()]


def our_values(given: Values) -> Values:
    """Each formula of `rl.objectives`, in the form in which verl gives it."""
    of = tensors(given)
    trained = of["mask"].bool()
    counts = trained.sum(1).tolist()
    advantages = of["advantages"][:, None].expand_as(trained)

    def policy_loss(lengths: losses.LossNormalization) -> Callable[[Tensor], Tensor]:
        weigh = losses.token_weights(counts, lengths, constant=LONGEST)
        weights = torch.tensor(weigh, dtype=torch.float64)[:, None] * of["mask"]

        def loss(logprobs: Tensor) -> Tensor:
            each = losses.clipped_policy_loss(
                logprobs, of["old_logprobs"], advantages, clip_low=LOW, clip_high=HIGH
            )
            return (weights * each).sum()

        return loss

    def mean(each: Tensor) -> Tensor:
        return each[trained].mean()

    found: Values = {
        f"policy_loss_{lengths}": with_gradient(policy_loss(lengths), of["logprobs"]) for lengths in MODES
    }
    stopped = losses.clipped(of["logprobs"], of["old_logprobs"], advantages, clip_low=LOW, clip_high=HIGH)
    return found | {
        "clip_fraction": float(stopped[trained].double().mean()),
        "value_loss": with_gradient(
            lambda values: mean(
                losses.clipped_value_loss(values, of["values_before"], of["value_targets"], clip=VALUE_CLIP)
            ),
            of["values"],
        ),
        "kl": with_gradient(
            lambda logprobs: mean(losses.kl_estimate(logprobs, of["reference"])), of["logprobs"]
        ),
        "entropy": with_gradient(lambda logits: mean(losses.entropy(logits)), of["logits"]),
        "group_advantages": _group_advantages(of, scale=True),
        "group_advantages_unscaled": _group_advantages(of, scale=False),
        "gae": _gae(of, [0.0] * ROWS),
        "gae_truncated": _gae(of, of["left_at"].tolist()),
    }


def _group_advantages(of: dict[str, Tensor], *, scale: bool) -> list[float]:
    groups = torch.tensor(GROUPS)
    each = [
        losses.group_advantages(of["returns"][groups == group], scale_by_std=scale)
        for group in sorted(set(GROUPS))
    ]
    found: list[float] = torch.cat(each).tolist()
    return found


def _gae(of: dict[str, Tensor], left_at: list[float]) -> list[list[float]]:
    """Of each row's trained places, which stand for turns."""
    found = []
    for row, trained in enumerate(of["mask"].bool()):
        rewards, values = (of[name][row][trained].tolist() for name in ("rewards", "values"))
        found.append(losses.gae(rewards, values, left_at[row], gamma=GAMMA, gae_lambda=GAE_LAMBDA))
    return found


def verl_values(given: Values) -> Values:
    import numpy as np
    from verl.trainer.ppo import core_algos
    from verl.workers.config import FSDPActorConfig

    of = tensors(given)
    mask = of["mask"]
    actor = FSDPActorConfig(
        strategy="fsdp",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio_low=LOW,
        clip_ratio_high=HIGH,
        clip_ratio_c=1e9,  # no third bound
    )

    def policy_loss(logprobs: Tensor, mode: str) -> Any:
        spread = of["advantages"][:, None].expand_as(mask)
        return core_algos.compute_policy_loss_vanilla(
            of["old_logprobs"], logprobs, spread, mask, loss_agg_mode=mode, config=actor
        )

    def group_advantages(*, scale: bool) -> list[float]:
        rewards = torch.zeros_like(mask)
        rewards[:, 0] = of["returns"]
        values, _ = core_algos.compute_grpo_outcome_advantage(
            rewards, torch.ones_like(mask), np.array(GROUPS), norm_adv_by_std_in_grpo=scale
        )
        found: list[float] = values[:, 0].tolist()
        return found

    def gae(left_at: Tensor) -> list[list[float]]:
        """verl knows no truncation: what is still expected is part of the last reward instead. Its advantages
        are normalised over the batch, its returns are not, and they are advantages plus values."""
        rewards = of["rewards"].clone()
        for row, trained in enumerate(mask.bool()):
            rewards[row, int(trained.nonzero().max())] += GAMMA * left_at[row]
        _, returns = core_algos.compute_gae_advantage_return(
            rewards, of["values"], mask, *torch.tensor([GAMMA, GAE_LAMBDA], dtype=torch.float64)
        )
        plain = returns - of["values"]
        return [plain[row][trained].tolist() for row, trained in enumerate(mask.bool())]

    def loss_in(mode: str) -> Callable[[Tensor], Tensor]:
        return lambda logprobs: policy_loss(logprobs, mode)[0]

    return {
        **{
            f"policy_loss_{lengths}": with_gradient(loss_in(mode), of["logprobs"])
            for lengths, mode in MODES.items()
        },
        "clip_fraction": policy_loss(of["logprobs"], "token-mean")[1]["actor/pg_clipfrac"],
        "value_loss": with_gradient(
            lambda values: core_algos.compute_value_loss(
                values, of["value_targets"], of["values_before"], mask, VALUE_CLIP
            )[0],
            of["values"],
        ),
        "kl": with_gradient(
            lambda logprobs: core_algos.agg_loss(
                core_algos.kl_penalty(logprobs, of["reference"], "k3"), mask, "token-mean"
            ),
            of["logprobs"],
        ),
        "entropy": with_gradient(lambda logits: core_algos.compute_entropy_loss(logits, mask), of["logits"]),
        "group_advantages": group_advantages(scale=True),
        "group_advantages_unscaled": group_advantages(scale=False),
        "gae": gae(torch.zeros_like(of["left_at"])),
        "gae_truncated": gae(of["left_at"]),
    }


def differences(mine: Any, theirs: Any) -> list[float]:
    """Of all numbers in two values of the same form."""
    if isinstance(theirs, list):
        pairs = zip(mine, theirs, strict=True)
        return [gap for one, other in pairs for gap in differences(one, other)]
    return [mine - theirs]


def rounded(value: Any) -> Any:
    """To as many digits as a comparison needs."""
    if isinstance(value, dict):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, list):
        return [rounded(one) for one in value]
    return round(value, 9)


if __name__ == "__main__":
    main()
