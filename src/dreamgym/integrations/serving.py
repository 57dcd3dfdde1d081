"""Sessions of a server: each plays episodes one after another, in the dream or in reality, with the same
tasks and the same replies. The wire protocol is in `openenv_server`."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dreamgym.config import nearest_name
from dreamgym.envs.episode import check_split
from dreamgym.errors import BudgetSpentError, ConfigError, EndpointError, EpisodeFailedError, EpisodeOverError
from dreamgym.integrations.served_results import ServedResults
from dreamgym.models.usage import Usage, UsageRow, stage
from dreamgym.protocols import Environment, EnvironmentFactory, find_world_sheet
from dreamgym.seeding import derive_seed
from dreamgym.training.dream_loading import Dream
from dreamgym.types import (
    Demonstration,
    FailureKind,
    Outcome,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
)

Mode = Literal["dream", "real"]
_STAGE = "serve"


class ResetRequest(BaseModel):
    """What a client may choose; other fields are ignored, as by other servers."""

    model_config = ConfigDict(extra="ignore")

    seed: int | None = Field(None, ge=0, description="Episodes of one task and seed start alike.")
    episode_id: str | None = Field(None, max_length=255)
    mode: Mode | None = Field(None, description="dream or real; by default what the server was started with.")
    split: str | None = Field(None, description="Split of the task; by default the split of the dream.")
    index: int | None = Field(None, ge=0, description="Position of the task in its split.")
    task_id: str | None = None
    policy: str = Field("served", max_length=255, description="Name of the policy, for the records.")
    policy_version: int = Field(0, ge=0, description="Updates that the policy has received.")


class Observation(BaseModel):
    """All that a policy may see: some clients show it the whole object."""

    text: str = Field(description="What the environment replies.")
    instruction: str = Field(description="The task.")
    done: bool = False
    reward: float | None = None
    metadata: dict[str, Any] = Field(default_factory=dict, description="Always empty.")


class Source(BaseModel):
    """A demonstration in the experience model's prompt."""

    transition: str
    similarity: float
    source: str


class Cost(BaseModel):
    """What the episode has cost so far."""

    seconds: float = 0.0
    """Waited for the environment."""
    requests: int = 0
    """To endpoints; a local experience model sends none."""
    tokens: int = 0
    money: float = 0.0


class EpisodeState(BaseModel):
    """For the trainer, never for the policy: how the episode stands, and where the last reply comes from."""

    episode_id: str | None = None
    step_count: int = 0
    mode: Mode | None = None
    task_id: str | None = None
    split: str | None = None
    seed: int | None = None
    terminated: bool = False
    truncated: bool = False
    success: bool = False
    total_reward: float = 0.0
    failure: FailureKind | None = Field(None, description="Why the episode could not be finished.")
    failure_message: str | None = None
    admissible_actions: list[str] | None = None
    experience_model: str | None = Field(None, description="None in the real environment.")
    reward_source: str | None = Field(None, description="The grader of the last action.")
    support: float | None = Field(None, description="How far the last reply can be trusted, 0 to 1.")
    reasoning: str | None = None
    refused: bool = False
    demonstrations: list[Source] = []
    cost: Cost = Cost()


