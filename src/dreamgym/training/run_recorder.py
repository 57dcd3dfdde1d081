"""Records a run: metrics, trajectories, checkpoints, replay buffer, and steps and seconds used."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dreamgym.config import TrainConfig
from dreamgym.data.schema import decode_trajectory, encode_trajectory
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.evaluation.evaluate import Evaluation
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.store import records
from dreamgym.training.metrics import MetricsLog, Row
from dreamgym.training.prediction_log import prediction_rows
from dreamgym.training.run_dir import CHECKPOINT, RunDir
from dreamgym.types import RolloutGroup, Trajectory


class Stateful(Protocol):
    """A part of a run whose state a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, stored: Mapping[str, Any]) -> None: ...


@dataclass(slots=True, kw_only=True)
class RunRecorder:
    """The progress of a run, and everything of it that is written to disk."""

    config: TrainConfig
    run_dir: RunDir
    log: MetricsLog
    trajectories: TrajectoryWriter
    parts: Mapping[str, Stateful]
    """The parts of a checkpoint."""
    weights: Callable[[], Mapping[str, Any]]
    """The trainable weights, to save a policy."""
    buffer: ReplayBuffer | None = None
    predictions: MetricsLog | None = None
    """Demonstrations and changes behind the saved synthetic episodes."""
    done: int = 0
    """Finished steps."""
    episodes: int = 0
    """Episodes that were played to their end."""
    last_failure: str | None = None
    spent: dict[str, float] = field(default_factory=dict)
    """Real steps, synthetic steps and seconds so far."""
    consistent: bool = True
    """Whether all parts are at the end of the same step."""
    fresh: list[Trajectory] = field(default_factory=list)
    """Played since the last checkpoint."""
    evaluated: int = -1
    """The step of the last evaluation."""
    best: float = -1.0
    """Real success of the selected policy on the validation split."""

    def spend(self, what: str, amount: float) -> None:
        self.spent[what] = self.spent.get(what, 0) + amount

    @property
    def real_left(self) -> int | None:
        """Real steps left in the budget; None without a budget."""
        if self.config.real_steps is None:
            return None
        return max(0, self.config.real_steps - int(self.spent.get("real_steps", 0)))

    @property
    def out_of_time(self) -> bool:
        """Whether training has used its seconds; evaluations do not count."""
        used = self.spent.get("rollout_seconds", 0.0) + self.spent.get("update_seconds", 0.0)
        return self.config.seconds is not None and used >= self.config.seconds

    async def record_step(self, row: Row, groups: Sequence[RolloutGroup]) -> None:
        """Write the metrics and trajectories of a step; every `checkpoint_every` steps, a checkpoint."""
        self.log.append(row | {"spent": dict(self.spent)})
        saved = [each for group in groups[: self.config.save_groups] for each in group.trajectories]
        self.trajectories.append(saved)
        if self.predictions is not None:
            for each in saved:
                for step in prediction_rows(each):
                    self.predictions.append(step)
        self.fresh += [each for group in groups for each in group.trajectories]
        if self.done % self.config.save_policy_every == 0:
            self.run_dir.save_policy(self.done, self.weights())
        if self.done % self.config.checkpoint_every == 0:
            self.checkpoint()
            await self.update_buffer()

    def checkpoint(self) -> None:
        state = {
            "done": self.done,
            "episodes": self.episodes,
            "spent": dict(self.spent),
            "evaluated": self.evaluated,
            "best": self.best,
            "fresh": [encode_trajectory(each) for each in self.fresh] if self.buffer is not None else [],
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        self.run_dir.save(CHECKPOINT, state)

    async def resume(self) -> bool:
        """Load the checkpoint, if there is one."""
        state = self.run_dir.load(CHECKPOINT)
        if state is None:
            return False
        self.done, self.episodes, self.spent = state["done"], state["episodes"], dict(state["spent"])
        self.evaluated, self.best = state["evaluated"], state["best"]
        for name, part in self.parts.items():
            if name in state["parts"]:  # audits may begin when a run resumes
                part.load_state_dict(state["parts"][name])
        self.fresh = [decode_trajectory(line) for line in state["fresh"]]
        if self.done % self.config.checkpoint_every == 0:
            await self.update_buffer()
        return True

    async def update_buffer(self) -> None:
        """Add the fresh trajectories to the replay buffer; only after the checkpoint, or a step that a
        crash undid could retrieve its own transitions when it is repeated."""
        if self.buffer is not None:
            await self.buffer.add([row for each in self.fresh for row in records(each)])
        self.fresh = []

    def record_evaluation(self, found: Evaluation, dream_success: float | None) -> Row:
        """Record an evaluation; the best policy so far becomes the selected one."""
        self.spend("evaluation_real_steps", found.real_steps)
        self.spend("evaluation_seconds", found.seconds)
        success = found.success
        known = dream_success is not None and success.value is not None
        row: Row = {
            "kind": "evaluation",
            "step": self.done,
            "split": found.split,
            "success": success.to_dict(),
            "gap": dream_success - success.value if known else None,  # type: ignore[operator]
            "failures": dict(found.failures),
            "spent": dict(self.spent),
        }
        self.log.append(row)
        if success.value is not None and success.value > self.best:
            self.best = success.value
            self.run_dir.save_policy(self.done, self.weights())
            self.run_dir.select_policy(self.done, {"success": success.to_dict(), "split": found.split})
        self.evaluated = self.done
        self.checkpoint()
        return row
