"""Our GRPO against TRL's: its formulas on random tensors, and whole updates from the same trajectories."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from dreamgym.config import AgentConfig, LearnerConfig
from dreamgym.models.tiny import save
from dreamgym.rl import losses
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rl.packing import pack
from dreamgym.types import RolloutGroup
from tests.invariants.test_learners import Gradients, recorded
from tests.rl.echo_environment import TOKENIZER, nano_model

LOW, HIGH, LONGEST = 0.2, 0.28, 12
NAMES: dict[str, losses.LossNormalization] = {
    "dapo": "token",
    "bnpo": "token",
    "grpo": "trajectory",
    "dr_grpo": "constant",
}
"""TRL's names of what a token weighs."""
TALKING = AgentConfig(show_actions="never", max_tokens=8)


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")


def trainer(folder: Path, rows: Sequence[dict[str, Any]], **settings: Any) -> Any:
    """TRL's, over the weights that `nano_model` has."""
    if not (folder / "model").exists():
        save(nano_model(), TOKENIZER, folder / "model")
    hooks = {name: settings.pop(name) for name in ("rollout_func", "callbacks") if name in settings}
    config = {
        "output_dir": str(folder / "trl"),
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": LONGEST,
        "epsilon": LOW,
        "epsilon_high": HIGH,
        "max_grad_norm": 0.0,  # gradients as they are
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.95,
        "bf16": False,
        "use_cpu": True,
        "shuffle_dataset": False,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": [],
    }
    return GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=lambda **given: given.get("earned", [0.0] * 16),
        args=GRPOConfig(**config | settings),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=TOKENIZER,
        **hooks,
    )


def random_batch(seed: int = 0) -> dict[str, Tensor]:
    """Trajectories of several lengths with words of the environment in them, off policy both ways."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, len(TOKENIZER), (8, 5 + LONGEST), generator=random)
    lengths = torch.tensor([12, 1, 7, 3, 12, 5, 9, 2])
    written = (torch.arange(LONGEST)[None] < lengths[:, None]).long()
    sampled = torch.rand((8, LONGEST), generator=random) < 0.7
    sampled[:, 0] = True

    def around(spread: float) -> Tensor:
        usual = -math.log(len(TOKENIZER))
        return usual + spread * torch.randn((8, LONGEST), generator=random)

    return {
        "prompt_ids": tokens[:, :5],
        "prompt_mask": torch.ones((8, 5), dtype=torch.long),
        "completion_ids": tokens[:, 5:],
        "completion_mask": written,
        "tool_mask": sampled.long(),
        "advantages": torch.randn(8, generator=random),
        "old_per_token_logps": around(0.5),
        "ref_per_token_logps": around(0.5),
        "num_items_in_batch": (written * sampled).sum(),
    }


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def same(found: dict[str, Tensor], expected: dict[str, Tensor], closeness: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    assert largest > 1e-3
    for name, grad in found.items():
        torch.testing.assert_close(grad, expected[name], atol=closeness * largest, rtol=closeness)


@pytest.mark.parametrize(
    ("loss_type", "kl", "corrected", "bonus"),
    [
        ("dapo", 0.0, False, 0.0),
        ("dapo", 0.1, False, 0.01),
        ("bnpo", 0.1, True, 0.0),
        ("grpo", 0.1, False, 0.0),
        ("dr_grpo", 0.1, True, 0.0),
    ],
)
def test_loss_and_gradient_are_those_of_trl(
    tmp_path: Path, loss_type: str, kl: float, corrected: bool, bonus: float
) -> None:
    """Clip-higher, lengths, KL and entropy, on tokens that are partly not the policy's own."""
    batch = random_batch()
    theirs = trainer(
        tmp_path,
        [{"prompt": "x"}] * 4,
        loss_type=loss_type,
        beta=kl,
        use_bias_correction_kl=corrected,
        entropy_coef=bonus,
    )
    theirs.model.eval()
    expected = theirs._compute_loss(theirs.model, batch)
    expected.backward()

    model = nano_model()
    tokens = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
    logits = model(input_ids=tokens, use_cache=False).logits[:, 4:-1]
    trained = (batch["completion_mask"] * batch["tool_mask"]).bool()
    logits, targets = logits[trained], batch["completion_ids"][trained]
    logprobs = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    old_logprobs, advantages = (
        batch["old_per_token_logps"][trained],
        batch["advantages"][:, None].expand_as(trained)[trained],
    )
    stopped = losses.clipped(logprobs, old_logprobs, advantages, clip_low=LOW, clip_high=HIGH)
    assert 5 < int(stopped.sum()) < len(stopped) - 5, "both sides of the bounds are met"
    loss = losses.clipped_policy_loss(logprobs, old_logprobs, advantages, clip_low=LOW, clip_high=HIGH)
    reference = batch["ref_per_token_logps"][trained]
    loss = loss + kl * losses.kl_estimate(logprobs, reference, old_logprobs if corrected else None)
    loss = loss - bonus * losses.entropy(logits)
    lengths = trained.sum(1)
    weights = losses.token_weights(lengths.tolist(), NAMES[loss_type], constant=LONGEST)
    found = (torch.tensor(weights).repeat_interleave(lengths) * loss).sum()
    found.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    same(gradients(model), gradients(theirs.model))


