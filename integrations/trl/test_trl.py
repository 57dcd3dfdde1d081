"""TRL's own trainer learns in the dream, and the real environment confirms it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    command = [sys.executable, str(HERE / "train.py"), str(tmp_path_factory.mktemp("trl"))]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    if "INTEGRATION_DETAILS" in os.environ:
        Path(os.environ["INTEGRATION_DETAILS"]).write_text(json.dumps(found))
    return found


def test_real_success_rises(trained: dict[str, dict[str, float]]) -> None:
    assert trained["difference"]["low"] > 0, trained


def test_the_dream_recorded_what_the_trainer_did(trained: dict[str, dict[str, float]]) -> None:
    assert trained["recorded"]["groups"] == 60 * 8
    assert trained["recorded"]["fresh_rows"] > 0
