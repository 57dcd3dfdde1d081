"""Pretrained weights: real small models on disk, trained whole or by LoRA, loaded without PEFT."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
)

from dreamgym.config import Config, ExperienceConfig, load_config
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from dreamgym.errors import ConfigError
from dreamgym.experience.dataset import Example
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.local.tokens import TextCodec
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.rl.logprobs import LogProbModel
from dreamgym.rl.packing import PackedSequence
from dreamgym.training.experience import fine_tune
from dreamgym.training.fine_tuning import FineTuning, Progress
from dreamgym.training.model_setup import LoadedModel, choose_precision, load_model

torch.set_num_threads(1)
EXAMPLES = [
    Example(
        prompt=f"task: say {word}\nstate: a room{' with a door' * (number % 5)}\naction: say {word}\n",
        reply=f"think: easy.\nchange:\nnext: You say {word}.\nend: no",
        trajectory_id=str(number),
        position=0,
    )
    for number, word in enumerate(["mug", "pan", "egg", "cup", "fork", "lamp", "desk", "bed"] * 2)
]
FAMILIES = ["llama", "lfm2", "gpt2", "gemma2"]


@cache
def tokenizer() -> Any:
    return make_tokenizer((example.prompt + example.reply for example in EXAMPLES), vocab_size=400)


def pretrained(family: str) -> Any:
    torch.manual_seed(1)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer()), "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 256,
    }  # fmt: skip
    if family == "gpt2":  # its body is no `.model`, and it has dropout
        return GPT2LMHeadModel(GPT2Config(**shape))
    if family == "gemma2":  # caps its logits behind the head
        shape |= {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
        return Gemma2ForCausalLM(Gemma2Config(**shape, final_logit_softcapping=3.0))
    return make_model("nano", tokenizer(), family=family)  # type: ignore[arg-type]


def read_model(folder: Path) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder)
    return model.eval()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("pretrained")
    for family in FAMILIES:
        pretrained(family).save_pretrained(root / family)
        tokenizer().save_pretrained(root / family)
    return {family: root / family for family in FAMILIES}


def loaded_from(folder: Path, **settings: Any) -> LoadedModel:
    return load_model(ExperienceConfig(model=f"hf:{folder}", **settings), EXAMPLES, seed=3)


def run_of(loaded: LoadedModel, folder: Path, steps: int) -> FineTuning:
    fast = replace(loaded, sft_rates=loaded.sft_rates | {"learning_rate": 3e-3})
    return FineTuning(
        fast,
        TextCodec(loaded.tokenizer),
        EXAMPLES,
        EXAMPLES,
        folder=folder,
        steps=steps,
        batch_size=4,
        warmup_steps=2,
        evaluate_every=5,
        checkpoint_every=5,
    )


async def losses_of(loaded: LoadedModel, folder: Path, steps: int) -> list[float]:
    losses: list[float] = []
    await run_of(loaded, folder, steps).run(lambda progress: losses.append(progress.loss or 0.0))
    return losses


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", ["none", "lora"])
async def test_any_family_learns_and_its_merged_weights_give_the_same_logits(
    folders: dict[str, Path], tmp_path: Path, family: str, adapter: str
) -> None:
    loaded = loaded_from(folders[family], adapter=adapter)
    tokens = torch.tensor([TextCodec(loaded.tokenizer).start(EXAMPLES[0].prompt)])
    losses: list[float] = []
    trained: list[torch.Tensor] = []

    def look(progress: Progress) -> None:
        losses.append(progress.loss or 0.0)
        if progress.step == 20:
            loaded.model.eval()
            with torch.no_grad():
                trained.append(loaded.model(input_ids=tokens).logits)

    await run_of(loaded, tmp_path, 20).run(look)
    assert losses[-1] < 0.95 * losses[0]
    with torch.no_grad():
        again = read_model(tmp_path / "model")(input_ids=tokens).logits
    assert torch.allclose(trained[0], again, atol=1e-5)
    untrained = read_model(folders[family])
    assert not torch.allclose(untrained(input_ids=tokens).logits, again, atol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_of_chosen_positions_are_those_of_the_whole_model(family: str) -> None:
    model = pretrained(family).eval()
    rows = [torch.randint(3, len(tokenizer()), (length,)).tolist() for length in (9, 5, 12)]
    with torch.no_grad():
        found = LogProbModel(model)([predicting(row, range(len(row) - 3, len(row))) for row in rows])
        own = torch.cat([model(input_ids=torch.tensor([row])).logits[0, -3:] for row in rows])
    assert torch.allclose(found.logits, own, atol=1e-5)
    assert torch.allclose(found.logprobs, own.log_softmax(-1)[:, 1], atol=1e-5)


def predicting(tokens: list[int], positions: Sequence[int]) -> PackedSequence:
    """Token 1 is predicted at these positions."""
    count = len(positions)
    return PackedSequence(
        tokens=tokens,
        positions=list(positions),
        targets=[1] * count,
        allowed=[()] * count,
        token_ids=[0] * count,
    )


def test_a_model_that_padding_disturbs_gets_a_mask() -> None:
    class Looking(torch.nn.Module):
        """Every position sees the mean of all that the mask lets it see, later ones too."""

        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(20, 20)

        def forward(self, input_ids: Any, attention_mask: Any = None, use_cache: bool = False) -> Any:
            mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            seen = self.table(input_ids) * mask[..., None]
            mean = seen.sum(1, keepdim=True) / mask.sum(1)[:, None, None]
            return type("Output", (), {"logits": mean.expand(-1, input_ids.shape[1], -1)})

    model = Looking()
    short, long = [3, 4, 5], [6, 7, 8, 9, 10]
    found = LogProbModel(model)([predicting(short, [0]), predicting(long, [1])]).logits
    assert torch.allclose(found[0], model(torch.tensor([short])).logits[0, 0], atol=1e-6)
    assert torch.allclose(found[1], model(torch.tensor([long])).logits[0, 0], atol=1e-6)


@pytest.mark.parametrize(
    ("family", "adapter"),
    [pytest.param("llama", "lora", marks=pytest.mark.exhaustive), ("gpt2", "lora"), ("gpt2", "none")],
)
async def test_a_resumed_run_ends_with_the_weights_of_one_never_stopped(
    folders: dict[str, Path], tmp_path: Path, family: str, adapter: str
) -> None:
    """gpt2 has dropout, which must not depend on what was drawn before the stop."""

    class Stopped(Exception):  # noqa: N818 - a stop, no error
        pass

    def stop(progress: Progress) -> None:
        if progress.step == 6:
            raise Stopped

    await run_of(loaded_from(folders[family], adapter=adapter), tmp_path / "whole", 8).run()
    with pytest.raises(Stopped):
        await run_of(loaded_from(folders[family], adapter=adapter), tmp_path / "halves", 8).run(stop)
    torch.randn(7)  # other code draws random numbers
    await run_of(loaded_from(folders[family], adapter=adapter), tmp_path / "halves", 8).run()
    whole, resumed = (
        torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "halves")
    )
    assert whole["progress"]["curve"] == resumed["progress"]["curve"]
    mine, theirs = whole["sft"]["model"], resumed["sft"]["model"]
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


async def test_a_checkpoint_holds_only_what_learns_and_knows_its_base(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    loaded = loaded_from(folders["llama"], adapter="lora", lora_rank=2)
    total = loaded.model.get_base_model().num_parameters()
    await run_of(loaded, tmp_path, 5).run()
    stored = torch.load(tmp_path / "checkpoint.pt", weights_only=True)["sft"]
    assert stored["model"]
    assert all("lora_" in name for name in stored["model"])
    kept = sum(tensor.numel() for tensor in stored["model"].values())
    assert kept < total / 5
    for other in (
        loaded_from(folders["llama"], adapter="lora", lora_rank=4),
        loaded_from(folders["llama"]),
        loaded_from(folders["lfm2"], adapter="lora", lora_rank=2),
    ):
        with pytest.raises(ConfigError, match="of the same model"):
            await run_of(other, tmp_path, 5).run()
    moved = loaded_from(folders["llama"], adapter="lora", lora_rank=2)
    with torch.no_grad():
        moved.model.get_input_embeddings().weight += 1
    with pytest.raises(ConfigError, match="of the same model"):
        await run_of(moved, tmp_path, 5).run()


@pytest.mark.parametrize("adapter", ["none", "lora"])
async def test_bf16_products_leave_trained_weights_in_fp32(
    folders: dict[str, Path], tmp_path: Path, adapter: str
) -> None:
    loaded = loaded_from(folders["llama"], adapter=adapter, precision="bf16")
    trained = [parameter for parameter in loaded.model.parameters() if parameter.requires_grad]
    losses = await losses_of(loaded, tmp_path, 15)
    assert losses[-1] < 0.95 * losses[0]
    assert {parameter.dtype for parameter in trained} == {torch.float32}


async def test_a_run_from_pretrained_weights_leaves_a_folder_that_needs_no_adapter(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    with TrajectoryWriter(tmp_path / "data") as writer:
        writer.append(islice(read_trajectories(builtin_dataset()), 8))
    settings = ExperienceConfig(model=f"hf:{folders['llama']}", adapter="lora", steps=3, batch=2)
    recorded = read_trajectories(tmp_path / "data")
    progress = await fine_tune(
        Config(experience=settings), recorded, HouseholdAnnotator(), tmp_path / "run", actor=AGENT
    )
    assert progress.step == 3
    assert not list((tmp_path / "run" / "model").glob("adapter*"))
    loaded = LocalLanguageModel.load(tmp_path / "run" / "model")
    assert type(loaded.model).__name__ == "LlamaForCausalLM"
    await loaded.aclose()


def test_the_architecture_of_a_model_from_scratch_is_one_switch() -> None:
    def made(**settings: Any) -> str:
        loaded = load_model(ExperienceConfig(model="nano", **settings), EXAMPLES, seed=0)
        return type(loaded.model).__name__

    assert made() == "Lfm2ForCausalLM"
    assert made(family="llama") == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match=r"experience\.family"):
        load_config(overrides=["experience.family=rnn"])


def test_defaults_follow_the_model(folders: dict[str, Path]) -> None:
    def chosen(**settings: Any) -> tuple[float | None, ...]:
        loaded = load_model(ExperienceConfig(**settings), EXAMPLES, seed=0)
        return tuple(loaded.sft_rates.values())

    path = f"hf:{folders['llama']}"
    assert chosen(model="nano") == (3e-3, 0.02)
    assert chosen(model=path) == (2e-5, None)
    assert chosen(model=path, adapter="lora") == (2e-4, None)
    assert chosen(model=path, adapter="lora", learning_rate=1e-3) == (1e-3, None)


def test_a_model_that_cannot_be_trained_is_refused_before_anything_starts(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = tmp_path / "endless"
    shutil.copytree(folders["llama"], endless)
    settings = json.loads((endless / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("eos_token")
    (endless / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    (endless / "special_tokens_map.json").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="expected a tokenizer with an end token"):
        loaded_from(endless)
    with pytest.raises(ConfigError, match=r"expected a directory.*'/nowhere/at/all'"):
        loaded_from(Path("/nowhere/at/all"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="'nobody/none' is no directory and not in the Hugging Face cache"):
        loaded_from(Path("nobody/none"))
    with pytest.raises(ConfigError, match="adapts pretrained weights"):
        load_model(ExperienceConfig(model="nano", adapter="lora"), EXAMPLES, seed=0)
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="needs a GPU"):
            loaded_from(folders["llama"], device="cuda")


def test_names_that_the_environment_gives_are_exchanged_and_numbers_unless_switched_off() -> None:
    text = "You are in the kitchen. You can go north to the pantry. There is a mug 1 and a mug 2."
    corpus = [Example(prompt=text, reply=text, trajectory_id="1", position=0)]
    rooms = (frozenset({"kitchen", "pantry", "attic"}),)
    loaded = load_model(ExperienceConfig(model="nano"), corpus, 0, names=rooms)
    words = [
        sorted([loaded.tokenizer.decode([token]) for token in name] for name in group)
        for group in loaded.exchangeable
    ]
    assert words == [[[" 1", "1"], [" 2", "2"]], [[" kitchen", "kitchen"], [" pantry", "pantry"]]]
    plain = ExperienceConfig(model="nano", exchange_numbers=False)
    assert len(load_model(plain, corpus, 0, names=rooms).exchangeable) == 1


@pytest.mark.parametrize("read", [loaded_from, LocalLanguageModel.load], ids=["training", "inference"])
def test_a_model_folder_with_code_of_its_own_is_refused_and_never_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    """transformers would ask "run the custom code? [y/N]" at a terminal."""
    folder, ran = tmp_path / "model", tmp_path / "ran"
    tokenizer().save_pretrained(folder)
    module = f"from pathlib import Path\nPath({str(ran)!r}).touch()\n"
    (folder / "own_code.py").write_text(module, encoding="utf-8")
    auto_map = {"AutoConfig": "own_code.Config", "AutoModelForCausalLM": "own_code.Model"}
    about = {"model_type": "own_model", "auto_map": auto_map, "architectures": ["Model"]}
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("it asked"))
    with pytest.raises(ConfigError, match="cannot read a language model"):
        read(folder)
    assert not ran.exists()


@pytest.mark.parametrize("gpu", [True, False])
def test_auto_precision_is_bf16_only_for_pretrained_weights_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: True)
    monkeypatch.setattr("torch.cpu._is_amx_tile_supported", lambda: True, raising=False)
    device = "cuda" if gpu else "cpu"
    assert choose_precision("auto", device, from_scratch=True) == "fp32"
    assert choose_precision("auto", device, from_scratch=False) == ("bf16" if gpu else "fp32")
    assert choose_precision("bf16", device, from_scratch=True) == "bf16"
    assert load_model(ExperienceConfig(model="nano"), EXAMPLES, seed=0).precision == "fp32"
