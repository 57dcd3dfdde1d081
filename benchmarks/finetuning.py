"""What a well-kept trainer costs on a small model: our fine-tuning loop against `transformers.Trainer`.

    python benchmarks/finetuning.py [--quick] [--json] [--preset tiny] [--rounds 3] [--updates 15]

Every side makes the same updates from the same weights: one batch of 32 examples from shipped trajectories,
AdamW with a constant rate, gradients clipped at 1, single precision, one thread. In turn, in one run, each
after its warm-up; who is first changes every round. `ours, whole` sends every position through the output
layer, as the trainer's side does: it separates what the loop saves from what fewer logits save.

CPU time, since wall time depends on the other load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import logging

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from dreamgym.experience.dataset import Example, examples
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.models.local.tokens import TextCodec
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rl.packing import pack_replies
from dreamgym.rl.sft import SFT

BATCH = 32
WARM_UP = 2
RATE = 1e-3
LOOP = "ours"
WHOLE = "ours, whole"
TRAINER = "Trainer"


@dataclass(frozen=True, slots=True)
class Measured:
    """One side's updates after its warm-up."""

    cpu: float
    """Seconds per update."""
    loss: float
    """Of the last update: equal sides end alike."""


class Whole(torch.nn.Module):
    """A model that shows no body of its own, so that nothing but its full logits can be asked for."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.inside = model

    def forward(self, **inputs: Any) -> Any:
        return self.inside(**inputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round of 4 updates")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=15)
    arguments = parser.parse_args()
    rounds, updates = (1, 4) if arguments.quick else (arguments.rounds, arguments.updates)
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    rows = asyncio.run(batch())
    tokenizer = make_tokenizer((one.prompt + one.reply for one in rows), vocab_size=1024)
    sides: dict[str, Callable[[], Measured]] = {
        LOOP: lambda: ours(make_model(arguments.preset, tokenizer), tokenizer, rows, updates),
        WHOLE: lambda: ours(make_model(arguments.preset, tokenizer), tokenizer, rows, updates, whole=True),
        TRAINER: lambda: theirs(make_model(arguments.preset, tokenizer), tokenizer, rows, updates),
    }
    found: dict[str, list[Measured]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            found[name].append(sides[name]())
    parameters = make_model(arguments.preset, tokenizer).num_parameters()
    lengths = [len(tokens) for tokens, _ in encoded(tokenizer, rows)]
    result = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, 1 thread",
        "model": f"{arguments.preset}, {parameters:,} parameters",
        "batch": f"{BATCH} x {round(statistics.mean(lengths))} tokens (longest {max(lengths)})",
        "rounds": rounds,
        "updates": updates,
        **compared(found),
    }
    print(json.dumps(result, indent=2) if arguments.json else table(result))


async def batch() -> list[Example]:
    """Of like length, as our loop would put them together."""
    recorded = islice(read_trajectories(builtin_dataset()), 40)
    made = examples(recorded, HouseholdAnnotator(), settings=PromptSettings(actor=AGENT, history=1))
    steps = sorted([one async for one in made if one.position >= 0], key=lambda one: len(one.prompt))
    middle = len(steps) // 2
    return steps[middle : middle + BATCH]


def encoded(tokenizer: Any, rows: list[Example]) -> list[tuple[list[int], int]]:
    """Tokens of each example, and where its reply begins."""
    codec = TextCodec(tokenizer)
    prompts = [codec.start(one.prompt) for one in rows]
    replies = [codec.more(one.reply) for one in rows]
    return [
        ([*prompt, *reply, tokenizer.eos_token_id], len(prompt))
        for prompt, reply in zip(prompts, replies, strict=True)
    ]


def ours(model: Any, tokenizer: Any, rows: list[Example], updates: int, *, whole: bool = False) -> Measured:
    tokens = encoded(tokenizer, rows)
    sft = SFT(
        TrainableModel(Whole(model) if whole else model),
        pack_replies((row[:start], row[start:]) for row, start in tokens),
        steps=WARM_UP + updates,
        batch_size=BATCH,
        warmup_steps=1,
        decay_fraction=0.0,
        learning_rate=RATE,
    )
    seen: list[tuple[float, float]] = []
    while not sft.done:
        loss = sft.step()["loss"]
        seen.append((time.process_time(), loss))
    return measured(seen, updates)


def theirs(model: Any, tokenizer: Any, rows: list[Example], updates: int) -> Measured:
    tokens = encoded(tokenizer, rows)
    seen: list[tuple[float, float]] = []

    class Note(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            seen.append((time.process_time(), losses[-1]))

    losses: list[float] = []

    class Kept(Trainer):  # type: ignore[misc]
        """Reads the loss after every update, as our progress does."""

        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            losses.append(loss.item())
            return loss

    with tempfile.TemporaryDirectory() as folder:
        trainer = Kept(
            model=model,
            args=TrainingArguments(
                output_dir=folder,
                max_steps=WARM_UP + updates,
                per_device_train_batch_size=BATCH,
                learning_rate=RATE,
                lr_scheduler_type="constant",
                optim="adamw_torch",
                adam_beta2=0.95,
                max_grad_norm=1.0,
                use_cpu=True,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                remove_unused_columns=False,
                train_sampling_strategy="sequential",
            ),
            train_dataset=tokens * (WARM_UP + updates),
            data_collator=collate,
            callbacks=[Note()],
        )
        trainer.remove_callback(PrinterCallback)  # standard output is for the result
        trainer.train()
    return measured(seen, updates)


def collate(rows: list[tuple[list[int], int]]) -> dict[str, torch.Tensor]:
    """Padded on the right, prompts no targets: as our loop does it."""
    width = max(len(tokens) for tokens, _ in rows)
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), -100)
    for row, (tokens, reply_at) in enumerate(rows):
        inputs[row, : len(tokens)] = torch.tensor(tokens)
        labels[row, reply_at : len(tokens)] = inputs[row, reply_at : len(tokens)]
    return {"input_ids": inputs, "labels": labels}


def measured(seen: list[tuple[float, float]], updates: int) -> Measured:
    assert len(seen) == WARM_UP + updates
    return Measured(cpu=(seen[-1][0] - seen[WARM_UP - 1][0]) / updates, loss=seen[-1][1])


def compared(found: dict[str, list[Measured]]) -> dict[str, Any]:
    """Medians of each side; ratios within a round, so that a slow minute of the machine slows both."""

    def ratios(side: str, base: str) -> dict[str, float]:
        each = [a.cpu / b.cpu for a, b in zip(found[side], found[base], strict=True)]
        return {
            "median": round(statistics.median(each), 3),
            "least": round(min(each), 3),
            "most": round(max(each), 3),
        }

    return {
        "cpu_seconds_per_update": {
            name: round(statistics.median(one.cpu for one in runs), 4) for name, runs in found.items()
        },
        "last_loss": {name: round(runs[-1].loss, 5) for name, runs in found.items()},
        "trainer_to_ours": ratios(TRAINER, LOOP),
        "trainer_to_ours_whole": ratios(TRAINER, WHOLE),
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{name}: {result[name]}" for name in ("machine", "model", "batch", "rounds", "updates")]
    lines += ["", f"{'':<14}{'CPU s/update':>14}{'last loss':>12}"]
    for name, seconds in result["cpu_seconds_per_update"].items():
        lines.append(f"{name:<14}{seconds:>14.4f}{result['last_loss'][name]:>12.5f}")
    for name in ("trainer_to_ours", "trainer_to_ours_whole"):
        ratio = result[name]
        lines.append(f"{name}: {ratio['median']} times the CPU time ({ratio['least']} to {ratio['most']})")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
