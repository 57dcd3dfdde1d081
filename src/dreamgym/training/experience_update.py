"""Fine-tunes the experience model of a running practice on new real trajectories: a few updates, mixed with
recorded examples, in a version of its weights that the agent's run keeps. The experience run stays as it is.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, Protocol

from dreamgym.config import Config, ReplayConfig
from dreamgym.errors import StoreError
from dreamgym.experience.dataset import Example, held_out
from dreamgym.protocols import Annotator, LanguageModel, Retriever
from dreamgym.seeding import derive_seed
from dreamgym.training.experience import exchangeable_names, split_examples
from dreamgym.training.experience_run import ExperienceRun
from dreamgym.training.fine_tuning import MAX_LENGTH
from dreamgym.training.model_setup import LoadedModel, exchangeable_tokens, sft_rates
from dreamgym.training.run_dir import RunDir
from dreamgym.types import Trajectory

if TYPE_CHECKING:
    from dreamgym.models.local.language_model import LocalLanguageModel
    from dreamgym.rl.packing import PackedBatch
    from dreamgym.rl.sft import SFT

VERSIONS = "experience"
"""In the run directory of the agent: the weights after each audit."""
UPDATES = 30
_RATE = 1 / 3
"""Of the learning rate of fine-tuning: the model is to keep what it knows."""
_WARMUP = 5
_OLD_TRAJECTORIES, _CHECKED = 64, 96
_FORGOTTEN = 0.05
"""Share of held-out replies that an update may lose; with a larger loss it is undone."""


class Updatable(Protocol):
    """An experience model whose weights are in this process."""

    @property
    def language_model(self) -> LanguageModel: ...

    def weights_changed(self) -> None: ...


class ExperienceUpdater:
    """Updates the weights behind an experience model in place, while no request runs."""

    def __init__(
        self,
        model: Updatable,
        run: ExperienceRun,
        annotator: Annotator,
        retriever: Retriever | None,
        recorded: Sequence[Trajectory],
        run_dir: RunDir,
        *,
        seed: int = 0,
    ) -> None:
        """`recorded` is what the experience model was fine-tuned on."""
        self._model, self._run, self._annotator, self._retriever = model, run, annotator, retriever
        share = run.experience.validation
        self._old = [each for each in recorded if not held_out(each.task.id, share)]
        self._held_out = [each for each in recorded if held_out(each.task.id, share)]
        self._run_dir = run_dir
        self._seed = seed
        self._config = Config(
            seed=run.seed,
            environment=run.environment,
            experience=run.experience,
            replay=ReplayConfig(k=run.k, embedder=run.embedder),
        )
        self._names = exchangeable_names(self._config, recorded)

    async def update(
        self, step: int, fresh: Sequence[Trajectory], earlier: Sequence[Trajectory]
    ) -> dict[str, Any]:
        """Fine-tune on `fresh` and earlier audits, and write the version `step`, unless old replies are
        forgotten; returns its metrics."""
        new, old, checked = await self._data(step, fresh, earlier)
        served = self._language_model.model
        model, before = _trainable(served), _copy(served)
        sft, check = self._sft(model, step, [*old, *new]), self._packed(checked)
        loss, agreement = 0.0, [sft.exact_match(check)]
        while not sft.done:
            loss = sft.step()["loss"]
            await asyncio.sleep(0)  # a cancelled task stops here
        agreement.append(sft.exact_match(check))
        kept = agreement[1] >= agreement[0] - _FORGOTTEN
        weights = _copy(model) if kept else before
        self._serve(weights)
        if kept:
            self._run_dir.save(_file(step), {"weights": weights})
        return {
            "updates": sft.steps,
            "loss": loss,
            "examples": len(new),
            "agreement_before": agreement[0],
            "agreement_after": agreement[1],
            "kept": kept,
        }

    def load(self, version: int) -> None:
        """Serve the weights of an earlier audit."""
        found = self._run_dir.load(_file(version))
        if found is None:
            raise StoreError(f"{self._run_dir.path / _file(version)}: missing; start the run again")
        self._serve(found["weights"])

    def keep(self, versions: Iterable[int]) -> None:
        """Remove the files of all other versions."""
        names = {Path(_file(version)).name for version in versions}
        for file in (self._run_dir.path / VERSIONS).glob("*.pt"):
            if file.name not in names:
                file.unlink(missing_ok=True)

    @property
    def _language_model(self) -> LocalLanguageModel:
        found: Any = self._model.language_model
        return found  # type: ignore[no-any-return]

    def _serve(self, weights: Mapping[str, Any]) -> None:
        from dreamgym.rl.optimizers import restore, trainable_weights

        with self._language_model.updating():
            restore(trainable_weights(self._language_model.model), weights)
        self._model.weights_changed()

    async def _data(
        self, step: int, fresh: Sequence[Trajectory], earlier: Sequence[Trajectory]
    ) -> tuple[list[Example], list[Example], list[Example]]:
        """New examples, about as many old ones, and those to check that nothing is forgotten."""
        rng = Random(derive_seed(self._seed, "audit examples", step))
        known, new = [*_some(self._old, rng), *_some(self._held_out, rng)], [*earlier, *fresh]
        trained, validated = await split_examples(
            *(self._config, [*known, *new], self._annotator, self._run.actor, self._retriever)
        )
        ids = {each.id for each in new}
        found = [each for each in [*trained, *validated] if each.trajectory_id in ids]
        old = [each for each in trained if each.trajectory_id not in ids]
        checked = [each for each in validated if each.trajectory_id not in ids] or old
        return found * max(1, round(len(old) / max(1, len(found)))), old, checked[:_CHECKED]

    def _sft(self, model: Any, step: int, data: Sequence[Example]) -> SFT:
        from dreamgym.rl.sft import SFT

        settings = self._run.experience
        rate = sft_rates(settings)["learning_rate"] or 0.0
        loaded = LoadedModel(
            model=model,
            tokenizer=self._language_model.tokenizer,
            sft_rates={"learning_rate": _RATE * rate, "muon_lr": None},
            precision="fp32",
            updating=self._language_model.updating,
        )
        return SFT(
            loaded,
            self._packed(data),
            steps=UPDATES,
            batch_size=settings.batch,
            warmup_steps=_WARMUP,
            seed=derive_seed(self._seed, "audit updates", step),
            exchangeable=exchangeable_tokens(settings, loaded.tokenizer, self._names),
        )

    def _packed(self, data: Sequence[Example]) -> PackedBatch:
        from dreamgym.models.local.tokens import TextCodec
        from dreamgym.rl.packing import pack_replies

        tokenizer = self._language_model.tokenizer
        codec = TextCodec(tokenizer)
        pairs = [
            (codec.start(each.prompt), [*codec.more(each.reply), tokenizer.eos_token_id]) for each in data
        ]
        return pack_replies(pair for pair in pairs if sum(map(len, pair)) <= MAX_LENGTH)


def _file(version: int) -> str:
    return f"{VERSIONS}/{version:06d}.pt"


def _some(trajectories: Sequence[Trajectory], rng: Random) -> list[Trajectory]:
    return rng.sample(trajectories, min(_OLD_TRAJECTORIES, len(trajectories)))


def _copy(model: Any) -> dict[str, Any]:
    from dreamgym.rl.optimizers import trainable_weights

    return {name: weight.detach().clone() for name, weight in trainable_weights(model).items()}


def _trainable(served: Any) -> Any:
    """The model itself, or a copy in fp32: small updates of half precision are lost in rounding."""
    import torch

    half = next(served.parameters()).dtype != torch.float32
    return copy.deepcopy(served).float() if half else served