class ServedEnvironment:
    """What a server offers: one environment as a dream, in reality, or both."""

    def __init__(
        self,
        name: str,
        *,
        dream: Dream | None = None,
        open_real: Callable[[], EnvironmentFactory] | None = None,
        results: ServedResults | None = None,
        mode: Mode | None = None,
        seed: int = 0,
    ) -> None:
        """`open_real` is called with the first episode that asks for the real environment."""
        self.name = name
        self.dream, self.results = dream, results
        self._open_real = open_real
        self._real = open_real() if dream is None and open_real is not None else None
        self.modes: tuple[Mode, ...] = (*(("dream",) if dream else ()), *(("real",) if open_real else ()))
        self.mode: Mode = mode or self.modes[0]
        self.check_mode(self.mode)
        self.counts: Counter[str] = Counter()
        self._seed = seed
        self._drawn = 0
        self._real_tasks: dict[str, Sequence[Task]] = {}

    @property
    def usage(self) -> Usage | None:
        """Of endpoints."""
        return None if self.dream is None or self.dream.models is None else self.dream.models.usage

    @property
    def splits(self) -> tuple[str, ...]:
        own = () if self.dream is None else (self.dream.split,)
        return tuple(dict.fromkeys((*own, *(self._real.splits if self._real is not None else ()))))

    def check_mode(self, mode: str) -> None:
        if mode not in self.modes:
            raise ConfigError(f"this server offers mode {' and '.join(self.modes)} only, got {mode!r}")

    def factory(self, mode: Mode) -> EnvironmentFactory:
        self.check_mode(mode)
        if mode == "dream":
            assert self.dream is not None
            return self.dream
        if self._real is None:
            assert self._open_real is not None
            self._real = self._open_real()
        return self._real

    async def tasks(self, split: str) -> Sequence[Task]:
        """The tasks of a split in a fixed order, the same in both modes; a curriculum appends to them."""
        if self.dream is not None and split == self.dream.split:
            return self.dream.known_tasks if self.results is None else self.results.pool.tasks
        if "real" in self.modes and split not in self._real_tasks:
            real = self.factory("real")
            check_split(split, real.splits, self.name)
            self._real_tasks[split] = await real.tasks(split, None, seed=self._seed)
        check_split(split, [*self.splits, *self._real_tasks], self.name)
        return self._real_tasks[split]

    async def choose(self, request: ResetRequest) -> tuple[Mode, Task, int]:
        """Mode, task and seed of a new episode."""
        mode = request.mode or self.mode
        factory = self.factory(mode)
        split = request.split or (self.dream.split if self.dream is not None else factory.splits[0])
        if mode == "dream" and self.dream is not None and split != self.dream.split:
            raise ConfigError(
                f"split {split!r}: the dream has the tasks of {self.dream.split!r}; use mode=real"
            )
        task: Task | None = None
        if request.task_id is not None or request.index is not None:
            task = await self._named(split, request)
        elif request.seed is None and mode == "dream" and self.results is not None:
            return mode, *await self.results.draw()
        else:
            tasks = [each for each in await self.tasks(split) if each.origin == "seed"]
            number = request.seed if request.seed is not None else self._next()
            task = tasks[derive_seed(self._seed, "task", number) % len(tasks)]
        if mode == "real" and task.origin == "generated":
            raise ConfigError(f"task {task.id!r} was generated: it can be played in mode=dream only")
        if request.seed is not None:
            return mode, task, request.seed
        if mode == "dream" and self.results is not None:
            return mode, task, self.results.seed_for(task)
        return mode, task, derive_seed(self._seed, task.id) % 2**31

    def _next(self) -> int:
        self._drawn += 1
        return self._drawn

    async def _named(self, split: str, request: ResetRequest) -> Task:
        tasks = await self.tasks(split)
        if request.index is not None:
            if request.index >= len(tasks):
                raise ConfigError(f"split {split!r} has {len(tasks)} tasks, got index {request.index}")
            return tasks[request.index]
        for task in tasks:
            if task.id == request.task_id:
                return task
        wrong = str(request.task_id)
        raise ConfigError(
            f"split {split!r}: unknown task {wrong!r}{nearest_name(wrong, [each.id for each in tasks])}"
        )

    async def aclose(self) -> None:
        if self.results is not None:
            await self.results.aclose()
        if self._real is not None:
            await self._real.aclose()
        if self.dream is not None:
            await self.dream.aclose()


