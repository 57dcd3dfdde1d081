"""A run folder made with the writers of the training loop, from synthetic episodes of recorded tasks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from dreamgym.curriculum.task_pool import FILE, TaskPool
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.alfworld.annotator import HouseholdAnnotator
from dreamgym.envs.synthetic import SyntheticEnvironment
from dreamgym.evaluation.evaluate import Episode, Evaluation, compare
from dreamgym.evaluation.fidelity import measure_fidelity
from dreamgym.protocols import ExperienceModel
from dreamgym.rollouts import GroupReport, Origin, run_episode
from dreamgym.training.metrics import MetricsLog, train_row
from dreamgym.training.prediction_log import PREDICTIONS, prediction_rows
from dreamgym.types import (
    Decision,
    Demonstration,
    Prediction,
    Provenance,
    RolloutGroup,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)
from tests.training.dreaming import recited

HOSTILE = "</script><script>harmed=1</script><img src=http://127.0.0.1:9/x onerror=harmed=2>\x1b[2J"
"""What a model that means harm would write."""
EVALUATED = {0: 20, 4: 35}
"""Successes of 50 in reality, by step."""


def recorded_episodes(count: int = 6) -> list[Trajectory]:
    found = read_trajectories(builtin_dataset())
    return list(islice((each for each in found if each.success and 4 < len(each) < 12), count))


def misremembered(trajectory: Trajectory, position: int, reply: str) -> str:
    """A model that gets the third step of every episode wrong."""
    return "think: I lost it.\nchange:\nnext: You see nothing.\nend: no" if position == 2 else reply


class Reminded:
    """An experience model that says of each answer that it was shown how it really was."""

    def __init__(self, inner: ExperienceModel, episodes: Sequence[Trajectory]) -> None:
        self._inner = inner
        self._shown = {each.task.id: each for each in episodes}

    @property
    def name(self) -> str:
        return self._inner.name

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return await self._inner.imagine_start(task, sheet)

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        made = await self._inner.predict(task, sheet, history, state, action)
        real, position = self._shown[task.id], len(history)
        demonstration = Demonstration(
            transition=real.transitions[position],
            similarity=0.875,
            transition_id=f"{real.id}:{position}",
            trajectory_id=real.id,
            task_id=task.id,
            position=position,
            provenance=real.provenance,
        )
        return replace(made, demonstrations=(demonstration,))


class Repeats:
    """A policy that does what was done in a recorded episode."""

    name = "repeats"

    def __init__(self, trajectory: Trajectory) -> None:
        self._actions = [transition.action for transition in trajectory.transitions]

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        return Decision(action=self._actions[len(history)], thought="as it was done before")


async def dream_of(model: ExperienceModel, episode: Trajectory, name: str) -> Trajectory:
    sheet = episode.sheet
    assert sheet is not None
    synthetic = await run_episode(
        lambda: SyntheticEnvironment(episode.task, model, sheet, horizon=len(episode), first=episode.start),
        lambda environment: Repeats(episode),
        trajectory_id=name,
        task=episode.task,
        seed=0,
        origin=Origin(source="synthetic", experience_model=model.name, policy_version=3),
    )
    assert isinstance(synthetic, Trajectory)
    return synthetic


def hostile_episode(example: Trajectory) -> Trajectory:
    """An episode each of whose texts tries to get out of where it is shown."""
    first = example.transitions[0]
    state = State(text=HOSTILE)
    outcome = replace(
        first.outcome, next_state=state, reasoning=HOSTILE, reward_source=HOSTILE, terminated=True
    )
    return replace(
        example,
        id=f"hostile {HOSTILE}",
        task=replace(example.task, id=f"hostile {HOSTILE}", instruction=f"hostile {HOSTILE}"),
        start=state,
        transitions=(replace(first, state=state, action=HOSTILE, thought=HOSTILE, outcome=outcome),),
        provenance=Provenance(source="synthetic", policy=HOSTILE, experience_model=HOSTILE),
    )


async def write_run(folder: Path, *, steps: int = 6) -> list[Trajectory]:
    """Fills the folder; returns the recorded episodes whose tasks were simulated."""
    episodes = recorded_episodes()
    faithful = Reminded(await recited(episodes), episodes)
    forgetful = await recited(episodes, misremembered)
    groups = [
        RolloutGroup(
            task=episode.task,
            trajectories=(
                await dream_of(faithful, episode, f"dream-{place}-0"),
                await dream_of(forgetful, episode, f"dream-{place}-1"),
            ),
        )
        for place, episode in enumerate(episodes)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    with TrajectoryWriter(folder / "trajectories") as keeper:
        keeper.append(each for group in groups for each in group.trajectories)
        keeper.append([hostile_episode(groups[0].trajectories[0])])
    with MetricsLog(folder / PREDICTIONS) as log:
        for row in (row for group in groups for row in prediction_rows(group.trajectories[0])):
            log.append(row)
    _write_metrics(folder, groups, steps)
    _write_pool(folder, groups)
    _write_evaluation(folder, episodes)
    fidelity = await measure_fidelity(forgetful, HouseholdAnnotator(), episodes, repeats=2)
    text = json.dumps({**fidelity.to_dict(), "asked": {}}, default=str)
    (folder / "fidelity.json").write_text(text, encoding="utf-8")
    return episodes


def _write_metrics(folder: Path, groups: Sequence[RolloutGroup], steps: int) -> None:
    with MetricsLog(folder / "metrics.jsonl") as log:
        for step in range(steps):
            spent = {"synthetic_steps": 100 * (step + 1), "rollout_seconds": 2.5 * (step + 1)}
            if step in EVALUATED:
                log.append(_validation_row(step, spent))
            spent |= {"evaluation_real_steps": 450 * (1 + (step > 3)), "evaluation_seconds": 7.5}
            report = GroupReport(groups=list(groups[: step + 1]))
            log.append(train_row(step, report, {"entropy": 1.0 / (step + 1)}) | {"spent": spent})
        log.append({"kind": HOSTILE, "step": steps, HOSTILE: HOSTILE})


def _validation_row(step: int, spent: dict[str, float]) -> dict[str, object]:
    won = EVALUATED[step]
    outcomes = tuple(
        Episode(number=number, task=str(number), family="", success=number < won, steps=9)
        for number in range(50)
    )
    evaluation = _evaluation("agent", outcomes)
    return {
        "kind": "evaluation",
        "step": step,
        "split": "valid_seen",
        "success": evaluation.success.to_dict(),
        "spent": spent,
    }


def _evaluation(policy: str, outcomes: tuple[Episode, ...]) -> Evaluation:
    return Evaluation(
        policy=policy,
        environment="alfworld",
        split="valid_unseen",
        seed=0,
        episodes=outcomes,
        failures={},
        real_steps=9 * len(outcomes),
        seconds=7.0,
    )


def _write_pool(folder: Path, groups: Sequence[RolloutGroup]) -> None:
    with TaskPool(path=folder / FILE) as pool:
        pool.add_seeds([group.task for group in groups])
        pool.record(groups, step=0)
        for step in (1, 2):
            made = replace(groups[0].task, id=f"made-{step}", origin="generated", instruction=HOSTILE)
            pool.add_generated([made], step=step, counts={"accepted": 1, HOSTILE: 2})


def _write_evaluation(folder: Path, episodes: Sequence[Trajectory]) -> None:
    outcomes = tuple(
        Episode(number=number, task=each.task.id, family=f"kind {number % 2}", success=number > 2, steps=9)
        for number, each in enumerate(episodes)
    )
    mine, theirs = _evaluation("agent@6", outcomes), _evaluation(HOSTILE, outcomes[:3])
    comparison = {"against": HOSTILE, **compare(mine, theirs).to_dict()}
    stored = json.dumps({**mine.to_dict(), "comparison": comparison, "other": theirs.to_dict()})
    (folder / "evaluations").mkdir()
    (folder / "evaluations" / "alfworld-valid_unseen-0.json").write_text(stored, encoding="utf-8")
