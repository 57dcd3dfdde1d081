"""What travels with an experience model: a moved run finds its data, and commands take its settings."""

from __future__ import annotations

from pathlib import Path

import pytest

from dreamgym.config import load_config
from dreamgym.data.datasets import builtin_dataset, dataset_path
from dreamgym.envs.textworld import SPEC
from dreamgym.errors import ConfigError
from dreamgym.training.experience_loading import experience_run
from dreamgym.training.experience_run import ExperienceRun, inherit_settings

COOKING = [
    "environment.name=textworld",
    "environment.options.family=cooking",
    "environment.options.horizon=9",
]


def written(run: Path, *data: Path) -> str:
    found = ExperienceRun.of(load_config(overrides=COOKING), SPEC, annotator="rules", splits=["valid"])
    run.mkdir()
    found.with_data(run, data).write(run)
    return str(run)


def test_a_command_takes_environment_options_split_data_and_horizon_from_the_run(tmp_path: Path) -> None:
    name = written(tmp_path / "run", builtin_dataset(), tmp_path / "run" / "real", tmp_path / "mine")
    config = inherit_settings(load_config(), name)
    assert config.environment.name == "textworld"
    assert config.environment.options == {"family": "cooking", "horizon": 9}
    assert (config.train.split, config.train.horizon) == ("valid", 9)
    assert config.train.data == ["builtin:alfworld", f"{name}/real", str(tmp_path / "mine")]
    assert dataset_path(config.train.data[0]) == builtin_dataset()


def test_what_the_command_sets_itself_stays(tmp_path: Path) -> None:
    name = written(tmp_path / "run")
    settings = ["train.horizon=3", 'train.data=["other"]', "environment.options.family=cooking"]
    config = inherit_settings(load_config(overrides=settings), name)
    assert (config.train.horizon, config.train.data) == (3, ["other"])


def test_what_counts_as_supported_may_be_chosen_after_fine_tuning(tmp_path: Path) -> None:
    name = written(tmp_path / "run")
    assert inherit_settings(load_config(), name).experience.unsupported == "no_success"
    config = inherit_settings(load_config(overrides=["experience.unsupported=end"]), name)
    used = experience_run(name, config).experience
    assert (used.unsupported, used.min_support) == (
        "end",
        ExperienceRun.read(Path(name)).experience.min_support,
    )


def test_a_run_that_was_moved_finds_the_trajectories_inside_it(tmp_path: Path) -> None:
    written(tmp_path / "run", tmp_path / "run" / "real")
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert ExperienceRun.read(moved).data_sources(moved) == [str(moved / "real")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["environment.name=alfworld"], "was fine-tuned on environment 'textworld', not 'alfworld'"),
        (["environment.options.family=treasure"], "options.family='cooking', not 'treasure'"),
        (["environment.options.level=3"], "options.level='its default', not 3"),
        (["replay.k=5"], "was fine-tuned with replay.k=1, not 5"),
    ],
)
def test_another_environment_or_other_options_are_refused(
    tmp_path: Path, settings: list[str], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        inherit_settings(load_config(overrides=settings), written(tmp_path / "run"))
