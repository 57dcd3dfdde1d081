"""A language model in this process: any Hugging Face causal LM behind the role `protocols.LanguageModel`.

Coroutines ask one by one; a worker thread (`lane`) computes for all of them at once and leaves the event loop
free.
The weights are the ones given, not a copy: after an optimiser's step the next completion comes from the new
ones.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.models.local.backends import Backend, choose_backend
from dreamgym.models.local.scheduler import Engine, Meter, PendingRequest
from dreamgym.models.local.tokenization import TextCodec
from dreamgym.models.local.worker import Worker, Workers
from dreamgym.types import Completion, CompletionRequest, FailureKind

PREFIX = "hf:"
_UNLIMITED_POSITIONS = 8192
"""For models that name no limit of their own."""
_SMALL = 16_000_000
_PROBES = 8
_ENOUGH = 32
"""Conversations that fill a lane's steps: with fewer, two lanes are slower than one."""


class LocalLanguageModel:
    """Batched generation with conversations that go on where they stopped.

    Log-probs of a completion are those of the model itself, at temperature 1 and over the whole vocabulary,
    whatever temperature, top-p or choices the tokens were drawn under: what a learner's forward pass gives
    for these tokens.

    The same request with the same seed gives the same completion, log-probs included, whatever else is in the
    batch: a run depends on its seed and not on timing. This holds to the bit where the processor computes each
    row of a matrix product alike (`backends.is_batch_invariant`); elsewhere a draw within rounding of the
    border between two tokens may differ, about one token in a million.

    Requests are served under the weights that they find. Change weights between requests as you like; while
    some may be under way, do it within `updating()`.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        context: int | None = None,
        max_batch: int = 256,
        cache_bytes: int = 2 << 30,
        threads: int | None = None,
        lanes: int | None = None,
        closing_tokens: Sequence[int] | None = None,
        parse_special_tokens: bool = False,
        backend: str | None = None,
    ) -> None:
        """
        Args:
            model: a transformers causal LM, as it is: device, precision and parameters stay the owner's.
            context: the most tokens of a prompt and its completion; by default what the model was made for.
            cache_bytes: about the limit of what conversations leave behind, and again of the present batch.
                A conversation that had to go costs its recomputation.
            threads: of one matrix product on a CPU. By default torch's number, but 1 for small models, whose
                products end before a second thread of a busy machine has woken up.
            lanes: batches computed side by side. By default 1, but 2 for small models where torch may use
                more than one thread. The limits above are divided among them.
            closing_tokens: end a completion; by default those of the model's generation settings.
            parse_special_tokens: read names of special tokens in prompts as such tokens, as chat templates
                want it. Off, they are text, and no state of an environment can end a turn.
            backend: ``lean``, ``hosted`` or ``plain`` only; by default the first that agrees with the model.
        """
        self._model = model
        self._tokenizer = tokenizer
        made_for = getattr(model.config, "max_position_embeddings", None) or _UNLIMITED_POSITIONS
        if closing_tokens is None:
            closing_tokens = _closing_tokens(model, tokenizer)
        self._wanted = backend
        self.backend, chosen = choose_backend(model, only=backend)
        small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
        allowed = torch.get_num_threads() if next(model.parameters()).device.type == "cpu" else 1
        count = lanes or (min(2, allowed) if small else 1)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._look_up_parameters()
        self._served: dict[Engine, list[int]] = {}

        def lane(backend: Backend, tokenizer: Any) -> Worker:
            engine = Engine(
                backend,
                TextCodec(tokenizer, parse_special_tokens=parse_special_tokens),
                positions=min(made_for, context or made_for),
                closing=closing_tokens,
                max_batch=max(1, max_batch // count),
                cache_bytes=cache_bytes // count,
                fingerprint=self._fingerprint,
            )
            self._served[engine] = [id(parameter) for parameter in self._parameters]
            return Worker(engine, threads=threads or (1 if small else allowed), restart=self._restart)

        more = [  # a tokenizer serves one thread at a time
            lane(choose_backend(model, only=self.backend)[1], copy.deepcopy(tokenizer))
            for _ in range(count - 1)
        ]
        self._lanes = Workers([lane(chosen, tokenizer), *more], enough=_ENOUGH)
        self._closed = False

    @classmethod
    def load(cls, source: str | Path, *, device: str | None = None, **settings: Any) -> LocalLanguageModel:
        """Opens a folder, or ``hf:NAME_OR_PATH`` as transformers finds it. On a GPU if there is one.

        Single precision on a CPU, where halves are many times slower; on a GPU bfloat16 if it has it, else
        float16.

        Raises:
            ConfigError: there is no such model, or it cannot be read.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        name = str(source).removeprefix(PREFIX)
        if not str(source).startswith(PREFIX) and not Path(name).is_dir():
            raise ConfigError(f"expected a model's folder or hf:NAME, got {str(source)!r}")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        half = torch.bfloat16 if place.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16
        try:
            tokenizer = AutoTokenizer.from_pretrained(name)
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32 if place.type == "cpu" else half
            )
        except Exception as error:  # files of others fail in many ways
            raise ConfigError(f"cannot read a language model from {str(source)!r}: {error}") from error
        model.to(place)  # type: ignore[arg-type]
        return cls(model, tokenizer, **settings)

    @property
    def model(self) -> Any:
        return self._model

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def meter(self) -> Meter:
        """Of all lanes together."""
        meters = [lane.engine.meter for lane in self._lanes.all]
        return Meter(**{each.name: sum(getattr(m, each.name) for m in meters) for each in fields(Meter)})

    async def complete(self, request: CompletionRequest) -> Completion:
        """
        Raises:
            ConfigError: the request asks for something that no model could give.
            EpisodeFailedError: the prompt is longer than the model reads (`budget`), its forward pass failed
                (`crashed`), or the model is closed (`server_down`).
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        ticket = PendingRequest(with_system(request))
        ticket.waiter = loop.create_future()
        lane = self._lanes.of(request.conversation)
        lane.put(ticket)
        lane.under_way += 1
        loop.call_soon(lane.wake)
        try:
            return await ticket.waiter  # type: ignore[no-any-return]
        finally:
            ticket.cancelled = True
            lane.under_way -= 1

    def forget(self, conversation: str) -> None:
        """A conversation is over: frees what it left behind."""
        self._lanes.forget(conversation)

    def weights_changed(self) -> None:
        """Drops everything remembered under the old weights.

        Optimiser steps are noticed without this; parameters or modules that were replaced (adapters) are not.
        """
        for lane in self._lanes.all:
            lane.expire()

    @contextmanager
    def updating(self) -> Iterator[None]:
        """For changing weights while requests are under way: between two steps, and noticed at once."""
        with ExitStack() as stack:
            for lane in self._lanes.all:
                stack.enter_context(lane.held())
            yield

    async def aclose(self) -> None:
        """Ends the workers; whoever still waits gets an error. May be called twice."""
        self._closed = True
        await asyncio.gather(*(lane.aclose() for lane in self._lanes.all))

    def _check(self, request: CompletionRequest) -> None:
        ids = request.prompt_token_ids
        problem = None
        if self._closed:
            raise EpisodeFailedError(FailureKind.SERVER_DOWN, "this model is closed: open it again")
        if not 0 <= request.temperature < float("inf"):
            problem = f"a temperature of at least 0, got {request.temperature!r}"
        elif not 0 < request.top_p <= 1:
            problem = f"top_p above 0 and at most 1, got {request.top_p!r}"
        elif request.max_tokens < 1:
            problem = f"max_tokens of at least 1, got {request.max_tokens!r}"
        elif "" in request.stop:
            problem = "stop strings with text, got an empty one"
        elif request.choices is not None and not request.choices:
            problem = "at least one choice, got none"
        elif ids is not None and not (ids and min(ids) >= 0 and max(ids) < self._vocabulary):
            problem = f"prompt tokens from 0 to {self._vocabulary - 1} and at least one, got {ids!r:.200}"
        if problem:
            raise ConfigError(f"expected {problem}")

    def _fingerprint(self) -> object:
        """Changes with every optimiser step: counters, addresses, and a few numbers for `.data` edits."""
        numbers = torch.stack(
            [parameter.detach().flatten()[-1].float() for parameter in self._probed]
        ).tolist()
        versions = [parameter._version for parameter in self._trained]
        return versions, [parameter.data_ptr() for parameter in self._trained], numbers

    def _look_up_parameters(self) -> None:
        self._parameters = parameters = list(self._model.parameters())
        self._trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
        self._probed = self._trained[:: max(1, len(self._trained) // _PROBES)]

    def _restart(self, engine: Engine) -> None:
        self._look_up_parameters()
        chosen, known = None, [id(parameter) for parameter in self._parameters]
        if known != self._served[engine]:  # adapters, say
            self.backend, chosen = choose_backend(self._model, only=self._wanted)
            self._served[engine] = known
        engine.restart(chosen)


def with_system(request: CompletionRequest) -> CompletionRequest:
    """The same, with its instructions and earlier turns as the beginning of the prompt."""
    if not request.system and not request.turns:
        return request
    before = [request.system] if request.system else []
    before += [text for turn in request.turns for text in turn]
    return replace(request, prompt="\n\n".join([*before, request.prompt]), system="", turns=())


def _closing_tokens(model: Any, tokenizer: Any) -> list[int]:
    found: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += [] if ids is None else ids if isinstance(ids, list) else [ids]
    return list(dict.fromkeys(found))
