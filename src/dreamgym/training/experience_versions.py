"""Versions of the weights behind an experience model, in the run directory of an agent: one after each audit
that changed them. The driver and its workers serve the same version."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from dreamgym.errors import StoreError
from dreamgym.protocols import LanguageModel
from dreamgym.training.experience_run import ExperienceRun
from dreamgym.training.model_setup import with_lora
from dreamgym.training.run_dir import RunDir

if TYPE_CHECKING:
    from dreamgym.models.local.language_model import LocalLanguageModel

VERSIONS = "experience"
"""The folder in the run directory."""


class Updatable(Protocol):
    """An experience model whose weights are in this process."""

    @property
    def language_model(self) -> LanguageModel: ...

    def weights_changed(self) -> None: ...


class ExperienceVersions:
    """Changes the served weights in place, between two steps of the language model."""

    def __init__(self, model: Updatable, run: ExperienceRun, run_dir: RunDir, *, seed: int = 0) -> None:
        """A model that was fine-tuned with a LoRA adapter gets a new one here, and only that changes."""
        self.run, self.run_dir = run, run_dir
        self._model = model
        self.version = 0
        """The served one; 0 for the weights of the experience run."""
        if run.experience.adapter == "lora":
            with self.language_model.updating():  # the adapter is put into the layers of the model
                with_lora(self.language_model.model, run.experience, run.experience.model, seed, "experience")

    @property
    def language_model(self) -> LocalLanguageModel:
        found: Any = self._model.language_model
        return found  # type: ignore[no-any-return]

    def serve(self, weights: Mapping[str, Any]) -> None:
        from dreamgym.rl.gradients import trainable_weights
        from dreamgym.rl.optimizers import restore

        with self.language_model.updating():
            restore(trainable_weights(self.language_model.model), weights)
        self._model.weights_changed()

    def save(self, version: int, weights: Mapping[str, Any]) -> None:
        self.run_dir.save(_file(version), {"weights": dict(weights)})
        self.version = version

    def load(self, version: int) -> None:
        """Serve this version, unless it or a newer one is served."""
        if version <= self.version:
            return
        found = self.run_dir.load(_file(version))
        if found is None:
            raise StoreError(f"{self.run_dir.path / _file(version)}: missing; start the run again")
        self.serve(found["weights"])
        self.version = version

    def keep(self, count: int) -> None:
        """Remove all files but those of the newest versions."""
        for file in sorted((self.run_dir.path / VERSIONS).glob("*.pt"))[:-count]:
            file.unlink(missing_ok=True)


def _file(version: int) -> str:
    return f"{VERSIONS}/{version:06d}.pt"
