"""Fine-tunes a model on examples of replies: validation, early stopping, checkpoints, and a usable model at
every stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from dreamgym.agents import Codec
from dreamgym.errors import ConfigError, StoppedError, StoreError
from dreamgym.experience.dataset import Example
from dreamgym.files import atomic_directory, write_text
from dreamgym.training.model_setup import LoadedModel
from dreamgym.training.run_dir import RunDir

if TYPE_CHECKING:
    from dreamgym.rl.packing import PackedBatch

CHECKPOINT = "checkpoint.pt"
CURVE = "curve.json"
MODEL = "model"
MAX_LENGTH = 1024
"""Tokens of an example; longer ones are skipped and counted."""
_WARMUP_STEPS = 50
_DECAY_FRACTION = 0.6


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a fine-tuning run is."""

    step: int = 0
    steps: int = 0
    """In all."""
    loss: float | None = None
    agreement: float | None = None
    """Share of validation replies that greedy decoding reproduces token for token; None until measured."""
    best: float = -1.0
    skipped: int = 0
    """Examples that are too long."""
    seconds: float = 0.0
    """Of training, over all sessions of the run."""
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, loss, agreement) of every evaluation."""

    @property
    def remaining(self) -> float | None:
        """Seconds, estimated from the updates so far."""
        return self.seconds / self.step * (self.steps - self.step) if self.step else None


OnProgress = Callable[[Progress], None]


class FineTuning:
    """One run in a directory with its checkpoint; a stopped run resumes bit for bit, with fewer or more
    `steps`."""

    def __init__(
        self,
        loaded: LoadedModel,
        codec: Codec,
        training: Sequence[Example],
        validation: Sequence[Example],
        *,
        folder: Path,
        steps: int,
        batch_size: int,
        seed: int = 0,
        processes: int = 1,
        warmup_steps: int = _WARMUP_STEPS,
        max_length: int = MAX_LENGTH,
        evaluate_every: int = 200,
        validation_size: int = 256,
        checkpoint_every: int = 100,
        checkpoint_seconds: float = 60.0,
    ) -> None:
        """
        Args:
            patience: evaluations without a better agreement after which to stop early.
            checkpoint_every, checkpoint_seconds: whichever comes first.
        """
        from dreamgym.rl.sft import SFT

        self.progress = Progress(steps=steps)
        self._loaded = loaded
        self._folder = folder
        self._max_length = min(max_length, loaded.context or max_length)
        self._evaluate_every = evaluate_every
        self._checkpoint_every = checkpoint_every
        self._checkpoint_seconds = checkpoint_seconds
        packed = self._packed(training, codec)
        self._validation = self._packed(validation[:validation_size], codec)
        if not packed.sequences:
            raise ConfigError(
                f"expected training examples of at most {self._max_length} tokens, "
                f"got {len(training)}, none of which fits"
            )
        self._sft = SFT(
            loaded,
            packed,
            steps=steps,
            batch_size=batch_size,
            warmup_steps=warmup_steps,
            decay_fraction=_DECAY_FRACTION,
            seed=seed,
            exchangeable=loaded.exchangeable,
            processes=processes,
        )

    def resume(self) -> None:
        """Loads the checkpoint, if there is one."""
        stored = RunDir(self._folder).load(CHECKPOINT)
        if stored is None or self.progress.step:
            return
        try:
            self._sft.load_state_dict(stored["sft"])
        except ConfigError as error:
            raise ConfigError(f"{self._folder / CHECKPOINT}: {error}") from None
        self.progress = Progress(**stored["progress"] | {"steps": self.progress.steps})

    async def run(self, on_progress: OnProgress | None = None) -> Progress:
        """Trains until the last step; cancelling, Ctrl-C and SIGTERM stop it after the current update.
        The checkpoint and `model/` are written whenever it stops."""
        self.resume()
        progress, saved = self.progress, time.monotonic()
        self._loaded.model.train()
        with _cancel_on_sigterm() as terminated:
            while not self._sft.done:
                self._step()
                try:
                    if on_progress is not None:
                        on_progress(progress)
                    await asyncio.sleep(0)  # a cancelled task stops here
                except BaseException:
                    self._stop()
                    if terminated:
                        raise StoppedError(
                            f"stopped by SIGTERM after update {progress.step} of {progress.steps}; "
                            f"{self._folder} has the checkpoint and the model, the same command resumes"
                        ) from None
                    raise
                due = time.monotonic() - saved > self._checkpoint_seconds
                if due or progress.step % self._checkpoint_every == 0:
                    self._save()
                    saved = time.monotonic()
        self._stop()
        return progress

    def _step(self) -> None:
        progress, start = self.progress, time.monotonic()
        progress.loss = self._sft.step()["loss"]
        progress.step = self._sft.steps
        if self._validation.sequences and (progress.step % self._evaluate_every == 0 or self._sft.done):
            agreement = progress.agreement = self._sft.exact_match(self._validation)
            progress.best = max(progress.best, agreement)
            progress.curve.append((progress.step, progress.loss, agreement))
        progress.seconds += time.monotonic() - start

    def _packed(self, examples: Sequence[Example], codec: Codec) -> PackedBatch:
        from dreamgym.rl.packing import pack_replies

        kept = []
        for example in examples:
            prompt = codec.start(example.prompt)
            reply = [*codec.more(example.reply), self._loaded.end]
            if len(prompt) + len(reply) > self._max_length:
                self.progress.skipped += 1
            else:
                kept.append((prompt, reply))
        return pack_replies(kept)

    def _save(self) -> None:
        state = {"sft": self._sft.state_dict(), "progress": asdict(self.progress)}
        RunDir(self._folder).save(CHECKPOINT, state)

    def _stop(self) -> None:
        """Writes the checkpoint and a model that can be used; adapters are merged, so training ends here."""
        self._save()
        self._loaded.model.eval()
        model = self._loaded.merged()
        with atomic_directory(self._folder / MODEL) as folder:
            try:
                model.save_pretrained(folder)
                self._loaded.tokenizer.save_pretrained(folder)
            except Exception as error:  # libraries report a full disk with exceptions of their own
                raise StoreError(f"{self._folder / MODEL}: cannot write: {error}; free some space") from None
        curve = [{"step": s, "loss": loss, "agreement": a} for s, loss, a in self.progress.curve]
        write_text(self._folder / CURVE, json.dumps(curve, indent=2) + "\n")


@contextmanager
def _cancel_on_sigterm() -> Iterator[list[bool]]:
    """Cancels the current task on SIGTERM; the list is then not empty."""
    terminated: list[bool] = []
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def cancel() -> None:
        terminated.append(True)
        task.cancel()

    try:
        loop.add_signal_handler(signal.SIGTERM, cancel)
    except (RuntimeError, ValueError, NotImplementedError):  # not the main thread, or no POSIX signals
        yield terminated
        return
    try:
        yield terminated
    finally:
        with contextlib.suppress(RuntimeError):
            loop.remove_signal_handler(signal.SIGTERM)
