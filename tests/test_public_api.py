"""The package's face: which names it has, and that importing it is quick and light."""

from __future__ import annotations

import subprocess
import sys

import pytest

import dreamgym

PUBLIC = [
    "Config", "Demonstration", "DreamGymError", "Embedder", "Environment", "EnvironmentFactory",
    "EnvironmentSpec", "FailureKind", "Outcome", "Policy", "Provenance", "ReplayBuffer", "RetrievalFilter",
    "Retriever", "State", "Task", "Trajectory", "TrajectoryWriter", "Transition", "WorldSheet",
    "builtin_dataset", "check_environment", "collect", "load_config", "open_environment",
    "read_trajectories", "run_episode",
]  # fmt: skip


def test_the_public_names_are_these_and_no_others() -> None:
    assert sorted(dreamgym.__all__) == sorted(PUBLIC) == sorted(dreamgym._HOME)


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_can_be_had_and_says_what_it_is(name: str) -> None:
    assert getattr(dreamgym, name).__doc__
    assert name in dir(dreamgym)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dreamgym.nonsense  # noqa: B018


def test_importing_the_package_is_quick_and_loads_nothing_heavy() -> None:
    script = (
        "import sys, time; began = time.process_time(); import dreamgym; "
        "print(time.process_time() - began); "
        "print([m for m in ('torch', 'numpy', 'pydantic', 'textworld', 'transformers') if m in sys.modules])"
    )
    runs = [
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
        for _ in range(3)
    ]
    seconds = min(float(run.splitlines()[0]) for run in runs)
    assert seconds < 0.3
    assert runs[0].splitlines()[1] == "[]"


def test_using_every_public_name_still_loads_no_torch() -> None:
    script = (
        "import sys, dreamgym; [getattr(dreamgym, name) for name in dreamgym.__all__]; "
        "print('torch' in sys.modules, 'textworld' in sys.modules, 'alfworld' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "False False False"
