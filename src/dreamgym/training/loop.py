"""The loop: tasks, rollout groups, an update, the curriculum told, fresh experience and all else kept.

Dream, sim-to-real and real RL are this same loop; they differ in the `EnvironmentFactory` alone. Every draw
is made from the run's seed and the number of the step, so there are no random states to keep: a run that goes
on from its checkpoint equals one that never stopped.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import BudgetSpentError
from dreamgym.evaluation.evaluate import Evaluation
from dreamgym.gc_pause import gc_frozen
from dreamgym.models.usage import stage
from dreamgym.protocols import Learner, TaskSource
from dreamgym.rollout_groups import Breaker, GroupSettings, PolicyFactory, run_groups
from dreamgym.rollouts import Origin
from dreamgym.training.metrics import Row, practice_row
from dreamgym.training.monitors import Monitors
from dreamgym.training.run_recorder import RunRecorder

OnStep = Callable[[Row, list[str]], None]
"""Told the metrics of each step or evaluation, and what the monitors warn of."""


@dataclass(slots=True, kw_only=True)
class Loop:
    """The parts of a run; `ledger` knows how far it is."""

    tasks: TaskSource
    factory: StepCounter
    make_policy: PolicyFactory
    learner: Learner
    monitors: Monitors
    ledger: RunRecorder
    groups: GroupSettings
    breaker: Breaker
    origin: Callable[[], Origin]
    evaluate: Callable[[], Awaitable[Evaluation]] | None
    """In reality, on a validation split; None where not even that is allowed."""
    seed: int
    refusals: tuple[str, ...] = ()
    on_step: OnStep = lambda row, warnings: None
    dreamt: float | None = None
    """Success of the last step in the dream."""

    async def run(self) -> str:
        """Until the last step or the end of the budget; returns why it ended."""
        with gc_frozen():
            return await self._steps()

    async def _steps(self) -> str:
        ledger, config = self.ledger, self.ledger.config
        try:
            while True:
                due = config.evaluate_every and ledger.done % config.evaluate_every == 0
                if self.evaluate is not None and due and ledger.evaluated != ledger.done:
                    with stage("evaluation"):
                        found = await self.evaluate()
                    row = ledger.keep_evaluation(found, self.dreamt)
                    self.on_step(row, self.monitors.watch_gap(row))
                if ledger.real_left == 0:
                    return f"{ledger.spent['real_steps']:.0f} real steps are used"
                if ledger.late:
                    return f"{config.seconds:g} seconds of practice are used"
                if ledger.done >= config.steps:
                    return f"{ledger.done} steps are done"
                with stage("practice"):
                    await self._step()
        except BudgetSpentError as error:  # nothing broke: this run has had what it was given
            return str(error)
        finally:
            if ledger.whole:  # also after Ctrl-C or a failure: the next run goes on from here
                ledger.checkpoint()

    async def _step(self) -> None:
        ledger, number, began = self.ledger, self.ledger.done, time.perf_counter()
        steps_before = self.factory.steps
        report = await run_groups(
            self.factory,
            self.make_policy,
            await self.tasks.sample(self._count()),
            name=f"{ledger.folder.path.name}-{number:06d}",
            seed=self.seed * 100_003 + number,
            settings=self.groups,
            origin=self.origin(),
            breaker=self.breaker,
        )
        rolled_out = time.perf_counter()
        ledger.spend(f"{self.origin().source}_steps", self.factory.steps - steps_before)
        ledger.spend("rollout_seconds", rolled_out - began)
        if len(report.dropped) > 1 and not report.groups and self.groups.failure_limit < 1:
            # Not one bad task, but an outage: the same step again, until it works or the breaker gives up.
            return
        ledger.whole = False
        learnt = self.learner.update(report.groups)
        told = await self.tasks.record(report.groups)
        ledger.done += 1
        ledger.spend("update_seconds", time.perf_counter() - rolled_out)
        row = practice_row(number, report, learnt, refusals=self.refusals) | {"tasks": dict(told)}
        ledger.whole = True
        self.dreamt = row["success"] if self.origin().source == "synthetic" else None
        warnings = self.monitors.watch(row)
        await ledger.keep(row, report.groups)
        self.on_step(row, warnings)
        self.monitors.check()

    def _count(self) -> int:
        """Tasks of the next step: fewer where the real steps that are left will not do for all."""
        ledger, most = self.ledger, self.ledger.config.tasks_per_step
        if ledger.real_left is None or not ledger.done:
            return most
        of_each = ledger.spent["real_steps"] / (ledger.done * most)
        return max(1, min(most, int(ledger.real_left / max(of_each, 1.0))))
