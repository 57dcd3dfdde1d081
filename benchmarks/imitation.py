"""Success of imitation alone on ALFWorld, by number of demonstrations.

    python benchmarks/imitation.py --seeds 0 1
    python benchmarks/imitation.py --table

It looks for a policy at which imitation has saturated and that still fails, to start reinforcement learning
from. A cell is a number of demonstrations and a seed. Its policy starts from the weights of the seed's
experience model, as in `claim.py`. For each seed, make that model first:

    dreamgym experience train --data builtin:alfworld --data builtin:alfworld-mistakes --env alfworld \\
        --steps 1200 --seed SEED --out runs/imitation/experience-SEED

Supervised fine-tuning runs in legs, each with its own learning rates, which fall over the leg's second half.
Legs are added until success on `valid_seen` no longer rises. The last policy then plays `valid_unseen`, also
in the real environment.

Demonstrations are recorded successes, one of each task family in turn; fewer are a subset of more. Turns that
were refused, that a noisy demonstrator drew at random, or that only help, look or list the inventory are
context and not trained.

An interrupted cell resumes when the same command runs again. Each cell writes one JSON file, which is valid
while the cell runs; `done` says whether it is finished.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import dreamgym as dg
from cells import (
    Examples,
    Result,
    change_plan,
    evaluate,
    fine_tune,
    interval,
    is_refused,
    log,
    open_agent,
    percent,
    read_results,
    run_config,
    summary,
    trajectories_of,
)
from dreamgym.envs.registry import find_environment
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.training.run_dir import RunDir
from dreamgym.training.warm_start import with_thoughts
from dreamgym.types import history

ALL = 0
"""As a number of demonstrations: all."""
ORDER = (200, 400, 100, ALL, 32)
"""The most promising numbers first."""
IDLE = ("help", "inventory", "look")
"""Actions that the hand-coded expert draws at random where it has no plan."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a cell; part of its result."""

    data: str = "builtin:alfworld"
    updates: int = 400
    """Of the first leg."""
    learning_rate: float = 1e-3
    matrix_learning_rate: float = 0.02
    """Of Muon."""
    further: int = 200
    """Updates of each other leg."""
    further_learning_rate: float = 6e-4
    further_matrix_learning_rate: float = 0.004
    legs: int = 4
    """At most."""
    rise: float = 0.02
    """A smaller gain over the best earlier leg ends the cell."""
    batch: int = 8
    micro_tokens: int = 8192
    horizon: int = 50
    temperature: float = 0.4
    engines: int = 32
    """Processes of the environment."""
    seen_episodes: int = 100
    seen_seed: int = 11
    unseen_episodes: int = 150
    unseen_seed: int = 7
    """The games of `claim.py`: exploratory cells use up no others."""

    def sft_settings(self, leg: int, seed: int) -> dict[str, Any]:
        first = leg == 0
        return {
            "steps": self.updates if first else self.further,
            "batch_size": self.batch,
            "learning_rate": self.learning_rate if first else self.further_learning_rate,
            "muon_lr": self.matrix_learning_rate if first else self.further_matrix_learning_rate,
            "micro_tokens": self.micro_tokens,
            "seed": seed + 1000 * leg,
        }


def demonstrations(source: str, count: int, seed: int) -> list[dg.Trajectory]:
    """Recorded successes, one of each family in turn; a smaller count gives the first ones of a larger."""
    successes = [each for each in trajectories_of(source) if each.success]
    Random(f"demonstrations/{seed}").shuffle(successes)
    chosen = round_robin(successes, lambda each: each.task.family)
    return chosen if count == ALL else chosen[:count]


def round_robin(items: Sequence[T], kind: Callable[[T], str]) -> list[T]:
    """
    >>> round_robin(["a1", "a2", "b1", "a3"], lambda name: name[0])
    ['a1', 'b1', 'a2', 'a3']
    """
    kinds: dict[str, list[T]] = {}
    for item in items:
        kinds.setdefault(kind(item), []).append(item)
    longest = max(map(len, kinds.values()), default=0)
    groups = [group for _, group in sorted(kinds.items())]
    return [group[place] for place in range(longest) for group in groups if place < len(group)]


