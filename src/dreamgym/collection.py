"""Records trajectories from a real environment, in parallel and resumable.

Episode i plays task i with a policy that depends on (seed, i) only, and its trajectory id names both. So a
killed run resumes by playing the missing ids, and the same settings always give the same episodes.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamgym.config import Config
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.envs.references import short_name
from dreamgym.envs.scripted_policies import make_policy, resolve_policy
from dreamgym.errors import ConfigError, DataError
from dreamgym.files import write_text
from dreamgym.models.registry import LanguageModels, check_language_model, names_language_model
from dreamgym.prompted_policy import PromptedPolicy
from dreamgym.protocols import Environment, EnvironmentFactory, Policy
from dreamgym.rollouts import run_episode
from dreamgym.seeding import derive_seed
from dreamgym.types import RolloutFailure, Task, Trajectory

_BLOCK = 64
"""Tasks requested at a time: some environments first prove that a task can be solved."""
_SETTINGS = "collect.json"


@dataclass(slots=True)
class CollectReport:
    """What one call recorded, apart from the episodes that were there before."""

    already_there: int = 0
    episodes: int = 0
    successes: int = 0
    steps: int = 0
    seconds: float = 0.0
    failures: Counter[str] = field(default_factory=Counter)
    by_policy: dict[str, list[int]] = field(default_factory=dict)
    """Policy name to [episodes, successes, steps]."""

    def count(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.successes += trajectory.success
        self.steps += len(trajectory)
        row = self.by_policy.setdefault(trajectory.provenance.policy, [0, 0, 0])
        for column, value in enumerate((1, int(trajectory.success), len(trajectory))):
            row[column] += value


OnEpisode = Callable[[CollectReport], None]


def trajectory_id(environment: str, split: str, seed: int, episode: int, policy: str = "mix") -> str:
    """A name for each episode; it holds the policy, since two policies may play the same games.

    >>> trajectory_id("alfworld", "train", 0, 7), trajectory_id("alfworld", "train", 0, 7, "random")
    ('alfworld-train-0-000007', 'alfworld-train-0-random-000007')
    """
    by = "" if policy == "mix" else f"{policy}-"
    return f"{short_name(environment)}-{split}-{seed}-{by}{episode:06d}"


async def collect(
    config: Config, factory: EnvironmentFactory, *, on_episode: OnEpisode | None = None
) -> CollectReport:
    """Fill `config.collect.out` up to `config.collect.episodes` episodes.

    An episode that keeps failing is counted by kind and left out; the next run tries it again.

    Raises:
        ConfigError: the directory was filled with other settings.
        StoreError: the directory cannot be written.
        DataError: what is in the directory is damaged.
    """
    settings = config.collect
    if names_language_model(settings.policy):  # a wrong name is reported before anything starts
        check_language_model(settings.policy, config)
    else:
        resolve_policy(settings.policy, seed=config.seed, episode=0)
    clock = asyncio.get_running_loop().time
    started, report = clock(), CollectReport()

    def notify() -> None:
        report.seconds = clock() - started
        if on_episode is not None:
            on_episode(report)

    async with AsyncExitStack() as stack:
        writer = stack.enter_context(TrajectoryWriter(settings.out))
        models = await stack.enter_async_context(LanguageModels(config, folder=settings.out))
        _check_settings(config, factory.name)
        wanted = {
            trajectory_id(factory.name, settings.split, config.seed, episode, settings.policy): episode
            for episode in range(settings.episodes)
        }
        missing = {name: episode for name, episode in wanted.items() if name not in writer.ids}
        report.already_there = len(wanted) - len(missing)
        if missing and names_language_model(settings.policy):
            models.open(settings.policy, role="agent")
            await models.check_reachable()
        places = asyncio.Semaphore(settings.concurrency)
        finished: asyncio.Queue[Trajectory | RolloutFailure] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_store(finished, len(missing), writer, report, notify))
                async for episode, task in _tasks(factory, config, sorted(missing.values())):
                    await places.acquire()
                    play = group.create_task(_episode(config, factory, models, episode, task, finished))
                    play.add_done_callback(lambda _: places.release())
                    # An in-process episode never waits: let it run now, so that rows are written early.
                    await asyncio.sleep(0)
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the others were cancelled because of the first
        report.seconds = clock() - started
    return report


async def _tasks(
    factory: EnvironmentFactory, config: Config, episodes: list[int]
) -> AsyncIterator[tuple[int, Task]]:
    """The task of each episode; tasks repeat where the environment has fewer than episodes."""
    settings = config.collect
    known: list[Task] = []
    complete = False
    for episode in episodes:
        while episode >= len(known) and not complete:
            count = min(settings.episodes, (episode // _BLOCK + 1) * _BLOCK)
            try:
                known = list(await factory.tasks(settings.split, count, seed=config.seed))
            except ConfigError:
                # Fewer tasks than episodes; a split that does not exist raises again, without a count.
                known = list(await factory.tasks(settings.split, None, seed=config.seed))
                complete = True
        yield episode, known[episode % len(known)]


async def _episode(
    config: Config,
    factory: EnvironmentFactory,
    models: LanguageModels,
    episode: int,
    task: Task,
    finished: asyncio.Queue[Trajectory | RolloutFailure],
) -> None:
    settings = config.collect
    seed = derive_seed("collect", config.seed, episode)

    def policy(environment: Environment) -> Policy:
        if names_language_model(settings.policy):
            model = models.open(settings.policy, role="agent")
            return PromptedPolicy(model, config.agent, seed=seed, name=settings.policy)
        named = resolve_policy(settings.policy, seed=config.seed, episode=episode)
        return make_policy(named, environment, seed=seed)

    result = await run_episode(
        lambda: factory.make(task, seed=seed),
        policy,
        trajectory_id=trajectory_id(factory.name, settings.split, config.seed, episode, settings.policy),
        task=task,
        seed=seed,
        keep_admissible_actions=settings.admissible_actions,
        keep_world_sheet=settings.world_sheet,
    )
    await finished.put(result)


async def _store(
    finished: asyncio.Queue[Trajectory | RolloutFailure],
    count: int,
    writer: TrajectoryWriter,
    report: CollectReport,
    notify: Callable[[], None],
) -> None:
    """Write all finished episodes with one durable append, then count them."""
    while count:
        results = [await finished.get()]
        while not finished.empty():
            results.append(finished.get_nowait())
        count -= len(results)
        trajectories = [result for result in results if isinstance(result, Trajectory)]
        await asyncio.to_thread(writer.append, trajectories)
        for result in results:
            if isinstance(result, Trajectory):
                report.count(result)
            else:
                report.failures[result.kind] += 1
        notify()


def _check_settings(config: Config, environment: str) -> None:
    """Episodes are named by number, so all in a directory must come from one policy, split and seed."""
    settings = config.collect
    mine = {
        "environment": environment,
        "options": {key: str(value) for key, value in sorted(config.environment.options.items())},
        "policy": settings.policy,
        "split": settings.split,
        "seed": config.seed,
    }
    path = settings.out / _SETTINGS
    if not path.exists():
        write_text(path, json.dumps(mine, indent=2) + "\n")
        return
    theirs = _read_settings(path)
    for name, value in mine.items():
        if theirs.get(name) != value:
            raise ConfigError(
                f"{settings.out} was collected with {name}={theirs.get(name)!r}, now {value!r} was given; "
                "choose another --out, or the same settings to resume"
            )


def _read_settings(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        found = error
    if not isinstance(found, dict):
        raise DataError(
            f"{path}: expected the settings of this collection as a JSON object, got {str(found)[:80]!r}; "
            "if the trajectories next to it are yours, remove the file and run the same command again"
        )
    return found
