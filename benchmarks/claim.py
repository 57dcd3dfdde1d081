"""The paper's claim, cell by cell: RL in the dream against SFT, DPO and RL in the real environment.

    python benchmarks/claim.py --env textworld --methods sft grpo-dream grpo-real --seeds 0 1
    python benchmarks/claim.py --env alfworld --methods grpo-dream --seeds 0 --minutes 90
    python benchmarks/claim.py --env webshop --methods sft grpo-dream grpo-real grpo-s2r --seeds 0
    WEBSHOP_DATA=FOLDER python benchmarks/claim.py --env webshop-1000 --seeds 0
    python benchmarks/claim.py --table
    python benchmarks/claim.py --check

A cell is an environment, a method, a seed and, optionally, an ablation. Its stages are `dreamgym` commands,
shared between cells where they are equal (data, experience model, warm start); run the same command again
to resume. Each result is a file of its own; table and plot have the cells that are there. RL has two
budgets, minutes and real steps; sim-to-real gets a sixteenth of the real steps. All policies play the same
unseen games. `webshop` has our own catalogue, `webshop-1000` the first 1,000 products of WebShop's.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

METHODS = ("sft", "dpo", "grpo-real", "ppo-real", "grpo-dream", "ppo-dream", "grpo-s2r", "ppo-s2r")
SHARE = 16
"""Sim-to-real gets the real steps divided by this."""
FINE_TUNED_WITHOUT = ("no-history", "no-demonstrations", "no-reasoning", "no-sheet")
"""Ablations of the experience model."""
TRAINED_WITH = {"no-curriculum": "curriculum.generator=none", "own-word": "train.reward=model"}
"""Ablations of RL in the dream."""
LONG = "long"
"""Of SFT alone: six times as many updates, as a stronger baseline."""
LONGER = 6
ABLATIONS = (*FINE_TUNED_WITHOUT, *TRAINED_WITH, LONG)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An environment and the settings of its runs."""

    environment: str = ""
    """By default the name of the place."""
    options: tuple[str, ...] = ()
    """Of the real environment."""
    shipped: tuple[str, ...] = ()
    """Offline trajectories that come with the package."""
    recorded: tuple[tuple[str, ...], ...] = ()
    """Others: policy, episodes and seed of each folder."""
    fine_tuned: tuple[str, ...] = ()
    """Options of fine-tuning the experience model."""
    shared_weights: bool = True
    """Whether every policy starts from the weights of the experience model; these have read no states where
    replies name them."""
    data: str = ""
    """The variable that has to name the environment's data; other places do without it."""
    agent: tuple[str, ...] = ()
    """Settings of every run of the agent."""
    warm_start_steps: int
    """SFT updates of every policy."""
    unseen: str
    """The split of the evaluation."""
    real_steps: int
    """Budget of RL in the real environment; sim-to-real gets a sixteenth."""
    steps: int
    """Updates of RL and of DPO."""


