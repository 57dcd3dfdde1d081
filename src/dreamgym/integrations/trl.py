"""TRL: a dream as the environment of `GRPOTrainer`.

`Rollouts` is a `rollout_func`: all episodes of a batch run at once, and results reach task pool, curriculum
and replay buffer. `environment_factory` is TRL's other hook, which runs the episodes one after another.
"""

from __future__ import annotations

import asyncio
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.integrations.conversation import Conversation, Parse, TokenizedEpisode, first_line
from dreamgym.integrations.in_process import FAILURES, Episodes, Source, open_environment, run_together
from dreamgym.protocols import LanguageModel
from dreamgym.seeding import derive_seed
from dreamgym.types import CompletionRequest, FailureKind

os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # both hooks are marked as ones that may change
_ATTEMPTS = 3


class Rollouts:
    """A `rollout_func` for `GRPOTrainer`.

    Example::

        rollouts = Rollouts("runs/experience", max_turns=20)
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, train_dataset=rollouts.dataset(),
            rollout_func=rollouts, reward_funcs=rollouts.reward, args=GRPOConfig(num_generations=8, ...),
        )

    Replies are sampled by the trainer's own model, batched over all live episodes with a KV cache for each,
    or by `language_model`. An episode that fails is tried again; after three attempts it is masked and gets
    the mean reward of its group.
    """

    def __init__(
        self,
        environment: Source,
        *,
        max_turns: int = 30,
        turn_tokens: int = 64,
        temperature: float = 1.0,
        system: str = "",
        parse: Parse = first_line,
        tasks: Literal["rows", "curriculum"] = "rows",
        language_model: LanguageModel | None = None,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """
        Args:
            environment: a run, a name or a factory; `options` as for `in_process.open_environment`.
            turn_tokens: of one reply. TRL's ``max_completion_length`` does not limit what is returned here.
            parse: takes the action from a reply.
            tasks: those of the dataset's rows, or those that the curriculum of the dream chooses.
        """
        self.served = open_environment(environment, **options)
        if tasks == "curriculum" and self.served.results is None:
            raise ConfigError("tasks='curriculum' needs the dream of a run: it has a task pool")
        self.failures = 0
        self.log: list[dict[str, float]] = []
        """For each batch: mean reward, success, turns."""
        self._max_turns, self._turn_tokens, self._temperature = max_turns, turn_tokens, temperature
        self._system, self._parse, self._tasks = system, parse, tasks
        self._model = language_model
        self._seed = seed
        self._batches = 0
        self._splits: dict[str, str] = {}

    def dataset(self, count: int | None = None, split: str | None = None) -> Any:
        """Tasks as TRL's `train_dataset`: a row's prompt is the id of its task, whose text is written when
        its episode starts."""
        from datasets import Dataset

        found = Episodes(self.served).tasks(split)[:count]
        self._splits |= {task.id: task.split for task in found}
        return Dataset.from_list([{"prompt": task.id} for task in found])

    def reward(self, *, env_reward: Sequence[float], **given: Any) -> list[float]:
        """For `reward_funcs`."""
        return list(env_reward)

    def __call__(self, prompts: Sequence[str], trainer: Any) -> dict[str, Any]:
        if self._model is None:
            from dreamgym.models.local.language_model import LocalLanguageModel

            model = trainer.accelerator.unwrap_model(trainer.model)
            self._model = LocalLanguageModel(model, trainer.processing_class, parse_special_tokens=True)
        size = trainer.num_generations
        training = bool(getattr(trainer.model, "training", False))
        trainer.model.eval()
        if hasattr(self._model, "weights_changed"):
            self._model.weights_changed()
        try:
            played = run_together(lambda: self.play(prompts, trainer.processing_class, size))
        finally:
            trainer.model.train(training)
        return {
            "prompt_ids": [each.prompt for each in played],
            "completion_ids": [each.tokens for each in played],
            "logprobs": [each.logprobs for each in played],
            "env_mask": [each.mask for each in played],
            "env_reward": [sum(each.rewards) for each in played],
        }

    async def play(self, prompts: Sequence[str], tokenizer: Any, size: int) -> list[TokenizedEpisode]:
        """One episode for each prompt; `size` prompts in a row are a group, which shares task and seed."""
        self._batches += 1
        if self.served.results is not None:
            self.served.results.group_size = size
        chosen = [await self._choose(prompts[first], first // size) for first in range(0, len(prompts), size)]
        written = Conversation(tokenizer, system=self._system)
        work = [self._episode(chosen[number // size], written, number) for number in range(len(prompts))]
        found = await asyncio.gather(*work)
        played = [
            episode if episode is not None else _masked(found[start : start + size])
            for number, episode in enumerate(found)
            for start in [number - number % size]
        ]
        returns = [sum(each.rewards) for each in played]
        self.log.append(
            {"reward": statistics.fmean(returns), "turns": statistics.fmean(each.turns for each in played)}
        )
        return played

    async def _choose(self, prompt: str, group: int) -> dict[str, Any]:
        seed = derive_seed(self._seed, "trl", self._batches, group) % 2**31
        if self._tasks == "curriculum" and self.served.results is not None:
            task, seed = await self.served.results.draw(anew=True)
            return {"task_id": task.id, "seed": seed}
        return {"task_id": prompt, "split": self._splits.get(prompt), "seed": seed}

    async def _episode(
        self, chosen: Mapping[str, Any], written: Conversation, number: int
    ) -> TokenizedEpisode | None:
        """None after too many failures."""
        for attempt in range(_ATTEMPTS):
            episodes = Episodes(self.served)
            try:
                played = await self._play_one(
                    episodes, chosen, written, f"{self._batches}/{number}/{attempt}"
                )
                if episodes.failure is None:
                    return played
            except FAILURES as error:
                if getattr(error, "kind", None) is FailureKind.INVALID_TASK:
                    raise
            finally:
                await episodes.aclose_here()
        self.failures += 1
        return None

    async def _play_one(
        self, episodes: Episodes, chosen: Mapping[str, Any], written: Conversation, name: str
    ) -> TokenizedEpisode:
        assert self._model is not None
        seen = await episodes.areset_here(policy="trl", policy_version=self._batches, **chosen)
        episode = TokenizedEpisode(prompt=written.first(seen.instruction, seen.text))
        while True:
            request = CompletionRequest(
                prompt="",
                prompt_token_ids=tuple(episode.everything),
                conversation=name,
                max_tokens=self._turn_tokens,
                temperature=self._temperature,
                stop=written.stop,
                seed=derive_seed(self._seed, name, episode.turns),
            )
            completion = await self._model.complete(request)
            if not completion.token_ids:
                raise EpisodeFailedError(FailureKind.PARSE_ERROR, "the language model returned no token ids")
            episode.reply(list(completion.token_ids), list(completion.logprobs))
            seen = await episodes.astep_here(self._parse(completion.text))
            episode.rewards.append(float(seen.reward or 0.0))
            if seen.done or episode.turns >= self._max_turns:
                return episode  # the last token is the policy's own
            episode.observe(written.then(seen.text, list(completion.token_ids)))


def environment_factory(
    environment: Source, *, parse: Parse = str.strip, **options: Any
) -> Callable[[], Any]:
    """For TRL's `environment_factory`: objects with `reset`, the tool `act`, and `get_reward`.

    TRL calls the environments of a batch one after another, so prefer `Rollouts`. Rows need a column
    ``task_id`` or ``index``.
    """
    served = open_environment(environment, **options)

    class DreamEnvironment:
        def __init__(self) -> None:
            self._episodes = Episodes(served)
            self._reward, self._done = 0.0, True

        def reset(self, **row: Any) -> str:
            known = {name: row[name] for name in ("task_id", "index", "split", "mode", "seed") if name in row}
            seen = self._episodes.reset(policy="trl", **known)
            self._reward, self._done = 0.0, False
            return f"{seen.instruction}\n\n{seen.text}"

        def act(self, action: str) -> str:
            """
            Act in the environment.

            Args:
                action: What to do, in the environment's own words.

            Returns:
                What the environment replies.
            """
            if self._done:
                return "The episode is over."
            seen = self._episodes.step(parse(action))
            self._reward += float(seen.reward or 0.0)
            self._done = seen.done
            return f"{seen.text}\nThe episode is over." if seen.done else seen.text

        def get_reward(self) -> float:
            return self._reward

    return DreamEnvironment


def _masked(group: Sequence[TokenizedEpisode | None]) -> TokenizedEpisode:
    """Stands for a failed episode: nothing is learnt from it, and it does not move its group's mean."""
    finished = [each for each in group if each is not None]
    if not finished:
        raise EpisodeFailedError(FailureKind.CRASHED, "every episode of a group failed in every attempt")
    last = finished[0]
    mean = statistics.fmean(sum(each.rewards) for each in finished)
    return TokenizedEpisode(
        prompt=last.prompt, tokens=last.tokens[:1], mask=[0], logprobs=last.logprobs[:1], rewards=[mean]
    )
