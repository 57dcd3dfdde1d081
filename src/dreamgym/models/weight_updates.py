"""New weights for a served model while it runs, under the routes of vLLM: whole weights, or a LoRA adapter.

A client names a directory of this machine, so a server has these routes only if its owner asks for them. Only
safetensors are read.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from dreamgym.errors import ConfigError

if TYPE_CHECKING:
    from dreamgym.models.local.language_model import LocalLanguageModel

ROUTES = (
    *("/pause", "/resume", "/collective_rpc", "/reset_prefix_cache", "/update_weight_version"),
    *("/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
)


class _Update(BaseModel, extra="forbid"):
    """The fields of all routes."""

    method: str = ""
    kwargs: dict[str, str] = {}
    new_version: str = ""
    lora_name: str = ""
    lora_path: str = ""


class WeightUpdates:
    """The weights of a server. Between ``/pause`` and ``/resume`` requests wait. Weights change while no
    request runs: a reply that began with other weights would end with these."""

    def __init__(self, model: LocalLanguageModel) -> None:
        self.version = "default"
        self.adapter = ""
        """Name of the loaded adapter; while there is one, only requests that name it are answered."""
        self._model = model
        self._peft: Any = None
        self._running = 0
        self._lock = asyncio.Lock()
        self._open, self._idle = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._idle.set()

    @asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Around the computation of a request."""
        await self._open.wait()
        self._running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def answer(self, route: str, body: bytes) -> dict[str, Any]:
        """
        Raises:
            ConfigError: the weights cannot be loaded.
        """
        update = _Update.model_validate_json(body or b"{}")
        async with self._lock:
            await self._answer(route, update)
        return {"success": True, "weight_version": self.version}

    async def _answer(self, route: str, update: _Update) -> None:
        if route == "/pause":
            self._open.clear()
            await self._idle.wait()
        elif route == "/resume":
            self._open.set()
        elif route == "/collective_rpc":
            if update.method != "reload_weights":
                raise ConfigError(f"expected the method reload_weights, got {update.method!r}")
            await self._change(self._reload, update.kwargs.get("weights_path", ""))
        elif route == "/update_weight_version":
            self.version = update.new_version
        elif route == "/v1/load_lora_adapter":
            await self._change(self._load_adapter, update.lora_path)
            self.adapter = update.lora_name
        elif route == "/v1/unload_lora_adapter" and update.lora_name == self.adapter:
            async with self._no_request():
                await asyncio.to_thread(self._unload_adapter)

    @asynccontextmanager
    async def _no_request(self) -> AsyncIterator[None]:
        was_open = self._open.is_set()
        self._open.clear()
        try:
            await self._idle.wait()
            yield
        finally:
            if was_open:
                self._open.set()

    async def _change(self, change: Callable[[str], None], folder: str) -> None:
        if not Path(folder).is_absolute() or not Path(folder).is_dir():
            raise ConfigError(f"expected a directory of weights on this machine, got {folder!r}")
        try:
            async with self._no_request():
                await asyncio.to_thread(change, folder)
        except Exception as error:  # libraries report unsuitable weights in many ways
            raise ConfigError(f"cannot load the weights in {folder!r}: {error}") from None

    def _reload(self, folder: str) -> None:
        import torch
        from safetensors.torch import load_file

        fresh: dict[str, torch.Tensor] = {}
        for file in Path(folder).glob("*.safetensors"):
            fresh |= load_file(file)
        served = dict(self._model.model.named_parameters())
        if {name: each.shape for name, each in served.items()} != {
            name: each.shape for name, each in fresh.items()
        }:
            raise ConfigError("expected the names and shapes of the served model, got others")
        with self._model.updating(), torch.no_grad():
            for name, weight in served.items():
                weight.copy_(fresh[name])

    def _load_adapter(self, folder: str) -> None:
        from peft import PeftModel

        self._unload_adapter()
        with self._model.updating():
            self._peft = PeftModel.from_pretrained(self._model.model, folder)

    def _unload_adapter(self) -> None:
        if self._peft is not None:
            with self._model.updating():
                self._peft.unload()
        self._peft, self.adapter = None, ""
