"""A language model in this process: any Hugging Face causal LM behind the role `protocols.LanguageModel`.

Coroutines await single completions; worker threads compute them in batches and leave the event loop free. The
model uses the given weights, not a copy: after an optimizer step the next completion comes from the new ones.

A step of a small model is a sequence of short operations with Python between them. More threads per operation
do not help; a second worker does. Each worker has its own conversations; workers share only the weights.
Where torch may use only one thread, the event loop computes the batches itself.
"""

from __future__ import annotations

import asyncio
import copy
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from dreamgym.config import HF_PREFIX
from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError
from dreamgym.models.local.backends import Backend, choose_backend
from dreamgym.models.local.scheduler import Finished, PendingRequest, Scheduler, SchedulerStats
from dreamgym.models.local.tokens import TextCodec
from dreamgym.types import Completion, CompletionRequest, FailureKind

_UNLIMITED_POSITIONS = 8192
"""For models that declare no limit."""
_SMALL_MODEL_PARAMETERS = 16_000_000
_PROBES = 8
_CONVERSATIONS_PER_WORKER = 32
"""Conversations that fill one worker: with fewer, two workers are slower than one."""


class Worker:
    """One scheduler and the thread that runs it, fed from any event loop."""

    def __init__(self, scheduler: Scheduler, *, threads: int, restart: Callable[[Scheduler], None]) -> None:
        """
        Args:
            threads: of one matrix product.
            restart: called before the next step once weights have changed.
        """
        self.scheduler = scheduler
        self.inbox: deque[PendingRequest | Callable[[], None]] = deque()
        """Requests, and functions to call between two steps. After adding one, `wake` the worker."""
        self.conversations = 0
        """Conversations assigned to this worker."""
        self.running = 0
        self.stale = False
        """Weights have changed: clear caches before the next step."""
        self.executor: ThreadPoolExecutor | None = None
        self._threads = threads
        self._restart = restart
        self._lock = threading.Lock()
        self._weights = threading.Lock()
        self._working = False
        self._closed = False

    def call(self, message: Callable[[], None]) -> None:
        """Run a function in the worker's thread between two steps."""
        if not self._closed:
            self.inbox.append(message)
            self.wake()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block steps inside the context; clear caches afterwards."""
        with self._weights:
            yield
            self.stale = True

    async def aclose(self) -> None:
        self.call(lambda: None)
        self._closed = True
        if self.executor is not None:
            await asyncio.to_thread(self.executor.shutdown)

    def wake(self) -> None:
        with self._lock:
            if self._working or not self.inbox:
                return
            if self.executor is None:
                # torch.set_num_threads is per thread: the event loop's thread keeps its own setting.
                self.executor = ThreadPoolExecutor(
                    1, "dreamgym-model", initializer=torch.set_num_threads, initargs=(self._threads,)
                )
            self._working = True
        self.executor.submit(self._work)

    def _work(self) -> None:
        """In the worker's thread: run until no request is left."""
        while self._step():
            pass

    def _step(self) -> bool:
        """Take new requests and compute a token for each row; returns whether there is more to do."""
        while self.inbox:
            item = self.inbox.popleft()
            if isinstance(item, PendingRequest):
                self.scheduler.submit(item)
            else:
                item()
        if self._closed:
            closed = EpisodeFailedError(FailureKind.SERVER_DOWN, "the model was closed")
            _deliver(self.scheduler.fail_all(closed))
        with self._lock:
            if self.scheduler.idle and not self.inbox:
                self._working = False
                return False
        try:
            with self._weights:
                if self.stale:
                    self._restart(self.scheduler)
                    self.stale = False
                finished = self.scheduler.step()
        except Exception as error:  # a bug here must not leave callers waiting
            broken = EpisodeFailedError(FailureKind.CRASHED, f"{type(error).__name__}: {error}")
            finished = self.scheduler.fail_all(broken)
        _deliver(finished)
        return True


class LoopWorker(Worker):
    """One scheduler that an event loop runs, blocked for the time of a step.

    The models of a process then take turns: the rows that one of them finishes are all in the next batch of
    the other. Threads that share a core divide the rows into smaller batches.
    """

    _loop: asyncio.AbstractEventLoop | None = None

    def wake(self) -> None:
        loop = _running_loop()
        with self._lock:
            abandoned = self._loop is not None and self._loop.is_closed()
            if loop is None or not self.inbox or (self._working and not abandoned):
                return  # without a loop, the next request takes it along
            self._working, self._loop = True, loop
        loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._step():
            loop.call_soon(self._run, loop)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _deliver(finished: Sequence[Finished]) -> None:
    here = _running_loop()
    for loop in {pending.waiter.get_loop() for pending, _ in finished}:
        if loop is here:
            _settle(here, finished)
            continue
        with suppress(RuntimeError):  # the loop is closed: its callers are gone
            loop.call_soon_threadsafe(_settle, loop, finished)


