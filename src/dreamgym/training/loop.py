"""The training loop: sample tasks, run rollout groups, update the policy, update the curriculum, record.

Dream, sim-to-real and real RL use this loop; only the `EnvironmentFactory` differs. Every random draw is
derived from the run's seed and the step number, so a resumed run equals one that never stopped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from dreamgym.config import Config
from dreamgym.distributed.player import GroupPlayer, GroupRequest
from dreamgym.errors import BudgetSpentError, RolloutsFailingError
from dreamgym.evaluation.evaluate import Evaluation
from dreamgym.gc_pause import gc_frozen
from dreamgym.models.usage import stage
from dreamgym.protocols import Learner, TaskSource
from dreamgym.rollouts import GroupReport, GroupSettings, Origin
from dreamgym.seeding import derive_seed
from dreamgym.training.audits import Audits
from dreamgym.training.metrics import Row, train_row
from dreamgym.training.monitors import Monitors
from dreamgym.training.run_recorder import RunRecorder
from dreamgym.types import Task

OnStep = Callable[[Row, list[str]], None]
"""Takes the metrics of each step or evaluation, and the monitors' warnings."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """The parts of a run; `recorder` holds its progress."""

    tasks: TaskSource
    player: GroupPlayer
    learner: Learner
    monitors: Monitors
    recorder: RunRecorder
    groups: GroupSettings
    origin: Callable[[], Origin]
    evaluate: Callable[[], Awaitable[Evaluation]] | None
    """In the real environment, on the validation split; None for no evaluation."""
    seed: int
    audits: Audits | None = None
    """None for no audits."""
    horizon: int | None = None
    """Actions after which the environment truncates an episode, if known."""
    refusals: tuple[str, ...] = ()
    on_step: OnStep = lambda row, warnings: None
    dream_success: float | None = None
    """Success of the last step in the dream."""
    _begun: dict[int, asyncio.Task[GroupReport]] = field(default_factory=dict)
    """The rollouts of steps that were not trained on yet."""

    async def run(self) -> str:
        """Train until the last step or the end of the budget; returns why it ended."""
        with gc_frozen():
            ended = await self._steps()
        recorder = self.recorder
        if recorder.done and not recorder.episodes and recorder.last_failure is not None:
            raise RolloutsFailingError(
                f"every rollout of {recorder.done} steps failed, so nothing was learnt; "
                f"the last failure: {recorder.last_failure}"
            )
        return ended

    async def _steps(self) -> str:
        recorder, config = self.recorder, self.recorder.config
        try:
            while True:
                due = config.evaluate_every and recorder.done % config.evaluate_every == 0
                if self.evaluate is not None and due and recorder.evaluated != recorder.done:
                    with stage("evaluation"):
                        found = await self.evaluate()
                    row = recorder.record_evaluation(found, self.dream_success)
                    self.on_step(row, self.monitors.watch_gap(row))
                if recorder.real_left == 0 and config.mode == "real":
                    return f"{recorder.spent['real_steps']} real steps are used"
                if recorder.out_of_time:
                    return f"{config.seconds:g} seconds of training are used"
                if recorder.done >= config.steps:
                    return f"{recorder.done} steps are done"
                with stage("train"):
                    await self._step()
        except BudgetSpentError as error:  # not a failure: the run has used its budget
            return str(error)
        finally:
            for begun in self._begun.values():
                begun.cancel()
            await asyncio.gather(*self._begun.values(), return_exceptions=True)
            if recorder.consistent:  # also after Ctrl-C or a failure: the next run resumes here
                recorder.checkpoint()

    async def _step(self) -> None:
        recorder, number = self.recorder, self.recorder.done
        report = await self._rollouts(number)
        if not report.groups and recorder.real_left == 0 and recorder.config.mode == "real":
            return  # the budget ended within the only group
        if len(report.dropped) > 1 and not report.groups and self.groups.failure_limit < 1:
            return  # an outage, not one bad task: the same step again, until it works or the breaker raises
        began = time.perf_counter()
        recorder.consistent = False
        before = self.origin().policy_version
        update = self.learner.update(report.groups)
        recorded = await self.tasks.record(report.groups)
        recorder.done += 1
        recorder.episodes += sum(len(group.trajectories) for group in report.groups)
        recorder.spend("update_seconds", time.perf_counter() - began)
        row = train_row(number, report, update, refusals=self.refusals) | {"tasks": dict(recorded)}
        if recorder.config.max_staleness:
            row["staleness"] = _staleness(report, before)
        recorder.last_failure = row["last_failure"] or recorder.last_failure
        warnings = self.monitors.watch(row)
        audit = await self._audit(
            report
        )  # before the checkpoint: an interrupted one is repeated with its step
        recorder.consistent = True
        self.dream_success = row["success"] if self.origin().source == "synthetic" else None
        if audit is not None:
            warnings += self.monitors.watch_audit(audit, row["success"])
            recorder.log.append(audit | {"spent": dict(recorder.spent)})
        await recorder.record_step(row, report.groups)
        self.on_step(row, warnings)
        self.monitors.check()

    async def _audit(self, report: GroupReport) -> Row | None:
        recorder, audits = self.recorder, self.audits
        if audits is None or not audits.due(recorder.done) or recorder.real_left == 0:
            return None
        row = await audits.run(recorder.done, report.groups, recorder.real_left)
        recorder.spent["real_steps"] = audits.real_steps
        recorder.spend("audit_seconds", row["seconds"])
        recorder.fresh += audits.fresh
        return row

    async def _rollouts(self, number: int) -> GroupReport:
        recorder, began = self.recorder, time.perf_counter()
        await self.player.publish(self.origin().policy_version, recorder.weights)
        await self._begin(number)
        report = await self._begun.pop(number)
        recorder.spend(f"{self.origin().source}_steps", report.taken)
        recorder.spend("rollout_seconds", time.perf_counter() - began)
        return report

    async def _begin(self, number: int) -> None:
        """Begin the rollouts of this step, and of as many later ones as may be stale."""
        last = min(number + self.recorder.config.max_staleness, self.recorder.config.steps - 1)
        steps = [step for step in range(number, max(number, last) + 1) if step not in self._begun]
        if not steps:
            return
        count = self._count()
        tasks = await self.tasks.sample(count * len(steps))
        for place, step in enumerate(steps):
            request = self._request(step, tasks[place * count : (place + 1) * count])
            self._begun[step] = asyncio.create_task(self.player.play(request))

    def _request(self, number: int, tasks: Sequence[Task]) -> GroupRequest:
        recorder, size = self.recorder, self._group_size()
        real = recorder.config.mode == "real" and recorder.real_left is not None
        return GroupRequest(
            tasks=tasks,
            name=f"{recorder.run_dir.path.name}-{number:06d}",
            seed=derive_seed(self.seed, "step", number),
            settings=replace(self.groups, size=size),
            origin=self.origin(),
            limit=recorder.real_left if real else None,
            group_limit=self.horizon and self.horizon * size * (1 + self.groups.retries),
        )

    def _count(self) -> int:
        """Tasks of the next step: no more groups than the remaining real steps pay for at their longest, but
        at least one."""
        recorder, most = self.recorder, self.recorder.config.tasks_per_step
        if recorder.real_left is None or recorder.config.mode != "real":
            return most
        if self.horizon is None:  # unknown: one group at a time
            return 1
        return max(1, min(most, recorder.real_left // (self.horizon * self.groups.size)))

    def _group_size(self) -> int:
        """Rollouts of each group; fewer where the remaining real steps do not pay for all at their longest.
        The step that would exceed the budget is not taken: its group is dropped (`StepCounter.limit`)."""
        left, size = self.recorder.real_left, self.groups.size
        if left is None or self.horizon is None or self.recorder.config.mode != "real":
            return size
        return max(2, min(size, left // self.horizon))


def _staleness(report: GroupReport, version: int) -> float:
    """Weight updates between the start of a group and its use, on average."""
    ages = [version - group.trajectories[0].provenance.policy_version for group in report.groups]
    return sum(ages) / max(1, len(ages))


def group_settings(config: Config) -> GroupSettings:
    chosen = config.train
    return GroupSettings(
        size=chosen.group_size,
        concurrency=chosen.concurrency,
        retries=chosen.retries,
        pause=chosen.failure_pause_seconds,
        world_sheets=chosen.mode == "dream",
    )
