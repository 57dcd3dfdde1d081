"""Teaches a language model the replies of an experience model, resumable to the bit.

A plain loop: batches of like length, the loss on the reply alone. A model from scratch learns with
orthogonalised momentum (Muon) for weight matrices and AdamW for the rest, pretrained weights with AdamW.
Parameters that want no gradient stay as they are and out of the checkpoint. What a step does depends on the
settings and its number only, so a run that was killed and resumed from its last checkpoint ends with the same
weights as one that never stopped.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Literal, Protocol, TypeAlias

import torch
from torch import Tensor

from dreamgym.errors import ConfigError
from dreamgym.experience.dataset import Example
from dreamgym.experience.logits import ChosenLogits
from dreamgym.files import atomic_write
from dreamgym.gradients import accumulate
from dreamgym.muon import Muon

_CHECKPOINT = "checkpoint.pt"
_IGNORED = -100
_PADDED = 1.3
"""How much longer than the shortest the longest example of a part may be."""
_EXCHANGED = 0.7
"""Share of examples whose exchangeable names are exchanged."""


class Encoder(Protocol):
    """Turns text into token ids, as the model's own engine does."""

    def __call__(self, text: str) -> list[int]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FinetuneSettings:
    """How a model is taught. Learning rates rise for `warmup` steps, hold, and fall over the last part."""

    steps: int = 2000
    batch: int = 32
    optimiser: Literal["muon", "adamw"] = "muon"
    """Muon: AdamW for whatever is no weight matrix. Its large steps are for models from scratch."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Of the products; the weights keep their own."""
    learning_rate: float = 3e-3
    muon_lr: float = 0.02
    warmup: int = 50
    falling_share: float = 0.6
    clip: float = 1.0
    seed: int = 0
    longest: int = 1024
    """Tokens of an example; longer ones are left out and counted."""
    evaluate_every: int = 200
    evaluate_on: int = 256
    checkpoint_every: int = 100
    patience: int | None = None
    """Evaluations without a better agreement after which to stop early."""


@dataclass(slots=True, kw_only=True)
class Progress:
    """Where a run is."""

    step: int = 0
    loss: float = float("nan")
    agreement: float = float("nan")
    """Share of held-out replies that greedy decoding would give word for word."""
    best: float = -1.0
    stale: int = 0
    left_out: int = 0
    curve: list[tuple[int, float, float]] = field(default_factory=list)
    """(step, loss, agreement) of every evaluation."""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True, slots=True)
class _Encoded:
    tokens: tuple[int, ...]
    reply_at: int


_Inputs: TypeAlias = tuple[Tensor, Tensor, Tensor]
"""Tokens and targets `(B, T)`, and the tokens of each row that are none of the padding."""


