"""Settings of servers of language models, and what they may cost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from dreamgym.config.section import Section
from dreamgym.errors import ConfigError

DEFAULT_KEY = "DREAMGYM_API_KEY"
"""Environment variable of the API key, unless an endpoint names another; optional."""


class EndpointConfig(Section):
    """An OpenAI-compatible server, ``endpoint:NAME`` wherever a language model is named."""

    url: str = Field(description="address; /v1 is added to a bare one")
    model: str = Field(description="name of the model on the server")
    kind: Literal["chat", "completions"] = Field("chat", description="prompts as messages, or as plain text")
    api_key_env: str = Field(DEFAULT_KEY, description="environment variable that holds the API key")
    concurrency: int = Field(64, ge=1, description="requests in flight")
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1, description="prompt and reply together")
    timeout_seconds: float = Field(120.0, gt=0, description="of the first attempt; doubles after a timeout")
    deadline_seconds: float = Field(600.0, gt=0, description="of all attempts at one request")
    start_seconds: float = Field(10.0, ge=0, description="wait for the first reply of a server")
    max_attempts: int = Field(6, ge=1, description="at one request")
    backoff_seconds: float = Field(0.5, gt=0, description="before the first retry; doubles, with jitter")
    context_length: int = Field(8192, ge=1, description="tokens of prompt and reply that the model takes")
    json_schema: Literal["auto", "yes", "no"] = Field(
        "auto", description="whether the server follows a JSON schema; auto: until it rejects one"
    )
    logprobs: bool = Field(False, description="request log-probs of the reply's tokens")
    input_price: float | None = Field(None, ge=0, description="money per million prompt tokens")
    output_price: float | None = Field(None, ge=0, description="money per million reply tokens")
    cache: Path | None = Field(None, description="file of cached replies; default: one in the run directory")
    cache_sampled: bool = Field(False, description="cache sampled replies too; the server must follow seeds")
    extra_body: dict[str, Any] = Field(default_factory=dict, description="further fields of every request")

    @field_validator("url")
    @classmethod
    def _plain_address(cls, url: str) -> str:
        # Not a ValueError: pydantic's own message would quote a password.
        address = urlsplit(url)
        if address.scheme not in ("http", "https") or not address.hostname:
            raise ConfigError("endpoints: expected a url that begins with http:// or https://")
        if "@" in address.netloc or address.query:
            raise ConfigError(
                "endpoints: expected a url without password or ?query; the key belongs in the environment "
                "variable that api_key_env names"
            )
        return url

    @field_validator("api_key_env")
    @classmethod
    def _variable_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Z][A-Z0-9_]*", name):
            raise ConfigError(
                "endpoints: expected api_key_env to name an environment variable (capitals, digits, _); "
                "the key itself does not belong in a configuration"
            )
        return name

    def cost(self, prompt_tokens: int, reply_tokens: int) -> float:
        """Money for these tokens; 0 where no prices are set."""
        return (prompt_tokens * (self.input_price or 0.0) + reply_tokens * (self.output_price or 0.0)) / 1e6


class BudgetConfig(Section):
    """What endpoints may cost in one run; it stops before a request that could exceed it."""

    money: float | None = Field(None, gt=0, description="in the currency of the prices")
    tokens: int | None = Field(None, ge=1, description="of prompts and replies")
    requests: int | None = Field(None, ge=1, description="sent, retries included")
