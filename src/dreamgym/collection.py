"""Records trajectories from a real environment, in parallel and resumable.

The number of an episode and the seed give its task and its policy, and its trajectory id names them. So a
killed run resumes by playing the missing ids, and the same settings always give the same episodes. The policy
`explore` also depends on earlier episodes: those of earlier blocks, and those of the same task.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamgym.config import Config
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.distributed.jobs import Loss, UsageRows
from dreamgym.distributed.real import RealSetup
from dreamgym.distributed.setup import LOGS, check_budget, divided, open_pool, pool_settings
from dreamgym.distributed.worker import WorkerState
from dreamgym.envs.coverage import Coverage
from dreamgym.envs.episode import first_tasks
from dreamgym.envs.exploration import ExplorationMemory, ExplorePolicy
from dreamgym.envs.references import short_name
from dreamgym.envs.scripted_policies import make_policy, resolve_policy
from dreamgym.errors import ConfigError, DataError
from dreamgym.files import write_text
from dreamgym.models.registry import CACHE, LanguageModels, check_language_model, names_language_model
from dreamgym.prompted_policy import PromptedPolicy
from dreamgym.protocols import Environment, EnvironmentFactory, Policy
from dreamgym.rollouts import run_episode
from dreamgym.seeding import derive_seed
from dreamgym.types import RolloutFailure, Task, Trajectory

_BLOCK = 64
"""Tasks requested at a time: some environments first prove that a task can be solved."""
_SETTINGS, _COVERAGE = "collect.json", "coverage.json"


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
    coverage: Coverage = field(default_factory=Coverage)
    """The actions of all episodes, also of those that were there before."""

    def count(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.successes += trajectory.success
        self.steps += len(trajectory)
        row = self.by_policy.setdefault(trajectory.provenance.policy, [0, 0, 0])
        for column, value in enumerate((1, int(trajectory.success), len(trajectory))):
            row[column] += value
        self.coverage.add([trajectory])


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
        exploration = _Exploration(config)
        if writer.ids:
            await asyncio.to_thread(_read_earlier, settings.out, wanted, report, exploration)
        if missing and names_language_model(settings.policy):
            models.open(settings.policy, role="agent")
            await models.check_reachable()
        places = asyncio.Semaphore(settings.concurrency)

        run_job = await _where(stack, config, factory, models)

        async def play(episode: int, task: Task) -> None:
            explores = settings.policy == ExplorePolicy.name
            memory, earlier = await exploration.before(episode) if explores else (None, [])
            job = EpisodeJob(config=config, episode=episode, task=task, memory=memory, earlier=earlier)
            result = await run_job(job)
            exploration.finish(episode, result)
            await finished.put(result)

        finished: asyncio.Queue[Trajectory | RolloutFailure] = asyncio.Queue()
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_store(finished, len(missing), writer, report, notify))
                async for episode, task in _tasks(factory, config, sorted(missing.values())):
                    await places.acquire()
                    running = group.create_task(play(episode, task))
                    running.add_done_callback(lambda _: places.release())
                    # An in-process episode never waits: let it run now, so that rows are written early.
                    await asyncio.sleep(0)
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the others were cancelled because of the first
        report.seconds = clock() - started
        write_text(settings.out / _COVERAGE, json.dumps(report.coverage.to_dict(), indent=2) + "\n")
    return report


def _read_earlier(
    folder: Path, wanted: dict[str, int], report: CollectReport, exploration: _Exploration
) -> None:
    for trajectory in read_trajectories(folder):
        report.coverage.add([trajectory])
        if trajectory.id in wanted:
            exploration.finish(wanted[trajectory.id], trajectory)


class _Exploration:
    """What each episode of `explore` may know: all of the earlier blocks, and its own task's episodes.

    So episodes of different tasks in a block run concurrently, and the result depends neither on the order in
    which they end nor on interruptions.
    """

    def __init__(self, config: Config) -> None:
        self._active = config.collect.policy == ExplorePolicy.name
        self._per_task = config.collect.episodes_per_task
        self._block = max(1, _BLOCK // self._per_task) * self._per_task
        self._memory = ExplorationMemory()
        self._known = 0
        """Episodes in the memory: all before this number."""
        self._results: dict[int, Trajectory | RolloutFailure] = {}
        self._changed = asyncio.Event()

    def finish(self, episode: int, result: Trajectory | RolloutFailure) -> None:
        if self._active:
            self._results[episode] = result
            self._changed.set()

    async def before(self, episode: int) -> tuple[ExplorationMemory, list[Trajectory]]:
        """The memory of the earlier blocks, and the earlier episodes of the same task."""
        block, task = episode - episode % self._block, episode - episode % self._per_task
        while not all(
            each in self._results for each in range(self._known, episode) if each < block or each >= task
        ):
            self._changed.clear()
            await self._changed.wait()
        for number in range(self._known, block):
            result = self._results.pop(number)
            if isinstance(result, Trajectory):
                self._memory.add(result)
        self._known = max(self._known, block)
        earlier = [self._results[each] for each in range(task, episode)]
        return self._memory, [each for each in earlier if isinstance(each, Trajectory)]


async def _tasks(
    factory: EnvironmentFactory, config: Config, episodes: list[int]
) -> AsyncIterator[tuple[int, Task]]:
    """The task of each episode; tasks repeat where the environment has fewer than are needed."""
    settings = config.collect
    known: Sequence[Task] = []
    complete = False
    for episode in episodes:
        place = episode // settings.episodes_per_task
        while place >= len(known) and not complete:
            count = min(-(-settings.episodes // settings.episodes_per_task), (place // _BLOCK + 1) * _BLOCK)
            known = await first_tasks(factory, settings.split, count, seed=config.seed)
            complete = len(known) < count
        yield episode, known[place % len(known)]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeJob:
    """One episode, to be played here or by a worker."""

    config: Config
    episode: int
    task: Task
    memory: ExplorationMemory | None
    earlier: Sequence[Trajectory]

    @property
    def name(self) -> str:
        return f"episode {self.episode}"

    async def run(self, state: WorkerState) -> tuple[Trajectory | RolloutFailure, UsageRows]:
        return await self.play(state.factory, state.models), state.new_usage()

    async def play(self, factory: EnvironmentFactory, models: LanguageModels) -> Trajectory | RolloutFailure:
        config, settings = self.config, self.config.collect
        seed = derive_seed("collect", config.seed, self.episode)

        def policy(environment: Environment) -> Policy:
            if names_language_model(settings.policy):
                model = models.open(settings.policy, role="agent")
                return PromptedPolicy(model, config.agent, seed=seed, name=settings.policy)
            if settings.policy == ExplorePolicy.name:
                return ExplorePolicy(
                    seed, memory=self.memory, earlier=self.earlier, templates=settings.actions
                )
            named = resolve_policy(settings.policy, seed=config.seed, episode=self.episode)
            return make_policy(named, environment, seed=seed)

        name = trajectory_id(factory.name, settings.split, config.seed, self.episode, settings.policy)
        return await run_episode(
            lambda: factory.make(self.task, seed=seed),
            policy,
            trajectory_id=name,
            task=self.task,
            seed=seed,
            keep_admissible_actions=settings.admissible_actions,
            keep_world_sheet=settings.world_sheet,
        )


async def _where(
    stack: AsyncExitStack, config: Config, factory: EnvironmentFactory, models: LanguageModels
) -> Callable[[EpisodeJob], Awaitable[Trajectory | RolloutFailure]]:
    """Plays episodes in this process, or on ``collect.workers`` workers."""
    settings = config.collect
    if not settings.workers:
        return lambda job: job.play(factory, models)
    check_budget(config, "--workers 0")
    setup = RealSetup.of(divided(config, settings.workers), factory, settings.out / CACHE)
    limits = pool_settings(
        config, settings.workers, jobs=settings.episodes, episodes=1, concurrency=settings.concurrency
    )
    pool, _ = await open_pool(
        *(stack, config, setup, limits),
        workers=settings.workers,
        logs=settings.out / LOGS,
        on_event=lambda message: None,
    )

    async def run(job: EpisodeJob) -> Trajectory | RolloutFailure:
        found = await pool.run(job)
        if isinstance(found, Loss):
            return RolloutFailure(
                task=job.task, kind=found.kind, message=found.message, attempts=found.attempts
            )
        result: Trajectory | RolloutFailure = found[0]
        models.usage.add(found[1])
        return result

    return run


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
        "episodes_per_task": settings.episodes_per_task,
        "actions": list(settings.actions),
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
