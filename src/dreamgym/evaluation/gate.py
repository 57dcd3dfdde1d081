"""What is measured of a dream before a policy trains in it: replies to recorded actions and to near misses,
and episodes of the initial policy. `training.gate` decides by it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from random import Random
from typing import Any

from dreamgym.evaluation.closed_loop import ActionList, replay_in_dream
from dreamgym.evaluation.one_step import StepQuestion, StepRecord, predict_steps, step_questions
from dreamgym.evaluation.statistics import Estimate, share_of_episodes, share_of_steps
from dreamgym.evaluation.worst import AdviceSettings, WorstKind, worst_kinds
from dreamgym.experience.world_sheet import with_sheet
from dreamgym.protocols import Annotator, ExperienceModel
from dreamgym.training.metrics import supported_success
from dreamgym.types import FailureKind, Outcome, State, Trajectory, Transition, WorldSheet

_UNKNOWN = Outcome(next_state=State(text=""), reward=0.0, terminated=False)
"""Of a near miss: all that is known is that it is no success."""
_FREQUENT = 0.05
"""Share of the replies from which on a kind of action counts by itself."""
_LONG = 3
"""Actions of the shortest recorded success from which on its last action alone cannot be enough."""
_FIRST = 32
"""Transitions that are measured first."""
_NEAR_MISSES = 4
"""Recorded transitions per near miss."""
_EPISODES = 32
"""Recorded successes, and as many recorded failures, that are replayed as whole episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DreamCheck:
    """A dream on recorded actions and near misses of them."""

    transitions: int
    supported: Estimate
    """Share of the predictions with enough support; the others are refused in the dream, and not counted
    below."""
    exact: Estimate
    """Share of next states that are word for word right."""
    endings: Estimate
    """Share of actions after which the episode ends, or goes on, as recorded."""
    false_successes: Estimate
    """Of the successes predicted on recorded actions, those that the record does not have."""
    near_misses: Estimate
    """Share of near misses that succeed in the dream: the last action of a success, as the first one."""
    won_again: Estimate
    """Share of the recorded successes that succeed, with support, when all their actions are done in the
    dream."""
    lost_again: Estimate
    """Share of the recorded failures that fail, likewise."""
    worst: tuple[WorstKind, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def problems(self, *, least_exact: float | None, most_false: float, least_won: float = 0.0) -> list[str]:
        """Why a policy should not train in it; the whole interval is beyond the bound. With
        ``least_exact=None`` texts may differ from the recorded ones."""
        found = [
            f"recorded {what}: {share.percent()} of {share.count} do so again when their actions are done in "
            f"the dream, expected at least {least:.0%}"
            for what, share, least in (
                ("successes", self.won_again, least_won),
                ("failures", self.lost_again, 1 - most_false),
            )
            if share.high is not None and share.high < least
        ]
        if least_exact is not None:
            rows = [("next states", self.exact), ("endings", self.endings)]
            many = max(10, int(_FREQUENT * self.transitions))
            rows += [
                (f"replies to `{each.kind}`", each.right) for each in self.worst if each.right.count >= many
            ]
            found += [
                f"{what}: {share.percent()} of {share.count} are right, expected at least {least_exact:.0%}"
                for what, share in rows
                if share.high is not None and share.high < least_exact
            ]
        for what, share in (
            ("successes predicted on recorded actions that the record does not have", self.false_successes),
            ("near misses (the last action of a success as the first) that succeed", self.near_misses),
        ):
            if share.low is not None and share.low > most_false:
                found.append(f"{what}: {share.percent()} of {share.count}, expected at most {most_false:.0%}")
        return found


async def check_dream(
    experience_model: ExperienceModel,
    annotator: Annotator,
    trajectories: Sequence[Trajectory],
    recorded: Sequence[Trajectory],
    advice: AdviceSettings,
    *,
    transitions: int,
    episodes: Sequence[Trajectory] = (),
    hopeless: float = 0.0,
    seed: int = 0,
) -> DreamCheck:
    """Measure at most this many transitions of `trajectories`, near misses made from `recorded`, and some of
    the recorded `episodes` from their first action to their last.

    A part of the transitions is measured first. Where its share of exact next states is surely below
    `hopeless`, the rest is left out: a model that babbles takes its longest for every reply.
    """
    chosen = _sample(trajectories, transitions, seed)
    questions = (await step_questions(annotator, chosen))[:transitions]
    Random(f"gate questions/{seed}").shuffle(questions)
    misses = list(_near_misses(chosen, recorded, seed))[: max(1, transitions // _NEAR_MISSES)]
    answered = _answered(await predict_steps(experience_model, questions[:_FIRST]))
    first = share_of_steps((each.trajectory_id, each.exact) for each in answered)
    if first.high is not None and first.high < hopeless:
        misses, episodes = [], ()
    else:
        answered += _answered(await predict_steps(experience_model, questions[_FIRST:]))
    replies = [each for each in answered if _is_supported(each)]
    missed = _answered(await predict_steps(experience_model, misses))
    graded = [each for each in replies if each.real.graded]
    won, lost = [
        await _alike(experience_model, [each for each in episodes if each.success is success], seed)
        for success in (True, False)
    ]
    return DreamCheck(
        transitions=len(answered),
        supported=share_of_steps((each.trajectory_id, _is_supported(each)) for each in answered),
        exact=share_of_steps((each.trajectory_id, each.exact) for each in replies),
        endings=share_of_steps((each.trajectory_id, _ends_alike(each)) for each in graded),
        false_successes=share_of_steps(
            (each.trajectory_id, each.false_success) for each in graded if _counts(each)
        ),
        near_misses=share_of_steps((each.trajectory_id, _counts(each)) for each in missed),
        won_again=won,
        lost_again=lost,
        worst=worst_kinds(replies, advice).actions,
    )


async def _alike(experience_model: ExperienceModel, recorded: Sequence[Trajectory], seed: int) -> Estimate:
    """The share of recorded episodes that end in the dream as they were recorded."""
    graded = [each for each in recorded if each.graded and each.transitions]
    Random(f"gate episodes/{seed}").shuffle(graded)
    some = graded[:_EPISODES]
    lists = [replace(ActionList.of(each), first=State(text=each.start.text)) for each in some]
    replays = await replay_in_dream(experience_model, lists)
    return share_of_episodes(
        supported_success(found.trajectory) == each.success
        for found, each in zip(replays, some, strict=True)
        if found.failure in (None, FailureKind.PARSE_ERROR)
    )


def _answered(records: Sequence[StepRecord]) -> list[StepRecord]:
    """Without failures that are not the model's own, such as a server that is down."""
    return [each for each in records if each.failure in (None, FailureKind.PARSE_ERROR)]


def _is_supported(record: StepRecord) -> bool:
    return record.predicted is None or supported(record.predicted)


def _ends_alike(record: StepRecord) -> bool:
    predicted = record.predicted
    return predicted is not None and predicted.terminated == record.real.terminated


def _counts(record: StepRecord) -> bool:
    """Whether it is predicted to succeed, with support."""
    predicted = record.predicted
    return predicted is not None and predicted.success and supported(predicted)


def supported(outcome: Outcome) -> bool:
    """Whether a predicted outcome is supported by what the experience model has seen."""
    return bool(outcome.info.get("supported", True))


def _sample(trajectories: Sequence[Trajectory], transitions: int, seed: int) -> list[Trajectory]:
    """Whole trajectories in random order, up to this number of transitions."""
    order = [each for each in trajectories if each.transitions]
    Random(f"gate/{seed}").shuffle(order)
    chosen: list[Trajectory] = []
    count = 0
    for each in order:
        if count >= transitions:
            break
        chosen.append(each)
        count += len(each)
    return chosen


def _near_misses(
    trajectories: Sequence[Trajectory], recorded: Sequence[Trajectory], seed: int
) -> Iterator[StepQuestion]:
    """At each first state the last action of a success, of the same task if there is one. Where a success of
    few actions is recorded this could be right, so that there is none."""
    successes = [each for each in recorded if each.success]
    if not successes or min(map(len, successes)) < _LONG:
        return
    by_task = {each.task.id: each for each in successes}
    rng = Random(f"near misses/{seed}")
    for each in map(with_sheet, trajectories):
        success = by_task.get(each.task.id) or rng.choice(successes)
        action = next(turn.action for turn in success.transitions if turn.outcome.success)
        yield StepQuestion(
            trajectory_id=each.id,
            task=each.task,
            sheet=each.sheet or WorldSheet(facts=()),
            history=(),
            transition=Transition(state=each.start, action=action, outcome=_UNKNOWN),
            names=frozenset(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyCheck:
    """Episodes of the initial policy in the dream."""

    success: Estimate
    too_quick: Estimate
    """Share of episodes that succeed with at most half of the actions of the shortest recorded success."""
    shortest: int | None
    """Actions of the shortest recorded success."""
    recorded_success: Estimate
    """Share of the recorded episodes that succeed, of any policy."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def problems(self, *, most_false: float) -> list[str]:
        quick = self.too_quick
        if quick.low is None or quick.low <= most_false:
            return []
        return [
            f"episodes of the initial policy: {quick.percent()} of {quick.count} succeed with at most half "
            f"of the {self.shortest} actions of the shortest recorded success; "
            f"{self.recorded_success.percent()} of the recorded episodes succeed"
        ]


def check_policy(episodes: Sequence[Trajectory], recorded: Sequence[Trajectory]) -> PolicyCheck:
    """Compare imagined episodes of a policy with recorded ones."""
    shortest = min((len(each) for each in recorded if each.success), default=None)
    won = [supported_success(each) for each in episodes]
    quick = [
        success and shortest is not None and 2 * len(each) <= shortest
        for each, success in zip(episodes, won, strict=True)
    ]
    return PolicyCheck(
        success=share_of_episodes(won),
        too_quick=share_of_episodes(quick),
        shortest=shortest,
        recorded_success=share_of_episodes(each.success for each in recorded if each.graded),
    )