WEBSHOP = Place(
    environment="webshop",
    options=("view=elements",),
    recorded=(("mix", "400", "0"),),
    fine_tuned=("--steps", "400", "--set", "experience.batch=16", "--set", "replay.k=0"),
    shared_weights=False,
    agent=(
        *("agent.history=2", "agent.max_tokens=40", "agent.enforce_actions=true"),
        *("train.tasks_per_step=16", "curriculum.generator=none"),
        # Few demonstrations: imitation of all recorded successes may be prolonged instead.
        *("train.warm_start_successes=60", "train.warm_start_batch_size=8"),
        *("train.warm_start_lr=1e-3", "train.warm_start_muon_lr=0.02"),
    ),
    warm_start_steps=150,
    unseen="test",
    real_steps=24_000,
    steps=20,
)
PLACES = {
    "textworld": Place(
        options=("family=cooking", "ingredients=1", "rooms=1", "foods=train", "games=300"),
        recorded=(("mix", "200", "0"), ("clumsy:0.5", "700", "1"), ("careless:0.5", "500", "2")),
        fine_tuned=("--steps", "1200"),
        agent=(
            *(
                "agent.max_tokens=16",
                "train.horizon=30",
                "train.tasks_per_step=16",
                "curriculum.generator=none",
            ),
            *("train.warm_start_batch_size=8", "train.warm_start_lr=1e-3", "train.warm_start_muon_lr=0.02"),
        ),
        # A short one: a longer warm start leaves little to learn here (`--ablations long`).
        warm_start_steps=45,
        unseen="test",
        real_steps=32_000,
        steps=20,
    ),
    "alfworld": Place(
        shipped=("builtin:alfworld", "builtin:alfworld-mistakes"),
        fine_tuned=("--steps", "1200"),
        agent=(
            *("agent.thought=true", "train.horizon=30", "train.tasks_per_step=12"),
            *("train.warm_start_batch_size=8", "train.warm_start_lr=1e-3", "train.warm_start_muon_lr=0.02"),
        ),
        warm_start_steps=250,
        unseen="valid_unseen",
        real_steps=48_000,  # ten updates of 96 episodes, none longer than 50 steps
        steps=10,
    ),
    "webshop": WEBSHOP,
    "webshop-1000": replace(
        WEBSHOP, options=(*WEBSHOP.options, "products=1000", "goals=synthetic"), data="WEBSHOP_DATA"
    ),
}
RL_SETTINGS = (
    # At 0.7 all rollouts of a task soon did the same, right or wrong; and where every trajectory weighs the
    # same, a refused turn costs least in the longest failures (docs/log.md).
    *("agent.temperature=1.0", "learner.loss_normalization=token"),
    *("learner.learning_rate=2e-4", "learner.muon_lr=0.003", "learner.warmup_steps=4"),
    *("learner.epochs=2", "learner.minibatch_size=32", "learner.micro_tokens=2048"),
)
"""Settings of all RL."""
ALGORITHMS = {
    "grpo": ("learner.refusal_penalty=0.1",),
    "ppo": ("learner.refusal_penalty=0.05",),
    "dpo": (),
}
"""A refused turn costs a little of the reward: GRPO blames it alone, PPO all that led there, too.
It was 0.5 in the ALFWorld run in reality that lost (docs/log.md); whether that was why is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One number of the table."""

    env: str
    method: str
    seed: int
    ablation: str = ""

    @property
    def name(self) -> str:
        return "-".join(filter(None, (self.env, self.method, str(self.seed), self.ablation)))

    @property
    def algorithm(self) -> str:
        return self.method.split("-")[0]

    @property
    def environment(self) -> str:
        return PLACES[self.env].environment or self.env

    @property
    def variables(self) -> dict[str, str]:
        """Of the commands: without data that this place does not ask for."""
        unwanted = {place.data for place in PLACES.values()} - {PLACES[self.env].data}
        return {name: value for name, value in os.environ.items() if name not in unwanted}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One command of a cell; done for good when `NAME.done.json` is next to its directory."""

    folder: Path
    command: tuple[str, ...]

    @property
    def marker(self) -> Path:
        return self.folder.with_name(f"{self.folder.name}.done.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    minutes: float
    real_steps: int
    steps: int


def plan(cell: Cell, runs: Path, budget: Budget) -> list[Stage]:
    """The stages of a cell in order; the last one is the policy's own."""
    place, home = PLACES[cell.env], runs / cell.env
    data = [home / f"data-{policy.partition(':')[0]}" for policy, _, _ in place.recorded]
    sources = [*place.shipped, *map(str, data)]
    options = settings(f"environment.options.{option}" for option in place.options)
    named = (*words("--data", sources), "--env", cell.environment, "--seed", str(cell.seed), *options)
    whole = fine_tuned(Cell(env=cell.env, method="sft", seed=cell.seed), home, sources, options)
    begins = (f"agent.model=hf:{whole.folder}/model",) if place.shared_weights else ()
    common = (*named, *settings((*begins, *place.agent, "train.save_policy_every=5", "train.monitors=warn")))
    stages = [
        Stage(
            folder=folder,
            command=(
                *(
                    "collect",
                    "--env",
                    cell.environment,
                    "--policy",
                    policy,
                    "--episodes",
                    episodes,
                    "--seed",
                    seed,
                ),
                *("--split", "train", *options, "--out", str(folder)),
            ),
        )
        for folder, (policy, episodes, seed) in zip(data, place.recorded, strict=True)
    ]
    stages.append(whole)
    long = LONG if cell.ablation == LONG else ""
    start = home / "-".join(filter(None, ("sft", str(cell.seed), long)))
    updates = settings([f"train.warm_start_steps={place.warm_start_steps * (LONGER if long else 1)}"])
    imitated = ("train", *common, *updates, "--mode", "real", "--steps", "0", "--out", str(start))
    stages.append(Stage(folder=start, command=imitated))
    if cell.method == "sft":
        return stages
    out = home / "-".join(filter(None, (cell.method, str(cell.seed), cell.ablation)))
    limit = f"train.seconds={budget.minutes * 60:g}"
    chosen = [f"train.init_from={start}", limit, *RL_SETTINGS, *ALGORITHMS[cell.algorithm]]
    begun = ("--algorithm", cell.algorithm, *settings(chosen))
    command: tuple[str, ...]
    if cell.method.endswith("-s2r"):
        dream = Cell(env=cell.env, method=f"{cell.algorithm}-dream", seed=cell.seed, ablation=cell.ablation)
        stages = plan(dream, runs, budget)
        most = ("--real-steps", str(budget.real_steps // SHARE), "--steps", "1000000")
        # Few tasks at a time: more than one update from so few steps.
        small = settings([limit, "train.tasks_per_step=4"])
        command = ("train", "--sim-to-real", str(stages[-1].folder), *most, *small)
        command += ("--out", str(out))
    elif cell.method.endswith("-real"):
        # As many updates as in the dream, at most.
        budgeted = ("--real-steps", str(budget.real_steps), "--steps", str(budget.steps))
        command = ("train", *common, *begun, "--mode", "real", *budgeted, "--out", str(out))
    elif cell.method == "dpo":
        command = ("train", *common, *begun, "--steps", str(budget.steps), "--out", str(out))
    else:
        model_stage = fine_tuned(cell, home, sources, options)
        stages += [model_stage] if model_stage != whole else []
        in_dream = ("--experience", str(model_stage.folder), "--steps", str(budget.steps))
        changed = settings([TRAINED_WITH[cell.ablation]] if cell.ablation in TRAINED_WITH else [])
        command = ("train", *common, *begun, *in_dream, *changed, "--out", str(out))
    return [*stages, Stage(folder=out, command=command)]


def fine_tuned(cell: Cell, home: Path, sources: Sequence[str], options: Sequence[str]) -> Stage:
    """The experience model of a seed, whole or without a part."""
    without = cell.ablation if cell.ablation in FINE_TUNED_WITHOUT else ""
    out = home / "-".join(filter(None, ("experience", str(cell.seed), without)))
    command = ("experience", "train", *words("--data", sources), "--env", cell.environment, *options)
    command += (*PLACES[cell.env].fine_tuned, "--seed", str(cell.seed))
    left_out = ("--without", without.removeprefix("no-")) if without else ()
    return Stage(folder=out, command=(*command, *left_out, "--out", str(out)))


def sensible(method: str, ablation: str) -> bool:
    """
    >>> sensible("sft", "long"), sensible("sft", "no-sheet"), sensible("grpo-dream", "no-sheet")
    (True, False, True)
    """
    return method == "sft" if ablation == LONG else method.endswith("-dream")


def settings(named: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    return words("--set", named)


def words(option: str, values: Iterator[str] | Sequence[str]) -> tuple[str, ...]:
    return tuple(word for value in values for word in (option, value))


def measure(cell: Cell, runs: Path, results: Path, budget: Budget, episodes: int) -> None:
    """Go through the stages of a cell and evaluate its policy, unless its result is there."""
    result = results / f"{cell.name}.json"
    if result.exists():
        return
    stages = plan(cell, runs, budget)
    for stage in stages:
        carry_out(stage, cell.variables)
    policy = stages[-1].folder
    played = ("--split", PLACES[cell.env].unseen, "--episodes", str(episodes), "--seed", "7")
    asked = ("evaluate", str(policy), *played, "--json")
    print(f"== {cell.name}: dreamgym {' '.join(asked)}", file=sys.stderr, flush=True)
    output = subprocess.run(
        [*DREAMGYM, *asked], check=True, stdout=subprocess.PIPE, text=True, env=cell.variables
    ).stdout
    found = {
        "cell": cell.name,
        "environment": cell.env,
        "method": cell.method,
        "algorithm": cell.algorithm,
        "seed": cell.seed,
        "ablation": cell.ablation,
        "budget": {"minutes": budget.minutes, "real_steps": budget.real_steps, "steps": budget.steps},
        "commands": [f"dreamgym {' '.join(stage.command)}" for stage in stages]
        + [f"dreamgym {' '.join(asked)}"],
        "stages": {stage.folder.name: json.loads(stage.marker.read_text()) for stage in stages},
        "ended": json.loads((policy / "summary.json").read_text(encoding="utf-8"))["ended"],
        "spent": spent(policy),
        "evaluation": json.loads(output),
        "commit": commit(),
        "machine": {"cores": os.cpu_count(), "kind": platform.machine()},
    }
    results.mkdir(parents=True, exist_ok=True)
    fresh = result.with_suffix(".new")
    fresh.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    fresh.replace(result)


def commit() -> str:
    """Of the code that ran, as far as git knows it."""
    asked = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    return subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()


DREAMGYM = (sys.executable, "-m", "dreamgym")


def carry_out(stage: Stage, variables: Mapping[str, str] = os.environ) -> None:
    """Run a stage to its end; what earlier attempts took counts too."""
    if stage.marker.exists():
        return
    stage.folder.parent.mkdir(parents=True, exist_ok=True)
    meter = stage.folder.with_name(f"{stage.folder.name}.seconds.json")
    took = json.loads(meter.read_text()) if meter.exists() else {"seconds": 0.0, "cpu_seconds": 0.0}
    print(f"== dreamgym {' '.join(stage.command)}", file=sys.stderr, flush=True)
    used, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    try:
        done = subprocess.run([*DREAMGYM, *stage.command], stdout=sys.stderr, check=False, env=variables)
    finally:
        now = resource.getrusage(resource.RUSAGE_CHILDREN)
        took["seconds"] += round(time.monotonic() - began, 1)
        took["cpu_seconds"] += round(now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime, 1)
        meter.write_text(json.dumps(took), encoding="utf-8")
    if done.returncode:
        raise SystemExit(f"dreamgym {' '.join(stage.command)}: exit code {done.returncode}")
    stage.marker.write_text(json.dumps(took) + "\n", encoding="utf-8")


def spent(run: Path) -> dict[str, float]:
    """Real and synthetic steps of a run, and how many passes of the loop it made: of its last metrics."""
    found: dict[str, float] = {"steps": 0}
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["kind"] in ("train", "dpo"):
            found = {"steps": row["step"], **row.get("spent", {})}
    return found


def table(results: Path) -> str:
    """Markdown: a row per environment, method and ablation, its seeds together."""
    from dreamgym.evaluation.statistics import paired_difference, share_of_episodes

    known = list(read(results))
    starts = {(each["environment"], each["seed"]): each for each in known if each["method"] == "sft"}
    lines = [
        "| environment | method | seeds | real success | against SFT | online real steps | synthetic steps |"
        " minutes |",
        "|" + "---|" * 8,
    ]
    for env, method, ablation in rows_of(known):
        cells = [
            e for e in known if (e["environment"], e["method"], e["ablation"]) == (env, method, ablation)
        ]
        share = share_of_episodes(won for cell in cells for won in outcomes(cell).values())
        pairs = [
            (won, outcomes(starts[env, cell["seed"]])[episode])
            for cell in cells
            if (env, cell["seed"]) in starts
            for episode, won in outcomes(cell).items()
            if episode in outcomes(starts[env, cell["seed"]])
        ]
        gain = "–" if method == "sft" or not pairs else points(paired_difference(pairs).to_dict())
        each = ", ".join(f"{cell['evaluation']['success']['value']:.0%}" for cell in cells)
        named = " ".join(filter(None, (method, ablation)))
        used = (
            f"{mean(cells, 'real_steps'):,.0f} | {mean(cells, 'synthetic_steps'):,.0f} | {minutes(cells):.0f}"
        )
        lines.append(
            f"| {env} | {named} | {len(cells)} ({each}) | {percent(share.to_dict())} | {gain} | {used} |"
        )
    return "\n".join(lines)


def read(results: Path) -> Iterator[dict[str, Any]]:
    for path in sorted(results.glob("*.json")):
        yield json.loads(path.read_text(encoding="utf-8"))


def rows_of(known: Sequence[dict[str, Any]]) -> list[tuple[str, str, str]]:
    found = {(each["environment"], each["method"], each["ablation"]) for each in known}
    return sorted(found, key=lambda row: (row[0], row[2], METHODS.index(row[1])))


def outcomes(cell: dict[str, Any]) -> dict[tuple[int, str], bool]:
    return {(e["number"], e["task"]): bool(e["success"]) for e in cell["evaluation"]["outcomes"]}


def percent(share: dict[str, Any]) -> str:
    return f"{share['value']:.1%} [{share['low']:.1%}, {share['high']:.1%}]"


def points(difference: dict[str, Any]) -> str:
    value, low, high = (100 * difference[name] for name in ("value", "low", "high"))
    return f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"


def mean(cells: Sequence[dict[str, Any]], what: str) -> float:
    return sum(float(cell["spent"].get(what, 0)) for cell in cells) / len(cells)


def minutes(cells: Sequence[dict[str, Any]]) -> float:
    """Of the last stage alone: what was before it is shared."""
    return sum(float([*cell["stages"].values()][-1]["seconds"]) for cell in cells) / len(cells) / 60


def plot(results: Path) -> str:
    """SVG: a point with its interval for each row of the table, named by the legend."""
    from dreamgym.charts import Chart, Line, Point, draw_file
    from dreamgym.evaluation.statistics import share_of_episodes

    known = list(read(results))
    lines = []
    for place, (env, method, ablation) in enumerate(rows_of(known)):
        cells = [
            e for e in known if (e["environment"], e["method"], e["ablation"]) == (env, method, ablation)
        ]
        found = share_of_episodes(won for cell in cells for won in outcomes(cell).values())
        name = " ".join(filter(None, (env, method, ablation)))
        point = Point(x=place, y=found.value or 0.0, low=found.low, high=found.high)
        label = f"{place + 1}  {name}: {found.percent()}"
        lines.append(Line(label=label, points=(point,), colour=place, style="marks"))
    ticks = tuple(str(place + 1) for place in range(len(lines)))
    title = "Success in the real environment, unseen tasks, with 95% intervals"
    return draw_file(Chart(title=title, lines=tuple(lines), across="", ticks=ticks, percent=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    everywhere = [name for name, place in PLACES.items() if not place.data]
    parser.add_argument("--env", nargs="*", choices=list(PLACES), default=everywhere)
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--ablations", nargs="*", choices=ABLATIONS, default=[], help="dream rows; long: sft")
    parser.add_argument("--minutes", type=float, default=60.0, help="of RL, per cell")
    parser.add_argument("--real-steps", type=int, help="of RL in reality; sim-to-real: a sixteenth")
    parser.add_argument("--steps", type=int, help="of RL in the dream")
    parser.add_argument("--episodes", type=int, default=200, help="of each evaluation")
    parser.add_argument("--runs", type=Path, default=Path("runs/claim"))
    parser.add_argument("--results", type=Path, default=Path("results/claim"))
    parser.add_argument("--table", action="store_true", help="only make table and plot of what is there")
    parser.add_argument("--check", action="store_true", help="only compare docs/results.md with all results")
    chosen = parser.parse_args()
    if chosen.check:
        from check_results import disagreements

        found = list(disagreements())
        print("\n".join(found) or "every table of docs/results.md is that of the files")
        raise SystemExit(bool(found))
    for env in chosen.env if not chosen.table else ():
        if PLACES[env].data and PLACES[env].data not in os.environ:
            raise SystemExit(f"{env}: set {PLACES[env].data} to the folder of the environment's data")
        budget = Budget(
            minutes=chosen.minutes,
            real_steps=chosen.real_steps or PLACES[env].real_steps,
            steps=chosen.steps or PLACES[env].steps,
        )
        for method in chosen.methods:
            ablations = ["", *(each for each in chosen.ablations if sensible(method, each))]
            for ablation in ablations:
                for seed in chosen.seeds:
                    cell = Cell(env=env, method=method, seed=seed, ablation=ablation)
                    measure(cell, chosen.runs, chosen.results, budget, chosen.episodes)
    output = table(chosen.results)
    chosen.results.mkdir(parents=True, exist_ok=True)
    (chosen.results / "table.md").write_text(output + "\n", encoding="utf-8")
    (chosen.results / "success.svg").write_text(plot(chosen.results), encoding="utf-8")
    print(output)


if __name__ == "__main__":
    main()
