"""Fine-tuning: it learns, stops when it should, and a killed run ends as if it had never stopped."""

from __future__ import annotations

import multiprocessing
import signal
from pathlib import Path

import pytest
import torch

from dreamgym.errors import ConfigError
from tests.experience.finetune_run import finetuning, in_a_process
from tests.killable import started


def weights(folder: Path) -> dict[str, torch.Tensor]:
    stored = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert stored["progress"]["step"] == 40
    return dict(stored["model"])


def test_it_learns_to_copy_and_says_how_well(tmp_path: Path) -> None:
    _, run = finetuning(tmp_path, 150)
    progress = run.run()
    assert progress.agreement > 0.95
    assert progress.curve[0][2] < progress.curve[-1][2]


def test_exchanged_names_are_copied_though_most_were_never_shown(tmp_path: Path) -> None:
    """Taught with 8 of 64 pairs of letters; what is learnt by heart fails on the others."""
    by_heart = finetuning(tmp_path / "by heart", 150, known=8, exchangeable=())[1].run()
    copied = finetuning(tmp_path / "copied", 150, known=8)[1].run()
    assert by_heart.agreement < 0.5
    assert copied.agreement > 0.9


def test_names_are_exchanged_within_their_group_alone(tmp_path: Path) -> None:
    groups = (range(1, 4), range(4, 9), [9])
    _, run = finetuning(tmp_path, 1, exchangeable=groups)
    tokens = torch.tensor([[11, 9, 1, 5, 10, 1, 5]] * 200)
    targets = torch.tensor([[-100] * 5 + [1, 5]] * 200)
    torch.manual_seed(0)
    read, taught = run._exchanged(tokens, targets)
    assert (read[:, :2] == tokens[:, :2]).all()
    assert set(read[:, 2].tolist()) == {1, 2, 3}
    assert set(read[:, 3].tolist()) == {4, 5, 6, 7, 8}
    assert (read[:, 2:4] == read[:, 5:7]).all()
    assert (taught[:, 5:] == read[:, 5:]).all()


def test_a_run_killed_twice_ends_with_the_weights_of_one_never_stopped(tmp_path: Path) -> None:
    finetuning(tmp_path / "whole", 40)[1].run()
    for stop in (7, 23):
        steps, told = multiprocessing.Pipe(duplex=False)
        process = started(tmp_path / "errors", in_a_process, tmp_path / "killed", 40, told)
        told.close()  # so that the last reader learns when the process is gone
        while steps.recv() < stop:
            pass
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    finetuning(tmp_path / "killed", 40)[1].run()
    whole, resumed = weights(tmp_path / "whole"), weights(tmp_path / "killed")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    finetuning(tmp_path, 10)[1].run()
    with pytest.raises(ConfigError, match="was made with batch=8, now 4 is asked for"):
        finetuning(tmp_path, 10, batch=4)[1].run()


def test_it_stops_when_agreement_no_longer_rises(tmp_path: Path) -> None:
    _, run = finetuning(tmp_path, 400, patience=2)
    assert run.run().step < 400


def test_examples_that_are_too_long_are_counted_and_none_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of which fits"):
        finetuning(tmp_path, 10, longest=3)
