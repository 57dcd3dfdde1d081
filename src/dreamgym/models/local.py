"""A language model in this process: any Hugging Face causal LM behind the role `protocols.LanguageModel`.

Coroutines ask one by one; one worker thread computes for all of them at once and leaves the event loop free.
The weights are the ones given, not a copy: after an optimiser's step the next completion comes from the new
ones.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError
from dreamgym.models.backends import choose_backend
from dreamgym.models.engine import Engine, Meter, Settled, Ticket
from dreamgym.models.text import TextCodec
from dreamgym.types import Completion, CompletionRequest, FailureKind

PREFIX = "hf:"
_UNLIMITED_POSITIONS = 8192
"""For models that name no limit of their own."""
_SMALL = 16_000_000
_PROBES = 8


class LocalLanguageModel:
    """Batched generation with conversations that go on where they stopped.

    Log-probs of a completion are those of the model itself, at temperature 1 and over the whole vocabulary,
    whatever temperature, top-p or choices the tokens were drawn under: what a learner's forward pass gives
    for these tokens.

    The same request with the same seed gives the same completion whatever else is in the batch, but for draws
    that fall within rounding of the border between two tokens (about one token in a million in single
    precision).

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
            closing_tokens: end a completion; by default those of the model's generation settings.
            parse_special_tokens: read names of special tokens in prompts as such tokens, as chat templates
                want it. Off, they are text, and no state of an environment can end a turn.
            backend: ``lean``, ``hosted`` or ``plain`` only; by default the first that agrees with the model.
        """
        self._model = model
        self._tokenizer = tokenizer
        self._codec = TextCodec(tokenizer, parse_special_tokens=parse_special_tokens)
        made_for = getattr(model.config, "max_position_embeddings", None) or _UNLIMITED_POSITIONS
        if closing_tokens is None:
            closing_tokens = _closing_tokens(model, tokenizer)
        self._wanted = backend
        self.backend, chosen = choose_backend(model, only=backend)
        small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL
        self._threads = threads or (1 if small else torch.get_num_threads())
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._look_up_parameters()
        self._engine = Engine(
            chosen,
            self._codec,
            positions=min(made_for, context or made_for),
            closing=closing_tokens,
            max_batch=max_batch,
            cache_bytes=cache_bytes,
            fingerprint=self._fingerprint,
        )
        self._inbox: deque[Ticket | Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._weights = threading.Lock()
        self._worker: ThreadPoolExecutor | None = None
        self._working = False
        self._closed = False
        self._stale = False

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
        return self._engine.meter

    async def complete(self, request: CompletionRequest) -> Completion:
        """
        Raises:
            ConfigError: the request asks for something that no model could give.
            EpisodeFailedError: the prompt is longer than the model reads (`budget`), its forward pass failed
                (`crashed`), or the model is closed (`server_down`).
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        ticket = Ticket(with_system(request))
        ticket.waiter = loop.create_future()
        # Not at once: whoever else is ready now may come along.
        self._inbox.append(ticket)
        loop.call_soon(self._wake)
        try:
            return await ticket.waiter  # type: ignore[no-any-return]
        finally:
            ticket.cancelled = True

    def forget(self, conversation: str) -> None:
        """A conversation is over: frees what it left behind."""
        self._tell(lambda: self._engine.forget(conversation))

    def weights_changed(self) -> None:
        """Drops everything remembered under the old weights.

        Optimiser steps are noticed without this; parameters or modules that were replaced (adapters) are not.
        """
        self._stale = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """For changing weights while requests are under way: between two steps, and noticed at once."""
        with self._weights:
            yield
            self._stale = True

    async def aclose(self) -> None:
        """Ends the worker; whoever still waits gets an error. May be called twice."""
        if not self._closed:
            self._tell(lambda: None)
        self._closed = True
        if self._worker is not None:
            await asyncio.to_thread(self._worker.shutdown)

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

    def _restart(self) -> None:
        known = [id(parameter) for parameter in self._parameters]
        self._look_up_parameters()
        chosen = None
        if known != [id(parameter) for parameter in self._parameters]:  # adapters, say
            self.backend, chosen = choose_backend(self._model, only=self._wanted)
        self._engine.restart(chosen)
        self._stale = False

    def _tell(self, message: Callable[[], None]) -> None:
        if not self._closed:
            self._inbox.append(message)
            self._wake()

    def _wake(self) -> None:
        with self._lock:
            if self._working or not self._inbox:
                return
            if self._worker is None:
                # torch counts threads per thread: the owner of the event loop keeps its own number.
                self._worker = ThreadPoolExecutor(
                    1, "dreamgym-model", initializer=torch.set_num_threads, initargs=(self._threads,)
                )
            self._working = True
        self._worker.submit(self._work)

    def _work(self) -> None:
        """In the worker's thread: until nobody waits."""
        while True:
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, Ticket):
                    self._engine.take(item)
                else:
                    item()
            if self._closed:
                gone = EpisodeFailedError(FailureKind.SERVER_DOWN, "the model was closed before it answered")
                _deliver(self._engine.abandon(gone))
            with self._lock:
                if self._engine.idle and not self._inbox:
                    self._working = False
                    return
            try:
                with self._weights:
                    if self._stale:
                        self._restart()
                    settled = self._engine.step()
            except Exception as error:  # a bug of ours; nobody may wait for ever
                broken = EpisodeFailedError(FailureKind.CRASHED, f"{type(error).__name__}: {error}")
                settled = self._engine.abandon(broken)
            _deliver(settled)


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


def _deliver(settled: Sequence[Settled]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Settled]] = {}
    for ticket, answer in settled:
        by_loop.setdefault(ticket.waiter.get_loop(), []).append((ticket, answer))
    for loop, answers in by_loop.items():
        with suppress(RuntimeError):  # a loop that has closed: nobody waits there
            loop.call_soon_threadsafe(_settle, answers)


def _settle(answers: Sequence[Settled]) -> None:
    for ticket, answer in answers:
        future = ticket.waiter
        if future.done():
            continue
        if isinstance(answer, DreamGymError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
