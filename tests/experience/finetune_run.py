"""One fine-tuning run of a very small model, in a process that a test may kill."""

from __future__ import annotations

import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dreamgym.experience.dataset import Example
from dreamgym.experience.finetune import FinetuneSettings, Finetuning, Progress

WORDS = ["<end>", *"abcdefgh", ":", "\n", "say"]


def encode(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.replace("\n", " \n ").split(" ") if word]


def echo(number: int) -> Example:
    """A copying task: the reply repeats two letters of the prompt."""
    first, second = WORDS[1 + number % 8], WORDS[1 + (number // 8) % 8]
    return Example(
        prompt=f"say : {first} {second} \n ", reply=f"{first} {second}", trajectory_id=str(number), position=0
    )


def finetuning(
    folder: Path,
    steps: int,
    *,
    known: int = 64,
    exchangeable: Sequence[Sequence[int]] = (range(1, 9),),
    **changes: Any,
) -> tuple[Any, Finetuning]:
    """A run that is taught the first `known` examples and measured on all."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(
            vocab_size=len(WORDS), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    settings = FinetuneSettings(
        **{"steps": steps, "batch": 8, "evaluate_every": 20, "checkpoint_every": 5, "warmup": 5, **changes}
    )
    examples = [echo(number) for number in range(64)]
    run = Finetuning(
        model,
        encode,
        0,
        examples[:known],
        examples,
        settings=settings,
        folder=folder,
        exchangeable=exchangeable,
    )
    return model, run


def in_a_process(folder: Path, steps: int, told: Connection) -> None:
    """The whole life of a process that tells its steps, slowly enough to be killed between two."""

    def tell(progress: Progress) -> None:
        told.send(progress.step)
        time.sleep(0.01)

    finetuning(folder, steps)[1].run(tell)
