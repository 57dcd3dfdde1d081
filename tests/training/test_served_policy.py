"""Rollouts sampled by servers on loopback (`models serve`, with vLLM's routes for new weights): equal to one
process to the bit, and never from other weights than those of their step."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.config import Config
from dreamgym.errors import ConfigError, EndpointError, RolloutsFailingError
from dreamgym.http_server import HttpServer
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.serve import model_app
from dreamgym.models.weight_updates import WeightUpdates
from dreamgym.training.metrics import read_metrics
from dreamgym.training.progress import Progress
from dreamgym.training.trainer import train
from tests.models import small_models
from tests.training.test_loop import practised, same_end
from tests.training.training_run import FACTORY, record, run, settings

STEPS = 2
FEW = (f"train.steps={STEPS}", "train.save_policy_every=1", "train.warm_start_steps=60")
CHECKS = 8
"""Samples that the driver compares after each update."""
COMPLETIONS, RELOAD, LOAD = "/v1/completions", "/collective_rpc", "/v1/load_lora_adapter"


@dataclass
class Replica:
    """`models serve` in this process, with a record of the routes that were called."""

    local: LocalLanguageModel
    updates: WeightUpdates
    http: HttpServer = field(init=False)
    called: list[str] = field(default_factory=list)
    fault: Callable[[Replica], Awaitable[None]] | None = None
    """Happens during the rollouts of the second step."""
    faulted: bool = False
    updates_seen: int = 0
    sampled: int = 0
    """Since the last update."""
    killed: asyncio.Task[None] | None = None

    async def serve(self, scope: Any, receive: Any, send: Any) -> None:
        self.called.append(scope["path"])
        if self.called[-1] in (RELOAD, LOAD):
            self.updates_seen, self.sampled = self.updates_seen + 1, 0
        self.sampled += self.called[-1] == COMPLETIONS
        if self.fault is not None and self.updates_seen == STEPS and self.sampled > CHECKS + 3:
            fault, self.fault, self.faulted = self.fault, None, True
            await fault(self)
        app = model_app("policy", plain=self.local, chat=self.local, updates=self.updates)
        await app(scope, receive, send)


@asynccontextmanager
async def replica(base: Path) -> AsyncIterator[Replica]:
    local = LocalLanguageModel.load(base)
    made = Replica(local, WeightUpdates(local))
    made.http = HttpServer(made.serve)
    try:
        async with made.http:
            yield made
    finally:
        await local.aclose()


@asynccontextmanager
async def replicas(base: Path) -> AsyncIterator[dict[str, Replica]]:
    async with replica(base) as one, replica(base) as other:
        yield {"a": one, "b": other}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded corridors, and undisturbed runs in one process to compare with: all weights, and LoRA."""
    home = tmp_path_factory.mktemp("served")
    asyncio.run(record(home / "offline"))
    asyncio.run(run(settings(home / "whole", *FEW)))
    asyncio.run(run(settings(home / "lora", *FEW, *of_kind(home, "lora"))))
    return home


def of_kind(home: Path, kind: str) -> list[str]:
    if kind == "whole":
        return []
    model = home / "whole" / "run" / "policy"
    return [f"agent.model=hf:{model}", "agent.adapter=lora", "train.warm_start_steps=0"]


def base(home: Path, kind: str = "whole") -> Path:
    return home / "whole" / "run" / ("base" if kind == "whole" else "policy")


def served_by(folder: Path, servers: dict[str, Replica], *overrides: str, kind: str = "whole") -> Config:
    """A run in `folder` whose warm start is behind it, with rollouts by these servers."""
    for part in ("base", "policies/000000.pt"):
        source, target = folder.parent / kind / "run" / part, folder / "run" / part
        if source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    sections = [
        f'endpoints.{name}={{url="{each.http.url}", model="policy", backoff_seconds=0.01, max_attempts=2}}'
        for name, each in servers.items()
    ]
    names = ", ".join(f'"endpoint:{name}"' for name in servers)
    quick = ["train.failure_pause_seconds=0.01", f"train.policy_servers=[{names}]"]
    return settings(folder, *FEW, *quick, *sections, *of_kind(folder.parent, kind), *overrides)


@pytest.mark.parametrize(
    ("kind", "workers"), [("whole", 0), pytest.param("whole", 2, marks=pytest.mark.slow), ("lora", 0)]
)
async def test_a_run_on_servers_equals_one_in_process_to_the_bit(home: Path, kind: str, workers: int) -> None:
    folder = home / f"{kind} on servers, {workers} workers"
    async with replicas(base(home, kind)) as servers:
        await run(served_by(folder, servers, f"train.workers={workers}", kind=kind))
    same_end(home / kind / "run", folder / "run", STEPS)
    rows = read_metrics(folder / "run" / "metrics.jsonl", "train")
    assert [row["sampling_gap"] < 1e-4 for row in rows] == STEPS * [True]
    assert rows[0]["learner"]["updates"], "the second step had the same weights as the first"
    for each in servers.values():
        assert each.called.count(LOAD if kind == "lora" else RELOAD) == STEPS
        assert each.called.count(COMPLETIONS) > STEPS * CHECKS
    assert not (folder / "run" / "served").exists()


