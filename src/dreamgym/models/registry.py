"""Opens language models by name: ``hf:``, ``endpoint:`` and ``openai:``.

Each name is opened once per command: all users of an endpoint share its rate limits, and all endpoints of a
run share its budget.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Self

from dreamgym.config import HF_PREFIX, Config, EndpointConfig, nearest_name
from dreamgym.errors import ConfigError
from dreamgym.models.endpoint.cache import ReplyCache
from dreamgym.models.endpoint.client import Endpoint, EndpointLanguageModel, check_settings
from dreamgym.models.usage import FILE, Usage
from dreamgym.protocols import LanguageModel

if TYPE_CHECKING:
    from dreamgym.models.local.language_model import LocalLanguageModel

ENDPOINT, OPENAI = "endpoint:", "openai:"
REMOTE = (ENDPOINT, OPENAI)
NAMES = "hf:NAME_OR_PATH, endpoint:NAME, endpoint:MODEL@URL or openai:MODEL"
"""For help texts and messages."""
_BASE_URL_VARIABLE, _BASE_URL = "OPENAI_BASE_URL", "https://api.openai.com/v1"
_KEY_VARIABLE = "OPENAI_API_KEY"
"""For ``openai:MODEL``: the variables of the official client."""
CACHE = "replies.sqlite"
_DEFAULT_CONTEXT = 8192
"""For local models that declare no limit."""


def names_language_model(name: str) -> bool:
    """Whether the name has the form of a language model's name (rather than of a built-in choice).

    >>> names_language_model("hf:models/chat"), names_language_model("endpoint:strong")
    (True, True)
    >>> names_language_model("rules")
    False
    """
    return any(name.startswith(prefix) and name != prefix for prefix in (HF_PREFIX, *REMOTE))


def find_endpoint(name: str, endpoints: Mapping[str, EndpointConfig]) -> EndpointConfig:
    """Settings of ``endpoint:NAME``, ``endpoint:MODEL@URL`` or ``openai:MODEL``; ``endpoint:`` is optional.

    >>> find_endpoint("endpoint:qwen@http://localhost:8000", {}).model
    'qwen'
    >>> find_endpoint("openai:qwen@http://localhost:8000", {}).url
    'http://localhost:8000'
    """
    if name.startswith(OPENAI) and "@" not in name:
        url = os.environ.get(_BASE_URL_VARIABLE) or _BASE_URL
        return EndpointConfig(url=url, model=endpoint_name(name), api_key_env=_KEY_VARIABLE)
    name = endpoint_name(name)
    if name in endpoints:
        return endpoints[name]
    model, at, url = name.rpartition("@")
    if at and model and "://" in url:
        return EndpointConfig(url=url, model=model)
    hint = nearest_name(name, list(endpoints)) if endpoints else ""
    raise ConfigError(
        f"no endpoint {name!r}{hint}; expected a section [endpoints.{name or 'NAME'}] with url and model in "
        "the configuration (--config), or endpoint:MODEL@URL"
    )


def endpoint_name(name: str) -> str:
    """An endpoint's name without its prefix."""
    return name.removeprefix(ENDPOINT).removeprefix(OPENAI)


def with_base_url(name: str, base_url: str | None) -> str:
    """Add the URL of ``--base-url`` to a model's name.

    >>> with_base_url("openai:qwen", "http://localhost:8000/v1")
    'endpoint:qwen@http://localhost:8000/v1'
    """
    if base_url is None:
        return name
    model = endpoint_name(name)
    if name.startswith(HF_PREFIX) or "@" in model:
        raise ConfigError(f"--base-url {base_url}: expected openai:MODEL with it, got {name!r}")
    return f"{ENDPOINT}{model}@{base_url}"


def check_language_model(name: str, config: Config) -> None:
    """Check a language model's name and its endpoint's settings without a request."""
    if not names_language_model(name):
        raise ConfigError(f"expected {NAMES}, got {name!r}")
    if name.startswith(REMOTE):
        settings = find_endpoint(name, config.endpoints)
        check_settings(endpoint_name(name), settings, in_money=config.budget.money is not None)


class LanguageModels:
    """The open language models of one command. Close it in the event loop that used it."""

    def __init__(self, config: Config, *, folder: Path | None = None, cache: Path | None = None) -> None:
        """`folder` of the run holds usage and reply cache; a resumed run continues both. A worker of the run
        has only its `cache`."""
        self._config = config
        self._default_cache = folder / CACHE if cache is None and folder is not None else cache
        self.usage = Usage(config.budget, folder / FILE if folder is not None else None)
        self._endpoints: dict[str, Endpoint] = {}
        self._caches: dict[Path, ReplyCache] = {}
        self._local: dict[str, LocalLanguageModel] = {}

    def open(self, name: str, *, role: str) -> LanguageModel:
        """Usage is counted per `role` of the caller (annotator, judge, …)."""
        check_language_model(name, self._config)
        if name.startswith(REMOTE):
            return EndpointLanguageModel(self.endpoint(name), role=role)
        from dreamgym.models.local.chat_template import with_chat_template

        return with_chat_template(self._load(name))

    def endpoint(self, name: str) -> Endpoint:
        settings = find_endpoint(name, self._config.endpoints)
        name = endpoint_name(name)
        if name not in self._endpoints:
            self._endpoints[name] = Endpoint(name, settings, usage=self.usage, cache=self._cache(settings))
        return self._endpoints[name]

    async def check_reachable(self) -> None:
        """Wait `start_seconds` for each opened endpoint, so that a run fails before long work starts."""
        await asyncio.gather(*(endpoint.check_reachable() for endpoint in self._endpoints.values()))

    def context_length(self, name: str) -> int:
        """The model's limit for prompt and reply together, in tokens."""
        if name.startswith(REMOTE):
            return find_endpoint(name, self._config.endpoints).context_length
        limit = getattr(self._load(name).model.config, "max_position_embeddings", None)
        return limit or _DEFAULT_CONTEXT

    async def aclose(self) -> None:
        """Close all models; idempotent."""
        for endpoint in self._endpoints.values():
            await endpoint.aclose()
        for model in self._local.values():
            await model.aclose()
        for cache in self._caches.values():
            cache.close()
        self.usage.save()
        self._endpoints, self._local, self._caches = {}, {}, {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _cache(self, settings: EndpointConfig) -> ReplyCache | None:
        path = settings.cache or self._default_cache
        if path is None:
            return None
        if path not in self._caches:
            self._caches[path] = ReplyCache(path)
        return self._caches[path]

    def _load(self, name: str) -> LocalLanguageModel:
        if name not in self._local:
            from dreamgym.models.hub import check_weights
            from dreamgym.models.local.language_model import LocalLanguageModel

            check_weights(name.removeprefix(HF_PREFIX))
            self._local[name] = LocalLanguageModel.load(name)
        return self._local[name]
