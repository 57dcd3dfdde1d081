"""Teaching, measuring, starting and judging as the quickstart does: by default in everything."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym.config import Config
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import find_environment, open_environment
from dreamgym.evaluation.evaluate import compare, evaluate
from dreamgym.evaluation.fidelity import (
    OnStage,
    drift_svg,
    markdown_table,
    measure_fidelity,
)
from dreamgym.files import write_text
from dreamgym.quickstart.plan import DREAMGYM, SFT, Plan
from dreamgym.training.agent import opened_agent
from dreamgym.training.annotators import choose_annotator
from dreamgym.training.experience_loading import load_experience_model, own_buffer
from dreamgym.training.metrics import read_metrics
from dreamgym.training.run_dir import CONFIG, METRICS, SUMMARY, read_config
from dreamgym.types import Trajectory

if TYPE_CHECKING:
    from dreamgym.training.trainer import OnProgress

ENOUGH = 0.2
"""Share of dreamt episodes that must succeed for practice to begin: where fewer do, most rollout groups fail
together, and there is nothing to learn from."""
LONGER = 4 / 3
"""As many updates, if they do not."""
STARTS = 4
"""That are tried at most."""


async def taught(
    config: Config, data: Sequence[str], out: Path, on_update: Callable[[int, float], None]
) -> dict[str, Any]:
    """Teach an experience model in `out`, or go on with it.

    Args:
        on_update: takes the updates done, and the loss.
    """
    from dreamgym.training.experience import fine_tune

    sources = [dataset_path(name) for name in data]
    recorded = [each for source in sources for each in read_trajectories(source)]
    spec = find_environment(config.environment.name)
    annotator = await choose_annotator(None, spec, recorded, default_annotations=out / "annotations")
    found = await fine_tune(
        config,
        recorded,
        annotator,
        out,
        data=data,
        actor=spec.actor,
        on_progress=lambda progress: on_update(progress.step, progress.loss or 0.0),
    )
    return {"steps": found.step, "loss": found.loss, "agreement": found.agreement}


async def measured(
    run: Path, plan: Plan, trajectories: Sequence[Trajectory], *, on_stage: OnStage
) -> dict[str, Any]:
    """Fidelity on these real trajectories: whole in the run's folder, as `experience eval` leaves it, and in
    short."""
    seed, spec = plan.seed, find_environment(plan.env)
    annotator = await choose_annotator(None, spec, trajectories, default_annotations=run / "annotations")
    factory = open_environment(plan.env, plan.world.options)
    try:
        with own_buffer(run) as buffer:
            loaded = load_experience_model(run, retriever=buffer)
            found = await measure_fidelity(
                loaded.model, annotator, trajectories, factory=factory, seed=seed, on_stage=on_stage
            )
    finally:
        await factory.aclose()
    asked: dict[str, Any] = {
        "reward": loaded.grader,
        "seed": seed,
        "without": [],
    }
    write_text(run / "fidelity.json", json.dumps({**found.to_dict(), "asked": asked}, indent=2) + "\n")
    write_text(run / "fidelity.md", markdown_table(found))
    write_text(run / "drift.svg", drift_svg(found.drift))
    back = found.dream_to_real
    return {
        "episodes": found.episodes,
        "recorded_steps": sum(map(len, trajectories)),
        "next_state_exact": found.steps.next_state_exact.to_dict(),
        "success_agreement": found.steps.success.agreement.to_dict(),
        "real_to_dream": found.real_to_dream.share.to_dict(),
        "dream_to_real": back.share.to_dict() if back is not None else None,
    }


async def imitated(config: Config, on_progress: OnProgress | None = None) -> float:
    """The start that this configuration makes, or goes on with; returns the seconds that its imitation took.

    A start of other updates, and practice from it, are thrown away.
    """
    from dreamgym.training.trainer import train

    folder, updates = config.train.out, config.train.warm_start_steps
    if (folder / CONFIG).exists() and read_config(folder).train.warm_start_steps != updates:
        shutil.rmtree(folder.parent / DREAMGYM, ignore_errors=True)
        shutil.rmtree(folder)
    if (folder / SUMMARY).exists():
        found = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    else:
        found = await train(config, on_progress=on_progress)
    return float(found["spent"].get("warm_start_seconds", 0.0))


async def first_step(practice: Config, on_progress: OnProgress | None = None) -> dict[str, float]:
    """How often the policy that practice begins with succeeds in the dream; practice goes on from there."""
    from dreamgym.training.trainer import train

    once = practice.train.model_copy(update={"steps": 1})
    found = await train(practice.model_copy(update={"train": once}), on_progress=on_progress)
    row = read_metrics(once.out / METRICS, "train")[0]
    return {"success": row["success"], "synthetic_steps": found["spent"]["synthetic_steps"]}


async def judged(out: Path, plan: Plan, on_episode: Callable[[], None]) -> dict[str, Any]:
    """Both policies on the same real episodes; each result is left with its run, as `dreamgym evaluate` does.

    Returns:
        That of the policy which practised, with the comparison and the other one's result in it.
    """
    found = []
    factory = open_environment(plan.env, plan.world.options)
    try:
        for name in (str(out / DREAMGYM), f"{out / SFT}@0"):
            async with opened_agent(name) as agent:
                policy = agent.policy_factory(temperature=agent.config.evaluation_temperature)
                found.append(
                    await evaluate(
                        factory,
                        policy,
                        split=plan.world.unseen,
                        episodes=plan.evaluation_episodes,
                        seed=plan.seed,
                        policy=agent.name,
                        on_episode=on_episode,
                    )
                )
    finally:
        await factory.aclose()
    after, before = (each.to_dict() for each in found)
    comparison = {"against": before["policy"], **compare(found[0], found[1]).to_dict()}
    result = after | {"comparison": comparison, "other": before}
    for run, kept in ((SFT, before), (DREAMGYM, result)):
        name = f"quickstart-{plan.world.unseen}.json"
        write_text(out / run / "evaluations" / name, json.dumps(kept, indent=2) + "\n")
    return result
