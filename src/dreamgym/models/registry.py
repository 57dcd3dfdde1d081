"""Language models by name: the one place that knows what ``hf:``, ``endpoint:`` and ``openai:`` mean.

What is named twice is opened once, so that all who ask one endpoint share its limits, and all endpoints of a
run its budget.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from dreamgym.config import Config, EndpointConfig, nearest_name
from dreamgym.errors import ConfigError
from dreamgym.models.endpoint.cache import ReplyCache
from dreamgym.models.endpoint.client import Endpoint, check_settings
from dreamgym.models.endpoint.language_model import EndpointLanguageModel
from dreamgym.models.usage import FILE, Spending
from dreamgym.protocols import LanguageModel

if TYPE_CHECKING:
    from dreamgym.models.local.language_model import LocalLanguageModel

LOCAL, ENDPOINT, OPENAI = "hf:", "endpoint:", "openai:"
REMOTE = (ENDPOINT, OPENAI)
NAMES = "hf:NAME_OR_PATH, endpoint:NAME, endpoint:MODEL@URL or openai:MODEL"
"""For help texts and messages."""
_ADDRESS_FROM, _ADDRESS = "OPENAI_BASE_URL", "https://api.openai.com/v1"
_KEY_FROM = "OPENAI_API_KEY"
"""Of ``openai:MODEL``, as the official client has it."""
CACHE = "replies.sqlite"
_UNTOLD_CONTEXT = 8192


def names_language_model(name: str) -> bool:
    """Whether this is the name of a language model, and not of something else that can be chosen.

    >>> names_language_model("hf:models/chat"), names_language_model("endpoint:strong")
    (True, True)
    >>> names_language_model("rules")
    False
    """
    return any(name.startswith(prefix) and name != prefix for prefix in (LOCAL, *REMOTE))


def find_endpoint(name: str, endpoints: Mapping[str, EndpointConfig]) -> EndpointConfig:
    """The settings behind ``endpoint:NAME``, ``endpoint:MODEL@URL`` (which both go without ``endpoint:``) or
    ``openai:MODEL``.

    >>> find_endpoint("endpoint:qwen@http://localhost:8000", {}).model
    'qwen'
    >>> find_endpoint("openai:qwen@http://localhost:8000", {}).url
    'http://localhost:8000'

    Raises:
        ConfigError: there is no such section.
    """
    if name.startswith(OPENAI) and "@" not in name:
        url = os.environ.get(_ADDRESS_FROM) or _ADDRESS
        return EndpointConfig(url=url, model=plain_name(name), key_from=_KEY_FROM)
    name = plain_name(name)
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


def plain_name(name: str) -> str:
    """An endpoint's name without what says that it is one."""
    return name.removeprefix(ENDPOINT).removeprefix(OPENAI)


def at_address(name: str, base_url: str | None) -> str:
    """A model's name with the address that was given beside it.

    >>> at_address("openai:qwen", "http://localhost:8000/v1")
    'endpoint:qwen@http://localhost:8000/v1'

    Raises:
        ConfigError: the name says already where it is, or that it is nowhere else.
    """
    if base_url is None:
        return name
    model = plain_name(name)
    if name.startswith(LOCAL) or "@" in model:
        raise ConfigError(f"--base-url {base_url}: expected openai:MODEL beside it, got {name!r}")
    return f"{ENDPOINT}{model}@{base_url}"


def check_named(name: str, config: Config) -> None:
    """Say before anything starts what would be wrong with a language model's name.

    Raises:
        ConfigError: it is none, or its endpoint is unknown or lacks its key.
    """
    if not names_language_model(name):
        raise ConfigError(f"expected {NAMES}, got {name!r}")
    if name.startswith(REMOTE):
        settings = find_endpoint(name, config.endpoints)
        check_settings(plain_name(name), settings, in_money=config.budget.money is not None)


class LanguageModels:
    """The language models of one command; close it where its event loop runs."""

    def __init__(self, config: Config, *, folder: Path | None = None) -> None:
        """
        Args:
            folder: of the run. What was spent and the cache of replies are kept there, and gone on with.
        """
        self._config = config
        self._folder = folder
        self.spending = Spending(config.budget, folder / FILE if folder is not None else None)
        self._endpoints: dict[str, Endpoint] = {}
        self._caches: dict[Path, ReplyCache] = {}
        self._local: dict[str, LocalLanguageModel] = {}

    def open(self, name: str, *, role: str) -> LanguageModel:
        """
        Args:
            role: who asks (annotator, judge, …): its cost is counted apart.

        Raises:
            ConfigError: there is no such model.
        """
        check_named(name, self._config)
        if name.startswith(REMOTE):
            return EndpointLanguageModel(self.endpoint(name), role=role)
        from dreamgym.models.local.chat_template import with_chat_template

        return with_chat_template(self._loaded(name))

    def endpoint(self, name: str) -> Endpoint:
        settings = find_endpoint(name, self._config.endpoints)
        name = plain_name(name)
        if name not in self._endpoints:
            self._endpoints[name] = Endpoint(
                name, settings, spending=self.spending, cache=self._cache(settings)
            )
        return self._endpoints[name]

    async def reach(self) -> None:
        """Say before long work starts that an endpoint which was opened is not there.

        Raises:
            EndpointError: one has not answered in its `start_seconds`.
        """
        await asyncio.gather(*(endpoint.reach() for endpoint in self._endpoints.values()))

    def context(self, name: str) -> int:
        """Tokens of a prompt and its reply that the model takes."""
        if name.startswith(REMOTE):
            return find_endpoint(name, self._config.endpoints).context
        made_for = getattr(self._loaded(name).model.config, "max_position_embeddings", None)
        return made_for or _UNTOLD_CONTEXT

    async def aclose(self) -> None:
        """May be called twice."""
        for endpoint in self._endpoints.values():
            await endpoint.aclose()
        for model in self._local.values():
            await model.aclose()
        for cache in self._caches.values():
            cache.close()
        self.spending.save()
        self._endpoints, self._local, self._caches = {}, {}, {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _cache(self, settings: EndpointConfig) -> ReplyCache | None:
        path = settings.cache or (self._folder / CACHE if self._folder is not None else None)
        if path is None:
            return None
        if path not in self._caches:
            self._caches[path] = ReplyCache(path)
        return self._caches[path]

    def _loaded(self, name: str) -> LocalLanguageModel:
        if name not in self._local:
            from dreamgym.models.local.language_model import LocalLanguageModel

            self._local[name] = LocalLanguageModel.load(name)
        return self._local[name]
