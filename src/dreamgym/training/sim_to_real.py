"""Sim-to-real: a run of its own in the real environment, from the policy and with the settings of a run in
the dream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dreamgym.config import Config, load_config, validate
from dreamgym.training.run_dir import parse_policy_name, read_config


def sim_to_real(
    init_from: str,
    file: Path | None = None,
    overrides: Sequence[str] = (),
    *,
    real_steps: int,
    out: Path,
    steps: int | None = None,
    seed: int | None = None,
) -> Config:
    """The settings of the run in ``init_from`` (RUN or RUN@STEP), changed by a file and overrides, for
    `real_steps` real environment steps."""
    run, _ = parse_policy_name(init_from)
    begun = read_config(run)
    given = load_config(file, overrides).model_dump(exclude_unset=True)
    values = _merged(begun.model_dump(mode="json"), given)
    values["seed"] = begun.seed if seed is None else seed
    values["train"] |= {
        "mode": "real",
        "init_from": init_from,
        "real_steps": real_steps,
        "out": str(out),
        "warm_start_steps": 0,
        "audit_every": 0,
        # By default only the budget of real steps ends it.
        "steps": max(begun.train.steps, real_steps) if steps is None else steps,
    }
    return validate(Config, values)


def _merged(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """
    >>> _merged({"a": {"b": 1, "c": 2}}, {"a": {"c": 3}})
    {'a': {'b': 1, 'c': 3}}
    """
    found = dict(below)
    for name, value in above.items():
        known = found.get(name)
        found[name] = (
            _merged(known, value) if isinstance(known, dict) and isinstance(value, Mapping) else value
        )
    return found
