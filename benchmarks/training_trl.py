"""TRL's side of `training.py`: its GRPO trainer, with a `rollout_func` that plays all episodes in step."""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from transformers.utils import logging

from dreamgym.agents import render_prompt
from dreamgym.types import Completion, State, Task, Transition
from training import AGENT, LEARNING, WARM_UP, Costs, Shape, world

_LONGEST = 4096
"""Tokens of an episode: more than any has."""


def theirs(model: Any, tokenizer: Any, shape: Shape, steps: int) -> Costs:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # the hook is marked as one that may change
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    from trl import GRPOConfig, GRPOTrainer

    play = InStep(tokenizer, shape)
    watch = Watch(play)
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model,
            reward_funcs=lambda **given: given["earned"],
            rollout_func=play,
            args=GRPOConfig(
                output_dir=folder,
                max_steps=WARM_UP + steps,
                per_device_train_batch_size=shape.episodes,
                num_generations=shape.group,
                max_completion_length=_LONGEST,
                loss_type="dapo",
                epsilon=LEARNING.clip_low,
                epsilon_high=LEARNING.clip_high,
                beta=0.0,
                learning_rate=LEARNING.learning_rate,
                lr_scheduler_type="constant",
                adam_beta2=0.95,
                max_grad_norm=LEARNING.max_grad_norm,
                bf16=False,
                gradient_checkpointing=False,
                use_cpu=True,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=Dataset.from_list([{"prompt": task.id} for task in play.tasks.values()]),
            processing_class=tokenizer,
            callbacks=[watch],
        )
        trainer.remove_callback(PrinterCallback)  # standard output is for the result
        trainer.train()
    counted = watch.steps[WARM_UP:]
    return Costs(
        rollouts=sum(step.rollouts for step in counted),
        update=sum(step.update for step in counted),
        episodes=sum(step.episodes for step in counted),
        tokens=sum(step.tokens for step in counted),
    )


class Watch(TrainerCallback):  # type: ignore[misc]
    """A step is its rollouts, and all that is done from their end to its own."""

    def __init__(self, play: InStep) -> None:
        self._play = play
        self.steps: list[Costs] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        played = self._play.last
        played.update = time.process_time() - self._play.ended
        self.steps.append(played)


class InStep:
    """Every episode takes its turn, all of them in one batch of `generate`."""

    def __init__(self, tokenizer: Any, shape: Shape) -> None:
        self._tokenizer = tokenizer
        self._factory = world(shape)
        known = asyncio.run(self._factory.tasks("train", shape.tasks))
        self.tasks: dict[str, Task] = {task.id: task for task in known}
        self._closing = [tokenizer.eos_token_id, *tokenizer.encode("\n", add_special_tokens=False)]
        self.last = Costs()
        self.ended = 0.0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        began = time.process_time()
        episodes = [Episode(self._factory.make(self.tasks[task])) for task in prompts]
        asyncio.run(self._play(episodes, trainer.model))
        self.ended = time.process_time()
        self.last = Costs(
            rollouts=self.ended - began,
            episodes=len(episodes),
            tokens=sum(sum(episode.mask) for episode in episodes),
        )
        return {
            "prompt_ids": [episode.tokens[: episode.first] for episode in episodes],
            "completion_ids": [episode.tokens[episode.first :] for episode in episodes],
            "env_mask": [episode.mask[episode.first :] for episode in episodes],
            "logprobs": None,
            "earned": [episode.earned for episode in episodes],
        }

    async def _play(self, episodes: list[Episode], model: Any) -> None:
        for episode in episodes:
            await episode.start()
        while going := [episode for episode in episodes if not episode.over]:
            asked = [self._tokenizer.encode(episode.prompt()) for episode in going]
            for episode, before, reply in zip(going, asked, self._replies(asked, model), strict=True):
                text = self._tokenizer.decode(reply, skip_special_tokens=True)
                await episode.take(before, reply, text)

    @torch.no_grad()
    def _replies(self, asked: list[list[int]], model: Any) -> list[list[int]]:
        width = max(map(len, asked))
        pad = self._tokenizer.pad_token_id
        out = model.generate(
            input_ids=torch.tensor([[pad] * (width - len(row)) + row for row in asked]),
            attention_mask=torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in asked]),
            do_sample=True,
            top_k=0,
            max_new_tokens=AGENT.max_tokens,
            eos_token_id=self._closing,
            pad_token_id=pad,
        )
        replies = []
        for row in out[:, width:].tolist():
            end = next((at + 1 for at, token in enumerate(row) if token in self._closing), len(row))
            replies.append(row[:end])
        return replies


class Episode:
    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._history: list[Transition] = []
        self._state = State(text="")
        self.tokens: list[int] = []
        self.mask: list[int] = []
        self.first = 0
        """Tokens of the first prompt."""
        self.over = False
        self.earned = 0.0

    async def start(self) -> None:
        self._state = await self._environment.start()

    def prompt(self) -> str:
        return render_prompt(self._environment.task, self._history, self._state, AGENT)

    async def take(self, before: list[int], reply: list[int], text: str) -> None:
        """Act by this reply to these tokens."""
        self.first = self.first or len(before)
        self.mask = [*self.mask[: len(before)], *([0] * (len(before) - len(self.mask))), *([1] * len(reply))]
        self.tokens = before + reply
        outcome = await self._environment.step(text.split("\n", 1)[0].strip())
        self._history.append(
            Transition(
                state=self._state, action=text.strip(), outcome=outcome, completion=Completion(text=text)
            )
        )
        self._state, self.over = outcome.next_state, outcome.over
        self.earned += outcome.reward
