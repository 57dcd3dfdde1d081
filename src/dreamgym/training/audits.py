"""Audits during practice: imagined episodes are replayed in reality, action by action. What really happened
joins the replay buffer, and the experience model is fine-tuned on it briefly.

Every real episode is written to `audits.jsonl` before and after it is played, so that its steps are counted
once, whenever the process is killed, and a repeated audit does not play it again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from dreamgym.data.schema import decode_trajectory, encode_trajectory
from dreamgym.envs.wrappers import StepCounter, TimeLimit
from dreamgym.errors import DataError
from dreamgym.evaluation.async_map import ask_all
from dreamgym.evaluation.audit import Audit, compare_replays, has_counterpart
from dreamgym.evaluation.closed_loop import ActionList, Replay
from dreamgym.evaluation.worst import Kinds
from dreamgym.files import AppendLog
from dreamgym.models.usage import stage
from dreamgym.protocols import EnvironmentFactory
from dreamgym.rollouts import run_episode
from dreamgym.seeding import derive_seed
from dreamgym.training.metrics import Row
from dreamgym.types import Decision, RolloutGroup, State, Task, Trajectory, Transition

if TYPE_CHECKING:
    from dreamgym.training.experience_versions import ExperienceVersions

LOG = "audits.jsonl"
POLICY = "audit"
"""`Provenance.policy` of a replayed episode."""
_SUCCESSES = 3
"""Successes replayed for each failure."""
_CONCURRENCY = 8


class Updater(Protocol):
    """Fine-tunes the experience model; see `experience_update.ExperienceUpdater`."""

    async def update(
        self, step: int, fresh: Sequence[Trajectory], earlier: Sequence[Trajectory]
    ) -> dict[str, Any]: ...

    @property
    def versions(self) -> ExperienceVersions: ...


class AuditLog:
    """Real episodes of audits and their steps, in a file."""

    def __init__(self, path: Path) -> None:
        self._log = AppendLog(path, _decode, lock=False)
        self._ended: dict[tuple[int, str], Trajectory | None] = {}
        self._reserved: Counter[tuple[int, str]] = Counter()
        self.steps = 0
        """Real steps; of an episode that a crash interrupted, all that it could have taken."""
        for row in self._log.rows:
            self._count(row)
        self._reserved.clear()

    def _count(self, row: Mapping[str, Any]) -> None:
        key = (row["step"], row["episode"])
        if "reserved" in row:
            self._reserved[key] += row["reserved"]
            self.steps += row["reserved"]
            return
        self.steps += row["steps"] - self._reserved.pop(key, 0)
        found = row["trajectory"]
        self._ended[key] = None if found is None else decode_trajectory(found)

    def begin(self, step: int, episode: str, steps: int) -> None:
        self._append({"step": step, "episode": episode, "reserved": steps})

    def end(self, step: int, episode: str, steps: int, trajectory: Trajectory | None) -> None:
        encoded = None if trajectory is None else encode_trajectory(trajectory)
        self._append({"step": step, "episode": episode, "steps": steps, "trajectory": encoded})

    def _append(self, row: dict[str, Any]) -> None:
        self._log.append([json.dumps(row).encode()])
        self._count(row)

    def known(self, step: int, dreamt: Trajectory) -> Trajectory | None:
        """The replay of this episode, if it was played before with the same actions."""
        found = self._ended.get((step, dreamt.id))
        if found is None:
            return None
        wanted = [turn.action for turn in dreamt.transitions]
        return found if [turn.action for turn in found.transitions] == wanted[: len(found)] else None

    def trajectories(self, *, before: int) -> list[Trajectory]:
        """Of audits of earlier steps, in an order that does not depend on which ended first."""
        ended = sorted(self._ended.items(), key=lambda each: each[0])
        return [found for (step, _), found in ended if found is not None and step < before]

    def close(self) -> None:
        self._log.close()


def _decode(line: bytes) -> dict[str, Any]:
    try:
        row = json.loads(line)
        steps = row["reserved"] if "reserved" in row else row["steps"]
        right = isinstance(row["step"], int) and isinstance(row["episode"], str) and isinstance(steps, int)
    except (ValueError, LookupError, TypeError):
        right = False
    if not right:
        raise DataError(f"expected a row of an audit, got {line[:200]!r}")
    return dict(row)


Replayed: TypeAlias = tuple[Trajectory | None, int]
"""A real episode, None if it failed, and the environment steps that it took."""
Replayer: TypeAlias = Callable[[ActionList, str], Awaitable[Replayed]]
"""Takes actions in reality; the text is the id of the trajectory."""


async def replay(real: EnvironmentFactory, actions: ActionList, trajectory_id: str) -> Replayed:
    """A `Replayer` in this process."""
    counted = StepCounter(TimeLimit(real, len(actions.actions)))
    result = await run_episode(
        lambda: counted.make(actions.task, seed=actions.seed),
        lambda environment: _Replaying(actions.actions),
        trajectory_id=trajectory_id,
        task=actions.task,
        seed=actions.seed,
        retries=0,
    )
    return (result if isinstance(result, Trajectory) else None), counted.steps


@dataclass(frozen=True, slots=True)
class _Replaying:
    """Acts as an imagined episode did."""

    actions: tuple[str, ...]
    name: str = POLICY

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        return Decision(action=self.actions[len(history)])


class Audits:
    """The audits of a run. A part of its checkpoint: it holds the version of the experience model."""

    def __init__(
        self,
        replayer: Replayer,
        log: AuditLog,
        *,
        every: int,
        steps: int,
        recorded: Sequence[Trajectory] = (),
        updater: Updater | None = None,
        seed: int = 0,
        kept_versions: int = 2,
    ) -> None:
        """
        Args:
            replayer: plays the real episodes.
            every: training steps between audits.
            steps: the most real steps of an audit.
            recorded: real trajectories of the tasks, whose seeds are used again.
            updater: None leaves the experience model as it is.
            kept_versions: of the experience model; a crash may go back to the version before.
        """
        self.replayer = replayer
        """Workers replace it."""
        self._log = log
        self._every, self._steps = every, steps
        self._seeds = {each.task.id: each.seed for each in recorded}
        self._actions = [(each.id, turn.action) for each in recorded for turn in each.transitions]
        self._updater = updater
        self._seed = seed
        self._kept = kept_versions
        self.fresh: list[Trajectory] = []
        """Real trajectories of the last audit."""

    @property
    def real_steps(self) -> int:
        return self._log.steps

    @property
    def version(self) -> int:
        """Of the experience model: the step of the last audit that changed it, 0 for none."""
        return 0 if self._updater is None else self._updater.versions.version

    def due(self, step: int) -> bool:
        return self._every > 0 and step > 0 and step % self._every == 0

    async def run(self, step: int, groups: Sequence[RolloutGroup], left: int | None) -> Row:
        """Audit the episodes of a training step; returns its metrics.

        Args:
            left: real steps that the run may still take; None for any number.
        """
        began, before = time.perf_counter(), self._log.steps
        budget = self._steps if left is None else min(self._steps, left)
        chosen, known = self._choose(step, groups, budget)
        with stage("audit"):
            played = await ask_all(lambda each: self._play(step, each), chosen, in_flight=_CONCURRENCY)
        pairs = [*known, *((dream, real) for dream, real in zip(chosen, played, strict=True) if real)]
        self.fresh = [real for _, real in pairs]
        found = _compared(pairs, left_out=len(chosen) + len(known) - len(pairs))
        update: dict[str, Any] = {}
        if self._updater is not None and self.fresh:
            earlier = self._log.trajectories(before=step)
            update = await self._updater.update(step, self.fresh, earlier)
            self._updater.versions.keep(self._kept)
        return {
            "kind": "audit",
            "step": step,
            **self._row(found, pairs),
            "real_steps": self._log.steps - before,
            "experience_model": update,
            "seconds": time.perf_counter() - began,
        }

    def _choose(
        self, step: int, groups: Sequence[RolloutGroup], budget: int
    ) -> tuple[list[Trajectory], list[tuple[Trajectory, Trajectory]]]:
        """Episodes to replay, successes first with some failures, within the budget; and those that were
        replayed before the process was killed."""
        members = {
            (each.task.id, tuple(turn.action for turn in each.transitions)): each
            for group in groups
            for each in group.trajectories
            if each.transitions and has_counterpart(each)
        }
        order = list(members.values())
        Random(derive_seed(self._seed, "audit", step)).shuffle(order)
        chosen: list[Trajectory] = []
        known: list[tuple[Trajectory, Trajectory]] = []
        for each in _mixed(order):
            if (real := self._log.known(step, each)) is not None:
                known.append((each, real))
                budget -= len(real)
            elif len(each) <= budget:
                chosen.append(each)
                budget -= len(each)
        return chosen, known

    async def _play(self, step: int, dreamt: Trajectory) -> Trajectory | None:
        """The same actions in reality; None if the real episode failed."""
        taken = tuple(turn.action for turn in dreamt.transitions)
        actions = ActionList(task=dreamt.task, actions=taken, seed=self._seeds.get(dreamt.task.id, 0))
        self._log.begin(step, dreamt.id, len(taken))
        real, steps = await self.replayer(actions, f"audit-{step:06d}-{dreamt.id}")
        self._log.end(step, dreamt.id, steps, real)
        return real

    def _row(self, found: Audit, pairs: Sequence[tuple[Trajectory, Trajectory]]) -> dict[str, Any]:
        actions = [(dream.id, turn.action) for dream, _ in pairs for turn in dream.transitions]
        kind = Kinds([*self._actions, *actions])
        return {
            "episodes": found.episodes,
            "left_out": found.left_out,
            "successes": found.successes.to_dict(),
            "faithful": found.faithful.to_dict(),
            "departures": dict(Counter(kind(each.action) for each in found.departures).most_common()),
            "examples": [asdict(each) for each in found.departures[:3]],
            "transitions": sum(len(real) for _, real in pairs),
        }

    def state_dict(self) -> dict[str, Any]:
        return {"version": self.version}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        if self._updater is not None:
            self._updater.versions.load(int(stored["version"]))

    def close(self) -> None:
        self._log.close()


def _mixed(order: Sequence[Trajectory]) -> list[Trajectory]:
    """Successes first, after each few of them a failure."""
    won = [each for each in order if each.success]
    lost = iter([each for each in order if not each.success])
    mixed: list[Trajectory] = []
    for number, each in enumerate(won, 1):
        mixed.append(each)
        if number % _SUCCESSES == 0 and (failure := next(lost, None)) is not None:
            mixed.append(failure)
    return [*mixed, *lost]


def _compared(pairs: Sequence[tuple[Trajectory, Trajectory]], *, left_out: int) -> Audit:
    replays = [
        (
            dream,
            Replay(
                played=replace(ActionList.of(dream), seed=real.seed),
                start=real.start,
                outcomes=tuple(turn.outcome for turn in real.transitions),
            ),
        )
        for dream, real in pairs
    ]
    return compare_replays(replays, left_out=left_out)
