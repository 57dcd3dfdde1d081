"""`dreamgym quickstart`: the whole loop once, on the embedded default, in a quarter of an hour.

Real games are recorded, an experience model is taught, an agent imitates recorded successes and then
practises in the dream alone; before and after it is judged in real rooms that nobody has seen. Every stage
can be stopped, also by `kill -9`, and goes on when the command is run again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import Progress as Bar
from rich.progress import TaskID
from rich.table import Table

from dreamgym.cli import console
from dreamgym.cli.collect import report_table, run_collect, summary
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import Json
from dreamgym.cli.report import write_report
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import DreamGymError
from dreamgym.evaluation.sim_real_gap import gap_warning
from dreamgym.files import atomic_write, lock_directory
from dreamgym.quickstart.plan import DREAMGYM, EXPERIENCE, SFT, USUAL, Plan, offline, told
from dreamgym.quickstart.progress import Progress, Tick
from dreamgym.quickstart.stages import (
    ENOUGH,
    LONGER,
    STARTS,
    first_step,
    imitated,
    judged,
    measured,
    taught,
)

if TYPE_CHECKING:
    from dreamgym.quickstart.background_training import BackgroundTraining
    from dreamgym.training.trainer import Progress as Told_

_NEXT = (
    "dreamgym play --dream {out}/experience --split {unseen}     walk around in the dream yourself",
    "dreamgym data show {out}/dreamgym/trajectories                  read what the agent dreamt",
    "dreamgym tasks list {out}/dreamgym --generated                  tasks that the curriculum wrote",
    "dreamgym train --sim-to-real {out}/dreamgym --real-steps 2000   carry the policy on in reality",
    "docs/guides/experience-model.md                                 the same with your own traces and model",
)


@console.command
def quickstart(
    out: Annotated[Path, typer.Option(help="The run's folder; gone on with if it was begun.")] = Path(
        "runs/quickstart"
    ),
    env: Annotated[str, typer.Option(help="alfworld (household) or textworld (cooking).")] = "textworld",
    minutes: Annotated[
        float, typer.Option(help="About how long it may take on 2 idle cores; less of everything in less.")
    ] = USUAL,
    seed: Annotated[int, typer.Option(help="Fixes games, weights and every draw.", min=0)] = 1,
    as_json: Json = False,
) -> None:
    """Record real games, teach an experience model, train an agent in its dream, judge it in reality.

    Everything runs on this machine, with no network and no GPU. Run it again after a stop: it goes on. Leaves
    summary.json and report.html in its folder; the stages are told in docs/guides/quickstart.md.

    Examples:

      dreamgym quickstart

      dreamgym quickstart --minutes 5 --seed 3 --out runs/second

      dreamgym quickstart --env alfworld --out runs/household
    """
    need_models()
    plan = Plan.of(minutes, seed, env)
    out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        run = Quickstart(out, plan, Progress(out, plan), quiet=as_json)
        result = run.carry_through()
    if as_json:
        console.show(result, [], as_json=True)


class Quickstart:
    """One call of the command: the stages of a plan, each told, timed and gone on with."""

    def __init__(self, out: Path, plan: Plan, progress: Progress, *, quiet: bool) -> None:
        self._out = out
        self._plan = plan
        self._progress = progress
        self._quiet = quiet
        self._data = offline(out, plan)

    def carry_through(self) -> dict[str, Any]:
        _say(f"{self._plan.minutes:g} minutes are asked for; on 2 idle cores this takes about", bold=True)
        for stage, seconds in self._progress.expected().items():
            _say(f"  {_about(seconds):>8}  {told(stage)}")
        stages: dict[str, Callable[[], None]] = {
            "collect": self._collect,
            "learn": self._learn,
            "practice": self._practise,
            "evaluation": self._judge,
        }
        for number, (stage, carry_out) in enumerate(stages.items(), 1):
            if stage in self._progress.results:
                _say(f"{number}/{len(stages)}  {told(stage)}: done before", bold=True)
                continue
            left = self._progress.expected()[stage]
            _say(f"{number}/{len(stages)}  {told(stage)}: about {_about(left)}", bold=True)
            carry_out()
        return self._report()

    def _collect(self) -> None:
        found = {}
        with self._progress.timed("collect"):
            for config in self._plan.collect_configs(self._out):
                report = run_collect(config)
                if not report.episodes and not report.already_there:
                    raise DreamGymError(
                        f"no game could be recorded: {dict(report.failures)}; see `dreamgym envs check`"
                    )
                self._show(report_table(report, config))
                found[config.collect.policy] = summary(report, config)
        self._progress.finish("collect", found)

    def _learn(self) -> None:
        """First the experience model. Then the agent's warm start, which begins with its weights, on one core
        while the dream is measured on the other. Last, a start that practice can go on from."""
        with self._progress.timed("learn") as tick:
            self._learn_both()
            self._find_start(tick)
        self._progress.finish("learn", {})

    def _learn_both(self) -> None:
        import torch

        from dreamgym.quickstart.background_training import BackgroundTraining

        done, threads = self._progress.results, torch.get_num_threads()
        shown: dict[str, tuple[int, int]] = {}
        with ExitStack() as stack:
            if "experience" not in done:
                with self._progress.timed("experience") as tick, console.progress() as bar:
                    taught = asyncio.run(self._teach(_Bars(bar, None, shown), tick))
                self._progress.finish("experience", taught)
            beside = None
            if "warm start" not in done:
                torch.set_num_threads(1)
                stack.callback(torch.set_num_threads, threads)
                config = self._plan.warm_start_config(self._out, self._data)
                told_so_far = shown.__setitem__
                beside = BackgroundTraining(config, lambda what, now, of: told_so_far(what, (now, of)))
                stack.enter_context(beside)
            if "fidelity" not in done:
                with self._progress.timed("fidelity"):
                    self._progress.finish("fidelity", self._measure())
            if beside is not None:
                with console.progress() as bar:
                    bars = _Bars(bar, beside, shown)
                    while not beside.done:
                        bars.draw()
                        beside.wait(0.5)
                result = beside.result()
                self._progress.seconds["warm start"] = result["spent"].get("warm_start_seconds", 0.0)
                self._progress.finish("warm start", result)

    def _find_start(self, tick: Tick) -> None:
        """Imitate for longer until enough dreamt episodes succeed. How good a policy is after so many updates
        depends on the machine, and where hardly any episode succeeds practice has nothing to learn from."""
        plan, progress = self._plan, self._progress
        updates = int(progress.results.get("start", {}).get("updates", plan.warm_start_steps))
        while True:
            left = progress.left_for("practice")
            with console.progress() as bar:
                tell = _watching(bar, tick)
                config = plan.warm_start_config(self._out, self._data, updates)
                progress.seconds["warm start"] = asyncio.run(imitated(config, tell))
                found = asyncio.run(first_step(plan.practice_config(self._out, self._data, left), tell))
            before = progress.results.get("start", {}).get("tried", [])
            tried = [each for each in before if each["updates"] != updates] + [{"updates": updates, **found}]
            progress.finish("start", {"updates": updates, "tried": tried})
            tick(now=True)
            longer = round(updates * LONGER)
            # A third of what is left to practise, for something to practise from; no more.
            late = 3 * plan.trying(longer) > progress.left_for("practice")
            if found["success"] >= ENOUGH or late or len(tried) >= STARTS:
                return
            _say(
                f"after {updates} updates of imitation {found['success']:.0%} of dreamt episodes succeed, "
                f"too few to learn from: {longer} instead"
            )
            updates = longer
            progress.finish("start", {"updates": updates, "tried": tried})

    async def _teach(self, bars: _Bars, tick: Callable[[], None]) -> dict[str, Any]:
        steps = self._plan.experience_steps

        def tell(done: int, loss: float) -> None:
            tick()
            bars.draw(done, steps, f"loss {loss:.3f}")

        return await taught(self._plan.experience_config(), self._data, self._out / EXPERIENCE, tell)

    def _measure(self) -> dict[str, Any]:
        """How faithful the dream is, on a few real episodes of unseen rooms."""
        run = self._out / EXPERIENCE
        plan = self._plan
        run_collect(plan.recording("mix", plan.fidelity_episodes, plan.world.unseen, run / "real"))
        found = list(read_trajectories(run / "real"))
        with console.progress() as bar:
            bars: dict[str, TaskID] = {}

            def tell(stage: str, done: int, total: int) -> None:
                if stage not in bars:
                    bars[stage] = bar.add_task(stage, total=total, note="")
                bar.update(bars[stage], completed=done)

            return asyncio.run(measured(run, plan, found, on_stage=tell))

    def _practise(self) -> None:
        from dreamgym.training.trainer import train

        left = self._progress.left_for("practice")
        config = self._plan.practice_config(self._out, self._data, left)
        with self._progress.timed("practice") as tick, console.progress() as bar:
            result = asyncio.run(train(config, on_progress=_watching(bar, tick)))
        self._progress.finish("practice", result)

    def _judge(self) -> None:
        with self._progress.timed("evaluation") as tick, console.progress() as bar:
            job = bar.add_task("playing", total=2 * self._plan.evaluation_episodes, note="")

            def tell() -> None:
                tick()
                bar.advance(job)

            result = asyncio.run(judged(self._out, self._plan, tell))
        self._progress.finish("evaluation", result)

    def _report(self) -> dict[str, Any]:
        page = self._out / "report.html"
        with self._progress.timed("report"):
            write_report([self._out / name for name in (SFT, DREAMGYM, EXPERIENCE)], page, self._data, 100)
        result = self._progress.summary(self._out, self._data) | {"report": str(page)}
        with atomic_write(self._out / "summary.json") as file:
            file.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        for table in (_success_table(result), _difference_table(result), _spent_table(result)):
            self._show(table)
        dreamt, real = result["practice"]["success_in_dream"], result["policies"][SFT]["success"]
        gap = gap_warning(dreamt["first"] - real) if dreamt and real is not None else None
        if gap:
            _say(f"warning: {gap}; see where it goes wrong: dreamgym experience audit {self._out / DREAMGYM}")
        _say(f"report: {page} (open it in a browser); numbers: {self._out / 'summary.json'}", bold=True)
        for line in _NEXT:
            _say(f"  {line.format(out=self._out, unseen=self._plan.world.unseen)}")
        return result

    def _show(self, table: Table) -> None:
        if not self._quiet:
            console.out.print(table)


def _watching(bar: Bar, tick: Tick) -> Callable[[Told_], None]:
    """Shows how far a run is."""
    jobs: dict[str, TaskID] = {}

    def tell(now: Told_) -> None:
        tick()
        for warning in now.warnings:
            _say(f"warning: {warning}")
        if now.stage not in jobs:
            jobs[now.stage] = bar.add_task(now.stage, total=now.total, note="")
        note = f"success {now.row['success']:.0%} in the dream" if "success" in now.row else ""
        bar.update(jobs[now.stage], completed=now.done, note=note)

    return tell


class _Bars:
    """How far teaching here, or the warm start in another process, is."""

    def __init__(
        self, bar: Bar, beside: BackgroundTraining | None, shown: Mapping[str, tuple[int, int]]
    ) -> None:
        self._bar = bar
        self._beside = beside
        self._shown = shown
        self._jobs: dict[str, TaskID] = {}

    def draw(self, done: int | None = None, total: int = 0, note: str = "") -> None:
        if done is not None:
            self._update("experience model", done, total, note)
        if self._beside is not None:
            self._beside.wait()
            if "warm start" in self._shown:
                self._update("warm start", *self._shown["warm start"], "")

    def _update(self, name: str, done: int, total: int, note: str) -> None:
        if name not in self._jobs:
            self._jobs[name] = self._bar.add_task(name, total=total, note=note)
        self._bar.update(self._jobs[name], completed=done, note=note)


def _success_table(result: Mapping[str, Any]) -> Table:
    meaning = {SFT: "after imitation", DREAMGYM: "after practice in the dream"}
    rows = []
    for name, found in result["policies"].items():
        low, high = found["interval"]
        shown = "–" if found["success"] is None else f"{found['success']:.1%} [{low:.1%}, {high:.1%}]"
        rows.append((name, meaning[name], found["episodes"], shown))
    split = result["policies"][SFT]["split"]
    title = f"real success in games nobody has learnt from ({result['environment']['name']}, {split})"
    return console.table(title, "policy", "", "episodes", "success [95%]", rows=rows)


def _difference_table(result: Mapping[str, Any]) -> Table:
    found, told_apart = result["difference"], "–"
    if found["difference"]["value"] is not None:
        value, low, high = (100 * found["difference"][name] for name in ("value", "low", "high"))
        told_apart = f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"
    return console.table(
        f"{DREAMGYM} against {SFT}, paired by episode",
        *("difference [95%]", f"only {DREAMGYM}", f"only {SFT}", "p (McNemar)"),
        rows=[(told_apart, found["first_only"], found["second_only"], f"{found['p_value']:.4f}")],
    )


def _spent_table(result: Mapping[str, Any]) -> Table:
    rows = [
        (
            told(stage),
            _about(spent["seconds"]),
            f"{spent['real_steps']:,}",
            f"{spent['synthetic_steps']:,}",
        )
        for stage, spent in result["stages"].items()
    ]
    title = f"what it took: {_about(result['seconds'])}; the dream was measured beside the warm start"
    return console.table(title, "stage", "time", "real steps", "synthetic steps", rows=rows)


def _about(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def _say(text: str, *, bold: bool = False) -> None:
    console.err.print(console.visible(text, "bold" if bold else ""), soft_wrap=True)