class _AbsentExpert:
    """Stands for the expert when the random draws of a recorded policy are repeated."""

    experts = ("expert",)
    finishing = ()

    def __init__(self, task: dg.Task) -> None:
        self.task = task

    async def expert_action(self, expert: str | None = None) -> str:
        return ""


async def random_turns(trajectory: dg.Trajectory) -> set[int]:
    """Positions of the turns that a noisy demonstrator drew at random; its recorded seed repeats the draws.

    Raises:
        ValueError: they are not the recorded actions.
    """
    name = trajectory.provenance.policy
    if not name.startswith("noisy:"):
        return set()
    stand_in: Any = _AbsentExpert(trajectory.task)
    policy = make_policy(name, stand_in, seed=trajectory.seed)
    found = set()
    for position, (past, turn) in enumerate(history(trajectory)):
        drawn = (await policy.act(trajectory.task, past, turn.state)).action
        if drawn and drawn != turn.action:
            raise ValueError(f"{trajectory.id}: its seed does not give the random action of turn {position}")
        if drawn:
            found.add(position)
    return found


async def examples_of(agent: dg.Agent, chosen: Sequence[dg.Trajectory]) -> Examples:
    """Demonstrations with thoughts and tokens."""
    think = find_environment("alfworld").think
    if agent.config.thought and think is not None:
        chosen = [with_thoughts(each, think) for each in chosen]
    trajectories = agent.tokenize(chosen)
    masked = set()
    for trajectory in trajectories:
        drawn = await random_turns(trajectory)
        masked |= {
            id(turn)
            for position, turn in enumerate(trajectory.transitions)
            if position in drawn or turn.action in IDLE or is_refused(turn)
        }
    return Examples(trajectories=trajectories, masked=masked)


def cell_name(count: int, seed: int) -> str:
    return f"alfworld-imitation-{'all' if count == ALL else count}-{seed}"


async def measure(count: int, seed: int, plan: Plan, model: str, runs: Path, results: Path) -> None:
    """Run or resume a cell."""
    name = cell_name(count, seed)
    config = run_config(model, runs / name, seed, plan.data)
    identity: dict[str, Any] = {
        "cell": name,
        "environment": "alfworld",
        "method": "imitation",
        "demonstrations": count or "all",
        "seed": seed,
        "config": {
            "plan": asdict(plan),
            "demonstrations": count or "all",
            "agent": config.agent.model_dump(mode="json") | {"model": model},
        },
        "run": str(runs / name),
        "legs": [],
        "checkpoints": [],
    }
    result = Result(results / f"{name}.json", identity)
    if result.done:
        return
    log(f"{name}: starts or resumes")
    with RunDir.open(config) as run:
        async with open_agent(config) as agent:
            examples = await examples_of(agent, demonstrations(plan.data, count, seed))
            result.save(lessons=examples.counts())
            log(f"{name}: {examples.counts()}")
            await _Cell(plan, seed, run, agent, examples, result).run_all()
    log(f"{name}: done in {result.values['seconds'] / 60:.1f} minutes")