async def restart(server: Replica) -> None:
    """As a server that comes back with the weights that it was started with."""
    name = server.updates.adapter
    await server.updates.answer("/v1/unload_lora_adapter", f'{{"lora_name": "{name}"}}'.encode())
    server.updates.version = "default"


async def kill(server: Replica) -> None:
    server.killed = asyncio.create_task(server.http.aclose())
    await asyncio.sleep(60)  # no reply


@pytest.mark.parametrize(("kind", "fault"), [("whole", restart), ("lora", restart), ("whole", kill)])
async def test_a_step_ends_the_same_when_a_server_loses_its_weights_in_the_middle(
    home: Path, kind: str, fault: Callable[[Replica], Awaitable[None]]
) -> None:
    folder = home / f"{kind} and {fault.__name__}"
    async with replicas(base(home, kind)) as servers:
        servers["a"].fault = fault
        await run(served_by(folder, servers, kind=kind))
        assert servers["a"].faulted
    same_end(home / kind / "run", folder / "run", STEPS)


async def test_the_only_server_gets_the_weights_again_after_it_has_lost_them(home: Path) -> None:
    folder = home / "restarted"
    async with replica(base(home)) as server:
        server.fault = restart
        await run(served_by(folder, {"a": server}, "train.retries=0"))
        assert server.called.count(RELOAD) == STEPS + 1
    same_end(home / "whole" / "run", folder / "run", STEPS)


async def test_a_run_whose_servers_are_all_gone_ends_with_the_reason(home: Path) -> None:
    async with replicas(base(home)) as servers:
        for each in servers.values():
            each.fault = kill
        with pytest.raises((RolloutsFailingError, EndpointError), match="connection failed"):
            await run(served_by(home / "gone", servers, "train.retries=0"))
    assert len(practised(home / "gone" / "run")) == 1, "the first step is saved"


async def test_a_dead_server_is_left_out_of_the_next_update_with_a_warning(home: Path) -> None:
    warnings, folder = list[str](), home / "one left"
    async with replicas(base(home)) as servers:
        dying = servers["a"]

        def on_progress(progress: Progress) -> None:
            warnings.extend(progress.warnings)
            if progress.row.get("kind") == "train" and dying.killed is None:
                dying.killed = asyncio.create_task(dying.http.aclose())

        await train(served_by(folder, servers), real=FACTORY, on_progress=on_progress)
    same_end(home / "whole" / "run", folder / "run", STEPS)
    assert [each for each in warnings if "1 of 2 policy servers" in each and "endpoint:a" in each]


async def test_a_server_that_takes_weights_and_samples_from_others_ends_the_run(home: Path) -> None:
    async with replica(base(home)) as server, replica(base(home)) as unused:
        server.updates = unused.updates
        with pytest.raises(EndpointError, match=r"samples from others.*nats.*sampling_tolerance"):
            await run(served_by(home / "others", {"a": server}))


class KeepsEmbeddings(WeightUpdates):
    """Takes all weights once, and from then on those of the layers only."""

    def _reload(self, folder: str) -> None:
        weight = self._model.model.get_input_embeddings().weight
        kept = weight.detach().clone()
        super()._reload(folder)
        if self.version != "default":
            with self._model.updating(), torch.no_grad():
                weight.copy_(kept)


async def test_a_server_that_takes_a_part_of_an_update_ends_the_run(home: Path) -> None:
    async with replica(base(home)) as server:
        server.updates = KeepsEmbeddings(server.local)
        with pytest.raises(EndpointError, match=r"samples from others.*expected at most 0.005"):
            await run(served_by(home / "in part", {"a": server}))
    assert len(practised(home / "in part" / "run")) == 1, "the first update was complete"


async def test_a_server_that_takes_no_updates_ends_the_run(home: Path) -> None:
    async with replica(base(home)) as server:
        fixed = HttpServer(model_app("policy", plain=server.local, chat=server.local))
        async with fixed:
            server.http = fixed
            with pytest.raises(EndpointError, match="VLLM_SERVER_DEV_MODE=1, or dreamgym models serve with"):
                await run(served_by(home / "fixed", {"a": server}))


async def test_a_server_of_another_model_ends_the_run(home: Path) -> None:
    other = LocalLanguageModel(small_models.model(), small_models.tokenizer())
    async with replica(base(home)) as server:
        server.updates = WeightUpdates(other)
        with pytest.raises(EndpointError, match="names and shapes of the served model"):
            await run(served_by(home / "another", {"a": server}))
    await other.aclose()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (['train.policy_servers=["hf:model"]'], "expected endpoint:NAME"),
        (['train.policy_servers=["endpoint:missing"]'], "no endpoint 'missing'"),
        (["agent.enforce_actions=true", "agent.show_actions=now"], "agent.enforce_actions"),
        (["train.max_staleness=1", "train.workers=1", "learner.old_logprobs=recorded"], "between two steps"),
        (["learner.algorithm=dpo", "train.evaluate_every=0"], "dpo has none"),
    ],
)
async def test_settings_that_servers_cannot_follow_are_refused(
    home: Path, changed: list[str], message: str
) -> None:
    near = ["endpoints.a={url='http://127.0.0.1:1', model='m'}", 'train.policy_servers=["endpoint:a"]']
    with pytest.raises(ConfigError, match=message):
        await run(settings(home / "refused", *near, *changed))
