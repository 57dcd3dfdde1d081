"""Closed-loop fidelity: the same actions in the dream and in reality.

Each prediction starts from the model's own previous state and sheet. Only lists of actions are shared between
dream and reality, so no policy's skill influences the result.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from dreamgym.envs.synthetic import SyntheticEnvironment
from dreamgym.errors import EpisodeFailedError
from dreamgym.evaluation.async_map import OnCount, ask_all
from dreamgym.evaluation.statistics import Estimate, share_of_episodes
from dreamgym.experience.world_sheet import with_sheet
from dreamgym.protocols import Environment, EnvironmentFactory, ExperienceModel
from dreamgym.types import FailureKind, Outcome, Provenance, State, Task, Trajectory, Transition, WorldSheet

_NO_FACTS = WorldSheet(facts=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionList:
    """The actions of one episode, and its start."""

    task: Task
    actions: tuple[str, ...]
    sheet: WorldSheet = _NO_FACTS
    """The hidden facts at the start; only the dream needs them."""
    first: State | None = None
    """The first state of the dream; None: the experience model imagines it."""
    seed: int = 0

    @classmethod
    def of(cls, trajectory: Trajectory) -> ActionList:
        return cls(
            task=trajectory.task,
            actions=tuple(transition.action for transition in trajectory.transitions),
            sheet=with_sheet(trajectory).sheet or _NO_FACTS,
            seed=trajectory.seed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """How an action list went: up to its last action, the end of the episode, or a failure."""

    played: ActionList
    start: State | None
    outcomes: tuple[Outcome, ...]
    failure: FailureKind | None = None

    @property
    def success(self) -> bool:
        return any(outcome.success for outcome in self.outcomes)

    @property
    def total_reward(self) -> float:
        return sum(outcome.reward for outcome in self.outcomes)

    @property
    def states(self) -> tuple[str, ...]:
        """The first state and those after each action, as far as it went."""
        if self.start is None:
            return ()
        return (self.start.text, *(outcome.next_state.text for outcome in self.outcomes))

    @property
    def trajectory(self) -> Trajectory:
        """What was played, as a synthetic trajectory."""
        states = [self.start or State(text=""), *(outcome.next_state for outcome in self.outcomes)]
        return Trajectory(
            id=f"{self.played.task.id}/replay",
            task=self.played.task,
            start=states[0],
            transitions=tuple(
                Transition(state=state, action=action, outcome=outcome)
                for state, action, outcome in zip(states, self.played.actions, self.outcomes, strict=False)
            ),
            provenance=Provenance(source="synthetic", policy="replay"),
            seed=self.played.seed,
        )


async def replay(environment: Environment, played: ActionList) -> Replay:
    """Do these actions in a fresh environment, which is closed afterwards."""
    start: State | None = None
    outcomes: list[Outcome] = []
    failure: FailureKind | None = None
    try:
        start = await environment.start()
        for action in played.actions:
            outcomes.append(await environment.step(action))
            if outcomes[-1].over:
                break
    except EpisodeFailedError as error:
        failure = error.kind
    finally:
        await environment.aclose()
    return Replay(played=played, start=start, outcomes=tuple(outcomes), failure=failure)


async def replay_in_dream(
    experience_model: ExperienceModel,
    lists: Sequence[ActionList],
    *,
    in_flight: int = 64,
    on_count: OnCount | None = None,
) -> list[Replay]:
    """Each list in a dream of its own world, in order; no horizon cuts it short."""

    async def dream(played: ActionList) -> Replay:
        environment = SyntheticEnvironment(
            *(played.task, experience_model, played.sheet),
            horizon=len(played.actions) + 1,
            first=played.first,
        )
        return await replay(environment, played)

    return await ask_all(dream, lists, in_flight=in_flight, on_count=on_count)


async def replay_in_reality(
    factory: EnvironmentFactory,
    lists: Sequence[ActionList],
    *,
    in_flight: int = 8,
    on_count: OnCount | None = None,
) -> list[Replay]:
    """Each list in an episode of the real environment, in order."""

    async def play(played: ActionList) -> Replay:
        return await replay(factory.make(played.task, seed=played.seed), played)

    return await ask_all(play, lists, in_flight=in_flight, on_count=on_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class DriftPoint:
    """Share of episodes that still match after `step` steps, among real episodes of at least that length."""

    step: int
    """0 is the first state."""
    exact: Estimate
    """This state is word for word the real one."""
    unbroken: Estimate
    """This state and every one before it."""


def drift_by_step(trajectories: Sequence[Trajectory], dreams: Sequence[Replay]) -> tuple[DriftPoint, ...]:
    """Compare real episodes with the dreams of their own actions, step by step. A dream that ended
    earlier than the real episode is not exact there."""
    matches: list[list[bool]] = []
    for trajectory, dream in zip(trajectories, dreams, strict=True):
        real = [trajectory.start.text, *(step.outcome.next_state.text for step in trajectory.transitions)]
        imagined = [*dream.states, *[None] * len(real)]
        matches.append([text == other for text, other in zip(real, imagined, strict=False)])
    points = []
    for step in range(max(map(len, matches), default=0)):
        lasting = [found for found in matches if len(found) > step]
        points.append(
            DriftPoint(
                step=step,
                exact=share_of_episodes(found[step] for found in lasting),
                unbroken=share_of_episodes(all(found[: step + 1]) for found in lasting),
            )
        )
    return tuple(points)


@dataclass(frozen=True, slots=True, kw_only=True)
class Transfer:
    """Action lists that succeed in one world, replayed in the other."""

    share: Estimate
    """Of the lists replayed to their end, those that succeed there too."""
    failures: dict[str, int]
    """Replays that broke, by kind; they count as unsuccessful in the dream and are left out in reality."""


def real_to_dream(trajectories: Sequence[Trajectory], dreams: Sequence[Replay]) -> Transfer:
    """Real successes replayed in the dream. A prediction that failed is the model's own fault and counts."""
    wanted = [dream for trajectory, dream in zip(trajectories, dreams, strict=True) if trajectory.success]
    return Transfer(
        share=share_of_episodes(dream.success for dream in wanted), failures=failure_counts(wanted)
    )


