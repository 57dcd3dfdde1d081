"""The task generator (the paper's M_task): a proposer writes candidates, the task filter keeps the valid
ones, and the proposer selects one of those. (In the paper it selects first.)"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace

from dreamgym.curriculum.task_filter import Rejection, TaskFilter
from dreamgym.curriculum.task_pool import LINEAGE, Lineage, TaskPool
from dreamgym.curriculum.task_proposers import Selection, TaskProposer
from dreamgym.errors import EpisodeFailedError
from dreamgym.seeding import derive_seed
from dreamgym.types import Task

ACCEPTED = "accepted"


class LanguageModelTaskGenerator:
    """Writes variations of tasks. Every candidate is counted once, as accepted or by its `Rejection`."""

    def __init__(
        self,
        proposer: TaskProposer,
        task_filter: TaskFilter,
        pool: TaskPool,
        *,
        candidates: int = 4,
        attempts: int = 3,
    ) -> None:
        """Requests `candidates` variations per task and attempt; an accepted one differs from all of the
        pool."""
        self._proposer = proposer
        self._filter = task_filter
        self._pool = pool
        self._candidates = candidates
        self._attempts = attempts
        self.counts: Counter[str] = Counter()
        """All candidates so far by result."""

    async def vary(self, tasks: Sequence[Task], *, count: int, seed: int) -> list[Task]:
        """Up to `count` new valid tasks, at most one per task and attempt, determined by the seed."""
        made: list[Task] = []
        known = self._filter.task_ids(self._pool.tasks)
        for attempt in range(self._attempts):
            if len(made) >= count:
                break
            seeds = [derive_seed(seed, attempt, task.id) % 2**32 for task in tasks]
            proposed = await asyncio.gather(*map(self._propose, tasks, seeds))
            for task, texts, own_seed in zip(tasks, proposed, seeds, strict=True):
                if len(made) >= count:
                    self._count(Rejection.NOT_SELECTED, len(texts))
                    continue
                chosen = await self._choose(task, texts, known, own_seed)
                if chosen is not None:
                    known.add(chosen.id)
                    made.append(chosen)
        return made

    async def _propose(self, task: Task, seed: int) -> list[str | None]:
        try:
            return await self._proposer.propose(task, count=self._candidates, seed=seed)
        except EpisodeFailedError:
            self._count(Rejection.FAILED)
            return []

    async def _choose(
        self, parent: Task, texts: Sequence[str | None], known: set[str], seed: int
    ) -> Task | None:
        valid: dict[str, Task] = {}
        for text in texts:
            checked = (
                Rejection.UNREADABLE if text is None else self._filter.check(text, {*known, *valid.keys()})
            )
            if isinstance(checked, Task):
                valid[checked.id] = checked
            else:
                self._count(checked)
        if not valid:
            return None
        found = list(valid.values())
        selection = await self._select(parent, found, seed) if len(found) > 1 else None
        self._count(Rejection.NOT_SELECTED, len(found) - 1)
        self.counts[ACCEPTED] += 1
        chosen = found[selection.index if selection else 0]
        origin = Lineage(
            parent=parent.id,
            generator=self._proposer.name,
            seed=seed,
            reason=selection.reason if selection else "",
        )
        return replace(chosen, parameters={**chosen.parameters, LINEAGE: asdict(origin)})

    def _count(self, reason: Rejection, number: int = 1) -> None:
        if number:
            self.counts[reason.value] += number

    async def _select(self, parent: Task, candidates: Sequence[Task], seed: int) -> Selection | None:
        """None where the proposer selects none: the first candidate is used then."""
        try:
            return await self._proposer.select(parent, [each.instruction for each in candidates], seed=seed)
        except EpisodeFailedError:
            return None
