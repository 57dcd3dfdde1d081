"""Embeddings from an OpenAI-compatible ``/v1/embeddings`` endpoint.

A reply is validated before it becomes a key (number of vectors, dimension, finite numbers): one wrong vector
in a store makes every later search wrong.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from dreamgym.errors import ConfigError, EndpointError
from dreamgym.http_client import HttpClient, RequestFailedError, retry_delay
from dreamgym.protocols import Keys
from dreamgym.replay.embedders import combine, distinct_texts

API_KEY = "DREAMGYM_EMBEDDINGS_API_KEY"
"""The environment variable that holds the API key, if the endpoint needs one."""
_MAX_DELAY = 30.0

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Vector(BaseModel):
    index: int
    embedding: Annotated[list[_Finite], Field(min_length=1)]


class _Reply(BaseModel):
    data: list[_Vector]


class EndpointEmbedder:
    """Requests vectors of `model` from `url`; ``/v1/embeddings`` is added to a bare address.

    One text is embedded on construction, to learn the dimension and to fail before a run starts. The address
    is not part of the identity: the same model may move to another host.
    """

    def __init__(
        self,
        model: str,
        url: str,
        *,
        batch: int = 128,
        max_attempts: int = 5,
        timeout_seconds: float = 60.0,
        backoff_seconds: float = 0.5,
    ) -> None:
        self._model = model
        self._url = _checked_url(url)
        self._batch = batch
        self._max_attempts = max_attempts
        self._timeout = timeout_seconds
        self._backoff = backoff_seconds
        self._client = HttpClient(self._url.geturl())
        # Its own event loop: one pool of connections for callers in any thread, async or not.
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        thread.start()
        weakref.finalize(self, _close, self._client, self._loop, thread, os.getpid())
        self._dimension: int | None = None
        self._dimension = self._submit(["probe"]).result().shape[1]

    @property
    def identity(self) -> str:
        return f"endpoint-1:{self._model}:{self._dimension}"

    @property
    def dimension(self) -> int:
        return self._dimension or 0

    async def embed(self, pairs: Sequence[tuple[str, str]]) -> Keys:
        texts = distinct_texts(pairs)
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        return combine(pairs, texts, await asyncio.wrap_future(self._submit(texts)))

    def _submit(self, texts: Sequence[str]) -> Future[npt.NDArray[np.float64]]:
        return asyncio.run_coroutine_threadsafe(self._vectors(texts), self._loop)

    async def _vectors(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        starts = range(0, len(texts), self._batch)
        return np.concatenate(
            [await self._embed_batch(texts[start : start + self._batch]) for start in starts]
        )

    async def _embed_batch(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        payload = {"model": self._model, "input": list(texts), "encoding_format": "float"}
        key = os.environ.get(API_KEY, "").strip()
        failures = 0
        while True:
            try:
                reply = await self._client.post(self._url.geturl(), payload, key=key, seconds=self._timeout)
                return self._checked_vectors(reply, len(texts))
            except RequestFailedError as error:
                failures += 1
                if not error.retry or failures >= self._max_attempts:
                    raise EndpointError(
                        f"expected embeddings by {self._model!r} from {self._url.geturl()}, got {error}; "
                        f"check the address, the model's name and ${API_KEY}"
                    ) from None
                delay = retry_delay(failures, error.retry_after, first=self._backoff)
                await asyncio.sleep(min(delay, _MAX_DELAY))

    def _checked_vectors(self, reply: Any, count: int) -> npt.NDArray[np.float64]:
        """The vectors in the order of the texts, whatever the order of the reply."""
        try:
            vectors = sorted(_Reply.model_validate(reply).data, key=lambda vector: vector.index)
        except ValidationError as error:
            raise EndpointError(
                f"expected embeddings from {self._url.geturl()}, got a malformed reply: "
                f"{error.errors(include_input=False)[0]['msg']}"
            ) from None
        dimensions = {len(vector.embedding) for vector in vectors}
        expected = {self._dimension} if self._dimension else dimensions
        if [vector.index for vector in vectors] != list(range(count)) or dimensions != expected:
            raise EndpointError(
                f"expected {count} embeddings of dimension {self._dimension} from {self._url.geturl()}, "
                f"got {len(vectors)} of dimensions {sorted(dimensions)}"
            )
        return np.array([vector.embedding for vector in vectors])


def _close(
    client: HttpClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread, process: int
) -> None:
    if os.getpid() != process:  # a fork has no thread that runs the loop
        return

    async def stop() -> None:
        await client.aclose()
        loop.stop()

    asyncio.run_coroutine_threadsafe(stop(), loop)
    if threading.current_thread() is not thread:
        thread.join(timeout=2)


def _checked_url(url: str) -> SplitResult:
    address = urlsplit(url if "//" in url else f"http://{url}")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"expected an http(s) address for the embeddings endpoint, got {url!r}")
    if "@" in address.netloc or address.query:
        raise ConfigError(f"expected an address without password or ?query; the key belongs in ${API_KEY}")
    path = address.path.rstrip("/")
    if not path.endswith("/embeddings"):
        path += "/embeddings" if path else "/v1/embeddings"
    return address._replace(path=path, fragment="")