def dream_successes(dreams: Iterable[Replay]) -> list[ActionList]:
    """The action lists that succeed in the dream, cut where it says so, to be tried in reality."""
    return [
        replace(dream.played, actions=dream.played.actions[: len(dream.outcomes)])
        for dream in dreams
        if dream.success
    ]


def arrived(replays: Sequence[Replay]) -> Transfer:
    """How many of these real replays succeed."""
    return Transfer(
        share=share_of_episodes(real.success for real in replays if real.failure is None),
        failures=failure_counts(replays),
    )


def near_miss(played: ActionList, *, seed: int = 0) -> ActionList:
    """The same list without one of its actions but the last: a dream that wants to please forgives it.

    >>> task = Task(id="t", instruction="open the safe", environment="house")
    >>> near_miss(ActionList(task=task, actions=("go to safe 1", "open safe 1"))).actions
    ('open safe 1',)
    """
    if len(played.actions) < 2:
        return played
    left_out = Random(f"{seed}/{played.task.id}").randrange(len(played.actions) - 1)
    return replace(played, actions=played.actions[:left_out] + played.actions[left_out + 1 :])


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySpread:
    """How much replays of the same actions in the dream differ; 0 and 1 where the sheet fixes the outcome."""

    repeats: int
    mean_deviation: float | None
    """Standard deviation of the returns of one list, averaged over the lists."""
    largest_deviation: float | None
    all_equal: Estimate
    """Share of lists whose repeats agree in every state."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def replay_spread(dreams: Sequence[Replay], *, repeats: int) -> ReplaySpread:
    """Compare repeats of the same lists: `dreams` holds all lists once, then all again, and so on. Make
    them in one call: a model whose replies depend on its other requests shows it only then."""
    if repeats < 2 or len(dreams) % repeats:
        raise ValueError(f"expected the same lists at least 2 times, got {len(dreams)} dreams, {repeats=!r}")
    lists = len(dreams) // repeats
    groups = [dreams[place::lists] for place in range(lists)]
    deviations = [statistics.pstdev(dream.total_reward for dream in group) for group in groups]
    return ReplaySpread(
        repeats=repeats,
        mean_deviation=statistics.fmean(deviations) if deviations else None,
        largest_deviation=max(deviations, default=None),
        all_equal=share_of_episodes(len({dream.states for dream in group}) == 1 for group in groups),
    )


def failure_counts(replays: Iterable[Replay]) -> dict[str, int]:
    return dict(sorted(Counter(str(each.failure) for each in replays if each.failure).items()))
