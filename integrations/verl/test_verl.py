"""verl's own agent loop worker, tokenisation, advantages and loss with our agent loop, on a CPU.

Not started, because they need CUDA: its inference servers (a tiny model answers instead, in this process) and
its trainer (one loss and its gradient are computed here, with verl's functions).
"""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import verl
from hydra import compose, initialize_config_dir
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, compute_policy_loss_vanilla
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.workers.config import ActorConfig
from verl.workers.rollout.replica import TokenOutput

from dreamgym.errors import EpisodeFailedError
from dreamgym.integrations.verl import write_dataset
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.types import CompletionRequest

LAMP = str(Path(__file__).parent.parent / "trl" / "lamp.py") + ":Lamp"
TEXTS = ["You see a lamp with a label and a red, a green, a blue and a white button.", "press, read, says"]
TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n"
    "{{ eos_token if m.role == 'assistant' else '' }}{% endfor %}"
    "{{ 'assistant:' if add_generation_prompt else '' }}"
)
LENGTHS = {"prompt_length": 96, "response_length": 96}


class Server:
    """Stands for verl's client of its inference servers; `reply` gets the text before the reply."""

    def __init__(self, tokenizer: Any, reply: Callable[[str], str]) -> None:
        self.tokenizer, self.say = tokenizer, reply
        self.requests: list[dict[str, Any]] = []

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        self.requests.append({"id": request_id, "prompt": list(prompt_ids), **sampling_params})
        text = self.say(self.tokenizer.decode(prompt_ids))
        tokens = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        version = {"min_global_steps": len(self.requests), "max_global_steps": len(self.requests)}
        return TokenOutput(token_ids=tokens, log_probs=[-0.5] * len(tokens), extra_fields=version)


class ModelServer(Server):
    """A language model of 30 thousand parameters, sampled token by token."""

    def __init__(self, tokenizer: Any, model: Any) -> None:
        super().__init__(tokenizer, str)
        self.model = LocalLanguageModel(model, tokenizer, parse_special_tokens=True)

    async def generate(
        self, request_id: str, *, prompt_ids: list[int], sampling_params: dict[str, Any]
    ) -> TokenOutput:
        request = CompletionRequest(
            prompt="",
            prompt_token_ids=tuple(prompt_ids),
            max_tokens=sampling_params["max_tokens"],
            temperature=sampling_params["temperature"],
            seed=len(self.requests),
        )
        self.requests.append({"id": request_id})
        found = await self.model.complete(request)
        return TokenOutput(token_ids=list(found.token_ids), log_probs=list(found.logprobs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model for verl, and the file that names our agent loop."""
    path = tmp_path_factory.mktemp("verl")
    tokenizer = make_tokenizer([*TEXTS, TEMPLATE])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    make_model("nano", tokenizer, family="llama").save_pretrained(path)
    (path / "agents.yaml").write_text(agents(LAMP))
    return path


def agents(environment: str) -> str:
    target = "dreamgym.integrations.verl.DreamGymAgentLoop"
    found = {"name": "dreamgym", "_target_": target, "environment": environment}
    return json.dumps([found | {"max_turns": 4, "turn_tokens": 8}])  # which is YAML


def make_worker(folder: Path, server: Callable[[Any], Server], **lengths: int) -> AgentLoopWorker:
    overrides = [
        f"actor_rollout_ref.model.path={folder}",
        f"actor_rollout_ref.rollout.agent.agent_loop_config_path={folder / 'agents.yaml'}",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.calculate_log_probs=true",
        *(f"actor_rollout_ref.rollout.{name}={value}" for name, value in {**LENGTHS, **lengths}.items()),
    ]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=overrides)
    worker = AgentLoopWorker(config, llm_client=None)
    worker.llm_client = server(worker.tokenizer)
    return worker


def rows(worker: AgentLoopWorker, folder: Path, tasks: int, rollouts: int, **options: Any) -> DataProto:
    """A batch as verl's dataset reads it, each row `rollouts` times."""
    path = folder / "tasks.parquet"
    assert write_dataset(LAMP, path, count=tasks, **options) == tasks
    dataset = RLHFDataset(str(path), worker.tokenizer, worker.config.data)
    found = [{**dataset[number], "uid": f"row {number}"} for number in range(tasks) for _ in range(rollouts)]
    names = ("raw_prompt", "extra_info", "index", "uid", "agent_name", "data_source", "reward_model")
    columns = {name: np.array([None] * len(found), dtype=object) for name in names}
    for name, column in columns.items():
        column[:] = [row[name] for row in found]
    return DataProto.from_dict(non_tensors=columns, meta_info={"global_steps": 3})


def solve(seen: str) -> str:
    """Reads the label, then presses."""
    said = seen.partition("The label says ")[2]
    return f" press {said.split('.')[0]}\n" if said else " read label\n"


def test_the_command_of_the_guide_has_settings_that_verl_knows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "trainers.md").read_text()
    _, *words = page.partition("verl.trainer.main_ppo")[2].partition("```")[0].replace("\\\n", " ").split()
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides=words)
    assert config.actor_rollout_ref.rollout.agent.agent_loop_config_path == "agents.yaml"
    assert config.actor_rollout_ref.rollout.response_length == 4096
    assert config.trainer.use_v1  # the trainer that drops a group whose episodes fail


