"""The task generator (the paper's M_task): variations of the tasks that teach most, through the gate.

Per task: an author writes candidates, the gate keeps the valid ones, the author selects one of those. The
paper selects among all candidates; a choice among what cannot be done would be wasted.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from dreamgym.curriculum.task_filter import Rejection, TaskFilter
from dreamgym.curriculum.task_pool import LINEAGE, Lineage, PoolView
from dreamgym.curriculum.task_proposers import Choice, TaskProposer, derive_seed
from dreamgym.errors import EpisodeFailedError
from dreamgym.types import Task

ACCEPTED = "accepted"


class LanguageModelTaskGenerator:
    """Writes variations of tasks (the paper's M_task).

    Every candidate is counted once, as accepted or by its `Rejection`.
    """

    def __init__(
        self,
        author: TaskProposer,
        gate: TaskFilter,
        pool: PoolView,
        *,
        candidates: int = 4,
        attempts: int = 3,
    ) -> None:
        """
        Args:
            pool: what is known; a candidate must differ from all of it.
            candidates: variations asked for per task and attempt.
            attempts: how often each task is asked about, until there are enough.
        """
        self._author = author
        self._gate = gate
        self._pool = pool
        self._candidates = candidates
        self._attempts = attempts
        self.counts: Counter[str] = Counter()
        """What became of all candidates so far."""

    async def vary(self, tasks: Sequence[Task], *, count: int, seed: int) -> list[Task]:
        """New valid tasks, at most one per task and attempt; fewer than `count` where no more came through.

        Equal arguments and an equal pool give equal tasks, if the language model keeps to its seeds.
        """
        made: list[Task] = []
        known = self._gate.meanings(self._pool.tasks)
        for turn in range(self._attempts):
            if len(made) >= count:
                break
            seeds = [derive_seed(seed, turn, task.id) for task in tasks]
            written = await asyncio.gather(*map(self._write, tasks, seeds))
            for task, texts, own_seed in zip(tasks, written, seeds, strict=True):
                if len(made) >= count:
                    # Written for nothing: the tasks before it have brought enough.
                    self._count(Rejection.NOT_SELECTED, len(texts))
                    continue
                chosen = await self._choose(task, texts, known, own_seed)
                if chosen is not None:
                    known.add(chosen.id)
                    made.append(chosen)
        return made

    async def _write(self, task: Task, seed: int) -> list[str | None]:
        try:
            return await self._author.write(task, count=self._candidates, seed=seed)
        except EpisodeFailedError:
            self._count(Rejection.FAILED)
            return []

    async def _choose(
        self, parent: Task, texts: Sequence[str | None], known: set[str], seed: int
    ) -> Task | None:
        valid: dict[str, Task] = {}
        for text in texts:
            judged = Rejection.UNREADABLE if text is None else self._gate.judge(text, {*known, *valid.keys()})
            if isinstance(judged, Task):
                valid[judged.id] = judged
            else:
                self._count(judged)
        if not valid:
            return None
        found = list(valid.values())
        choice = await self._select(parent, found, seed) if len(found) > 1 else None
        self._count(Rejection.NOT_SELECTED, len(found) - 1)
        self.counts[ACCEPTED] += 1
        chosen = found[choice.index if choice else 0]
        origin = Lineage(
            parent=parent.id,
            generator=self._author.name,
            seed=seed,
            reason=choice.reason if choice else "",
        )
        return replace(chosen, parameters={**chosen.parameters, LINEAGE: origin.as_parameter()})

    def _count(self, reason: Rejection, number: int = 1) -> None:
        if number:
            self.counts[reason.value] += number

    async def _select(self, parent: Task, candidates: Sequence[Task], seed: int) -> Choice | None:
        """The author's choice; where it has none, the first stands, as good as any for all we know."""
        try:
            return await self._author.select(parent, [each.instruction for each in candidates], seed=seed)
        except EpisodeFailedError:
            return None