@dataclass(slots=True)
class _Cell:
    plan: Plan
    seed: int
    run: RunDir
    agent: dg.Agent
    examples: Examples
    result: Result

    async def run_all(self) -> None:
        legs = self.result.values["legs"]
        if legs:
            self.agent.restore(self.run.policy_weights(legs[-1]["updates"]))
        while len(legs) < self.plan.legs and (not legs or legs[-1]["rising"]):
            await self._leg(len(legs), legs[-1]["updates"] if legs else 0)
        self.result.save(saturated=not legs[-1]["rising"], updates=legs[-1]["updates"])
        if "unseen" not in self.result.values:
            games = ("valid_unseen", self.plan.unseen_episodes, self.plan.unseen_seed)
            self.result.save(unseen=await self._evaluate(legs[-1]["updates"], *games))
        self.result.save(done=True)

    async def _leg(self, leg: int, before: int) -> None:
        """One leg of fine-tuning; the first is also evaluated at its half, before its rates fall."""
        settings, state = self.plan.sft_settings(leg, self.seed), f"leg-{leg}.pt"
        end, half = before + settings["steps"], settings["steps"] // 2
        saved = self.run.load(state)
        if leg == 0 and (saved is None or saved["steps"] <= half):
            losses = fine_tune(self.agent, self.examples, self.run, state, settings, until=half)
            await self._checkpoint(half, leg, losses)
        losses = fine_tune(self.agent, self.examples, self.run, state, settings)
        success = await self._checkpoint(end, leg, losses)
        legs = self.result.values["legs"]
        best = max((each["valid_seen"] for each in legs), default=0.0)
        rising = success >= best + self.plan.rise - 1e-9
        legs.append({"updates": end, "valid_seen": success, "rising": rising})
        self.result.save()
        (self.run.path / state).unlink(missing_ok=True)

    async def _checkpoint(self, updates: int, leg: int, losses: Mapping[str, float]) -> float:
        """Save the policy, and its success on `valid_seen`, which is returned."""
        self.run.save_policy(updates, self.agent.weights())
        rows = self.result.values["checkpoints"]
        if all(row["updates"] != updates for row in rows):
            games = ("valid_seen", self.plan.seen_episodes, self.plan.seen_seed)
            evaluation = await self._evaluate(updates, *games)
            rows.append({"updates": updates, "leg": leg, **losses, "evaluation": evaluation})
            self.result.save()
        return next(float(row["evaluation"]["of_all"]["value"]) for row in rows if row["updates"] == updates)

    async def _evaluate(self, updates: int, split: str, episodes: int, seed: int) -> dict[str, Any]:
        row = await evaluate(
            self.agent, self.run, str(updates), split=split, episodes=episodes, seed=seed,
            temperature=self.plan.temperature, horizon=self.plan.horizon, processes=self.plan.engines,
        )  # fmt: skip
        log(f"{self.result.values['cell']}: {updates} updates, {summary(row)}")
        return row


def table(results: Path) -> str:
    """Markdown: one row per cell, unfinished ones included."""
    lines = [
        "| demonstrations | seed | valid_seen by updates | stopped rising | valid_unseen |"
        " in view and not taken | minutes |",
        "|" + "---|" * 7,
    ]
    cells = [each for each in read_results(results) if each["method"] == "imitation" and "lessons" in each]
    for cell in sorted(cells, key=lambda each: (each["seed"], each["lessons"]["trajectories"])):
        rows = cell["checkpoints"]
        curve = ", ".join(f"{row['updates']}: {percent(row['evaluation']['of_all'])}" for row in rows) or "–"
        unseen = cell.get("unseen")
        last = unseen or (rows[-1]["evaluation"] if rows else None)
        stopped = ("yes" if cell["saturated"] else "no") if cell["done"] else "not done"
        lines.append(
            f"| {cell['demonstrations']} ({cell['lessons']['trajectories']}) | {cell['seed']} | {curve} | "
            f"{stopped} | {interval(unseen['of_all']) if unseen else '–'} | "
            f"{percent(last['in_view_not_taken']) if last else '–'} | {cell['seconds'] / 60:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--demonstrations", nargs="*", type=int, default=list(ORDER), help="0: all")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument(
        "--experience", default="hf:runs/imitation/experience-{seed}/model", help="or nano, tiny"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/imitation"))
    parser.add_argument("--results", type=Path, default=Path("results/imitation"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="settings of the plan")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    options = parser.parse_args()
    plan = change_plan(Plan(), options.set)
    for seed in options.seeds if not options.table else ():
        for count in options.demonstrations:
            model = options.experience.format(seed=seed)
            asyncio.run(measure(count, seed, plan, model, options.runs, options.results))
    print(table(options.results))


if __name__ == "__main__":
    main()
