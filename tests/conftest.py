"""What the tests share: a cache of their own, and real data where it happens to be."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Models of tests are so small that threads only wait for each other; children inherit it. Before any torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Whether an example is refused or not is tested, not how busy the machine is.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")

pytest_plugins = ["tests.replay.postgres_server"]

ROOT = Path(__file__).parent.parent

# Processes that tests start import this source and the helpers in `tests`, wherever they run.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH")])
)

# A server that is installed separately: its tests run where its address is set.
collect_ignore = [] if os.environ.get("DREAMGYM_VLLM_PYTHON") else ["models/test_vllm.py"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: the processes that share the files then end at about the same time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collection."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def excluded_from_collection() -> Iterator[None]:
    """What a file of tests has imported and cached too: a full collection in a later file costs half a second
    otherwise."""
    yield
    gc.collect(1)
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Games and translations of this session; never those of the user who runs the tests."""
    folder = tmp_path_factory.mktemp("cache")
    before = {name: os.environ.pop(name, None) for name in ("DREAMGYM_CACHE", "ALFWORLD_DATA")}
    os.environ["DREAMGYM_CACHE"] = str(folder)
    yield folder
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(scope="session")
def real_data() -> Path:
    """A folder of real benchmark data next to the repository; tests that want it are skipped without."""
    folder = Path(os.environ.get("DREAMGYM_REAL_DATA", ROOT.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("no real benchmark data next to the repository (DREAMGYM_REAL_DATA)")
    return folder