class Finetuning:
    """One run of teaching, in a folder that holds its checkpoint."""

    def __init__(
        self,
        model: Any,
        encode: Encoder,
        end: int,
        training: Sequence[Example],
        validation: Sequence[Example],
        *,
        settings: FinetuneSettings,
        folder: Path,
        exchangeable: Sequence[Sequence[int]] = (),
    ) -> None:
        """
        Args:
            end: the token that closes a reply.
            exchangeable: tokens of names that mean nothing by themselves, such as the number of a drawer, in
                groups. Those of a group are exchanged for each other at random, the same way throughout an
                example, so that the model must copy them from its question and cannot learn them by heart.
        """
        self._exchangeable = [torch.tensor(sorted(group)) for group in exchangeable if len(group) > 1]
        self._model = model
        self._settings = settings
        self._folder = folder
        self.progress = Progress()
        self._training = self._encoded(training, encode, end)
        self._validation = self._encoded(validation[: settings.evaluate_on], encode, end)
        if not self._training:
            raise ConfigError(
                f"expected training examples of at most {settings.longest} tokens, "
                f"got {len(training)}, none of which fits"
            )
        self._device = next(model.parameters()).device
        self._logits = ChosenLogits(model)
        self._taught = {name: p for name, p in model.named_parameters() if p.requires_grad}
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        for name, parameter in self._taught.items():
            turned = settings.optimiser == "muon" and parameter.ndim == 2 and "embed" not in name
            (matrices if turned else rest).append(parameter)
        adam = torch.optim.AdamW(rest, lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
        self._optimisers: list[tuple[torch.optim.Optimizer, float]] = [(adam, settings.learning_rate)]
        if matrices:
            self._optimisers.append((Muon(matrices), settings.muon_lr))

    def run(self, on_progress: OnProgress | None = None) -> Progress:
        """Teach until the last step, or until agreement stops rising; from a checkpoint if there is one."""
        self.resume()
        settings, progress = self._settings, self.progress
        self._model.train()
        while progress.step < settings.steps and not self._finished():
            self._step()
            progress.step += 1
            last = progress.step == settings.steps
            if self._validation and (progress.step % settings.evaluate_every == 0 or last):
                self._evaluate()
            if progress.step % settings.checkpoint_every == 0 or last:
                self._save()
            if on_progress is not None:
                on_progress(progress)
        self._model.eval()
        return progress

    def _finished(self) -> bool:
        return self._settings.patience is not None and self.progress.stale >= self._settings.patience

    def _step(self) -> None:
        settings = self._settings
        examples = [self._training[index] for index in self._batch(self.progress.step)]
        taught = sum(len(example.tokens) - example.reply_at for example in examples)
        with self._own_chance():
            parts = [self._inputs(part, exchange=True) for part in _alike(examples)]

            def loss_of(inputs: _Inputs) -> Tensor:
                logits, targets, _ = self._taught_logits(inputs)
                return torch.nn.functional.cross_entropy(logits, targets, reduction="sum") / taught

            losses = [functools.partial(loss_of, part) for part in parts]
            loss = accumulate(self._taught.values(), losses, in_turn=_draws(self._model))
        torch.nn.utils.clip_grad_norm_(self._taught.values(), settings.clip)
        scale = _schedule(self.progress.step, settings)
        for optimiser, rate in self._optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * scale
            optimiser.step()
        self._model.zero_grad(set_to_none=True)
        self.progress.loss = loss

    def _inputs(self, examples: Sequence[_Encoded], *, exchange: bool = False) -> _Inputs:
        padded = _padded(examples)
        if exchange and self._exchangeable:
            padded = self._exchanged(*padded)
        tokens, targets = (part.to(self._device) for part in padded)
        return tokens, targets, torch.tensor([len(one.tokens) for one in examples], device=self._device)

    def _taught_logits(self, inputs: _Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, target and example of every taught position: the output layer, which is most of a small
        model's work, sees no other."""
        tokens, targets, lengths = inputs
        after = torch.nn.functional.pad(targets[:, 1:], (0, 1), value=_IGNORED)
        wanted = after != _IGNORED
        half = self._settings.precision == "bf16"
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=half):
            logits = self._logits(tokens, lengths, wanted)
        return logits.float(), after[wanted], wanted.nonzero()[:, 0]

    def _exchanged(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Some examples stay as they are: numbers as they really come must be seen, too."""
        highest = max(int(tokens.max()), *(int(names.max()) for names in self._exchangeable))
        table = torch.arange(highest + 1).repeat(len(tokens), 1)
        for row in (torch.rand(len(tokens)) < _EXCHANGED).nonzero()[:, 0].tolist():
            for names in self._exchangeable:
                table[row, names] = names[torch.randperm(len(names))]
        taught = targets != _IGNORED
        tokens = table.gather(1, tokens)
        return tokens, torch.where(taught, tokens, targets)

    @contextmanager
    def _own_chance(self) -> Iterator[None]:
        """Dropout that depends on the seed and the step alone; everyone else's chance stays as it was."""
        with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
            torch.manual_seed(self._settings.seed * 1_000_003 + self.progress.step)
            yield

    def _batch(self, step: int) -> list[int]:
        """The examples of a step. Every step draws from all there is: a step of long examples only would be
        forgotten before the next one."""
        size = min(self._settings.batch, len(self._training))
        epoch, place = divmod(step, len(self._training) // size)
        if getattr(self, "_epoch", None) != epoch:
            self._epoch, self._order = epoch, list(range(len(self._training)))
            Random(f"{self._settings.seed}/{epoch}").shuffle(self._order)
        return self._order[place * size : (place + 1) * size]

    @torch.no_grad()
    def _evaluate(self) -> None:
        """A greedy reply is right word for word exactly when each of its tokens is the likeliest, given the
        right ones before it; so one forward pass tells what generation would."""
        progress = self.progress
        right = 0
        self._model.eval()
        for examples in _chunks(self._validation, 64):
            logits, targets, rows = self._taught_logits(self._inputs(examples))
            right += len(examples) - len(set(rows[logits.argmax(-1) != targets].tolist()))
        self._model.train()
        progress.agreement = right / len(self._validation)
        progress.stale = 0 if progress.agreement > progress.best else progress.stale + 1
        progress.best = max(progress.best, progress.agreement)
        progress.curve.append((progress.step, progress.loss, progress.agreement))

    def _encoded(self, examples: Sequence[Example], encode: Encoder, end: int) -> list[_Encoded]:
        made = []
        for example in examples:
            prompt, reply = encode(example.prompt), encode(example.reply)
            if len(prompt) + len(reply) + 1 > self._settings.longest:
                self.progress.left_out += 1
                continue
            made.append(_Encoded((*prompt, *reply, end), len(prompt)))
        return made

    def _save(self) -> None:
        """Whole or not at all: a new file takes the old one's name only when it is on disk."""
        path = self._folder / _CHECKPOINT
        with atomic_write(path) as partial:
            torch.save(
                {
                    "settings": asdict(self._settings),
                    "progress": asdict(self.progress),
                    "model": {name: p.detach() for name, p in self._taught.items()},
                    "untaught": self._untaught(),
                    "optimisers": [optimiser.state_dict() for optimiser, _ in self._optimisers],
                },
                partial,
            )

    def resume(self) -> None:
        """Take up the checkpoint, if there is one.

        Raises:
            ConfigError: it was made with other settings or from another model.
        """
        path = self._folder / _CHECKPOINT
        if not path.exists() or self.progress.step:
            return
        stored = torch.load(path, weights_only=True, map_location=self._device)
        theirs, mine = asdict(FinetuneSettings()) | stored["settings"], asdict(self._settings)
        for name, value in mine.items():
            if theirs.get(name) != value:
                raise ConfigError(
                    f"{path} was made with {name}={theirs.get(name)!r}, now {value!r} is asked for; "
                    "choose another folder, or the same settings to go on"
                )
        shapes = {name: parameter.shape for name, parameter in self._taught.items()}
        found = {name: stored["model"][name].shape for name in shapes if name in stored["model"]}
        if found != shapes or stored.get("untaught", []) != self._untaught():
            raise ConfigError(
                f"{path} was made from another model, or teaches other parts of it; "
                "choose another folder, or the same model and adapter to go on"
            )
        with torch.no_grad():
            for name, parameter in self._taught.items():
                parameter.copy_(stored["model"][name])
        for (optimiser, _), state in zip(self._optimisers, stored["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.progress = Progress(**stored["progress"])

    def _untaught(self) -> list[float]:
        """The last number of every frozen parameter: enough to tell other pretrained weights by."""
        return [p.detach().flatten()[-1].item() for p in self._model.parameters() if not p.requires_grad]


def _schedule(step: int, settings: FinetuneSettings) -> float:
    rising = min(1.0, (step + 1) / max(1, settings.warmup))
    left = (settings.steps - step) / max(1, settings.steps)
    falling = 1.0 if left > settings.falling_share else max(0.02, left / settings.falling_share)
    return rising * falling


def _draws(model: Any) -> bool:
    """Whether a forward pass draws (dropout): then one part must come after the other."""
    named: dict[str, Any] = model.config.to_dict()
    return any("drop" in name and isinstance(value, float) and value > 0 for name, value in named.items())


def _alike(examples: Sequence[_Encoded]) -> Iterator[list[_Encoded]]:
    """Parts of like length, so that little is spent on padding, the longest first; none has much more than
    a quarter of the batch, so that two cores have about the same to do."""
    most = sum(len(example.tokens) for example in examples) / 4
    part: list[_Encoded] = []
    for example in sorted(examples, key=lambda example: -len(example.tokens)):
        size = sum(len(other.tokens) for other in part)
        if part and (_PADDED * len(example.tokens) < len(part[0].tokens) or size > most):
            yield part
            part = []
        part.append(example)
    yield part


def _padded(examples: Sequence[_Encoded]) -> tuple[Tensor, Tensor]:
    """Tokens and targets `(B, T)`, padded on the right; prompts are no targets."""
    width = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), width, dtype=torch.long)
    targets = torch.full((len(examples), width), _IGNORED)
    for row, example in enumerate(examples):
        length = len(example.tokens)
        tokens[row, :length] = torch.tensor(example.tokens)
        targets[row, example.reply_at : length] = tokens[row, example.reply_at : length]
    return tokens, targets


def _chunks(items: Sequence[_Encoded], size: int) -> Iterator[Sequence[_Encoded]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
