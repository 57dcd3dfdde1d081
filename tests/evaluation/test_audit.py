"""Synthetic episodes of a policy, replayed in the real ALFWorld engine."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dreamgym.cli import app
from dreamgym.config import Config, config_json
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.registry import open_environment
from dreamgym.evaluation.audit import audit
from dreamgym.types import Outcome, State, Trajectory, Transition


@pytest.fixture(scope="module")
def recorded() -> list[Trajectory]:
    """Real successes of experts, as imagined episodes."""
    experts = (e for e in read_trajectories(builtin_dataset()) if e.provenance.policy == "expert")
    short = (each for each in experts if len(each) < 10)
    found = list(islice(short, 2))
    return [
        replace(each, id=f"dream-{n}", provenance=replace(each.provenance, source="synthetic"))
        for n, each in enumerate(found)
    ]


def forgiving(trajectory: Trajectory) -> Trajectory:
    """The same, but the dream gives a thing that is not there, and calls it success."""
    first = trajectory.transitions[0]
    reported = State(text="You pick up the moon 1.")
    taken = Outcome(next_state=reported, reward=1.0, terminated=True, success=True)
    turn = Transition(state=first.state, action="take moon 1 from desk 1", outcome=taken)
    return replace(trajectory, id=f"{trajectory.id} forgiving", transitions=(turn,))


async def test_a_faithful_dream_arrives_and_a_forgiving_one_is_reported_by_its_verb(
    recorded: list[Trajectory],
) -> None:
    elsewhere = replace(recorded[0], id="elsewhere", start=State(text="You are on the moon."))
    made_up = replace(recorded[0], id="made up", task=replace(recorded[0].task, id="generated/nothing"))
    factory = open_environment("alfworld", {})
    try:
        found = await audit(factory, [*recorded, forgiving(recorded[0]), elsewhere, made_up])
    finally:
        await factory.aclose()
    assert (found.episodes, found.left_out) == (3, 2)
    assert found.successes.value == pytest.approx(2 / 3)
    assert found.faithful.value == pytest.approx(2 / 3)
    assert found.by_verb == {"take": 1}
    (departure,) = found.departures
    assert (departure.dreamt, departure.real) == ("You pick up the moon 1.", "Nothing happens.")


def test_the_command_reads_what_a_run_kept_and_refuses_a_run_in_reality(
    recorded: list[Trajectory], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    with TrajectoryWriter(run / "trajectories") as writer:
        writer.append([forgiving(recorded[0])])
    (run / "config.json").write_text(config_json(Config()), encoding="utf-8")
    reported = CliRunner().invoke(app, ["experience", "audit", str(run), "--json"])
    assert reported.exit_code == 0, reported.output
    assert json.loads(reported.stdout)["by_verb"] == {"take": 1}
    [replayed] = read_trajectories(run / "audit")  # what a report shows beside the dream
    assert (replayed.id, replayed.provenance.source) == (forgiving(recorded[0]).id, "real")
    real = Config().model_copy(update={"train": Config().train.model_copy(update={"mode": "real"})})
    (run / "config.json").write_text(config_json(real), encoding="utf-8")
    refused = CliRunner().invoke(app, ["experience", "audit", str(run)])
    assert refused.exit_code != 0
    assert "trained in the real environment" in refused.output
