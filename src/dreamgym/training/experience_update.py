"""Fine-tunes the experience model of a running practice on new real trajectories: a few updates, mixed with
recorded examples, in a version of its weights that the agent's run keeps. The experience run stays as it is.

Every version is compared with the original one, on the same held-out examples: many updates that each lose a
little would lose much. A model that was fine-tuned with a LoRA adapter gets a new one, and only that changes.
"""

from __future__ import annotations

import asyncio
import copy
import json
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import TYPE_CHECKING, Any

from dreamgym.config import Config, ReplayConfig
from dreamgym.experience.dataset import Example
from dreamgym.experience.dataset import held_out as is_held_out
from dreamgym.files import write_text
from dreamgym.protocols import Annotator, Retriever
from dreamgym.seeding import derive_seed
from dreamgym.training.black_box import mine_knowledge
from dreamgym.training.experience import exchangeable_names, split_examples
from dreamgym.training.experience_versions import VERSIONS, ExperienceVersions
from dreamgym.training.fine_tuning import MAX_LENGTH
from dreamgym.training.model_setup import LoadedModel, exchangeable_tokens, sft_rates
from dreamgym.types import Trajectory

if TYPE_CHECKING:
    from dreamgym.rl.packing import PackedBatch
    from dreamgym.rl.sft import SFT

_ORIGINAL = f"{VERSIONS}/original.json"
"""Held-out examples, and the share of them that the model predicted before its first update."""
UPDATES = 30
_RATE = 1 / 3
"""Of the learning rate of fine-tuning: the model is to keep what it knows."""
_WARMUP = 5
_REHEARSED = 3
"""Recorded examples for each new one."""
_OLD_TRAJECTORIES, _CHECKED = 64, 256
FORGOTTEN = 0.03
"""Share of held-out replies that a version may lose against the original; with a larger loss an update is
undone."""


