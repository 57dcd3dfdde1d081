"""The public names: which there are, that importing them is quick, and that none is also a module."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import dreamgym
from tests.command import python

LEARNERS = ("GRPO", "PPO", "ExpertIteration", "SFT", "DPO")


def test_every_public_name_is_listed_once_and_has_a_module() -> None:
    assert sorted(dreamgym.__all__) == sorted(dreamgym._HOME)
    assert len(dreamgym.__all__) == len(set(dreamgym.__all__))
    assert 40 <= len(dreamgym.__all__) <= 50


@pytest.mark.parametrize("name", dreamgym.__all__)
def test_every_public_name_can_be_imported_and_has_a_docstring(name: str) -> None:
    assert getattr(dreamgym, name).__doc__
    assert name in dir(dreamgym)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        dreamgym.nonsense  # noqa: B018


def test_no_module_or_package_has_the_name_of_a_public_object() -> None:
    modules = {
        path.stem for path in Path(str(dreamgym.__file__)).parent.iterdir() if path.suffix in ("", ".py")
    }
    assert not modules & set(dreamgym.__all__)


def test_public_functions_stay_functions_after_their_modules_are_imported(tmp_path: Path) -> None:
    script = (
        "import importlib, dreamgym as dg\n"
        "for module in dg._MODULES: importlib.import_module('dreamgym.' + module)\n"
        "from dreamgym import collect, evaluate, train, audit, rollout\n"
        "print(all(map(callable, (collect, evaluate, train, audit, rollout, dg.fine_tune, dg.ingest))))"
    )
    assert python(script, cwd=tmp_path).stdout.strip() == "True"


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


def test_only_the_learners_load_torch() -> None:
    script = (
        "import sys, dreamgym as dg\n"
        f"[getattr(dg, name) for name in dg.__all__ if name not in {LEARNERS}]\n"
        "print([m for m in ('torch', 'transformers', 'textworld', 'alfworld') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
