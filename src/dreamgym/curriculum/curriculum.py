"""The curriculum: a task source that samples a task pool and adds variations of the most informative
tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from dreamgym.config import CurriculumConfig
from dreamgym.curriculum.entropy import cluster_entropy, group_entropy
from dreamgym.curriculum.generator import ACCEPTED, LanguageModelTaskGenerator
from dreamgym.curriculum.task_pool import TaskPool
from dreamgym.errors import ConfigError
from dreamgym.protocols import Embedder
from dreamgym.seeding import derive_seed
from dreamgym.types import JsonValue, RolloutGroup, Task

_CLUSTERS = 8
"""PPO: at most this many clusters of similar tasks share a reward entropy."""


class Curriculum:
    """Implements `TaskSource`. The pool holds the data; the state is the number of the next step."""

    def __init__(
        self,
        pool: TaskPool,
        generator: LanguageModelTaskGenerator | None,
        *,
        settings: CurriculumConfig,
        embedder: Embedder | None = None,
    ) -> None:
        """With an `embedder`, similar tasks share their reward entropy, as PPO needs: it has no groups."""
        self.pool = pool
        self._generator = generator
        self._settings = settings
        self._embedder = embedder
        self._step = 0

    async def sample(self, count: int) -> list[Task]:
        if self._step == 0:
            self.pool.rewind(0)  # a run that was killed before its first checkpoint starts again
        return self.pool.sample(count, step=self._step)

    async def record(self, groups: Sequence[RolloutGroup]) -> dict[str, JsonValue]:
        """Store the results of a step, and generate tasks if it is time."""
        entropy = (
            group_entropy(groups)
            if self._embedder is None
            else await cluster_entropy(groups, self._embedder, clusters=_CLUSTERS)
        )
        self.pool.record(groups, step=self._step, entropy=entropy)
        counts = await self._generate() if (self._step + 1) % self._settings.every == 0 else Counter[str]()
        self._step += 1
        generated = len(self.pool.generated)
        return {
            "task_entropy": sum(entropy.values()) / len(entropy) if entropy else None,
            "generated_share": sum(group.task.origin == "generated" for group in groups) / len(groups)
            if groups
            else None,
            "pool_seed": len(self.pool) - generated,
            "pool_generated": generated,
            "accepted": counts.pop(ACCEPTED, 0),
            "rejected": {str(reason): number for reason, number in sorted(counts.items())},
        }

    def state_dict(self) -> dict[str, JsonValue]:
        return {"step": self._step, "tasks": len(self.pool)}

    def load_state_dict(self, stored: Mapping[str, JsonValue]) -> None:
        step, tasks = stored.get("step"), stored.get("tasks")
        if not isinstance(step, int) or step < 0:
            raise ConfigError(f"expected the state of a curriculum with its step, got {stored!r}")
        found = len(self.pool.before(step))
        if tasks != found:
            raise ConfigError(
                f"{self.pool.path}: expected the {tasks!r} tasks of this run before step {step}, found "
                f"{found}; use the same file to resume, or choose another directory"
            )
        self.pool.rewind(step)
        self._step = step

    async def _generate(self) -> Counter[str]:
        chosen = self.pool.most_informative(self._settings.sources)
        if self._generator is None or not chosen:
            return Counter()
        before = self._generator.counts.copy()
        seed = derive_seed(self.pool.seed, self._step)
        made = await self._generator.vary(chosen, count=len(chosen), seed=seed)
        counts = self._generator.counts - before
        self.pool.add_generated(made, step=self._step, counts=counts)
        return counts
