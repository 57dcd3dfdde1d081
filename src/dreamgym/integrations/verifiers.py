"""verifiers: a dream as an environment of `verifiers.v1` (install `verifiers`), for `vf-eval` and prime-rl.

verifiers finds environments by the name of a top-level module. `integrations/verifiers` is such a package,
``dreamgym-vf``, with what is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import verifiers.v1 as vf
from pydantic import Field

from dreamgym.integrations.conversation import first_line
from dreamgym.integrations.in_process import Episodes
from dreamgym.integrations.serving import Mode

REWARD = "dreamgym_reward"


class DreamGymData(vf.TaskData):  # type: ignore[misc]
    """A task; ``id`` is that of our task, and the environment opens the conversation."""

    split: str


class DreamGymConfig(vf.TasksetConfig):  # type: ignore[misc]
    """Under ``--env.taskset``."""

    environment: str = Field("", description="A run or a name as for `dreamgym serve`.")
    mode: Mode | None = None
    split: str | None = None
    group_size: int | None = Field(
        None, description="As `-r`: episodes of one task that share a seed. By default that of the run."
    )
    settings: list[str] = Field([], description="Overrides of the configuration (train.horizon=10).")

    def episodes(self) -> Episodes:
        """The environment is opened once in a process."""
        size = {} if self.group_size is None else {"group_size": self.group_size}
        return Episodes(self.environment, mode=self.mode, settings=tuple(self.settings), **size)


class DreamGymTask(vf.Task[DreamGymData]):  # type: ignore[misc]
    """Its reward comes from the environment, while it is played."""


class DreamGymTaskset(vf.Taskset[DreamGymTask, DreamGymConfig]):  # type: ignore[misc]
    """The tasks of a split."""

    def load(self) -> Iterator[DreamGymTask]:
        for task in self.config.episodes().tasks(self.config.split):
            data = DreamGymData(id=task.id, name=task.id, description=task.instruction, split=task.split)
            yield DreamGymTask(data, self.config.task)


class DreamGymEnvConfig(vf.EnvConfig):  # type: ignore[misc]
    """The policy answers from this process, so it needs no sandbox."""

    player: vf.AgentConfig = vf.AgentConfig(runtime={"type": "subprocess"}, max_turns=30)


class DreamGymEnv(vf.Env[DreamGymEnvConfig]):  # type: ignore[misc]
    """One episode. States are user turns, the first line of a reply is the action, the return is the reward.

    A failed episode raises: verifiers records the error, counts no reward, and tries again as
    ``--env.retries.max-retries`` says.
    """

    async def run(self, task: DreamGymTask, agents: Any) -> None:
        config = self.taskset.config
        episodes, rewards, finished = config.episodes(), [0.0], False
        try:
            chosen = {"task_id": task.data.id, "split": task.data.split, "mode": config.mode}
            seen = await episodes.areset(policy="verifiers", **chosen)
            async with agents.player.interaction(task) as talk:
                segment = await talk.turn(f"{seen.instruction}\n\n{seen.text}")
                while not segment.terminated:
                    seen = await episodes.astep(first_line(segment.last_reply))
                    episodes.check()
                    rewards.append(float(seen.reward or 0.0))
                    if seen.done:
                        break
                    segment = await talk.turn(seen.text)
            finished = bool(talk.trace.ok)
            if finished:
                talk.trace.record_reward(REWARD, sum(rewards))
                talk.trace.record_metrics({"success": episodes.state.success, "turns": len(rewards) - 1})
        finally:
            await episodes.aclose(finished=finished)


class DreamGymHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]
    """Nothing to choose."""


class DreamGymHarness(vf.Harness[DreamGymHarnessConfig]):  # type: ignore[misc]
    """Asks for one reply from this process; verifiers' own harnesses start a program for each turn."""

    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    def __init__(self, config: DreamGymHarnessConfig) -> None:
        super().__init__(config)
        self._client: Any = None

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
    ) -> Any:
        system, prompt = self.resolve_prompt(data)  # after the first turn: the whole conversation
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(map(_plain, prompt))
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        body = {"model": ctx.model, "messages": messages}
        reply = await self._http().post(
            f"{endpoint}/chat/completions", json=body, headers={"authorization": f"Bearer {secret}"}
        )
        failed = reply.status_code != 200
        return vf.ProgramResult(exit_code=int(failed), stdout="", stderr=reply.text if failed else "")

    def _http(self) -> Any:
        """One client for all turns: a new one costs as much as the turn."""
        if self._client is None:
            import httpx

            self._client = httpx.AsyncClient(timeout=None)  # verifiers has limits of its own
        return self._client


def _plain(message: Any) -> dict[str, Any]:
    return {"role": message.role, "content": message.content}
