"""Expert iteration in ALFWorld and in its dream against further imitation, from where imitation saturates.

    python benchmarks/expert_iteration.py --seeds 0
    python benchmarks/expert_iteration.py --table

It needs the finished cells of `imitation.py` with the same seed and selects its start among them (`choose`):
once, with the first seed, for all seeds. After an evaluation of the start itself there are five arms:

    ei           plays groups of 4 episodes and imitates the shortest success of each group
    imitation    plays nothing and imitates the demonstrations of the start further
    unfiltered   as ei, but imitates a random member of each group: measures the filter by success
    ei-dream     as ei, but plays in the dream of the experience model that the start began from
    ei-s2r       goes from the end of ei-dream through one round in reality with a sixteenth of ei's episodes

A round has the same number of updates, trajectories per update and learning rates in each arm; the rates fall
in each round. Refused turns are context and not trained. The episodes of the last rounds are pooled. Training
uses rooms of the training split only. Each arm then plays the same unseen games at two temperatures.

An interrupted cell resumes when the same command runs again.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

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
from dreamgym.evaluation.statistics import mcnemar, paired_difference
from dreamgym.files import atomic_write, write_text
from dreamgym.seeding import derive_seed
from dreamgym.training.run_dir import RunDir
from imitation import ALL, demonstrations, examples_of, round_robin

START = "start"
DREAM, SIM_TO_REAL = "ei-dream", "ei-s2r"
ARMS = ("ei", "imitation", "unfiltered", DREAM, SIM_TO_REAL)
SHARE = 16
"""Sim-to-real gets the real episodes divided by this."""
BAND = (0.30, 0.60)
"""Success on valid_seen: below, rollouts hold few successes; above, there is little to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Settings of a cell; part of its result."""

    data: str = "builtin:alfworld"
    rounds: int = 6
    tasks: int = 150
    """Of a round."""
    group: int = 4
    pooled: int = 4
    """Rounds whose episodes are trained on."""
    updates: int = 90
    """Of a round."""
    batch: int = 8
    learning_rate: float = 6e-4
    matrix_learning_rate: float = 0.004
    """Of Muon."""
    warmup: int = 5
    falling_share: float = 0.5
    """Of the updates of a round."""
    micro_tokens: int = 8192
    practice_horizon: int = 30
    practice_temperature: float = 1.0
    horizon: int = 50
    temperatures: tuple[float, ...] = (0.4, 1.0)
    engines: int = 32
    """Processes of the environment."""
    seen_every: int = 2
    """Rounds between evaluations on valid_seen."""
    seen_episodes: int = 100
    seen_seed: int = 11
    unseen_episodes: int = 150
    unseen_seed: int = 7

    def sft_settings(self, seed: int, round_: int) -> dict[str, Any]:
        return {
            "steps": self.updates,
            "batch_size": self.batch,
            "learning_rate": self.learning_rate,
            "muon_lr": self.matrix_learning_rate,
            "warmup_steps": self.warmup,
            "decay_fraction": self.falling_share,
            "micro_tokens": self.micro_tokens,
            "seed": seed + 1000 * (round_ + 100),
        }


def choose(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The number of demonstrations to start from; the start is the policy after the last leg.

    Of the cells that saturated within the band, the one nearest to its middle; else of those within the band,
    else of all. Of equal ones, that with fewer demonstrations.

    >>> def cell(count, share, saturated):
    ...     legs = [{"updates": 400, "valid_seen": share}]
    ...     return {"demonstrations": count, "saturated": saturated, "legs": legs, "seed": 0}
    >>> choose([cell(100, 0.2, True), cell(200, 0.35, True), cell(400, 0.44, False)])["demonstrations"]
    200
    """

    def rank(cell: Mapping[str, Any]) -> tuple[int, float, int]:
        share, count = cell["legs"][-1]["valid_seen"], cell["demonstrations"]
        within = BAND[0] <= share <= BAND[1]
        return (
            0 if within and cell["saturated"] else 1 if within else 2,
            round(abs(share - sum(BAND) / 2), 6),
            10**9 if count == "all" else int(count),
        )

    chosen = min(cells, key=rank)
    why = ("stopped rising within the band", "within the band, still rising", "none within the band")
    return {
        "demonstrations": chosen["demonstrations"],
        "chosen_with_seed": chosen["seed"],
        "valid_seen": chosen["legs"][-1]["valid_seen"],
        "band": list(BAND),
        "why": why[rank(chosen)[0]],
    }