def test_a_batch_of_episodes_in_verls_own_worker(folder: Path) -> None:
    worker = make_worker(folder, lambda tokenizer: Server(tokenizer, solve))
    batch = rows(worker, folder, 3, 2, system="You control a lamp.")
    out = asyncio.run(worker.generate_sequences(batch))
    assert out.batch["responses"].shape == (6, LENGTHS["response_length"])
    assert out.batch["rm_scores"].sum(1).tolist() == [1.0] * 6
    last = (out.batch["rm_scores"] > 0).nonzero()[:, 1]
    own = out.batch["response_mask"].bool()
    assert all(
        own[row, position] for row, position in enumerate(last)
    )  # the score is on the policy's own token
    decode = worker.tokenizer.decode
    said = [decode(ids[mask]) for ids, mask in zip(out.batch["responses"], own, strict=True)]
    shown = decode(out.batch["responses"][0])
    assert all(each.startswith(" read label\n<eos> press ") for each in said)
    assert "user: The label says " in shown
    assert "user: The label" not in said[0]
    assert out.batch["rollout_log_probs"][own].unique().tolist() == [-0.5]
    assert out.batch["rollout_log_probs"][~own].abs().sum() == 0
    prompt = decode(out.batch["prompts"][0], skip_special_tokens=True)
    assert prompt.startswith("system: You control a lamp.\nuser: Switch on the lamp.\n\nYou see a lamp")
    assert out.non_tensor_batch["success"].tolist() == [1.0] * 6
    assert out.non_tensor_batch["turn_scores"][0] == [0.0, 1.0]
    assert out.non_tensor_batch["min_global_steps"][0] < out.non_tensor_batch["max_global_steps"][0]
    assert said[0::2] == said[1::2]  # rollouts of one row share the task and its seed
    assert len({request["id"] for request in worker.llm_client.requests}) == 6


def test_an_episode_ends_where_the_response_is_full(folder: Path) -> None:
    worker = make_worker(
        folder, lambda tokenizer: Server(tokenizer, lambda seen: " wait\n"), response_length=14
    )
    out = asyncio.run(worker.generate_sequences(rows(worker, folder, 1, 1)))
    length = int(out.batch["attention_mask"][0, LENGTHS["prompt_length"] :].sum())
    assert length <= 14
    assert out.batch["response_mask"][0, length - 1] == 1
    assert out.non_tensor_batch["turns"][0] < 4


BROKEN = """class Broken:
    tried = 0
    def start(self): return "hello"
    def step(self, action):
        Broken.tried += 1
        if Broken.tried < {failures}: raise OSError("gone")
        return "done", 1.0, True
"""


@pytest.mark.parametrize("failures", [3, 9])
def test_failed_episodes_are_tried_again_and_never_become_a_reward(folder: Path, failures: int) -> None:
    path = folder / f"broken_{failures}.py"
    path.write_text(BROKEN.format(failures=failures))
    worker = make_worker(folder, lambda tokenizer: Server(tokenizer, solve))
    batch = rows(worker, folder, 1, 1)
    batch.non_tensor_batch["extra_info"][0] = {"index": 0}
    (folder / "agents.yaml").write_text(agents(f"{path}:Broken"))
    try:
        worker = make_worker(folder, lambda tokenizer: Server(tokenizer, solve))
    finally:
        (folder / "agents.yaml").write_text(agents(LAMP))
    if failures == 3:
        assert asyncio.run(worker.generate_sequences(batch)).batch["rm_scores"].sum() == 1.0
    else:
        with pytest.raises(EpisodeFailedError, match="gone"):
            asyncio.run(worker.generate_sequences(batch))


def test_an_update_with_verls_advantages_and_loss(folder: Path) -> None:
    """The log-probs that the loop returns are those of its tokens, so the first update has ratio 1."""
    model: Any = None

    def serve(tokenizer: Any) -> Server:
        nonlocal model
        model = make_model("nano", tokenizer, family="llama")
        return ModelServer(tokenizer, model)

    worker = make_worker(folder, serve)
    batch = rows(worker, folder, 4, 4)
    out = asyncio.run(worker.generate_sequences(batch))
    mask = out.batch["response_mask"]
    rewards = out.batch["rm_scores"].clone()
    rewards[::4] += mask[::4] * 0.1  # a model without training may not succeed once
    advantages, _ = compute_grpo_outcome_advantage(rewards, mask, np.array(batch.non_tensor_batch["uid"]))
    logits = model(
        input_ids=out.batch["input_ids"],
        attention_mask=out.batch["attention_mask"],
        position_ids=out.batch["position_ids"],
    ).logits[:, LENGTHS["prompt_length"] - 1 : -1]
    logprobs = logits.log_softmax(-1).gather(-1, out.batch["responses"][..., None])[..., 0]
    old = out.batch["rollout_log_probs"]
    assert torch.allclose(logprobs[mask.bool()], old[mask.bool()], atol=1e-3)
    config = ActorConfig(strategy="fsdp", rollout_n=4, ppo_micro_batch_size_per_gpu=1)
    loss, metrics = compute_policy_loss_vanilla(old, logprobs, advantages, mask, config=config)
    loss.backward()
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-3)
    assert sum(float(each.grad.abs().sum()) for each in model.parameters() if each.grad is not None) > 0