def _settle(loop: asyncio.AbstractEventLoop | None, finished: Sequence[Finished]) -> None:
    for pending, answer in finished:
        future = pending.waiter
        if future.get_loop() is not loop or future.done():
            continue
        if isinstance(answer, DreamGymError):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class LocalLanguageModel:
    """Batched generation that reuses the KV cache of growing conversations.

    Log-probs of a completion are those of the model at temperature 1 over the whole vocabulary, whatever
    temperature, top-p or choices the tokens were sampled with: what a learner's forward pass computes.

    The same request with the same seed gives the same completion, log-probs included, whatever else is in the
    batch: a run depends on its seed and not on timing. This holds to the bit where the processor rounds each
    row of a matrix product alike (`backends.is_batch_invariant`). Elsewhere a draw within rounding of the
    border between two tokens may differ: about one token in a million.

    Weights may change between requests. While requests may be running, change them inside `updating()`.
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
        workers: int | None = None,
        stop_token_ids: Sequence[int] | None = None,
        parse_special_tokens: bool = False,
        backend: str | None = None,
    ) -> None:
        """
        Args:
            model: a transformers causal LM; its device, precision and parameters are not changed.
            context: maximum tokens of a prompt and its completion; by default the model's own limit.
            cache_bytes: approximate limit of the prefix cache, and again of the running batch. An evicted
                conversation costs its recomputation.
            threads: of one matrix product on a CPU. By default torch's setting, but 1 for small models, whose
                products are too short for a second thread.
            workers: batches computed in parallel, each by a thread of its own; 0: one batch, in the event
                loop's thread. By default 1, but for small models on a CPU 2 where torch may use more than one
                thread, else 0. The limits above are divided among them.
            stop_token_ids: end a completion; by default those of the model's generation config.
            parse_special_tokens: parse names of special tokens in prompts, as chat templates need. Off, they
                are plain text, and no state of an environment can end a turn.
            backend: ``fast``, ``hf`` or ``plain``; by default the first whose logits match the model's.
        """
        self._model = model
        self._tokenizer = tokenizer
        model_limit = getattr(model.config, "max_position_embeddings", None) or _UNLIMITED_POSITIONS
        if stop_token_ids is None:
            stop_token_ids = _stop_token_ids(model, tokenizer)
        self._wanted = backend
        self.backend, chosen = choose_backend(model, only=backend)
        small = sum(parameter.numel() for parameter in model.parameters()) < _SMALL_MODEL_PARAMETERS
        on_cpu = next(model.parameters()).device.type == "cpu"
        allowed = torch.get_num_threads() if on_cpu else 1
        if workers is None and small and on_cpu:
            workers = 2 if allowed > 1 else 0 if threads is None else 1
        kind = LoopWorker if workers == 0 else Worker
        count, threads = max(1, workers or 1), threads or (1 if small else allowed)
        self._vocabulary = model.get_input_embeddings().weight.shape[0]
        self._look_up_parameters()
        self._served: dict[Scheduler, list[int]] = {}

        def worker(backend: Backend, tokenizer: Any) -> Worker:
            scheduler = Scheduler(
                backend,
                TextCodec(tokenizer, parse_special_tokens=parse_special_tokens),
                positions=min(model_limit, context or model_limit),
                stop_token_ids=stop_token_ids,
                max_batch=max(1, max_batch // count),
                cache_bytes=cache_bytes // count,
                fingerprint=self._fingerprint,
            )
            self._served[scheduler] = [id(parameter) for parameter in self._parameters]
            return kind(scheduler, threads=threads, restart=self._restart)

        more = [  # tokenizers are not thread-safe
            worker(choose_backend(model, only=self.backend)[1], copy.deepcopy(tokenizer))
            for _ in range(count - 1)
        ]
        self._workers = (worker(chosen, tokenizer), *more)
        self._worker_of: dict[str, Worker] = {}
        self._closed = False

    @classmethod
    def load(cls, source: str | Path, *, device: str | None = None, **settings: Any) -> LocalLanguageModel:
        """Load a folder, or ``hf:NAME_OR_PATH`` as transformers finds it. On a GPU if there is one.

        float32 on a CPU, where half precision is many times slower; on a GPU bfloat16 if supported, else
        float16.

        Raises:
            ConfigError: there is no such model, or it cannot be read.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        name = str(source).removeprefix(HF_PREFIX)
        if not str(source).startswith(HF_PREFIX) and not Path(name).is_dir():
            raise ConfigError(f"expected a model's folder or hf:NAME, got {str(source)!r}")
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        half = torch.bfloat16 if place.type == "cuda" and torch.cuda.is_bf16_supported() else torch.float16
        try:
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                name, dtype=torch.float32 if place.type == "cpu" else half, trust_remote_code=False
            )
        except Exception as error:  # unreadable model files raise many kinds of errors
            raise ConfigError(f"cannot read a language model from {str(source)!r}: {error}") from error
        model.to(place)
        return cls(model, tokenizer, **settings)

    @property
    def model(self) -> Any:
        return self._model

    @property
    def tokenizer(self) -> Any:
        return self._tokenizer

    @property
    def stats(self) -> SchedulerStats:
        """Summed over all workers."""
        stats = [worker.scheduler.stats for worker in self._workers]
        names = [field.name for field in fields(SchedulerStats)]
        return SchedulerStats(**{name: sum(getattr(each, name) for each in stats) for name in names})

    async def complete(self, request: CompletionRequest) -> Completion:
        """
        Raises:
            ConfigError: the request is invalid for any model.
            EpisodeFailedError: the prompt is longer than the context (`budget`), the forward pass failed
                (`crashed`), or the model is closed (`server_down`).
        """
        self._check(request)
        loop = asyncio.get_running_loop()
        pending = PendingRequest(with_system(request))
        pending.waiter = loop.create_future()
        worker = self._choose_worker(request.conversation)
        worker.inbox.append(pending)
        worker.running += 1
        loop.call_soon(worker.wake)  # so that requests of one loop iteration share a step
        try:
            return await pending.waiter  # type: ignore[no-any-return]
        finally:
            pending.cancelled = True
            worker.running -= 1

    def forget(self, conversation: str) -> None:
        """Free the caches of a conversation that is over."""
        worker = self._worker_of.pop(conversation, None)
        if worker is not None:
            worker.conversations -= 1
            worker.call(lambda: worker.scheduler.forget(conversation))

    def weights_changed(self) -> None:
        """Clear the caches after parameters or modules were replaced (adapters).

        Optimizer steps are detected without this.
        """
        for worker in self._workers:
            worker.stale = True

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Change weights between two steps while requests are running; caches are cleared afterwards."""
        with ExitStack() as stack:
            for worker in self._workers:
                stack.enter_context(worker.held())
            yield

    async def aclose(self) -> None:
        """Stop the workers; waiting requests get an error. May be called twice."""
        self._closed = True
        await asyncio.gather(*(worker.aclose() for worker in self._workers))

    def _choose_worker(self, conversation: str | None) -> Worker:
        """Known conversations stay; new ones go to the worker with the fewest, once the first is full."""
        if conversation is None:
            return self._least_loaded([worker.running for worker in self._workers])
        if conversation not in self._worker_of:
            worker = self._least_loaded([worker.conversations for worker in self._workers])
            worker.conversations += 1
            self._worker_of[conversation] = worker
        return self._worker_of[conversation]

    def _least_loaded(self, loads: list[int]) -> Worker:
        return self._workers[0 if loads[0] < _CONVERSATIONS_PER_WORKER else loads.index(min(loads))]

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
        """Changes with every optimizer step: version counters, addresses, a few values for `.data` edits."""
        numbers = torch.stack(
            [parameter.detach().flatten()[-1].float() for parameter in self._probed]
        ).tolist()
        versions = [parameter._version for parameter in self._trained]
        return versions, [parameter.data_ptr() for parameter in self._trained], numbers

    def _look_up_parameters(self) -> None:
        self._parameters = parameters = list(self._model.parameters())
        self._trained = [parameter for parameter in parameters if parameter.requires_grad] or parameters
        self._probed = self._trained[:: max(1, len(self._trained) // _PROBES)]

    def _restart(self, scheduler: Scheduler) -> None:
        self._look_up_parameters()
        chosen, known = None, [id(parameter) for parameter in self._parameters]
        if known != self._served[scheduler]:  # e.g. adapters were added
            self.backend, chosen = choose_backend(self._model, only=self._wanted)
            self._served[scheduler] = known
        scheduler.restart(chosen)


def with_system(request: CompletionRequest) -> CompletionRequest:
    """The same request with system message and earlier turns put before the prompt."""
    if not request.system and not request.turns:
        return request
    before = [request.system] if request.system else []
    before += [text for turn in request.turns for text in turn]
    return replace(request, prompt="\n\n".join([*before, request.prompt]), system="", turns=())


def _stop_token_ids(model: Any, tokenizer: Any) -> list[int]:
    found: list[int] = []
    for source in (getattr(model, "generation_config", None), model.config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found += [] if ids is None else ids if isinstance(ids, list) else [ids]
    return list(dict.fromkeys(found))
