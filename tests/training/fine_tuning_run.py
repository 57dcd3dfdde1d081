"""One fine-tuning run of a very small model, in a process that a test may kill."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dreamgym.experience.dataset import Example
from dreamgym.training.fine_tuning import FineTuning, Progress
from dreamgym.training.model_setup import LoadedModel

WORDS = ["<end>", *"abcdefgh", ":", "\n", "say"]


class Words:
    """A tokenizer of whole words, with its codec."""

    eos_token_id = 0

    def start(self, text: str) -> list[int]:
        return [WORDS.index(word) for word in text.replace("\n", " \n ").split(" ") if word]

    more = start

    def save_pretrained(self, folder: Path) -> None:
        (folder / "words.txt").write_text(" ".join(WORDS), encoding="utf-8")


def echo(number: int) -> Example:
    """A copying task: the reply repeats two letters of the prompt."""
    first, second = WORDS[1 + number % 8], WORDS[1 + (number // 8) % 8]
    return Example(
        prompt=f"say : {first} {second} \n ", reply=f"{first} {second}", trajectory_id=str(number), position=0
    )


def fine_tuning(
    folder: Path,
    steps: int,
    *,
    known: int = 64,
    exchangeable: Sequence[Sequence[int]] = (range(1, 9),),
    **changes: Any,
) -> FineTuning:
    """A run that is trained on the first `known` examples and validated on all."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    loaded = LoadedModel(
        model=model,
        tokenizer=Words(),
        sft_rates={"learning_rate": 3e-3, "muon_lr": 0.02},
        precision="fp32",
        exchangeable=tuple(tuple((token,) for token in group) for group in exchangeable),
    )
    examples = [echo(number) for number in range(64)]
    settings: dict[str, Any] = {
        **{"batch_size": 8, "evaluate_every": 20, "checkpoint_every": 5, "warmup_steps": 5},
        **changes,
    }
    return FineTuning(loaded, Words(), examples[:known], examples, folder=folder, steps=steps, **settings)


def in_a_process(folder: Path, steps: int, report: Connection) -> None:
    """The whole life of a process that reports its steps, slowly enough to be killed between two."""

    def send(progress: Progress) -> None:
        report.send(progress.step)
        time.sleep(0.01)

    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # ignored where a shell started us in the background
    asyncio.run(fine_tuning(folder, steps).run(send))
