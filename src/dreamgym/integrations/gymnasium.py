"""Gymnasium, both ways: our environments and dreams as `gymnasium.Env`, and a text `gymnasium.Env` as a real
environment (extra `gymnasium`)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dreamgym.envs.registry import EnvironmentSpec, as_environment, register
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.integrations.in_process import Episodes, Source, open_environment, run_together
from dreamgym.integrations.serving import Observation
from dreamgym.types import Task

try:
    import gymnasium
    from gymnasium.vector import AutoresetMode, VectorEnv
    from gymnasium.vector.utils import batch_space
except ImportError:
    raise MissingExtraError("a Gymnasium environment", "gymnasium") from None

_LONGEST = 1 << 20
_LONGEST_SAMPLE = 200


class Unicode(gymnasium.spaces.Text):
    """Any text; Gymnasium's own space is limited to a set of characters."""

    def __init__(self, max_length: int = _LONGEST) -> None:
        super().__init__(max_length=max_length, min_length=0)

    def contains(self, x: Any) -> bool:
        return isinstance(x, str) and len(x) <= self.max_length


class DreamGymEnv(gymnasium.Env[str, str]):
    """An environment or dream of ours as a `gymnasium.Env`, with texts as observations and actions.

    Example::

        env = DreamGymEnv("runs/experience")               # the dream; mode="real" for the environment itself
        text, info = env.reset(seed=0, options={"index": 3})
        text, reward, terminated, truncated, info = env.step("open fridge 1")

    `options` may have the fields of a reset: index, task_id, split, mode, policy. An episode that fails is
    truncated, with its kind in ``info["failure"]``.
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi"], "render_fps": 1}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, environment: Source, *, render_mode: str | None = None, **options: Any) -> None:
        self.render_mode = render_mode
        self.observation_space, self.action_space = Unicode(), Unicode(_LONGEST_SAMPLE)
        self._episodes = Episodes(environment, **options)
        self._shown = ""

    def reset(
        self, *, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = _chosen(self._episodes, self.np_random, options)
        self._shown = self._episodes.reset(**chosen).text
        return self._shown, _info(self._episodes)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        seen = self._episodes.step(str(action))
        self._shown = seen.text
        reward, terminated, truncated = _result(self._episodes, seen)
        return seen.text, reward, terminated, truncated, _info(self._episodes)

    def render(self) -> str | None:
        return self._shown if self.render_mode == "ansi" else None

    def close(self) -> None:
        self._episodes.close()


class DreamGymVectorEnv(VectorEnv[tuple[str, ...], Sequence[str], Any]):
    """Several episodes at once: their steps are computed together, in one process.

    An episode that is over restarts with the next step (`AutoresetMode.NEXT_STEP`).
    """

    metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_modes": []}  # noqa: RUF012 - as Gymnasium declares it

    def __init__(self, environment: Source, num_envs: int = 8, **options: Any) -> None:
        served = open_environment(environment, **options)
        self.num_envs = num_envs
        self.single_observation_space, self.single_action_space = Unicode(), Unicode(_LONGEST_SAMPLE)
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self._members = [Episodes(served) for _ in range(num_envs)]
        self._over = [True] * num_envs
        self._options: Mapping[str, Any] | None = None

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[tuple[str, ...], dict[str, Any]]:
        """`seed` orders tasks and episodes of all members; `options` as for one, for each."""
        super().reset(seed=seed if seed is None or isinstance(seed, int) else seed[0])
        self._options = options
        chosen = [_chosen(each, self.np_random, options) for each in self._members]
        seen = run_together(lambda: asyncio.gather(*map(_reset, self._members, chosen)))
        self._over = [False] * self.num_envs
        return tuple(each.text for each in seen), self._infos()

    def step(
        self, actions: Sequence[str]
    ) -> tuple[
        tuple[str, ...], npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.bool_], dict[str, Any]
    ]:
        chosen = [
            _chosen(each, self.np_random, self._options) if over else None
            for each, over in zip(self._members, self._over, strict=True)
        ]
        seen = run_together(
            lambda: asyncio.gather(
                *(
                    each.astep_here(str(action)) if new is None else _reset(each, new)
                    for each, action, new in zip(self._members, actions, chosen, strict=True)
                )
            )
        )
        results = [_result(each, found) for each, found in zip(self._members, seen, strict=True)]
        rewards, terminated, truncated = (np.array(each) for each in zip(*results, strict=True))
        self._over = list(terminated | truncated)
        return tuple(each.text for each in seen), rewards, terminated, truncated, self._infos()

    def close_extras(self, **kwargs: Any) -> None:
        for each in self._members:
            each.close()

    def _infos(self) -> dict[str, Any]:
        infos: dict[str, Any] = {}
        for number, each in enumerate(self._members):
            infos = self._add_info(infos, _info(each), number)
        return infos


def from_gymnasium(
    environment: str | Callable[..., Any] | Any,
    *,
    name: str | None = None,
    tasks: Sequence[Task | str] | Mapping[str, Sequence[Task | str]] | None = None,
    horizon: int | None = None,
    **roles: Any,
) -> EnvironmentSpec:
    """Register a Gymnasium environment; `make(spec.name)` opens it.

    Args:
        environment: a Gymnasium id (``"Blackjack-v1"``), a `gymnasium.Env` class or instance, or a function
            that returns one. Each episode uses an instance of its own; `reset` receives the task's seed.
        name: by default the Gymnasium id, or the class name in lower case.
        tasks, horizon, roles: as in `as_environment`.

    Raises:
        ConfigError: observations or actions are not text.
    """
    made: Any = environment
    if isinstance(environment, str):
        identity = environment

        def made() -> Any:
            return gymnasium.make(identity)

        name = name or identity
    sample = made() if isinstance(environment, str) else environment
    for part in ("observation_space", "action_space"):
        space = getattr(sample, part, None)
        if space is not None and not isinstance(space, gymnasium.spaces.Text):
            raise ConfigError(
                f"{name or environment!r}: expected a Text {part}, got {space}; "
                "wrap the environment so that it reads and writes text"
            )
    return register(as_environment(made, name=name, tasks=tasks, horizon=horizon, **roles))


async def _reset(episodes: Episodes, chosen: Mapping[str, Any]) -> Observation:
    return await episodes.areset_here(**chosen)


def _chosen(
    episodes: Episodes, rng: np.random.Generator, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Task and seed of an episode, drawn where `options` do not name them."""
    chosen = dict(options or {})
    if not {"index", "task_id"} & chosen.keys():
        chosen["index"] = int(rng.integers(len(episodes.tasks(chosen.get("split")))))
    return {"seed": int(rng.integers(2**31)), **chosen}


def _result(episodes: Episodes, seen: Observation) -> tuple[float, bool, bool]:
    """Reward, terminated, truncated; a failed episode is truncated."""
    truncated = episodes.state.truncated or episodes.failure is not None
    return float(seen.reward or 0.0), episodes.state.terminated and not truncated, truncated


def _info(episodes: Episodes) -> dict[str, Any]:
    state = episodes.state
    return {
        "task_id": state.task_id,
        "success": state.success,
        "admissible_actions": list(state.admissible_actions or ()),
        "failure": episodes.failure,
    }


gymnasium.register(
    "DreamGym-v0",
    entry_point=f"{__name__}:DreamGymEnv",
    vector_entry_point=f"{__name__}:DreamGymVectorEnv",
    disable_env_checker=True,
)
