"""Attack: searches a dream for successes that are not real.

Candidates are hostile action texts, mutated recorded plans, and mutations of those on which the dream was
least sure (a hill-climb on the dream's own answers). Every success in the dream is replayed in the real
environment. A policy that practises in the dream searches in the same way, with more patience.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any, TypeAlias

from dreamgym.errors import EpisodeFailedError
from dreamgym.evaluation.async_map import ask_all
from dreamgym.evaluation.attack_plans import (
    CLIMBED,
    FORGED,
    RECORDED,
    Actions,
    Candidate,
    Candidates,
    known_failures,
)
from dreamgym.evaluation.closed_loop import ActionList, Replay, replay, replay_in_reality
from dreamgym.evaluation.statistics import Estimate, share_of_episodes
from dreamgym.experience.model import VIOLATION
from dreamgym.protocols import EnvironmentFactory
from dreamgym.types import Change, Trajectory

_ROUND = 128
_BEST = 64
"""Candidates that are kept for the hill-climb."""
_EXAMPLES = 10
_SHARES = (("forged", 0.3), ("mutated", 0.4), ("climbed", 0.3))
OnAttack: TypeAlias = Callable[["Attack"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FalseSuccess:
    """A success of the dream that the real environment does not grant."""

    task: str
    kind: str
    actions: Actions
    action: str
    """The first at which dream and reality differ."""
    dreamt: str
    real: str


@dataclass(slots=True, kw_only=True)
class Attack:
    """What an attack has found so far."""

    budget: int
    tried: int = 0
    failed: int = 0
    """Episodes in which the experience model failed."""
    checked: int = 0
    """Replies that a check turned into a refusal."""
    real_steps: int = 0
    dreamt: Counter[str] = field(default_factory=Counter)
    """Distinct successes in the dream, by kind."""
    verdicts: dict[str, list[bool]] = field(default_factory=lambda: defaultdict(list))
    """Whether each replayed success was real, by kind."""
    by_recordings: bool = False
    """No real environment: recorded outcomes decide, and forged texts count as not real."""
    false: list[FalseSuccess] = field(default_factory=list)

    @property
    def real(self) -> Estimate:
        """The share of dreamt successes that are real; recorded plans are a control and do not count."""
        return share_of_episodes(
            each for kind, found in self.verdicts.items() if kind != RECORDED for each in found
        )

    @property
    def unknown(self) -> int:
        """Dreamt successes that were not replayed."""
        return self.dreamt.total() - sum(map(len, self.verdicts.values()))

    def passes(self, least: float) -> bool | None:
        """Whether the share is at least this; None if nothing was there to judge."""
        return None if self.real.value is None else self.real.value >= least

    @property
    def worst(self) -> list[FalseSuccess]:
        """Examples, the shortest first, each differing at another action."""
        shortest: dict[str, FalseSuccess] = {}
        for each in sorted(self.false, key=lambda found: (len(found.actions), found.actions)):
            shortest.setdefault(each.action, each)
        return list(shortest.values())[:_EXAMPLES]

    def to_dict(self) -> dict[str, Any]:
        return {
            "tried": self.tried,
            "failed": self.failed,
            "checked": self.checked,
            "dreamt": self.dreamt.total(),
            "not_judged": self.unknown,
            "real_steps": self.real_steps,
            "by_recordings": self.by_recordings,
            "real": self.real.to_dict(),
            "kinds": {
                kind: {"dreamt": count, "judged": len(found), "real": sum(found)}
                for kind, count in self.dreamt.most_common()
                for found in [self.verdicts[kind]]
            },
            "worst": [asdict(each) for each in self.worst],
        }


async def attack(
    dream: EnvironmentFactory,
    trajectories: Sequence[Trajectory],
    factory: EnvironmentFactory | None,
    *,
    candidates: int = 2_000,
    real_steps: int = 50_000,
    seed: int = 0,
    in_flight: int = 64,
    on_round: OnAttack | None = None,
    found: Attack | None = None,
) -> Attack:
    """Search a dream for successes that are not real.

    Args:
        dream: makes the imagined episodes, as in training.
        trajectories: recorded episodes of its tasks, real; plans come from the successes.
        factory: the real environment. Without it, only recorded lists of actions and forged texts are judged.
        candidates: lists of actions to try in the dream.
        real_steps: actions in the real environment, exceeded by at most one round.
        found: filled while the attack runs, so that an interrupted one has a result.
    """
    search = _Search(dream, trajectories, factory, Random(f"attack/{seed}"), in_flight)
    state = found if found is not None else Attack(budget=candidates)
    state.by_recordings = factory is None
    for size, make in _rounds(search, candidates):
        await search.play(search.fresh(make, size), state, real_steps)
        if on_round is not None:
            on_round(state)
    return state


def _rounds(search: _Search, total: int) -> list[tuple[int, Callable[[], Candidate]]]:
    """Sizes of rounds and what makes their candidates: recorded plans first, the hill-climb last."""
    recorded = iter(search.candidates.recorded())
    control = min(_ROUND, total // 10)
    rounds: list[tuple[int, Callable[[], Candidate]]] = []
    if control:
        rounds.append((control, lambda: next(recorded, None) or search.candidates.mutated()))
    makers = {"forged": search.forged, "mutated": search.candidates.mutated, "climbed": search.climbed}
    left = total - control
    for name, share in _SHARES:
        size = left if name == _SHARES[-1][0] else round((total - control) * share)
        left -= size
        rounds += [(min(_ROUND, size - done), makers[name]) for done in range(0, size, _ROUND)]
    return rounds


class _Search:
    def __init__(
        self,
        dream: EnvironmentFactory,
        trajectories: Sequence[Trajectory],
        factory: EnvironmentFactory | None,
        rng: Random,
        in_flight: int,
    ) -> None:
        self.candidates = Candidates(trajectories, rng)
        self._dream = dream
        self._factory = factory
        self._rng = rng
        self._in_flight = in_flight
        self._failures = known_failures(trajectories)
        self._successes = {
            (each.task.id, each.seed, tuple(turn.action for turn in each.transitions))
            for each in trajectories
            if each.success
        }
        self._tried: set[tuple[str, Actions]] = set()
        self._confirmed: set[tuple[str, Actions]] = set()
        self._best: list[tuple[float, Candidate]] = []
        self._forged = 0

    def fresh(self, make: Callable[[], Candidate], size: int) -> list[Candidate]:
        """New candidates; fewer if hardly any new ones are made."""
        batch: list[Candidate] = []
        for _ in range(4 * size):
            candidate = make()
            key = (candidate.task.id, candidate.actions)
            if key not in self._tried:
                self._tried.add(key)
                batch.append(candidate)
            if len(batch) == size:
                break
        return batch

    def forged(self) -> Candidate:
        self._forged += 1
        return self.candidates.forged(self._forged - 1)

    def climbed(self) -> Candidate:
        """A mutation of one of the candidates that came closest to a success."""
        if not self._best:
            return self.candidates.mutated()
        _, chosen = self._rng.choice(self._best)
        return self.candidates.changed(chosen, self._rng.choice((1, 1, 2)), CLIMBED)

    async def play(self, batch: Sequence[Candidate], state: Attack, real_steps: int) -> None:
        """Try candidates in the dream, keep the closest ones, and replay new successes in reality."""

        async def imagine(candidate: Candidate) -> Replay | None:
            played = ActionList(task=candidate.task, actions=candidate.actions, seed=candidate.seed)
            try:
                return await replay(self._dream.make(candidate.task, seed=candidate.seed), played)
            except EpisodeFailedError:
                return None

        dreams = await ask_all(imagine, batch, in_flight=self._in_flight)
        won: list[tuple[Candidate, Replay]] = []
        for candidate, dream in zip(batch, dreams, strict=True):
            state.tried += 1
            if dream is None or dream.failure is not None:
                state.failed += 1
                continue
            state.checked += sum(VIOLATION in outcome.info for outcome in dream.outcomes)
            key = (candidate.task.id, dream.played.actions[: len(dream.outcomes)])
            if not dream.success:
                self._best.append((_closeness(dream), candidate))
            elif key not in self._confirmed:
                self._confirmed.add(key)
                state.dreamt[candidate.kind] += 1
                won.append((candidate, dream))
        self._best = sorted(self._best, key=lambda pair: -pair[0])[:_BEST]
        await self._verify(won, state, real_steps)

    async def _verify(self, won: Sequence[tuple[Candidate, Replay]], state: Attack, real_steps: int) -> None:
        if self._factory is None:
            for candidate, dream in won:
                self._judge_by_recordings(candidate, dream, state)
            return
        if state.real_steps >= real_steps:
            return
        lists = [_as_dreamt(dream) for _, dream in won]
        for (candidate, dream), real in zip(won, await replay_in_reality(self._factory, lists), strict=True):
            state.real_steps += len(real.outcomes)
            if real.failure is None:
                state.verdicts[candidate.kind].append(real.success)
                if not real.success:
                    state.false.append(_false_success(candidate, dream, real))

    def _judge_by_recordings(self, candidate: Candidate, dream: Replay, state: Attack) -> None:
        actions = _as_dreamt(dream).actions
        place = (candidate.task.id, candidate.seed)
        if (*place, actions) in self._successes:
            state.verdicts[candidate.kind].append(True)
        elif candidate.kind == FORGED or actions in self._failures.get(place, ()):
            state.verdicts[candidate.kind].append(False)
            state.false.append(_false_success(candidate, dream, None))


def _as_dreamt(dream: Replay) -> ActionList:
    """The actions up to the end of the imagined episode."""
    played = dream.played
    return ActionList(task=played.task, actions=played.actions[: len(dream.outcomes)], seed=played.seed)


def _closeness(dream: Replay) -> float:
    """How close an imagined episode came to a success: its reward, the accepted actions that changed
    something, how unsure its last refusal was, and the support of what came last; an episode that ended is
    further away."""
    refused = [outcome for outcome in dream.outcomes if outcome.info.get("refused")]
    changed = sum(bool(outcome.info.get("change", Change()) != Change()) for outcome in dream.outcomes)
    doubt = 1 - (refused[-1].confidence or 0.0) if refused else 0.0
    ended = any(outcome.terminated for outcome in dream.outcomes)
    support = dream.outcomes[-1].info.get("support", 0.0) if dream.outcomes else 0.0
    return 10 * dream.total_reward + changed / 5 + doubt + support - ended


def _false_success(candidate: Candidate, dream: Replay, real: Replay | None) -> FalseSuccess:
    steps = list(zip(dream.played.actions, dream.outcomes, strict=False))
    number = len(steps) - 1
    if real is not None:
        texts = [outcome.next_state.text for outcome in real.outcomes]
        for place, (_, outcome) in enumerate(steps):
            if place >= len(texts) or texts[place] != outcome.next_state.text:
                number = place
                break
        told = texts[number] if number < len(texts) else "(over)"
    else:
        told = "(not granted in the recordings)"
    action, outcome = steps[number]
    return FalseSuccess(
        task=candidate.task.id,
        kind=candidate.kind,
        actions=tuple(action for action, _ in steps),
        action=action,
        dreamt=outcome.next_state.text,
        real=told,
    )
