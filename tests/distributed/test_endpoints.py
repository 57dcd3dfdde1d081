"""Workers whose experience model is an endpoint that all of them share."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from dreamgym.models.usage import FILE
from dreamgym.training.trainer import train
from dreamgym.types import CompletionRequest
from tests.distributed.test_training import begun
from tests.scripted_server import ScriptedServer
from tests.training.test_loop import same_end
from tests.training.training_run import FACTORY, record, settings

STEPS = 3


def east_wins(request: CompletionRequest) -> str:
    """The reply of a simulator of corridors."""
    action = json.loads(request.prompt.partition("# Action\n\n")[2].partition("\n\n# ")[0])
    won = action == "go east"
    reply = {
        "reasoning": "",
        "ended": [],
        "begun": [],
        "confidence": 1.0,
        "next_state": f"You hear {action}.",
    }
    return json.dumps({**reply, "terminated": won, "success": won})


def asked(run: Path) -> list[tuple[str, str, int]]:
    """Replies that the run used, whether they were asked for, cached or in flight."""
    rows = json.loads((run / FILE).read_text(encoding="utf-8"))["rows"]
    counts = ("requests", "cache_hits", "shared", "failures")
    return [(row["stage"], row["role"], sum(row[name] for name in counts)) for row in rows]


async def test_workers_share_an_endpoint_and_their_usage_is_summed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    await record(tmp_path / "offline")
    with ScriptedServer(east_wins) as server:
        words = ["train.mode=dream", f"train.steps={STEPS}", "train.save_policy_every=1", "train.gate=off"]
        words += [f"train.experience={server.name}", "train.reward=model"]
        await train(settings(tmp_path / "dream", *words), real=FACTORY)
        folder = begun(tmp_path, "workers")
        await train(settings(folder, *words, "train.workers=2"), real=FACTORY)
    one, two = tmp_path / "dream" / "run", folder / "run"
    same_end(one, two, STEPS)
    assert asked(one) == asked(two)
    assert asked(one)[0][2] > 10
