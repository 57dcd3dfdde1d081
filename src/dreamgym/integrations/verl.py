"""verl: a dream as an `AgentLoop` (install `verl`).

Name it in the file of ``actor_rollout_ref.rollout.agent.agent_loop_config_path``, with its settings::

    - name: dreamgym
      _target_: dreamgym.integrations.verl.DreamGymAgentLoop
      environment: runs/experience

`write_dataset` writes the rows of tasks for ``data.train_files`` and ``data.val_files``.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from verl.experimental.agent_loop.agent_loop import (
    AgentLoopBase,
    AgentLoopMetrics,
    AgentLoopOutput,
    register,
)

from dreamgym.errors import EpisodeFailedError
from dreamgym.integrations.conversation import first_line
from dreamgym.integrations.in_process import FAILURES, Episodes, Source
from dreamgym.integrations.serving import Mode
from dreamgym.seeding import derive_seed
from dreamgym.types import FailureKind

NAME = "dreamgym"
_CHOSEN = ("task_id", "index", "split", "mode", "seed")
_ATTEMPTS = 3


@register(NAME)
class DreamGymAgentLoop(AgentLoopBase):  # type: ignore[misc]
    """One episode is one sample: replies of the policy have mask 1, texts of the environment 0; the score is
    the return. Rollouts of one row, which share its ``uid``, share task and seed. Of the row's own prompt,
    system messages are kept; task and first state take the place of the others.

    An episode that fails is tried again. After three attempts the error is raised: verl's trainer then drops
    the group of that row, so a failure is never a reward. (The deprecated trainer, ``trainer.use_v1=False``,
    loses the batch.)
    """

    def __init__(
        self,
        *args: Any,
        environment: str,
        mode: Mode | None = None,
        max_turns: int = 30,
        turn_tokens: int = 256,
        settings: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> None:
        """
        Args:
            environment: a run or a name as for `dreamgym serve`. Each of verl's workers opens it once.
            mode: of rows that do not choose it.
            turn_tokens: of one reply; ``rollout.response_length`` bounds a whole episode.
            settings: overrides of the configuration (``train.group_size=4``).
            options: further arguments of `in_process.open_environment`; ``out`` only with
                ``rollout.agent.num_workers=1``.
        """
        super().__init__(*args, **given)
        self._environment = environment
        self._opening: dict[str, Any] = {"mode": mode, "settings": tuple(settings)}
        self._opening |= {"group_size": int(self.rollout_config.n), **dict(options or {})}
        self._max_turns, self._turn_tokens = max_turns, turn_tokens

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput:
        error: Exception
        for _ in range(_ATTEMPTS):
            episodes, finished = Episodes(self._environment, **self._opening), False
            try:
                output = await self._play(episodes, sampling_params, row)
                episodes.check()
                finished = True
                return output
            except FAILURES as failed:
                error = failed
            finally:
                await episodes.aclose(finished=finished)
            if getattr(error, "kind", None) is FailureKind.INVALID_TASK:
                break
        raise error

    async def _play(
        self, episodes: Episodes, sampling_params: Mapping[str, Any], row: Mapping[str, Any]
    ) -> AgentLoopOutput:
        version = max(0, int(row.get("global_steps", 0)))
        seen = await episodes.areset(policy="verl", policy_version=version, **_chosen(row))
        sample = _Sample(self, sampling_params, self._turn_tokens)
        system = [dict(each) for each in row.get("raw_prompt", ()) if each["role"] == "system"]
        await sample.start([*system, _user(f"{seen.instruction}\n\n{seen.text}")])
        while True:
            reply = await sample.reply()
            started = perf_counter()
            seen = await episodes.astep(first_line(reply))
            sample.metrics.tool_calls += perf_counter() - started
            sample.rewards.append(float(seen.reward or 0.0))
            if seen.done or len(sample.rewards) >= self._max_turns or not await sample.observe(seen.text):
                return sample.output(success=episodes.state.success)


class _Sample:
    """The tokens of an episode, put together by verl's own builder."""

    def __init__(self, loop: AgentLoopBase, sampling_params: Mapping[str, Any], turn_tokens: int) -> None:
        self._loop, self._sampling, self._turn_tokens = loop, sampling_params, turn_tokens
        self._length = int(loop.rollout_config.response_length)
        self._request = uuid.uuid4().hex  # one for all turns: they go to one server, which has their prefix
        self._messages: list[dict[str, Any]] = []
        self._tokens: list[int] = []
        self._mask: list[int] = []
        self._logprobs: list[float] | None = [] if sampling_params.get("logprobs") else None
        self._extra: dict[str, Any] = {}
        self.rewards: list[float] = []
        self.metrics = AgentLoopMetrics()

    async def start(self, messages: list[dict[str, Any]]) -> None:
        self._messages = messages
        self._tokens = await self._loop.ct_build_initial_tokens(messages)

    async def reply(self) -> str:
        started = perf_counter()
        room = min(self._turn_tokens, self._length - len(self._mask))
        found = await self._loop.server_manager.generate(
            request_id=self._request,
            prompt_ids=self._tokens,
            sampling_params={**self._sampling, "max_tokens": room},
        )
        self.metrics.generate_sequences += perf_counter() - started
        if not found.token_ids:
            raise EpisodeFailedError(FailureKind.PARSE_ERROR, "verl's server returned no tokens")
        logprobs = None if self._logprobs is None else found.log_probs
        merged = await self._loop.ct_merge_assistant_token(
            self._tokens, found.token_ids, self._mask, self._logprobs, assistant_logprobs=logprobs
        )
        self._take(merged)
        # The weights of the first turn and of the last one: verl drops samples that span too many updates.
        self._extra = {**found.extra_fields, **_oldest(self._extra)}
        text = str(self._loop.tokenizer.decode(found.token_ids, skip_special_tokens=True))
        self._messages = [*self._messages, {"role": "assistant", "content": text}]
        return text

    async def observe(self, text: str) -> bool:
        """False if no reply would fit after it: the sample then ends with the policy's own token."""
        messages = [*self._messages, _user(text)]
        merged = await self._loop.ct_merge_context_msg(
            self._messages, messages, self._tokens, self._mask, self._logprobs
        )
        if len(merged[1]) >= self._length:
            return False
        self._take(merged)
        self._messages = messages
        return True

    def output(self, *, success: bool) -> AgentLoopOutput:
        start = len(self._tokens) - len(self._mask)
        info = {"success": float(success), "turns": len(self.rewards)}
        extra = {"turn_scores": self.rewards, "tool_rewards": [], "reward_extra_info": info}
        return AgentLoopOutput(
            prompt_ids=self._tokens[:start],
            response_ids=self._tokens[start:][: self._length],
            response_mask=self._mask[: self._length],
            response_logprobs=None if self._logprobs is None else self._logprobs[: self._length],
            reward_score=sum(self.rewards),
            num_turns=2 * len(self.rewards) + 1,  # messages, as verl counts them
            metrics=self.metrics,
            extra_fields={**self._extra, **extra},
        )

    def _take(self, merged: tuple[Any, list[int], list[float] | None]) -> None:
        found, self._mask, self._logprobs = merged
        self._tokens = found.token_ids