class ExperienceUpdater:
    """Updates the weights behind an experience model in place, while no request runs."""

    def __init__(
        self,
        versions: ExperienceVersions,
        annotator: Annotator,
        retriever: Retriever | None,
        recorded: Sequence[Trajectory],
        *,
        seed: int = 0,
    ) -> None:
        """`recorded` is what the experience model was fine-tuned on."""
        self.versions = versions
        self._run = run = versions.run
        self._run_dir = versions.run_dir
        self._annotator, self._retriever = annotator, retriever
        self._recorded = recorded
        self._seed = seed
        self._config = Config(
            seed=run.seed,
            environment=run.environment,
            experience=run.experience,
            replay=ReplayConfig(k=run.k, embedder=run.embedder),
        )
        self._names = exchangeable_names(self._config, recorded)
        black_box = run.experience.facts == "replies"
        self._knowledge = mine_knowledge(recorded) if black_box else None
        self._language_model = versions.language_model

    async def update(
        self, step: int, fresh: Sequence[Trajectory], earlier: Sequence[Trajectory]
    ) -> dict[str, Any]:
        """Fine-tune on `fresh` and earlier audits, and write the version `step`, unless old replies are
        forgotten; returns its metrics."""
        new, old = await self._data(step, fresh, earlier)
        served = self._language_model.model
        model, before = _trainable(served), _copy(served)
        sft = self._sft(model, step, mixed(new, old))
        original, held_out = await self._original(sft)
        loss, agreement = 0.0, [sft.exact_match(held_out)]
        while not sft.done:
            loss = sft.step()["loss"]
            await asyncio.sleep(0)  # a cancelled task stops here
        agreement.append(sft.exact_match(held_out))
        kept = agreement[1] >= original - FORGOTTEN
        weights = _copy(model) if kept else before
        self.versions.serve(weights)
        if kept:
            self.versions.save(step, weights)
        return {
            "updates": sft.steps,
            "loss": loss,
            "examples": len(new),
            "agreement_original": original,
            "agreement_before": agreement[0],
            "agreement_after": agreement[1],
            "kept": kept,
        }

    async def _data(
        self, step: int, fresh: Sequence[Trajectory], earlier: Sequence[Trajectory]
    ) -> tuple[list[Example], list[Example]]:
        """New examples and recorded ones."""
        new = [*earlier, *fresh]
        ids, tasks = {each.id for each in new}, {each.task.id for each in new}
        rng = Random(derive_seed(self._seed, "audit examples", step))
        # A prompt shows what other recordings of its task tell.
        known = self._some(rng, max(_OLD_TRAJECTORIES, _REHEARSED * len(new)), held_out=False, tasks=tasks)
        trained, validated = await self._examples([*known, *new])
        found = [each for each in [*trained, *validated] if each.trajectory_id in ids]
        return found, [each for each in trained if each.trajectory_id not in ids]

    async def _examples(self, trajectories: Sequence[Trajectory]) -> tuple[list[Example], list[Example]]:
        return await split_examples(
            *(self._config, trajectories, self._annotator, self._run.actor, self._retriever),
            knowledge=self._knowledge,
        )

    async def _original(self, sft: SFT) -> tuple[float, PackedBatch]:
        """The agreement of the original version and the examples it was measured on: measured before the
        first update of the run."""
        path = self._run_dir.path / _ORIGINAL
        if path.exists():
            stored = json.loads(path.read_text(encoding="utf-8"))
            return float(stored["agreement"]), self._packed(stored["examples"])
        rng = Random(derive_seed(self._seed, "audit check"))
        known = self._some(rng, _OLD_TRAJECTORIES, held_out=True)
        known = known or self._some(rng, _OLD_TRAJECTORIES, held_out=False)
        trained, validated = await self._examples(known)
        checked = validated or trained
        pairs = _pairs(rng.sample(checked, min(_CHECKED, len(checked))))
        packed = self._packed(pairs)
        agreement = sft.exact_match(packed)
        write_text(path, json.dumps({"agreement": agreement, "examples": pairs}) + "\n")
        return agreement, packed

    def _some(
        self, rng: Random, count: int, *, held_out: bool, tasks: Collection[str] = ()
    ) -> list[Trajectory]:
        """Those of these `tasks`, and `count` others, or a few more: all of a task or none."""
        others: dict[str, list[Trajectory]] = defaultdict(list)
        for each in self._recorded:
            if is_held_out(each.task.id, self._run.experience.validation) == held_out:
                others[each.task.id].append(each)
        chosen: list[Trajectory] = []
        for task in rng.sample(sorted(others), len(others)):
            if task not in tasks and len(chosen) < count:
                chosen += others[task]
        return [each for each in self._recorded if each.task.id in tasks] + chosen

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
            self._packed(_pairs(data)),
            steps=UPDATES,
            batch_size=settings.batch,
            warmup_steps=_WARMUP,
            seed=derive_seed(self._seed, "audit updates", step),
            exchangeable=exchangeable_tokens(settings, loaded.tokenizer, self._names),
        )

    def _packed(self, pairs: Iterable[Sequence[str]]) -> PackedBatch:
        from dreamgym.models.local.tokens import TextCodec
        from dreamgym.rl.packing import pack_replies

        tokenizer = self._language_model.tokenizer
        codec = TextCodec(tokenizer)
        tokens = [
            (codec.start(prompt), [*codec.more(reply), tokenizer.eos_token_id]) for prompt, reply in pairs
        ]
        return pack_replies(pair for pair in tokens if sum(map(len, pair)) <= MAX_LENGTH)


def mixed(new: Sequence[Example], old: Sequence[Example]) -> list[Example]:
    """All examples, repeated so that there are about `_REHEARSED` old ones for each new one.

    >>> [len(found) for found in (mixed("ab", "c" * 12), mixed("abcd", "e" * 6), mixed("ab", ""))]
    [16, 16, 2]
    """
    if not new or not old:
        return [*new, *old]
    wanted = _REHEARSED * len(new)
    return [*new] * max(1, len(old) // wanted) + [*old] * max(1, math.ceil(wanted / len(old)))


def _pairs(data: Iterable[Example]) -> list[tuple[str, str]]:
    return [(each.prompt, each.reply) for each in data]


def _copy(model: Any) -> dict[str, Any]:
    from dreamgym.rl.gradients import trainable_weights

    return {name: weight.detach().clone() for name, weight in trainable_weights(model).items()}


def _trainable(served: Any) -> Any:
    """The model itself, or a copy in fp32: small updates of half precision are lost in rounding."""
    import torch

    from dreamgym.rl.gradients import trainable_weights

    half = any(weight.dtype != torch.float32 for weight in trainable_weights(served).values())
    return copy.deepcopy(served).float() if half else served
