"""The curriculum as a source of tasks, on real household worlds; what it leaves can be looked at."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import pytest

from dreamgym.config import CurriculumConfig
from dreamgym.curriculum.curriculum import Curriculum
from dreamgym.curriculum.generator import LanguageModelTaskGenerator
from dreamgym.curriculum.task_filter import TaskFilter
from dreamgym.curriculum.task_pool import FILE, TaskPool, lineage, read_pool
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.instructions import can_succeed_here, task_from_instruction
from dreamgym.errors import ConfigError
from dreamgym.experience.reply_format import variation_text
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.protocols import TaskSource
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.training.curriculum_setup import (
    SampledStarts,
    fine_tuned_proposer,
    open_curriculum,
    prompted_proposer,
)
from dreamgym.types import CompletionRequest, RolloutGroup, Task, Trajectory
from tests.command import dreamgym
from tests.curriculum.pool_examples import group, seed_task
from tests.models import small_models

SETTINGS = CurriculumConfig(every=2, sources=3, generated_fraction=0.5)


@pytest.fixture(scope="module")
def recorded() -> Sequence[Trajectory]:
    return list(islice(read_trajectories(builtin_dataset()), 400))


@pytest.fixture(scope="module")
def worlds(recorded: Sequence[Trajectory]) -> SampledStarts:
    return SampledStarts((each.sheet for each in recorded if each.sheet is not None), can_succeed_here)


@pytest.fixture(scope="module")
def seeds(recorded: Sequence[Trajectory]) -> list[Task]:
    return [each.task for each in recorded[:24]]


@pytest.fixture(scope="module")
def others(recorded: Sequence[Trajectory]) -> list[str]:
    """Real instructions, from which a stand-in for fine-tuned weights draws its variations."""
    return sorted({each.task.instruction for each in recorded[24:]})


def varied(others: Sequence[str]) -> ScriptedLanguageModel:
    def script(request: CompletionRequest) -> str:
        assert request.prompt.startswith("fact: here: ")
        assert request.prompt.endswith("\naction: vary\n")
        return variation_text(others[request.seed % len(others)])

    return ScriptedLanguageModel(script)


def opened(
    folder: Path,
    seeds: Sequence[Task],
    worlds: SampledStarts,
    others: Sequence[str],
    reserved: Sequence[str] = (),
) -> Curriculum:
    author = fine_tuned_proposer(varied(others), worlds, name="experience")
    return open_curriculum(
        *(folder, seeds, task_from_instruction, worlds, author), settings=SETTINGS, seed=1, reserved=reserved
    )


def played(tasks: Sequence[Task]) -> list[RolloutGroup]:
    """Every third task is won, every third lost, every third goes both ways."""
    return [group(task, ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0])[len(task.instruction) % 3]) for task in tasks]


async def run(curriculum: TaskSource, steps: int) -> list[list[str]]:
    seen = []
    for _ in range(steps):
        tasks = await curriculum.sample(6)
        await curriculum.record(played(tasks))
        seen.append([task.id for task in tasks])
    return seen


async def test_new_household_tasks_join_the_pool_and_are_practised(
    tmp_path: Path, seeds: list[Task], worlds: SampledStarts, others: list[str]
) -> None:
    reserved = others[:100]
    curriculum = opened(tmp_path, seeds, worlds, others, reserved)
    seen = await run(curriculum, 8)
    reported = await curriculum.record(played(await curriculum.sample(6)))
    curriculum.pool.close()
    generated = read_pool(tmp_path / FILE).generated
    assert reported["pool_generated"] == len(generated) > 3
    assert reported["pool_seed"] == len(seeds)
    kept_out = {task.id for task in map(task_from_instruction, reserved) if task}
    for standing in generated:
        made = lineage(standing.task)
        assert made is not None
        assert made.generator == "experience"
        assert standing.task.id not in kept_out
        sheet = worlds(standing.task)
        assert sheet is not None
        assert can_succeed_here(standing.task, sheet)
    shares = [sum(name.startswith("generated/") for name in step) / len(step) for step in seen]
    assert max(shares) == SETTINGS.generated_fraction
    assert shares[:2] == [0.0, 0.0]


async def test_a_resumed_curriculum_equals_one_that_never_stopped(
    tmp_path: Path, seeds: list[Task], worlds: SampledStarts, others: list[str]
) -> None:
    whole = opened(tmp_path / "whole", seeds, worlds, others)
    expected = await run(whole, 7)
    whole.pool.close()

    first = opened(tmp_path / "cut", seeds, worlds, others)
    seen = await run(first, 3)
    stored = json.loads(json.dumps(first.state_dict()))
    await run(first, 2)  # played, written down, and then lost with the checkpoint that never came
    first.pool.close()
    second = opened(tmp_path / "cut", seeds, worlds, others)
    second.load_state_dict(stored)
    seen += await run(second, 4)
    second.pool.close()
    assert seen == expected
    assert [*read_pool(tmp_path / "cut" / FILE).records] == [*read_pool(tmp_path / "whole" / FILE).records]


async def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    tmp_path: Path, seeds: list[Task], worlds: SampledStarts, others: list[str]
) -> None:
    first = opened(tmp_path, seeds, worlds, others)
    seen = await run(first, 3)
    first.pool.close()
    second = opened(tmp_path, seeds, worlds, others)
    assert await run(second, 3) == seen
    assert max(each.episodes for each in second.pool.records) <= 2 * 3
    second.pool.close()


async def test_a_state_or_seed_tasks_of_another_run_are_refused_and_change_nothing(
    tmp_path: Path, seeds: list[Task], worlds: SampledStarts, others: list[str]
) -> None:
    curriculum = opened(tmp_path, seeds, worlds, others)
    await run(curriculum, 4)
    before = (tmp_path / FILE).read_bytes()
    for stored in ({}, {"step": "1", "tasks": 24}, {"step": 1, "tasks": 7}, {"step": -1, "tasks": 24}):
        with pytest.raises(ConfigError, match="expected the"):
            curriculum.load_state_dict(stored)  # type: ignore[arg-type]
    curriculum.pool.close()
    for given in (seeds[:5], [*seeds, seed_task(1)]):
        with pytest.raises(ConfigError, match="this run was begun with 24 seed tasks"):
            opened(tmp_path, given, worlds, others)
    assert (tmp_path / FILE).read_bytes() == before


async def test_with_an_embedder_similar_tasks_share_their_entropy_as_ppo_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dreamgym.curriculum.curriculum._CLUSTERS", 1)
    tasks = [seed_task(1, "put a mug in desk"), seed_task(2, "put a mug in shelf")]
    with TaskPool(path=tmp_path / FILE) as pool:
        pool.add_seeds(tasks)
        source = Curriculum(pool, None, settings=CurriculumConfig(), embedder=LexicalEmbedder())
        reported = await source.record([group(tasks[0], [1.0]), group(tasks[1], [0.0])])
        assert reported["task_entropy"] == 0.25
        assert pool["seed-1"].entropy == pool["seed-2"].entropy == 0.25
        assert (await source.record([]))["task_entropy"] is None


async def test_any_language_model_is_asked_with_what_there_is_and_how_tasks_are_worded(
    tmp_path: Path, seeds: list[Task], worlds: SampledStarts, others: list[str]
) -> None:
    def script(request: CompletionRequest) -> str:
        if "You choose" in request.prompt:
            return '{"choice": 2, "reason": "It needs one more place."}'
        return json.dumps({"variations": [others[(request.seed + n) % len(others)] for n in range(6)]})

    model = ScriptedLanguageModel(script)
    author = prompted_proposer(model, worlds, seeds, name="chat")
    curriculum = open_curriculum(tmp_path, seeds, task_from_instruction, worlds, author, settings=SETTINGS)
    await run(curriculum, 4)
    made = curriculum.pool.generated
    curriculum.pool.close()
    assert made
    assert {each.task.parameters["lineage"]["reason"] for each in made} >= {  # type: ignore[call-overload,index]
        "It needs one more place."
    }
    assert "What there is: " in model.requests[0].prompt
    assert sum(f'- "{task.instruction}"' in model.requests[0].prompt for task in seeds) >= 10


async def test_real_weights_that_were_never_fine_tuned_give_nothing_and_every_candidate_is_counted(
    tmp_path: Path, seeds: list[Task], worlds: SampledStarts
) -> None:
    model = LocalLanguageModel(small_models.model(), small_models.tokenizer())
    author = fine_tuned_proposer(model, worlds, name="nano")
    counts = []
    try:
        for name in ("one", "two"):
            with TaskPool(path=tmp_path / name) as pool:
                gate = TaskFilter(task_from_instruction, worlds)
                generator = LanguageModelTaskGenerator(author, gate, pool, candidates=3, attempts=1)
                assert await generator.vary(seeds[:2], count=2, seed=0) == []
                counts.append(generator.counts)
    finally:
        await model.aclose()
    assert counts[0] == counts[1]
    assert sum(counts[0].values()) >= 2


async def test_the_pool_of_a_run_can_be_listed_and_shown(
    tmp_path: Path, seeds: list[Task], worlds: SampledStarts, others: list[str]
) -> None:
    curriculum = opened(tmp_path, seeds, worlds, others)
    await run(curriculum, 6)
    curriculum.pool.close()
    name = curriculum.pool.generated[0].task.id
    listed = json.loads(dreamgym("tasks", "list", tmp_path, "--json").stdout)
    assert (listed["seed"], listed["generated"]) == (24, len(curriculum.pool.generated))
    assert len(listed["tasks"]) == len(curriculum.pool)
    assert listed["candidates"]["accepted"] == listed["generated"]
    entropies = [task["entropy"] for task in listed["tasks"]]
    assert entropies == sorted(entropies, key=lambda each: -1 if each is None else each, reverse=True)
    table = dreamgym("tasks", "list", tmp_path / FILE, "--generated", "--limit", 2)
    assert table.returncode == 0, table.stderr
    assert "generated" in table.stdout
    shown = dreamgym("tasks", "show", tmp_path, name)
    assert shown.returncode == 0, shown.stderr
    assert "lineage, newest first" in shown.stdout
    reported = json.loads(dreamgym("tasks", "show", tmp_path, name, "--json").stdout)
    assert reported["ancestry"][-1] in {task.id for task in seeds}
    parent = json.loads(dreamgym("tasks", "show", tmp_path, reported["lineage"]["parent"], "--json").stdout)
    assert name in parent["variations"]
    wrong = dreamgym("tasks", "show", tmp_path, name[:-1])
    assert wrong.returncode == 2
    assert "did you mean" in " ".join(wrong.stderr.split())


def test_a_task_that_few_worlds_allow_begins_in_the_one_it_was_let_in_with(
    recorded: Sequence[Trajectory], seeds: list[Task]
) -> None:
    sheets = [each.sheet for each in recorded if each.sheet is not None]
    allowed = SampledStarts(sheets, lambda task, sheet: True)(seeds[0])
    rare = SampledStarts(sheets, lambda task, sheet: sheet == allowed)
    assert [rare(seeds[0], seed) for seed in (1, 2)] == [None, None]
    begins = [rare.start_for(seeds[0], seed) for seed in (0, 1, 2)]
    assert [each.sheet if each else None for each in begins] == [allowed] * 3


def test_a_run_without_a_pool_is_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    listed = dreamgym("tasks", "list", tmp_path / "run")
    assert listed.returncode == 2
    assert "only runs with a curriculum have one" in " ".join(listed.stderr.split())