class Watch(TrainerCallback):  # type: ignore[misc]
    """Looks at the gradients of TRL's trainer in the moment before they are applied."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Tensor]] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        self.seen.append({name: grad.clone() for name, grad in gradients(given["model"]).items()})


def flat_rollouts(groups: Sequence[RolloutGroup]) -> dict[str, dict[str, Any]]:
    """For each task what a `rollout_func` returns: a row of tokens per trajectory, and which are sampled."""
    found: dict[str, dict[str, Any]] = {}
    for group in groups:
        packed = pack(group.trajectories)
        rollouts_of_task: dict[str, list[Any]] = {
            name: [] for name in ("prompt_ids", "completion_ids", "logprobs", "env_mask")
        }
        for (sequence,) in packed.sequences:
            tokens = [*sequence.tokens, sequence.targets[-1]]
            places = {place + 1 for place in sequence.positions}
            assert [tokens[place] for place in sorted(places)] == sequence.targets
            first = min(places)
            rollouts_of_task["prompt_ids"].append(tokens[:first])
            rollouts_of_task["completion_ids"].append(tokens[first:])
            rollouts_of_task["env_mask"].append([int(place in places) for place in range(first, len(tokens))])
            rollouts_of_task["logprobs"].append([0.0] * (len(tokens) - first))
        found[group.task.id] = rollouts_of_task | {
            "earned": [each.total_reward for each in group.trajectories]
        }
    return found


async def representable_rollouts() -> list[RolloutGroup]:
    """TRL takes one row of tokens per trajectory, so every sampled token must be an input of the next turn: a
    reply must not end with a token that the next prompt replaces."""

    def representable(group: RolloutGroup) -> bool:
        for sequence in pack(group.trajectories).all:
            pairs = zip(sequence.positions, sequence.targets, strict=True)
            inputs = [*sequence.tokens, sequence.targets[-1]]
            if any(inputs[position + 1] != target for position, target in pairs):
                return False
        return True

    for step in range(50):
        groups = await recorded(TALKING, step=step, size=4)
        if all(map(representable, groups)):
            return groups
    raise AssertionError("no rollouts without a replaced token")


@pytest.mark.parametrize(
    ("loss_type", "kl", "corrected"),
    [("dapo", 0.2, False), ("dapo", 0.2, True), ("grpo", 0.0, False)],
    ids=["dapo", "corrected", "grpo"],
)
async def test_two_epochs_over_the_same_trajectories_have_the_gradients_of_trls_trainer(
    tmp_path: Path, loss_type: str, kl: float, corrected: bool
) -> None:
    """The second weight change has ratios other than 1 and, by setting, a KL term other than 0."""
    groups = await representable_rollouts()
    known = flat_rollouts(groups)

    def rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
        rollouts_of_task = {name: [] for name in next(iter(known.values()))}  # type: ignore[var-annotated]
        for task in dict.fromkeys(prompts):
            for name, rows in known[task].items():
                rollouts_of_task[name] += rows
        return rollouts_of_task

    watch = Watch()
    theirs = trainer(
        tmp_path,
        [{"prompt": task} for task in known],
        rollout_func=rollouts,
        callbacks=[watch],
        loss_type=loss_type,
        beta=kl,
        use_bias_correction_kl=corrected,
        num_iterations=2,
        steps_per_generation=1,
        max_steps=2,
        max_completion_length=400,
    )
    theirs.train()

    model = nano_model()
    seen = Gradients(model)
    settings = LearnerConfig(
        clip_low=LOW,
        clip_high=HIGH,
        kl_coef=kl,
        kl_bias_correction=corrected,
        loss_normalization=NAMES[loss_type],
        epochs=2,
        old_logprobs="recomputed",
        learning_rate=3e-3,
        max_grad_norm=1e9,
    )
    found = GRPO(TrainableModel(model, seen.updating), settings).update(groups)
    assert found["updates"] == len(watch.seen) == 2
    assert found["approx_kl"] > 0
    # TRL adds 1e-4 to the deviation of a group, we add 1e-6.
    for mine, expected in zip(seen.seen, watch.seen, strict=True):
        same(mine, expected, closeness=2e-3)
