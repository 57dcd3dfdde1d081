"""Runs the stages of `learn` one after another; finished ones are skipped when it is run again."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from dreamgym import collection
from dreamgym.data.datasets import builtin_dataset, dataset_path
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.distributed.setup import fitting_workers
from dreamgym.envs.description import offers_expert
from dreamgym.envs.registry import open_environment
from dreamgym.errors import ConfigError, DreamGymError, MissingExtraError
from dreamgym.evaluation.audit import Audit, audit
from dreamgym.evaluation.runs import evaluate_runs
from dreamgym.files import lock_directory, write_text
from dreamgym.learning.estimate import Estimator
from dreamgym.learning.plan import Plan, experience_folder
from dreamgym.learning.shipped import install_experience
from dreamgym.learning.stages import Stages
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import EnvironmentFactory
from dreamgym.training import experience, trainer
from dreamgym.training.annotators import choose_annotator
from dreamgym.training.experience_run import ExperienceRun, environment_of_data
from dreamgym.training.fine_tuning import Progress as FineTuningProgress
from dreamgym.training.progress import Progress
from dreamgym.training.run_dir import TRAJECTORIES, flat
from dreamgym.types import Trajectory

STAGES = {
    "collect": "record real episodes",
    "experience": "fine-tune the experience model",
    "train": "train the agent: imitate recorded successes, then practise in the dream",
    "evaluate": "evaluate the agent in the real environment before and after practice, on unseen tasks",
}
SUMMARY = "summary.json"
_AUDITED = 24
"""Dreamt episodes that are replayed in reality for the report."""
OnProgress = Callable[[str, int, int, str], None]
"""Takes a job, what is done of it, its total, and a note."""
Log = Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class Pipeline:
    """One run of `learn` in the directory of its plan."""

    plan: Plan
    real: EnvironmentFactory | None = None
    """The real environment, if the caller has opened it; else it is opened by its name."""
    log: Log = lambda text: None
    on_progress: OnProgress = lambda job, done, total, note: None
    _estimator: Estimator = field(default_factory=Estimator)
    _missing: str = ""
    """Why there is no real environment."""

    async def run(self) -> dict[str, Any]:
        """Runs or resumes; returns the content of `summary.json`."""
        plan = self.plan
        plan.out.mkdir(parents=True, exist_ok=True)
        extent = plan.extent.model_dump(mode="json", exclude={"workers"})  # a run may change machines
        given = flat(plan.config.model_dump(mode="json")) | flat(extent)
        given |= {"data": plan.data, "experience": plan.experience, "recording": plan.recording}
        work: dict[str, Callable[[], Awaitable[dict[str, Any]]]] = {
            "collect": self._collect,
            "experience": self._experience,
            "train": self._train,
            "evaluate": self._evaluate,
        }
        with lock_directory(plan.out):
            stages = Stages(plan.out, given)
            stages.write()  # settings first: another run is refused from here on
            async with AsyncExitStack() as stack:
                for number, (stage, run) in enumerate(work.items(), 1):
                    before = ": done before" if stage in stages.done else ""
                    self.log(f"{number}/{len(work)} {STAGES[stage]}{before}")
                    if not before:
                        if stage != "experience":
                            self._open(stack)
                        began = time.perf_counter()
                        result = await run()
                        stages.finish(stage, time.perf_counter() - began, result)
            summary = self._summary(stages.done)
            write_text(plan.out / SUMMARY, json.dumps(summary, indent=2) + "\n")
            return summary

    def _open(self, stack: AsyncExitStack) -> None:
        config = self.plan.config.environment
        if self.real is not None or self._missing:
            return
        if self.plan.spec is None:
            self._missing = f"environment {config.name!r} is not installed"
            return
        try:
            self.real = open_environment(config.name, config.options)
        except MissingExtraError as error:
            if not self.plan.data:
                raise
            self._missing = str(error)
        else:
            stack.push_async_callback(self.real.aclose)

    def _progress(self, job: str, done: int, total: int, note: str = "") -> None:
        self.on_progress(job, done, total, note)
        if (text := self._estimator.first(job, done, total)) is not None:
            self.log(text)

    async def _collect(self) -> dict[str, Any]:
        plan = self.plan
        if plan.data or plan.experience is not None:
            self.log(f"given: {', '.join(plan.data) or plan.experience}")
            return {"real_steps": 0, "policies": {}}
        assert self.real is not None
        expert = await offers_expert(self.real)
        if not expert:
            self.log(f"{self.real.name} has no expert: its actions are explored")
        policies: dict[str, Any] = {}
        for config in plan.recordings(expert=expert):
            total, job = config.collect.episodes, f"collect, {config.collect.policy}"

            def on_episode(report: collection.CollectReport, job: str = job, total: int = total) -> None:
                self._progress(job, report.already_there + report.episodes, total)

            report = await collection.collect(config, self.real, on_episode=on_episode)
            if not report.episodes and not report.already_there:
                raise DreamGymError(
                    f"no episode could be recorded: {dict(report.failures)}; try dreamgym envs check"
                )
            if rare := report.coverage.rare():
                self.log(f"{', '.join(rare)}: tried too rarely for a model to learn what they do")
            policies[config.collect.policy] = {"episodes": total, "failures": dict(report.failures)}
        recorded = self._trajectories()
        won = sum(each.success for each in recorded)
        self.log(f"{won} of {len(recorded)} recorded episodes succeed")
        return {
            "policies": policies,
            "episodes": len(recorded),
            "successes": won,
            "real_steps": sum(map(len, recorded)),
        }

    async def _experience(self) -> dict[str, Any]:
        plan = self.plan
        config, folder = plan.config, Path(str(plan.config.train.experience))
        if plan.experience is not None:
            source = experience_folder(plan.experience)
            if source != folder:
                await install_experience(source, folder)
            return {"given": plan.experience, "agreement": None}
        recorded = self._trajectories()
        if config.train.warm_start_steps and not any(each.success for each in recorded):
            raise ConfigError(
                f"expected successes to imitate, none of {len(recorded)} episodes succeeds: list "
                "admissible actions or give examples of them (collect.actions), record with a better policy "
                "(collect.policy=endpoint:NAME), add trajectories of successes (--data), or set "
                "train.warm_start_steps=0"
            )
        spec = environment_of_data(config.environment.name, recorded)
        async with LanguageModels(config, folder=folder) as models:
            annotator = await choose_annotator(
                *(None, spec, recorded),
                annotations=None,
                default_annotations=folder / "annotations",
                models=models,
            )

        def on_progress(progress: FineTuningProgress) -> None:
            measured = "" if progress.agreement is None else f", agreement {progress.agreement:.1%}"
            self._progress("fine-tune", progress.step, progress.steps, f"loss {progress.loss:.3f}{measured}")

        progress = await experience.fine_tune(
            config,
            recorded,
            annotator,
            folder,
            data=[dataset_path(source) for source in self.sources()],
            actor=spec.actor if spec is not None else None,
            on_progress=on_progress,
        )
        return {"updates": progress.step, "agreement": progress.agreement, "annotator": annotator.name}

    def _workers(self) -> int:
        """For practice: as the user says, else as the preset says and the machine has cores."""
        config = self.plan.config
        if "workers" in config.train.model_fields_set:
            return config.train.workers
        return fitting_workers(config, self.plan.extent.workers)

    async def _train(self) -> dict[str, Any]:
        config, changed = self.plan.config, dict[str, Any](workers=self._workers())
        if self.plan.experience is None:
            changed["data"] = self.sources()
        config = config.model_copy(update={"train": config.train.model_copy(update=changed)})

        def on_progress(progress: Progress) -> None:
            for warning in progress.warnings:
                self.log(f"warning: {warning}")
            self._progress(progress.stage, progress.done, progress.total, progress.note)

        return await trainer.train(config, real=self.real, on_progress=on_progress)

    async def _evaluate(self) -> dict[str, Any]:
        plan = self.plan
        if self.real is None:
            self.log(f"skipped: {self._missing}")
            return {"skipped": self._missing, "real_steps": 0}
        run, episodes, done = str(plan.config.train.out), plan.extent.evaluation_episodes, 0

        def on_episode(policy: str) -> None:
            nonlocal done
            done += 1
            self._progress("real episodes", done, 2 * episodes, policy)

        found = await evaluate_runs(
            plan.config,
            [run, f"{run}@0"],
            episodes=episodes,
            seed=plan.config.seed,
            on_episode=on_episode,
            factory=self.real,
        )
        result = found.to_dict()
        audited = await self._audit()
        taken = result["real_steps"] + result["other"]["real_steps"] + audited.real_steps
        return result | {"real_steps": taken, "audit": audited.to_dict()}

    async def _audit(self) -> Audit:
        """Replays a few of the last dreamt episodes in reality; the report shows both side by side."""
        assert self.real is not None
        run = self.plan.config.train.out
        folder = run / TRAJECTORIES
        kept = list(read_trajectories(folder)) if folder.is_dir() else []
        audited = await audit(self.real, kept[-_AUDITED:])
        audited.save(run)
        return audited

    def sources(self) -> list[str]:
        """Given, recorded and shipped trajectories; of the last as many as the plan says, copied."""
        plan = self.plan
        if plan.data:
            return list(plan.data)
        if plan.experience is not None:
            source = experience_folder(plan.experience)
            return ExperienceRun.read(source).data_sources(source)
        folder = plan.out / "trajectories"
        found = sorted(str(path.parent) for path in folder.rglob("collect.json"))
        for name, count in plan.extent.datasets.items():
            copy = plan.out / "shipped" / name
            if not copy.exists():
                with TrajectoryWriter(copy) as writer:
                    writer.append(list(islice(read_trajectories(builtin_dataset(name)), count)))
            found.append(str(copy))
        return found

    def _trajectories(self) -> list[Trajectory]:
        return [each for source in self.sources() for each in read_trajectories(dataset_path(source))]

    def _summary(self, done: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        plan, train, real = self.plan, done["train"], done["evaluate"]
        summary: dict[str, Any] = {
            "out": str(plan.out),
            "environment": plan.config.environment.model_dump(mode="json"),
            "seed": plan.config.seed,
            "experience": str(plan.config.train.experience),
            "agreement": done["experience"]["agreement"],
            "train": {name: train[name] for name in ("steps", "ended", "gate") if name in train},
            "synthetic_steps": train["spent"].get("synthetic_steps", 0),
            "real_steps": {
                "collect": done["collect"]["real_steps"],
                "train": train["spent"].get("real_steps", 0),
                "evaluate": real["real_steps"],
            },
            "seconds": {stage: each["seconds"] for stage, each in done.items()},
        }
        if "skipped" in real:
            return summary | {"skipped": real["skipped"]}
        return summary | {
            "split": real["split"],
            "before": {name: real["other"][name] for name in ("policy", "success")},
            "after": {name: real[name] for name in ("policy", "success")},
            "comparison": real["comparison"],
            "audit": {name: real["audit"][name] for name in ("episodes", "successes", "faithful")},
            "notes": real["notes"],
        }
