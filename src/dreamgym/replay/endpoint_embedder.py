"""Embeddings from an OpenAI-compatible ``/v1/embeddings`` endpoint.

A reply is checked before it becomes a key (as many vectors as texts, one length, finite numbers): a store
that holds one wrong vector answers wrongly for ever.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence
from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field, ValidationError

from dreamgym.errors import ConfigError, EndpointError, MissingExtraError
from dreamgym.protocols import Keys
from dreamgym.replay.embedders import combine, distinct_texts

API_KEY = "DREAMGYM_EMBEDDINGS_API_KEY"
"""The environment variable that holds the secret, if the endpoint wants one."""

_WORTH_ANOTHER_TRY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_LONGEST_PAUSE = 30.0

_Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Vector(BaseModel):
    index: int
    embedding: Annotated[list[_Finite], Field(min_length=1)]


class _Reply(BaseModel):
    data: list[_Vector]


class EndpointEmbedder:
    """Asks `model` at `url` for vectors; ``/v1/embeddings`` is added to a bare address.

    One text is embedded on construction, to learn the dimension and to fail before a run starts, not within
    it. The address is no part of the identity: the same model may move to another host.
    """

    def __init__(
        self,
        model: str,
        url: str,
        *,
        batch: int = 128,
        attempts: int = 5,
        timeout_seconds: float = 60.0,
        first_pause: float = 0.5,
    ) -> None:
        try:
            import httpx
        except ImportError:
            raise MissingExtraError("the endpoint embedder", "endpoint") from None
        self._model = model
        self._address = _checked_address(url)
        self._batch = batch
        self._attempts = attempts
        self._first_pause = first_pause
        self._client = httpx.Client(timeout=timeout_seconds)
        self._transport_error = httpx.TransportError
        self._dimension: int | None = None
        self._dimension = self._ask(["probe"]).shape[1]

    @property
    def identity(self) -> str:
        return f"endpoint-1:{self._model}:{self._dimension}"

    @property
    def dimension(self) -> int:
        return self._dimension or 0

    async def embed(self, pairs: Sequence[tuple[str, str]]) -> Keys:
        return await asyncio.to_thread(self.keys, pairs)

    def keys(self, pairs: Sequence[tuple[str, str]]) -> Keys:
        """What `embed` returns, for callers that are not async."""
        texts = distinct_texts(pairs)
        if not texts:
            return np.zeros((0, self.dimension), np.float32)
        starts = range(0, len(texts), self._batch)
        vectors = np.concatenate([self._ask(texts[start : start + self._batch]) for start in starts])
        return combine(pairs, texts, vectors)

    def _ask(self, texts: Sequence[str]) -> npt.NDArray[np.float64]:
        problem = ""
        for attempt in range(self._attempts):
            pause = self._first_pause * 2**attempt * random.uniform(0.5, 1.0)
            try:
                reply = self._client.post(
                    self._address.geturl(),
                    headers=_authorisation(),
                    json={"model": self._model, "input": list(texts), "encoding_format": "float"},
                )
            except self._transport_error as error:
                problem = type(error).__name__  # its text may quote the address with everything in it
            else:
                if reply.status_code == 200:
                    return self._vectors(reply.content, len(texts))
                problem = _refusal(reply.status_code, reply.text)
                if reply.status_code not in _WORTH_ANOTHER_TRY:
                    break
                pause = max(pause, _asked_pause(reply.headers.get("retry-after")))
            if attempt + 1 < self._attempts:
                time.sleep(min(pause, _LONGEST_PAUSE))
        raise EndpointError(
            f"expected embeddings by {self._model!r} from {self._shown}, got {problem}; "
            f"check the address, the model's name and ${API_KEY}"
        )

    def _vectors(self, body: bytes, count: int) -> npt.NDArray[np.float64]:
        """The reply's vectors in the order of the texts, whatever order they came in."""
        try:
            vectors = sorted(_Reply.model_validate_json(body).data, key=lambda vector: vector.index)
        except ValidationError as error:
            raise EndpointError(
                f"expected embeddings from {self._shown}, got a malformed reply: "
                f"{error.errors(include_input=False)[0]['msg']}"
            ) from None
        dimensions = {len(vector.embedding) for vector in vectors}
        expected = {self._dimension} if self._dimension else dimensions
        if [vector.index for vector in vectors] != list(range(count)) or dimensions != expected:
            raise EndpointError(
                f"expected {count} embeddings of dimension {self._dimension} from {self._shown}, "
                f"got {len(vectors)} of dimensions {sorted(dimensions)}"
            )
        return np.array([vector.embedding for vector in vectors])

    @property
    def _shown(self) -> str:
        return f"{self._address.scheme}://{self._address.netloc}{self._address.path}"


def _checked_address(url: str) -> SplitResult:
    address = urlsplit(url if "//" in url else f"http://{url}")
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"expected an http(s) address for the embeddings endpoint, got {url!r}")
    if "@" in address.netloc:
        raise ConfigError(f"expected an address without a password in it; put the secret in ${API_KEY}")
    path = address.path.rstrip("/")
    if not path.endswith("/embeddings"):
        path += "/embeddings" if path else "/v1/embeddings"
    return address._replace(path=path)


def _authorisation() -> dict[str, str]:
    key = os.environ.get(API_KEY, "").strip()
    return {"Authorization": f"Bearer {key}"} if key else {}


def _refusal(status: int, body: str) -> str:
    if status in (401, 403):
        return f"status {status}: the key was refused"  # such bodies like to quote the key
    key = os.environ.get(API_KEY, "").strip()
    shown = body.replace(key, "…") if key else body
    return f"status {status}: {shown[:200]!r}"


def _asked_pause(header: str | None) -> float:
    # Anything but plain seconds (a date, nonsense) is ignored: our own pause will do.
    return float(header) if header and header.isdecimal() else 0.0
