"""SkyRL: a dream as a `BaseTextEnv` (install `skyrl-gym`).

Register it in every process (`register_dreamgym()`), name it in the dataset's column ``env_class``, and give
each row a ``task_id`` or ``index``. SkyRL runs steps in threads only if ``max_env_workers`` is set: choose
the number of episodes of a batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.registration import register, registry

from dreamgym.integrations.conversation import first_line
from dreamgym.integrations.in_process import FAILURES, Episodes

NAME = "dreamgym"
_CHOSEN = ("task_id", "index", "split", "mode", "seed")


def register_dreamgym(name: str = NAME) -> None:
    """Make the environment known to SkyRL in this process; may be called twice."""
    if name not in registry:
        register(id=name, entry_point=f"{__name__}:DreamGymEnv")


class DreamGymEnv(BaseTextEnv):  # type: ignore[misc]
    """One episode. It never raises: a failed episode is done, with reward 0 and its kind in the metadata.

    ``env_config`` (``environment.skyrl_gym.dreamgym``) names the environment: ``environment`` as for
    `dreamgym serve`, and optionally ``mode``. SkyRL cannot tell a failure from a real zero, so `get_metrics`
    counts failures.
    """

    def __init__(self, env_config: Any = None, extras: Mapping[str, Any] | None = None) -> None:
        super().__init__()
        given = dict(env_config or {})
        self._row = dict(extras or {})
        self.max_turns = int(self._row.get("max_turns") or given.get("max_turns") or 30)
        self._mode = given.get("mode")
        self._episodes = Episodes(given["environment"], settings=tuple(given.get("settings", ())))
        self._total = 0.0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        """The prompt of the row, then the task and the first observation."""
        row = {**self._row, **dict(self._row.get("extra_info") or {})}
        chosen = {name: row[name] for name in _CHOSEN if row.get(name) is not None}
        if self._mode is not None:
            chosen.setdefault("mode", self._mode)
        try:
            seen = self._episodes.reset(policy="skyrl", **chosen)
        except FAILURES as error:
            return [*prompt, _user(f"The environment failed: {error}")], {"failure": self._episodes.failure}
        return [*prompt, _user(f"{seen.instruction}\n\n{seen.text}")], {
            "task_id": self._episodes.state.task_id
        }

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        if self._episodes.failure is not None:
            return self._output([], 0.0, done=True)
        seen = self._episodes.step(first_line(action))
        reward = float(seen.reward or 0.0)
        self._total += reward
        done = seen.done or self.turns >= self.max_turns
        return self._output([] if done else [_user(seen.text)], reward, done=done)

    def get_metrics(self) -> dict[str, Any]:
        failed = float(self._episodes.failure is not None)
        success = float(self._episodes.state.success)
        return {"return": self._total, "success": success, "turns": self.turns, "failed": failed}

    def close(self) -> None:
        self._episodes.close()

    def _output(
        self, observations: list[dict[str, str]], reward: float, *, done: bool
    ) -> BaseTextEnvStepOutput:
        state = self._episodes.state
        metadata = {"failure": self._episodes.failure, "success": state.success, "truncated": state.truncated}
        return BaseTextEnvStepOutput(
            observations=observations,
            reward=reward,
            done=done,
            metadata=metadata,
            postprocessed_action=None,
        )


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}