def find_start(imitation: Path, seed: int, results: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The choice, stored for all seeds in ``start.json``, and the imitation cell of this seed it names."""
    stored = results / "start.json"
    cells = [each for each in read_results(imitation) if each["method"] == "imitation" and each["done"]]
    cells = [each for each in cells if each["seed"] == seed]
    if not stored.exists():
        if not cells:
            raise SystemExit(f"{imitation}: expected a finished imitation cell of seed {seed}, found none")
        results.mkdir(parents=True, exist_ok=True)
        write_text(stored, json.dumps(choose(cells), indent=1) + "\n")
    choice = json.loads(stored.read_text(encoding="utf-8"))
    for cell in cells:
        if cell["demonstrations"] == choice["demonstrations"]:
            return choice, cell
    raise SystemExit(
        f"{imitation}: expected a finished cell of seed {seed} with {choice['demonstrations']} demonstrations"
    )


def select(groups: Sequence[dg.RolloutGroup], arm: str, seed: int, round_: int) -> list[dg.Trajectory]:
    """The episodes that an arm imitates."""
    if arm == "unfiltered":
        random = Random(f"unfiltered/{seed}/{round_}")
        return [random.choice(group.trajectories) for group in groups]
    successes = [[each for each in group.trajectories if each.success] for group in groups]
    return [min(each, key=len) for each in successes if each]


def own_examples(selected: Sequence[dg.Trajectory]) -> Examples:
    """Episodes of the policy itself; those in which every turn was refused are left out."""
    kept = [each for each in selected if not all(map(is_refused, each.transitions))]
    masked = {id(turn) for each in kept for turn in each.transitions if is_refused(turn)}
    return Examples(trajectories=kept, masked=masked)


def training_tasks(data: str, seed: int) -> list[dg.Task]:
    """All recorded tasks, one of each family in turn."""
    tasks = list({each.task.id: each.task for each in trajectories_of(data)}.values())
    Random(f"practice/{seed}").shuffle(tasks)
    return round_robin(tasks, lambda task: task.family)


def practice_environment(arm: str, plan: Plan, experience: Path) -> Any:
    """The real environment, or the dream of the arm's experience model."""
    if arm == DREAM:
        return dg.Dream.load(experience, horizon=plan.practice_horizon)
    return dg.make("alfworld", horizon=plan.practice_horizon, processes=plan.engines)


async def play_round(
    agent: dg.Agent, arm: str, round_: int, seed: int, plan: Plan, tasks: Sequence[dg.Task], experience: Path
) -> tuple[list[dg.Trajectory], dict[str, Any]]:
    """The selected episodes of a round, and its metrics."""
    first = round_ * plan.tasks
    numbers = range(first, first + (plan.rounds * plan.tasks // SHARE if arm == SIM_TO_REAL else plan.tasks))
    factory = practice_environment(arm, plan, experience)
    try:
        report = await dg.rollout(
            agent.policy_factory(f"{arm}-{round_}", temperature=plan.practice_temperature),
            factory,
            [tasks[number % len(tasks)] for number in numbers],
            group_size=plan.group,
            seed=derive_seed("expert iteration", seed, round_),
            name=f"{arm}-{seed}-{round_:03d}",
            concurrency=plan.engines,
        )
    finally:
        await factory.aclose()
    selected = select(report.groups, arm, seed, round_)
    episodes = [each for group in report.groups for each in group.trajectories]
    turns = [turn for each in episodes for turn in each.transitions]
    return selected, {
        "episodes": report.episodes,
        "imagined_steps" if arm == DREAM else "real_steps": report.steps,
        "dropped_groups": len(report.dropped),
        "success": sum(each.success for each in episodes) / max(1, len(episodes)),
        "refused_turns": sum(map(is_refused, turns)) / max(1, len(turns)),
        "kept": len(selected),
        "kept_successes": sum(each.success for each in selected),
        "kept_turns": sum(map(len, selected)) / max(1, len(selected)),
    }


def cell_name(arm: str, seed: int) -> str:
    return f"alfworld-{arm}-{seed}"


async def measure(arm: str, seed: int, plan: Plan, imitation: Path, runs: Path, results: Path) -> None:
    """Run or resume a cell; the arm ``start`` only evaluates the start."""
    choice, origin = find_start(imitation, seed, results)
    name, start = cell_name(arm, seed), f"{origin['run']}@{origin['updates']}"
    if arm == SIM_TO_REAL:
        start = finished_dream(seed, plan, results)
    model = origin["config"]["agent"]["model"]
    config = run_config(model, runs / name, seed, plan.data)
    experience = Path(model.removeprefix("hf:")).parent
    identity = {
        "cell": name,
        "environment": "alfworld",
        "method": arm,
        "seed": seed,
        "config": {"plan": asdict(plan), "arm": arm, "start": start, "choice": choice},
        "run": str(runs / name),
        "demonstrations": choice["demonstrations"],
        "rounds": [],
        "seen": [],
        "unseen": [],
    }
    result = Result(results / f"{name}.json", identity)
    if result.done:
        return
    log(f"{name}: starts or resumes, from {start}")
    with RunDir.open(config) as run:
        async with open_agent(config) as agent:
            run_before, _, step = start.rpartition("@")
            agent.restore(RunDir(Path(run_before)).policy_weights(int(step)))
            await _Cell(arm, seed, plan, run, agent, result, experience, Path(run_before)).run_all()
    log(f"{name}: done in {result.values['seconds'] / 60:.1f} minutes")


def finished_dream(seed: int, plan: Plan, results: Path) -> str:
    """The policy that sim-to-real begins with, as ``RUN@ROUND``."""
    path = results / f"{cell_name(DREAM, seed)}.json"
    cell = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not cell.get("done"):
        raise SystemExit(f"{SIM_TO_REAL} begins where {DREAM} ended: expected the finished cell {path}")
    return f"{cell['run']}@{plan.rounds}"


@dataclass(slots=True)
class _Cell:
    arm: str
    seed: int
    plan: Plan
    run: RunDir
    agent: dg.Agent
    result: Result
    experience: Path
    """Run of the experience model."""
    before: Path
    """Run that sim-to-real continues; its last rounds are pooled, too."""

    @property
    def first(self) -> int:
        """Number of the first round."""
        return self.plan.rounds if self.arm == SIM_TO_REAL else 0

    async def run_all(self) -> None:
        rounds, unseen = self.result.values["rounds"], self.result.values["unseen"]
        if rounds:
            self.agent.restore(self.run.policy_weights(self.first + len(rounds)))
        fixed = await self._demonstrations() if self.arm == "imitation" else None
        tasks = training_tasks(self.plan.data, self.seed)
        wanted = {START: 0, SIM_TO_REAL: 1}.get(self.arm, self.plan.rounds)
        while len(rounds) < wanted:
            await self._round(self.first + len(rounds), tasks, fixed)
        for temperature in self.plan.temperatures:
            if all(row["temperature"] != temperature for row in unseen):
                games = ("valid_unseen", self.plan.unseen_episodes, self.plan.unseen_seed)
                unseen.append(await self._evaluate(len(rounds), temperature, *games))
                self.result.save()
        self.result.save(done=True)

    async def _demonstrations(self) -> Examples:
        chosen = self.result.values["demonstrations"]
        count = ALL if chosen == "all" else int(chosen)
        return await examples_of(self.agent, demonstrations(self.plan.data, count, self.seed))

    async def _round(self, round_: int, tasks: Sequence[dg.Task], fixed: Examples | None) -> None:
        examples, row = (fixed, {}) if fixed is not None else await self._play(round_, tasks)
        state, losses = f"round-{round_}.pt", {}
        if examples.trajectories:
            settings = self.plan.sft_settings(self.seed, round_)
            losses = fine_tune(self.agent, examples, self.run, state, settings, save_every=45)
        done = round_ + 1
        self.run.save_policy(done, self.agent.weights())
        if done % self.plan.seen_every == 0:
            games = ("valid_seen", self.plan.seen_episodes, self.plan.seen_seed)
            evaluation = await self._evaluate(done, self.plan.temperatures[0], *games)
            self.result.values["seen"].append({"rounds": done, "evaluation": evaluation})
        counts = examples.counts()
        self.result.values["rounds"].append({"round": round_, **row, **losses, "lessons": counts})
        self.result.save()
        (self.run.path / state).unlink(missing_ok=True)

    async def _play(self, round_: int, tasks: Sequence[dg.Task]) -> tuple[Examples, dict[str, Any]]:
        """The pooled examples up to this round; pickled, since trajectory files hold no tokens."""
        path = self.run.path / f"round-{round_}.pickle"
        if not path.exists():
            found = await play_round(
                self.agent, self.arm, round_, self.seed, self.plan, tasks, self.experience
            )
            with atomic_write(path) as partial:
                partial.write_bytes(pickle.dumps(found))
        pool = range(max(0, round_ - self.plan.pooled + 1), round_ + 1)
        folders = [self.run.path if each >= self.first else self.before for each in pool]
        rounds = [
            pickle.loads((folder / f"round-{each}.pickle").read_bytes())
            for folder, each in zip(folders, pool, strict=True)
        ]
        row = rounds[-1][1]
        log(f"{self.result.values['cell']}: round {round_}, {row}")
        return own_examples([each for selected, _ in rounds for each in selected]), row

    async def _evaluate(
        self, rounds: int, temperature: float, split: str, episodes: int, seed: int
    ) -> dict[str, Any]:
        row = await evaluate(
            self.agent, self.run, str(rounds), split=split, episodes=episodes, seed=seed,
            temperature=temperature, horizon=self.plan.horizon, processes=self.plan.engines,
        )  # fmt: skip
        log(f"{self.result.values['cell']}: {rounds} rounds, {summary(row)}")
        return row


def successes(evaluation: Mapping[str, Any]) -> list[bool]:
    """By number of the episode; one that could not be played is a failure."""
    found = {each["number"]: bool(each["success"]) for each in evaluation["outcomes"]}
    return [found.get(number, False) for number in range(evaluation["episodes"])]


def difference(row: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """In points, paired by episode, with its interval and McNemar's p."""
    rows = [] if other is None else other["unseen"]
    same = next((each for each in rows if each["temperature"] == row["temperature"]), None)
    if same is None:
        return "–"
    pairs = list(zip(successes(row), successes(same), strict=True))
    gain = paired_difference(pairs).percent(signed=True).replace(" points", "")
    p = mcnemar(sum(a and not b for a, b in pairs), sum(b and not a for a, b in pairs))
    return f"{gain} (p {p:.3f})"


def table(results: Path) -> str:
    """Markdown: one row per arm, seed and temperature, with differences to the start and the other arms."""
    cells = {(each["method"], each["seed"]): each for each in read_results(results)}
    lines = [
        "| arm | seed | T | valid_unseen | less start | less further imitation | less unfiltered |"
        " real steps | imagined steps | minutes |",
        "|" + "---|" * 10,
    ]
    for (arm, seed), cell in sorted(cells.items(), key=lambda each: (each[0][1], each[0][0])):
        steps, imagined = (
            sum(each.get(kind, 0) for each in cell["rounds"]) for kind in ("real_steps", "imagined_steps")
        )
        for row in cell["unseen"]:
            gains = [
                "–" if other == arm else difference(row, cells.get((other, seed)))
                for other in (START, "imitation", "unfiltered")
            ]
            lines.append(
                f"| {arm} | {seed} | {row['temperature']:g} | {interval(row['of_all'])} | "
                f"{' | '.join(gains)} | {steps:,} | {imagined:,} | {cell['seconds'] / 60:.0f} |"
            )
    return "\n".join(lines)


def family_table(results: Path) -> str:
    """Markdown: success by task family at the first temperature, one row per arm and seed."""
    cells = [each for each in read_results(results) if each["unseen"]]
    families = sorted({family for cell in cells for family in cell["unseen"][0]["by_family"]})
    lines = [f"| arm | seed | {' | '.join(families)} |", "|" + "---|" * (2 + len(families))]
    for cell in sorted(cells, key=lambda each: (each["seed"], each["method"])):
        shares = [cell["unseen"][0]["by_family"].get(family) for family in families]
        texts = [f"{percent(each)} of {each['count']}" if each else "–" for each in shares]
        lines.append(f"| {cell['method']} | {cell['seed']} | {' | '.join(texts)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--arms", nargs="*", choices=(START, *ARMS), default=[START, *ARMS])
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument(
        "--imitation", type=Path, default=Path("results/imitation"), help="cells to start from"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/expert_iteration"))
    parser.add_argument("--results", type=Path, default=Path("results/expert_iteration"))
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=NUMBER", help="settings of the plan")
    parser.add_argument("--table", action="store_true", help="only print the table of the results")
    options = parser.parse_args()
    plan = change_plan(Plan(), options.set)
    for seed in options.seeds if not options.table else ():
        for arm in options.arms:
            asyncio.run(measure(arm, seed, plan, options.imitation, options.runs, options.results))
    print(table(options.results))
    print(family_table(options.results))


if __name__ == "__main__":
    main()
