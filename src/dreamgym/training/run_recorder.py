"""What a run keeps of its steps: metrics, trajectories, checkpoints, replay buffer, and what it has spent."""

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
    """A part of a run that can be stopped and gone on with."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, stored: Mapping[str, Any]) -> None: ...


@dataclass(slots=True, kw_only=True)
class RunRecorder:
    """How far a run is, and all of it that outlives the process."""

    config: TrainConfig
    folder: RunDir
    log: MetricsLog
    keeper: TrajectoryWriter
    parts: Mapping[str, Stateful]
    """What a checkpoint is made of."""
    weights: Callable[[], Mapping[str, Any]]
    """What has been learnt, for a policy to be kept."""
    buffer: ReplayBuffer | None = None
    predictions: MetricsLog | None = None
    """What was behind the steps of kept episodes, in the dream."""
    done: int = 0
    """Steps behind us."""
    spent: dict[str, float] = field(default_factory=dict)
    """Real and synthetic steps and seconds so far."""
    whole: bool = True
    """Whether all parts are at the end of the same step."""
    fresh: list[Trajectory] = field(default_factory=list)
    """Played since the last checkpoint."""
    evaluated: int = -1
    """The step of the last evaluation."""
    best: float = -1.0
    """Real success of the chosen policy on the validation split."""

    def spend(self, what: str, amount: float) -> None:
        self.spent[what] = self.spent.get(what, 0) + amount

    @property
    def real_left(self) -> float | None:
        """Real steps that may still be taken; None where nobody counts."""
        if self.config.mode != "real" or self.config.real_steps is None:
            return None
        return max(0.0, self.config.real_steps - self.spent.get("real_steps", 0))

    @property
    def late(self) -> bool:
        """Whether practice has taken the seconds that it was given; evaluations do not count."""
        taken = self.spent.get("rollout_seconds", 0.0) + self.spent.get("update_seconds", 0.0)
        return self.config.seconds is not None and taken >= self.config.seconds

    async def keep(self, row: Row, groups: Sequence[RolloutGroup]) -> None:
        """Keep what a step has left; at a checkpoint, all that the next step depends on."""
        self.log.append(row | {"spent": dict(self.spent)})
        kept = [each for group in groups[: self.config.save_groups] for each in group.trajectories]
        self.keeper.append(kept)
        if self.predictions is not None:
            for each in kept:
                for step in prediction_rows(each):
                    self.predictions.append(step)
        self.fresh += [each for group in groups for each in group.trajectories]
        if self.done % self.config.save_policy_every == 0:
            self.folder.save_policy(self.done, self.weights())
        if self.done % self.config.checkpoint_every == 0:
            self.checkpoint()
            await self.remember()

    def checkpoint(self) -> None:
        state = {
            "done": self.done,
            "spent": dict(self.spent),
            "evaluated": self.evaluated,
            "best": self.best,
            "fresh": [encode_trajectory(each) for each in self.fresh] if self.buffer is not None else [],
            "parts": {name: part.state_dict() for name, part in self.parts.items()},
        }
        self.folder.save(CHECKPOINT, state)

    async def resume(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        state = self.folder.load(CHECKPOINT)
        if state is None:
            return False
        self.done, self.spent = state["done"], dict(state["spent"])
        self.evaluated, self.best = state["evaluated"], state["best"]
        for name, part in self.parts.items():
            part.load_state_dict(state["parts"][name])
        self.fresh = [decode_trajectory(line) for line in state["fresh"]]
        if self.done % self.config.checkpoint_every == 0:
            await self.remember()
        return True

    async def remember(self) -> None:
        """Put what was played into the buffer: only after the checkpoint, so that no step is dreamt with
        demonstrations of its own that a crash took back. Adding twice is harmless."""
        if self.buffer is not None:
            await self.buffer.add([row for each in self.fresh for row in records(each)])
        self.fresh = []

    def keep_evaluation(self, found: Evaluation, dreamt: float | None) -> Row:
        """Note an evaluation; the best policy so far is the one to use."""
        self.spend("evaluation_real_steps", found.real_steps)
        self.spend("evaluation_seconds", found.seconds)
        success = found.success
        row: Row = {
            "kind": "evaluation",
            "step": self.done,
            "split": found.settings.split,
            "success": success.to_dict(),
            "gap": dreamt - success.value if dreamt is not None and success.value is not None else None,
            "failures": dict(found.failures),
            "spent": dict(self.spent),
        }
        self.log.append(row)
        if success.value is not None and success.value > self.best:
            self.best = success.value
            self.folder.save_policy(self.done, self.weights())
            self.folder.choose(self.done, {"success": success.to_dict(), "split": found.settings.split})
        self.evaluated = self.done
        self.checkpoint()
        return row
