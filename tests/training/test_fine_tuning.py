"""Fine-tuning: it learns, stops early, stops on request with a usable model, and resumes bit for bit."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from dreamgym.errors import ConfigError, StoppedError
from dreamgym.training.fine_tuning import Progress
from tests.killable import started
from tests.training.fine_tuning_run import fine_tuning, in_a_process


def weights(folder: Path, step: int = 40) -> dict[str, torch.Tensor]:
    stored = torch.load(folder / "checkpoint.pt", weights_only=True)
    assert stored["progress"]["step"] == step
    return dict(stored["sft"]["model"])


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


async def test_it_learns_to_copy_and_measures_agreement(tmp_path: Path) -> None:
    progress = await fine_tuning(tmp_path, 150).run()
    assert progress.agreement is not None
    assert progress.agreement > 0.95
    assert progress.curve[0][2] < progress.curve[-1][2]


async def test_exchanged_names_are_copied_though_most_were_never_trained(tmp_path: Path) -> None:
    """8 of 64 pairs of letters are trained; what is memorised fails on the others."""
    memorised = await fine_tuning(tmp_path / "memorised", 150, known=8, exchangeable=()).run()
    copied = await fine_tuning(tmp_path / "copied", 150, known=8).run()
    assert memorised.agreement is not None
    assert copied.agreement is not None
    assert memorised.agreement < 0.5
    assert copied.agreement > 0.9


async def test_a_run_killed_twice_ends_with_the_weights_of_one_never_stopped(tmp_path: Path) -> None:
    await fine_tuning(tmp_path / "whole", 40).run()
    for stop in (7, 23):
        steps, report = multiprocessing.Pipe(duplex=False)
        process = started(tmp_path / "errors", in_a_process, tmp_path / "killed", 40, report)
        report.close()  # so that the last reader notices when the process is gone
        while steps.recv() < stop:
            pass
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
    await fine_tuning(tmp_path / "killed", 40).run()
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "killed"))


async def test_a_cancelled_task_stops_at_once_with_a_usable_model_and_resumes(tmp_path: Path) -> None:
    """What the first Ctrl-C does: `asyncio.run` cancels the task."""
    seen: list[int] = []

    def cancel(progress: Progress) -> None:
        seen.append(progress.step)
        if progress.step == 3:
            task.cancel()

    task = asyncio.create_task(fine_tuning(tmp_path / "stopped", 40, checkpoint_every=100).run(cancel))
    with pytest.raises(asyncio.CancelledError):
        await task
    assert seen == [1, 2, 3]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "stopped" / "model")
    stored = weights(tmp_path / "stopped", 3)
    assert torch.equal(model.state_dict()["lm_head.weight"], stored["lm_head.weight"])
    await fine_tuning(tmp_path / "stopped", 40).run()
    await fine_tuning(tmp_path / "whole", 40).run()
    assert same(weights(tmp_path / "whole"), weights(tmp_path / "stopped"))


async def test_the_first_ctrl_c_stops_a_process_at_once_with_a_checkpoint(tmp_path: Path) -> None:
    steps, report = multiprocessing.Pipe(duplex=False)
    process = started(tmp_path / "errors", in_a_process, tmp_path / "run", 4000, report)
    report.close()
    while steps.recv() < 7:
        pass
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(20)
    assert process.exitcode is not None
    stored = torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)
    assert 7 <= stored["progress"]["step"] < 4000
    assert (tmp_path / "run" / "model" / "config.json").exists()


async def test_sigterm_saves_and_says_so(tmp_path: Path) -> None:
    def terminate(progress: Progress) -> None:
        if progress.step == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match=r"SIGTERM after update \d of 40; .* the same command resumes"):
        await fine_tuning(tmp_path, 40, checkpoint_every=100).run(terminate)
    assert (tmp_path / "checkpoint.pt").exists()
    assert (tmp_path / "model" / "config.json").exists()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


async def test_a_short_run_is_checkpointed_by_time(tmp_path: Path) -> None:
    steps: list[int] = []

    def look(progress: Progress) -> None:
        if (tmp_path / "checkpoint.pt").exists():
            stored = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
            steps.append(stored["progress"]["step"])

    await fine_tuning(tmp_path, 3, checkpoint_every=100, checkpoint_seconds=0.0).run(look)
    assert steps == [1, 2]


async def test_steps_may_be_lowered_or_raised_on_resume(tmp_path: Path) -> None:
    await fine_tuning(tmp_path, 10).run()
    lower = await fine_tuning(tmp_path, 6).run()
    assert (lower.step, lower.steps) == (10, 6)
    higher = await fine_tuning(tmp_path, 14).run()
    assert higher.step == 14


async def test_progress_after_every_update_has_loss_and_time_but_no_agreement_until_measured(
    tmp_path: Path,
) -> None:
    seen: list[tuple[int, bool, bool, bool]] = []

    def note(progress: Progress) -> None:
        remaining = progress.remaining
        seen.append(
            (
                progress.step,
                progress.loss is not None,
                progress.agreement is None,
                remaining is not None and progress.seconds > 0 and remaining >= 0,
            )
        )

    await fine_tuning(tmp_path, 3, evaluate_every=2).run(note)
    assert seen == [(1, True, True, True), (2, True, False, True), (3, True, False, True)]


async def test_a_checkpoint_of_other_settings_is_refused(tmp_path: Path) -> None:
    await fine_tuning(tmp_path, 10).run()
    with pytest.raises(ConfigError, match="was made with batch_size=8, now batch_size=4"):
        await fine_tuning(tmp_path, 10, batch_size=4).run()


def test_examples_that_are_too_long_are_skipped_and_none_left_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="none of which fits"):
        fine_tuning(tmp_path, 10, max_length=3)
