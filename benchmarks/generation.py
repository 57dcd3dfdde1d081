"""Generation speed of local models: ratio to transformers' `generate`, and share of the matrix products.

    python benchmarks/generation.py [--quick] [--json] [--preset tiny] [--family lfm2] [--threads N]

Episodes have 10 turns on texts of shipped trajectories: each turn the model generates 16 tokens, then the
environment's next state is appended. Both sides play the same episodes greedily on the same weights and
alternate in one run. `generate` gets the tokens of the whole conversation each turn, in one batch with left
padding. N episodes are compared with its best batch of up to 64; larger batches are slower, as their
intermediate results exceed the processor caches. The limit is the time of the matrix products alone: each
product of each of our steps, with the same shapes and weights.

generation_peers.py compares with llama.cpp and transformers' `generate_batch`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.models.local.fast_forward import PackedBackend, PackedForward
from dreamgym.models.local.kv_cache import Step
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.types import CompletionRequest

TURNS = 10
TOKENS_PER_TURN = 16
MAX_GENERATE_BATCH = 64


@dataclass(frozen=True, slots=True)
class Script:
    """The environment's texts of one episode."""

    start: str
    states: list[str]


@dataclass(slots=True)
class Played:
    """Time and texts of one pass over all episodes."""

    wall: float = 0.0
    cpu: float = 0.0
    texts: list[list[str]] = field(default_factory=list)


class Conversation:
    """The tokens of one episode: generated ones are kept, the environment's are prepared in advance."""

    def __init__(self, tokenizer: Any, script: Script) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = list(tokenizer(script.start + "\n>").input_ids)
        self._states = [
            tokenizer(f"\n{state}\n>", add_special_tokens=False).input_ids for state in script.states
        ]
        self.final_length = len(self.tokens) + sum(TOKENS_PER_TURN + len(state) for state in self._states)
        self.texts: list[str] = []

    @property
    def finished(self) -> bool:
        return len(self.texts) == len(self._states)

    def add(self, generated: Sequence[int]) -> None:
        assert len(generated) == TOKENS_PER_TURN
        self.tokens = [*self.tokens, *generated, *self._states[len(self.texts)]]
        self.texts.append(self._tokenizer.decode(generated, skip_special_tokens=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1, 16 and 64 episodes, one round")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--family", default="lfm2", choices=["lfm2", "llama"])
    parser.add_argument(
        "--threads", type=int, default=1, help="of both sides; more than 1 needs an idle machine"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    scripts, tokenizer = read_scripts(256)
    model = make_model(arguments.preset, tokenizer, family=arguments.family)
    model.generation_config.eos_token_id = None  # every turn has the same length on both sides
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}",
        "threads": arguments.threads,
        "model": f"{arguments.family} {arguments.preset}, {model.num_parameters():,} parameters",
        "turns": TURNS,
        "tokens_per_turn": TOKENS_PER_TURN,
        "episodes": {},
    }
    generate: dict[int, list[Played]] = {}
    for episodes in (1, 16, 64) if arguments.quick else (1, 16, 64, 256):
        rounds = 3 if episodes < 64 and not arguments.quick else 1
        result["episodes"][episodes] = compare(model, tokenizer, scripts[:episodes], rounds, generate)
    print(json.dumps(result, indent=2) if arguments.json else table(result))


def read_scripts(count: int) -> tuple[list[Script], Any]:
    scripts, texts = [], []
    for trajectory in read_trajectories(builtin_dataset()):
        states = [transition.outcome.next_state.text for transition in trajectory.transitions]
        texts += [
            trajectory.start.text,
            *states,
            *(transition.action for transition in trajectory.transitions),
        ]
        # Expert episodes have similar lengths, so `generate` needs little padding.
        if len(states) >= TURNS and trajectory.provenance.policy == "expert":
            scripts.append(Script(trajectory.start.text, states[:TURNS]))
    return scripts[:count], make_tokenizer(texts)


def compare(
    model: Any, tokenizer: Any, scripts: list[Script], rounds: int, generate: dict[int, list[Played]]
) -> dict[str, Any]:
    """Play the episodes at once; `generate` collects the results of `generate` by batch size."""
    ours, limits = [], []
    for _ in range(rounds):
        played, steps, reused = play_ours(model, tokenizer, scripts)
        ours.append(played)
        limits.append(time_products(model, steps))
        if len(scripts) <= MAX_GENERATE_BATCH:
            generate.setdefault(len(scripts), []).append(play_generate(model, tokenizer, scripts))
    wall, cpu = median(ours, "wall"), median(ours, "cpu")
    batches = {size: median(played, "wall") / size for size, played in generate.items()}
    best = min(batches, key=lambda size: batches[size])
    written = len(scripts) * TURNS * TOKENS_PER_TURN
    pairs = zip(ours[-1].texts, generate[best][-1].texts, strict=False)
    same = [a == b for mine, other in pairs for a, b in zip(mine, other, strict=True)]
    layers, attention, cpu_limit = (
        statistics.median(x[n] for x in limits) for n in ("layers", "attention", "cpu")
    )
    return {
        "ours_tokens_per_second": written / wall,
        "generate_tokens_per_second": TURNS * TOKENS_PER_TURN / batches[best],
        "generate_batch": best,
        "ratio": batches[best] * len(scripts) / wall,
        "ratio_of_cpu_time": median(generate[best], "cpu") / best * len(scripts) / cpu,
        "milliseconds_per_step": 1e3 * wall / len(steps),
        "products_tokens_per_second": written / (layers + attention),
        "share_of_limit": (layers + attention) / wall,
        "share_of_limit_in_cpu_time": cpu_limit / cpu,
        "attention_share_of_products": attention / (layers + attention),
        "prompt_tokens_reused": reused,
        "identical_turns": sum(same) / len(same),
    }