def write_dataset(
    environment: Source,
    path: Path | str,
    *,
    split: str | None = None,
    count: int | None = None,
    mode: Mode | None = None,
    system: str = "",
    **options: Any,
) -> int:
    """Write tasks as a Parquet file for ``data.train_files`` or ``data.val_files``; how many there are.

    Args:
        mode: where the episodes of these rows are played: ``real`` for a validation file.
        system: a system message before the task.
        options: as for `in_process.open_environment`.
    """
    from datasets import Dataset

    tasks = Episodes(environment, **options).tasks(split)[:count]
    prompt = [{"role": "system", "content": system}] if system else []
    rows = [
        {
            "data_source": NAME,
            "agent_name": NAME,
            "prompt": prompt or [_user(task.instruction)],
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": number, "task_id": task.id, "split": task.split, "mode": mode},
        }
        for number, task in enumerate(tasks)
    ]
    Dataset.from_list(rows).to_parquet(str(path))
    return len(rows)


def _chosen(row: Mapping[str, Any]) -> dict[str, Any]:
    """Task, seed and mode of an episode; rollouts of one row get the same seed."""
    given = {**row, **dict(row.get("extra_info") or {})}
    chosen = {name: given[name] for name in _CHOSEN if given.get(name) is not None}
    if "task_id" in chosen:
        chosen.pop("index", None)  # of the row, where both are given
    if "uid" in row:
        chosen.setdefault("seed", derive_seed("verl", str(row["uid"])) % 2**31)
    return chosen


def _oldest(extra: Mapping[str, Any]) -> dict[str, Any]:
    return {name: extra[name] for name in ("min_global_steps",) if name in extra}


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
