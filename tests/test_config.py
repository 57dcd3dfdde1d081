"""Settings: file < --set < flag, and a wrong one is named with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from dreamgym.config import Config, ReplayConfig, load_config, settings, validate
from dreamgym.errors import ConfigError


def test_a_file_overrides_defaults_and_an_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('seed = 3\n[collect]\nepisodes = 7\npolicy = "expert"\n', encoding="utf-8")
    config = load_config(path, ["collect.episodes=9", "environment.options.horizon=30"])
    assert (config.seed, config.collect.episodes, config.collect.policy) == (3, 9, "expert")
    assert config.environment.options == {"horizon": 30}
    assert config.replay == ReplayConfig()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["collect.epsodes=1"], "unknown setting 'collect.epsodes'; did you mean 'collect.episodes'?"),
        (["colect.episodes=1"], "unknown setting 'colect'; did you mean 'collect'?"),
        (["replay.k=-1"], "setting 'replay.k': input should be greater than or equal to 0, got -1"),
        (["collect.episodes=many"], "setting 'collect.episodes'"),
        (["seed"], "expected --set section.key=value, got 'seed'"),
        (["=3"], "expected --set section.key=value, got '=3'"),
        (["seed.x=3", "seed=1", "seed.y=2"], "cannot set 'seed.y'"),
        (["replay.index=fast"], "setting 'replay.index'"),
        (["family=cooking"], "did you mean 'environment.options.family' (an option of the environment) or"),
        (["group_size=4"], "did you mean 'train.group_size'?"),
        (["learner.learning_rate=inf"], "setting 'learner.learning_rate': input should be a finite number"),
        (["learner.learning_rate=nan"], "setting 'learner.learning_rate': input should be a finite number"),
        ([f"seed={'1' * 5000}"], "setting 'seed'"),
    ],
)
def test_a_wrong_setting_is_named_before_anything_starts(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(overrides=overrides)
    assert message in str(caught.value)


def test_a_file_that_is_missing_or_not_toml_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found nothing at"):
        load_config(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_bytes(b"\xff = 1")
    with pytest.raises(ConfigError, match="expected TOML"):
        load_config(tmp_path / "bad.toml")


@pytest.mark.parametrize("text", ["seed = " + "1" * 5000, "seed = " + "[" * 20_000])
def test_numbers_too_long_and_values_too_deep_are_wrong_settings(tmp_path: Path, text: str) -> None:
    (tmp_path / "bad.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="expected TOML"):
        load_config(tmp_path / "bad.toml")


def test_configuration_cannot_change_during_a_run() -> None:
    config = load_config()
    with pytest.raises(ValueError, match="frozen"):
        config.seed = 4  # type: ignore[misc]


def test_every_setting_is_listed_with_its_default() -> None:
    listed = {name: default for name, _, default, _ in settings(Config)}
    assert listed["collect.episodes"] == 100
    assert listed["replay.embedder"] == "lexical"
    assert validate(Config, {}) == Config()
