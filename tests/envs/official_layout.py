"""Writes games in the benchmark's official layout, so that its loader can be tested without a download."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path

from dreamgym.envs.alfworld.generate import generate_game


def write_official_game(folder: Path, split: str, index: int, *, solvable: bool = True) -> Path:
    """A complete game.tw-pddl with its traj_data.json, as `alfworld-generate` leaves them."""
    game = generate_game("train", 77, index, 0)
    place = folder / "json_2.1.1" / split / game.name / f"trial_T{index:05d}"
    place.mkdir(parents=True)
    shipped = files("alfworld") / "data"
    grammar = (shipped / "alfred.twl2").read_text(encoding="utf-8").replace("UNKNOWN GOAL", game.instruction)
    data = {
        "pddl_domain": (shipped / "alfred.pddl").read_text(encoding="utf-8"),
        "grammar": grammar,
        "pddl_problem": game.problem,
        "solvable": solvable,
    }
    (place / "game.tw-pddl").write_text(json.dumps(data), encoding="utf-8")
    goal = game.parameters()
    facts = {"task_type": goal.pop("task_type"), "pddl_params": goal}
    (place / "traj_data.json").write_text(json.dumps(facts), encoding="utf-8")
    return place / "game.tw-pddl"
