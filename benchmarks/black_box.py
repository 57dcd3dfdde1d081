"""Practice in the dream of a black box against imitation and against reality, environment by environment.

    python benchmarks/black_box.py --environments vending lake --seeds 101 102 103
    python benchmarks/black_box.py --table

No annotator, hidden facts or goal code, and the same settings for all environments. A cell is an environment
and a seed:

- record: mostly failures, half of them by the policy `explore`, half by a demonstrator four fifths of whose
  actions are random (`demonstrators.py`);
- experience: an experience model of these recordings;
- imitation: fine-tuning on the recorded successes, longer until success on the validation split stops rising;
- further: imitation with as many more updates as practice makes;
- dream: practice in the dream, no online real steps;
- imagined: the same, and half of the rollout groups imagine the facts of their task anew;
- ignore: dream without pessimism (unsupported successes count);
- real: the same practice in the real environment, on the same tasks;
- audit: practice in the dream with audits, 1/16 of the real steps of `real`;
- no-history, no-demonstrations, no-reasoning, no-facts, no-pinning: practice in the dream of an experience
  model without this part (like `imagined`, they are run only where `--arms` names them).

All policies play the same unseen tasks of the test split. Finished stages are read from their files, an
interrupted one resumes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dreamgym as dg
from demonstrators import DEMONSTRATORS, DemonstratedFactory
from dreamgym.config import Config, ExperienceConfig, ReplayConfig
from dreamgym.envs.registry import make
from dreamgym.evaluation.evaluate import Episode, Evaluation, compare
from dreamgym.files import write_text

ENVIRONMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "vending": ("examples/environments/vending.py:Vending", {}),
    "helpdesk": ("examples/environments/helpdesk.py:HelpDesk", {}),
    "lake": ("examples/environments/frozen_lake.py:FrozenLake", {}),
    "textcraft": ("textcraft", {}),
    "babyai": ("babyai", {}),
    "kitchen": ("black-box:textworld", {"family": "cooking", "cut": False}),
    "treasure": ("black-box:textworld", {"family": "treasure"}),
}
ARMS = ("imitation", "further", "dream", "ignore", "real", "audit")
ABLATIONS: dict[str, Config] = {
    "no-history": Config(experience=ExperienceConfig(history=0)),
    "no-demonstrations": Config(replay=ReplayConfig(k=0)),
    "no-reasoning": Config(experience=ExperienceConfig(reasoning=False)),
    "no-facts": Config(experience=ExperienceConfig(sheet=False)),
    "no-pinning": Config(experience=ExperienceConfig(imagine=False)),
}
"""What an experience model is fine-tuned without; all prompts of one model are alike."""
ALL_ARMS = (*ARMS, "imagined", *ABLATIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The same for every environment; part of the result."""

    tasks: int = 100
    recorded: tuple[str, ...] = ("explore", "noisy:0.8")
    episodes_per_task: int = 4
    """Of each of these policies."""
    experience_steps: int = 500
    imitation: tuple[int, ...] = (100, 200, 400, 800)
    """Updates of the warm starts that are tried, until two in a row do not raise success in validation."""
    batch: int = 8
    steps: int = 60
    tasks_per_step: int = 12
    group_size: int = 8
    minibatch: int = 32
    epochs: int = 2
    learning_rate: float = 2e-4
    matrix_learning_rate: float = 0.003
    real_share: int = 16
    """Audits may take this part of the real steps that practice in reality takes."""
    audits: int = 4
    validation_episodes: int = 100
    test_episodes: int = 200
    audited_tasks: int = 24

    @property
    def updates(self) -> int:
        """Of practice."""
        return self.steps * self.epochs * -(-self.tasks_per_step * self.group_size // self.minibatch)


SMOKE = Plan(
    tasks=20,
    experience_steps=20,
    imitation=(10,),
    steps=4,
    tasks_per_step=2,
    group_size=4,
    audits=2,
    validation_episodes=4,
    test_episodes=8,
    audited_tasks=2,
)


class Cell:
    def __init__(self, name: str, seed: int, plan: Plan, runs: Path) -> None:
        self.name, self.seed, self.plan = name, seed, plan
        self.environment, self.options = ENVIRONMENTS[name]
        self.folder = runs / f"{name}-{seed}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.data = [self.folder / "data" / policy.partition(":")[0] for policy in plan.recorded]
        self.done: dict[str, Any] = {}

    async def run(self, arms: Sequence[str]) -> None:
        await self.stage("record", self.record)
        await self.stage("experience", self.experience)
        await self.stage("imitation", self.imitation)
        for arm in arms:
            if arm in ABLATIONS:
                await self.stage(f"experience-{arm}", partial(self.experience, arm))
            if arm != "imitation":
                await self.stage(arm, partial(self.arm, arm))

    async def stage(self, name: str, work: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        path = self.folder / f"{name}.json"
        if not path.exists():
            began, load = time.perf_counter(), os.getloadavg()[0]
            found = await work()
            found |= {"minutes": round((time.perf_counter() - began) / 60, 2), "load": round(load, 1)}
            write_text(path, json.dumps(found, indent=1) + "\n")
            shown = {key: value for key, value in found.items() if key not in ("episodes", "knowledge")}
            print(f"{self.name}, seed {self.seed}, {name}: {json.dumps(shown)}", flush=True)
        self.done[name] = json.loads(path.read_text(encoding="utf-8"))

    async def record(self) -> dict[str, Any]:
        plan, found = self.plan, {"recorded": 0, "successes": 0, "real_steps": 0}
        factory = DemonstratedFactory(make(self.environment, **self.options), DEMONSTRATORS[self.name])
        for policy, folder in zip(plan.recorded, self.data, strict=True):
            report = await dg.collect(
                factory,
                folder,
                episodes=plan.tasks * plan.episodes_per_task,
                policy=policy,
                seed=self.seed,
                episodes_per_task=plan.episodes_per_task,
            )
            found[policy] = report.successes
            found["recorded"] += report.episodes
            found["successes"] += report.successes
            found["real_steps"] += report.steps
        return found

    def model(self, arm: str = "") -> Path:
        """The experience model of an arm."""
        return self.folder / (f"experience-{arm}" if arm in ABLATIONS else "experience")

    async def experience(self, arm: str = "") -> dict[str, Any]:
        out = self.model(arm)
        progress = await dg.fine_tune(
            self.data,
            out,
            environment=self.environment,
            options=self.options,
            config=ABLATIONS.get(arm, Config()).model_copy(update={"seed": self.seed}),
            steps=self.plan.experience_steps,
        )
        calibration = json.loads((out / "knowledge.json").read_text(encoding="utf-8"))["calibration"]
        return {"agreement": progress.agreement, "calibration": calibration}

    async def imitation(self) -> dict[str, Any]:
        tried: dict[int, float] = {}
        for updates in self.plan.imitation:
            await self.train(f"imitation-{updates}", steps=0, warm_start_steps=updates)
            found = await self.evaluate(f"imitation-{updates}", "validation", self.plan.validation_episodes)
            tried[updates] = found.success.value or 0.0
            *before, second, last = (-1.0, -1.0, *tried.values())
            if max(before, default=-1.0) >= max(second, last):
                break
        chosen = max(tried, key=lambda updates: tried[updates])
        return {"validation": tried, "updates": chosen} | await self.test(f"imitation-{chosen}")

    async def arm(self, arm: str) -> dict[str, Any]:
        plan, start = self.plan, self.done["imitation"]["updates"]
        if arm == "further":
            await self.train("further", steps=0, warm_start_steps=start + plan.updates)
            return await self.test("further")
        chosen: dict[str, Any] = {}
        if arm == "ignore":
            chosen["config"] = Config(experience=ExperienceConfig(unsupported="ignore"))
        if arm == "imagined":
            chosen["start_states"] = "imagined"
        if arm == "real":
            chosen |= {"mode": "real"}
        if arm == "audit":
            budget = self.done["real"]["online_real_steps"] // plan.real_share
            every = plan.steps // plan.audits
            chosen |= {"real_steps": budget, "audit_every": every, "audit_steps": budget // plan.audits}
        summary = await self.train(arm, steps=plan.steps, init=f"imitation-{start}", **chosen)
        found: dict[str, Any] = {
            "online_real_steps": summary["spent"].get("real_steps", 0),
            "synthetic_steps": summary["spent"].get("synthetic_steps", 0),
            "ended": summary["ended"],
            "gate": summary.get("gate"),
        }
        if arm in ("dream", "imagined", "ignore", *ABLATIONS):
            found |= await self.audited(arm, chosen.get("config"))
        if arm == "audit":
            found["audits"] = _audit_rows(self.folder / arm)
        return found | await self.test(arm)

    async def train(
        self,
        name: str,
        *,
        steps: int,
        warm_start_steps: int = 0,
        init: str | None = None,
        **settings: Any,
    ) -> dict[str, Any]:
        plan = self.plan
        if init is not None:
            settings["init_from"] = f"{self.folder / init}@0"
        return await dg.train(
            experience=str(self.model(name)),
            data=list(map(str, self.data)),
            out=self.folder / name,
            environment=make(self.environment, **self.options),
            seed=self.seed,
            steps=steps,
            warm_start_steps=warm_start_steps,
            warm_start_batch_size=plan.batch,
            warm_start_lr=5e-4,
            warm_start_muon_lr=0.01,
            tasks_per_step=plan.tasks_per_step,
            group_size=plan.group_size,
            gate="warn",
            monitors="off",
            agent={"model": f"hf:{self.model() / 'model'}", "max_tokens": 24},
            learner={
                "negative_advantage_weight": 0,
                "refusal_penalty": 0.1,
                "learning_rate": plan.learning_rate,
                "muon_lr": plan.matrix_learning_rate,
                "warmup_steps": 4,
                "decay_steps": plan.steps,
                "epochs": plan.epochs,
                "minibatch_size": plan.minibatch,
                "micro_tokens": 2048,
            },
            curriculum={"generator": "none"},
            **settings,
        )

    async def audited(self, arm: str, config: Config | None) -> dict[str, Any]:
        """The share of the final policy's dreamt successes that are real."""
        dream = dg.Dream.load(self.model(arm), config)
        try:
            tasks = (await dream.tasks())[: self.plan.audited_tasks]
            agent = dg.Agent.load(str(self.folder / arm))
            groups = await dg.rollout(agent, dream, tasks, group_size=4, seed=self.seed)
        finally:
            await dream.aclose()
        dreamt = [each for group in groups for each in group.trajectories]
        found = await dg.audit(make(self.environment, **self.options), dreamt)
        return {
            "dream_success": sum(each.success for each in dreamt) / len(dreamt),
            "dreamt_successes_that_are_real": asdict(found.successes),
            "faithful": asdict(found.faithful),
        }

    async def evaluate(self, run: str, split: str, episodes: int) -> Evaluation:
        agent = dg.Agent.load(f"{self.folder / run}")
        factory = make(self.environment, **self.options)
        return await dg.evaluate(agent, factory, split=split, episodes=episodes, seed=7)

    async def test(self, run: str) -> dict[str, Any]:
        found = await self.evaluate(run, "test", self.plan.test_episodes)
        return {"success": asdict(found.success), "episodes": [asdict(each) for each in found.episodes]}


def _audit_rows(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row.get("kind") == "audit"]


def rows(runs: Path) -> list[dict[str, Any]]:
    """What each cell has found so far."""
    found = []
    for folder in sorted(runs.glob("*-*")):
        name, _, seed = folder.name.rpartition("-")
        done = {
            path.stem: json.loads(path.read_text(encoding="utf-8"))
            for path in sorted(folder.glob("*.json"))
            if path.stem in ("record", "experience", *ALL_ARMS)
        }
        if name in ENVIRONMENTS and "imitation" in done:
            found.append({"environment": name, "seed": int(seed), **_differences(name, done)})
    return found


def _differences(name: str, done: dict[str, Any]) -> dict[str, Any]:
    """The stages, with paired differences to imitation and to practice in reality instead of episodes."""
    played = {arm: _evaluation(name, done[arm]) for arm in ALL_ARMS if arm in done}
    for arm, evaluation in played.items():
        for other in ("imitation", "real"):
            if other in played and other != arm:
                done[arm][f"minus_{other}"] = asdict(compare(evaluation, played[other]).difference)
        done[arm].pop("episodes")
    return done


def _evaluation(name: str, stage: dict[str, Any]) -> Evaluation:
    episodes = tuple(Episode(**each) for each in stage["episodes"])
    return Evaluation(
        policy="",
        environment=name,
        split="test",
        seed=7,
        episodes=episodes,
        failures={},
        real_steps=0,
        seconds=0.0,
    )


def table(found: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| environment | seed | recorded | " + " | ".join(ARMS) + " | dream − imitation | real of dreamt |",
        "|" + "---|" * (len(ARMS) + 5),
    ]
    for row in found:
        cells = [f"{row[arm]['success']['value']:.1%}" if arm in row else "" for arm in ARMS]
        dream, record = row.get("dream", {}), row["record"]
        real = dream.get("dreamt_successes_that_are_real")
        lines.append(
            f"| {row['environment']} | {row['seed']} | {record['successes'] / record['recorded']:.1%} | "
            + " | ".join(cells)
            + f" | {_interval(dream.get('minus_imitation'))} | {_interval(real)} |"
        )
    return "\n".join(lines)


def _interval(estimate: dict[str, Any] | None) -> str:
    if estimate is None or estimate["value"] is None:
        return ""
    return f"{estimate['value']:+.1%} [{estimate['low']:+.1%}, {estimate['high']:+.1%}]"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--environments", nargs="+", choices=ENVIRONMENTS, default=list(ENVIRONMENTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[101, 102, 103])
    parser.add_argument("--arms", nargs="+", choices=ALL_ARMS, default=list(ARMS))
    parser.add_argument("--runs", type=Path, default=Path("runs/black-box"))
    parser.add_argument("--out", type=Path, default=Path("results/black-box/cells.json"))
    parser.add_argument("--smoke", action="store_true", help="a minute of each stage, to try the command")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    plan = SMOKE if given.smoke else Plan()
    if not given.table:
        for seed in given.seeds:
            for name in given.environments:
                asyncio.run(Cell(name, seed, plan, given.runs).run(given.arms))
                write_results(plan, given.runs, given.out)
    print(table(rows(given.runs)))


def write_results(plan: Plan, runs: Path, out: Path) -> None:
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout
    found: dict[str, Any] = {"commit": commit.strip(), "machine": platform.machine()}
    found |= {"cores": len(os.sched_getaffinity(0)), "plan": asdict(plan), "cells": rows(runs)}
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