def median(played: list[Played], name: str) -> float:
    return float(statistics.median(getattr(one, name) for one in played))


def play_ours(model: Any, tokenizer: Any, scripts: list[Script]) -> tuple[Played, list[Step], float]:
    language_model = LocalLanguageModel(model, tokenizer, stop_token_ids=())
    steps: list[Step] = []

    class RecordingForward:
        def __init__(self, forward: PackedForward) -> None:
            self.reach, self.refresh, self.forward = forward.reach, forward.refresh, forward

        def __call__(self, tokens: Any, step: Step, cache: Any) -> Any:
            steps.append(step)
            return self.forward(tokens, step, cache)

    async def episode(number: int, script: Script) -> list[str]:
        conversation, texts = script.start + "\n>", []
        for state in script.states:
            request = CompletionRequest(
                prompt=conversation, conversation=str(number), max_tokens=TOKENS_PER_TURN
            )
            texts.append((await language_model.complete(request)).text)
            conversation += f"{texts[-1]}\n{state}\n>"
        return texts

    async def all_episodes() -> list[list[str]]:
        texts = await asyncio.gather(*(episode(number, script) for number, script in enumerate(scripts)))
        await language_model.aclose()
        return texts

    for worker in language_model._workers:
        backend = worker.scheduler._backend
        assert isinstance(backend, PackedBackend)
        backend.forward = RecordingForward(backend.forward)
    played = timed(lambda: asyncio.run(all_episodes()))
    stats = language_model.stats
    return played, steps, stats.reused_tokens / stats.prompt_tokens


def play_generate(model: Any, tokenizer: Any, scripts: list[Script]) -> Played:
    pad = tokenizer.pad_token_id
    conversations = [Conversation(tokenizer, script) for script in scripts]

    def play() -> list[list[str]]:
        while not conversations[0].finished:
            rows = [conversation.tokens for conversation in conversations]
            longest = max(map(len, rows))
            inputs = torch.tensor([[pad] * (longest - len(row)) + row for row in rows])
            mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
            output = model.generate(
                input_ids=inputs,
                attention_mask=mask,
                max_new_tokens=TOKENS_PER_TURN,
                do_sample=False,
                pad_token_id=pad,
            )
            for conversation, row in zip(conversations, output[:, longest:].tolist(), strict=True):
                conversation.add(row)
        return [conversation.texts for conversation in conversations]

    with torch.inference_mode():
        return timed(play)


def timed(play: Callable[[], list[list[str]]]) -> Played:
    wall, cpu = time.perf_counter(), time.process_time()
    texts = play()
    return Played(time.perf_counter() - wall, time.process_time() - cpu, texts)


@torch.inference_mode()
def time_products(model: Any, steps: list[Step]) -> dict[str, float]:
    """Seconds of the matrix products of these steps alone."""
    config = model.config
    layers = [
        module.weight.t() for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)
    ]
    head, layers = layers[-1], layers[:-1]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    attentions = kinds.count("full_attention")
    size = config.hidden_size // config.num_attention_heads
    shared = config.num_attention_heads // config.num_key_value_heads
    rows = max(step.decoding + len(step.chunks) for step in steps) * config.num_key_value_heads
    columns = max(step.end for step in steps)
    keys, values = torch.randn(rows, size, columns), torch.randn(rows, columns, size)
    total = {"layers": 0.0, "attention": 0.0, "cpu": 0.0}
    for step in steps:
        tokens = step.decoding + sum(chunk.size for chunk in step.chunks)
        inputs = {weight.shape[0]: torch.randn(tokens, weight.shape[0]) for weight in layers}
        last = torch.randn(step.decoding + len(step.chunks), head.shape[0])
        spans = [(step.decoding * config.num_key_value_heads, 1, step.longest)] if step.decoding else []
        spans += [(config.num_key_value_heads, chunk.size, chunk.end) for chunk in step.chunks]
        pairs = [
            (torch.randn(n, q * shared, size), torch.randn(n, q * shared, end), end) for n, q, end in spans
        ]
        began, cpu = time.perf_counter(), time.process_time()
        for weight in layers:
            torch.mm(inputs[weight.shape[0]], weight)
        torch.mm(last, head)
        between = time.perf_counter()
        for _ in range(attentions):
            for query, scores, end in pairs:
                torch.bmm(query, keys[: len(query), :, :end])
                torch.bmm(scores, values[: len(scores), :end])
        total["attention"] += time.perf_counter() - between
        total["layers"] += between - began
        total["cpu"] += time.process_time() - cpu
    return total


def table(result: dict[str, Any]) -> str:
    lines = [
        f"{result['machine']}, {result['threads']} threads; {result['model']}",
        f"{result['turns']} turns of {result['tokens_per_turn']} tokens, greedy; tokens per second",
        "",
        "episodes     ours  generate  at   ratio  (cpu time)   products  share of limit   same text   reused",
    ]
    for episodes, row in result["episodes"].items():
        cells = (
            f"{episodes:8}",
            f"{row['ours_tokens_per_second']:7.0f}",
            f"{row['generate_tokens_per_second']:8.0f}",
            f"{row['generate_batch']:2}",
            f"{row['ratio']:5.1f}x",
            f"{row['ratio_of_cpu_time']:9.1f}x",
            f"{row['products_tokens_per_second']:9.0f}",
            f"{row['share_of_limit']:15.0%}",
            f"{row['identical_turns']:10.1%}",
            f"{row['prompt_tokens_reused']:7.0%}",
        )
        lines.append("  ".join(cells))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