class Session:
    """The episodes of one client, one after another."""

    def __init__(self, served: ServedEnvironment) -> None:
        self.id = uuid.uuid4().hex
        self.state = EpisodeState()
        self._served = served
        self._environment: Environment | None = None
        self._task: Task | None = None
        self._policy = ("", 0)
        self._start: State | None = None
        self._last: State | None = None
        self._transitions: list[Transition] = []

    async def reset(self, request: ResetRequest) -> Observation:
        """Begin a new episode; one that was under way ends as if it had been truncated."""
        await self.aclose(finished=True)
        mode, task, seed = await self._served.choose(request)
        dream = self._served.dream
        self.state = EpisodeState(
            episode_id=request.episode_id or uuid.uuid4().hex,
            mode=mode,
            task_id=task.id,
            split=task.split,
            seed=seed,
            experience_model=dream.experience_model.name if dream is not None and mode == "dream" else None,
        )
        self._task, self._policy = task, (request.policy, request.policy_version)
        self._transitions = []
        self._count("started")
        try:
            self._environment = environment = self._served.factory(mode).make(task, seed=seed)
        except BaseException:
            self._count("dropped")
            raise
        self._start = self._last = await self._run(environment.start())
        self.state.admissible_actions = _listed(self._start)
        return Observation(text=self._start.text, instruction=task.instruction)

    async def step(self, text: str) -> Observation:
        if self._environment is None or self._task is None or self._last is None:
            raise EpisodeOverError(f"step: expected a running episode, {self._why_not()}; reset first")
        outcome: Outcome = await self._run(self._environment.step(text))
        # Without `info`: demonstrations and facts are most of an episode's memory, and no record holds them.
        kept = replace(outcome, info={})
        self._transitions.append(Transition(state=self._last, action=text, outcome=kept))
        self._last = outcome.next_state
        self._update(outcome)
        if outcome.over:
            await self.aclose(finished=True)
        return Observation(
            text=outcome.next_state.text,
            instruction=self._task.instruction,
            done=outcome.over,
            reward=outcome.reward,
        )

    async def aclose(self, *, finished: bool = False) -> None:
        """End the episode. Unless it is `finished`, as when the client vanished, its results do not count."""
        environment, self._environment = self._environment, None
        if environment is None:
            return
        if finished and self._transitions:
            await self._finish(environment)
        else:
            self._count("dropped")
        await environment.aclose()

    async def _run(self, work: Any) -> Any:
        """Wait for the environment; a failure ends the episode, and its kind is in the state."""
        usage, started = self._served.usage, time.perf_counter()
        name = f"{_STAGE} {self.id}"
        try:
            with stage(name):
                return await work
        except (EpisodeFailedError, EndpointError, BudgetSpentError) as error:
            await self._fail(failure_kind(error), str(error))
            raise
        except Exception as error:
            await self._fail(FailureKind.CRASHED, f"{type(error).__name__}: {error}")
            raise
        finally:
            used = UsageRow() if usage is None else usage.move(name, _STAGE)
            cost = self.state.cost
            self.state.cost = Cost(
                seconds=cost.seconds + time.perf_counter() - started,
                requests=cost.requests + used.requests,
                tokens=cost.tokens + used.prompt_tokens + used.reply_tokens,
                money=cost.money + used.money,
            )

    async def _fail(self, kind: FailureKind, message: str) -> None:
        self.state.failure, self.state.failure_message = kind, message
        self._served.counts[str(kind)] += 1
        await self.aclose()

    def _update(self, outcome: Outcome) -> None:
        state = self.state
        state.step_count += 1
        state.terminated, state.truncated = outcome.terminated, outcome.truncated
        state.success = outcome.success
        state.total_reward += outcome.reward
        state.admissible_actions = _listed(outcome.next_state)
        state.reward_source, state.support = outcome.reward_source, outcome.confidence
        state.reasoning = outcome.reasoning
        state.refused = bool(outcome.info.get("refused"))
        state.demonstrations = [_source(each) for each in outcome.info.get("demonstrations", ())]
        self._served.counts["steps"] += 1

    async def _finish(self, environment: Environment) -> None:
        self._count("finished")
        self._served.counts["successes"] += self.state.success
        results = self._served.results
        if results is None or self.state.mode != "dream" or self._start is None:
            return
        facts = find_world_sheet(environment)
        *before, last = self._transitions
        if not last.outcome.over:  # the client went on to another episode
            last = replace(last, outcome=replace(last.outcome, truncated=True))
        policy, version = self._policy
        assert self._task is not None
        results.finished(
            Trajectory(
                id=f"served-{uuid.uuid4().hex}",
                task=self._task,
                start=self._start,
                transitions=(*before, last),
                provenance=Provenance(
                    source="synthetic",
                    policy=policy,
                    policy_version=version,
                    experience_model=self.state.experience_model,
                    recorded_at=time.time(),
                ),
                seed=self.state.seed or 0,
                sheet=await facts.world_sheet() if facts is not None else None,
            )
        )

    def _count(self, what: str) -> None:
        self._served.counts[f"{what}_{self.state.mode}"] += 1
        results = self._served.results
        if results is None or self.state.mode != "dream" or self._task is None:
            return
        if what == "started":
            results.started(self._task, self.state.seed or 0)
        elif what == "dropped":
            results.dropped(self._task, self.state.seed or 0)

    def _why_not(self) -> str:
        if self.state.failure is not None:
            return f"this one failed ({self.state.failure})"
        return "this one is over" if self.state.terminated or self.state.truncated else "there is none"


def failure_kind(error: Exception) -> FailureKind:
    """The kind of an error that ended an episode."""
    if isinstance(error, EpisodeFailedError):
        return error.kind
    if isinstance(error, EndpointError):
        return FailureKind.SERVER_DOWN
    return FailureKind.BUDGET if isinstance(error, BudgetSpentError) else FailureKind.CRASHED


def _listed(state: State) -> list[str] | None:
    return None if state.admissible_actions is None else list(state.admissible_actions)


def _source(demonstration: Demonstration) -> Source:
    return Source(
        transition=demonstration.transition_id,
        similarity=round(demonstration.similarity, 4),
        source=demonstration.provenance.source,
    )
