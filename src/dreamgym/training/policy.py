"""The policy that practises: a model from scratch or pretrained weights, as a run's folder names them.

`base/` holds a model from scratch as it was before its first update, with its tokenizer; what learns of any
model is kept in small files beside it (`checkpoints.RunDir`). So a run needs nothing but its folder and,
if there are any, the pretrained weights that its settings name.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dreamgym.agents import Agent, examples, tokenised, tokens_after
from dreamgym.config import AgentConfig, Config, ExperienceConfig
from dreamgym.errors import ConfigError, StoreError
from dreamgym.files import atomic_directory
from dreamgym.protocols import Environment
from dreamgym.rollout_groups import PolicyFactory
from dreamgym.training.model_setup import PREFIX, load_model, quiet_transformers
from dreamgym.training.run_dir import RunDir, named_policy, read_config
from dreamgym.types import Trajectory

if TYPE_CHECKING:
    from dreamgym.models.local.language_model import LocalLanguageModel
    from dreamgym.models.local.tokenization import TextCodec
    from dreamgym.rl.policy_gradient import PolicyLearner

Device: TypeAlias = Literal["auto", "cpu", "cuda"]
BASE = "base"
_FREE = ("device", "temperature", "evaluation_temperature", "max_tokens")
"""Settings of an agent that may differ from those of the run whose policy it goes on from."""


@dataclass(slots=True, kw_only=True)
class PolicyModel:
    """A model that acts and learns, and is served while it does."""

    model: Any
    tokenizer: Any
    codec: TextCodec
    served: LocalLanguageModel
    config: AgentConfig

    @property
    def end(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def context(self) -> int | None:
        """The most tokens that it reads, where it says so."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def weights(self) -> dict[str, Any]:
        """What learns, copied."""
        return {name: weight.detach().clone() for name, weight in self._learning().items()}

    def restore(self, stored: Mapping[str, Any]) -> None:
        """
        Raises:
            ConfigError: they are not weights of the same model.
        """
        from dreamgym.rl.optimizer_step import restore

        with self.served.updating():
            restore(self._learning(), stored)

    def members(self, name: str, *, temperature: float | None = None) -> PolicyFactory:
        """Makes the agent of each episode."""
        settings = self.config.at_temperature(temperature)

        def member(environment: Environment, conversation: str, seed: int) -> Agent:
            return Agent(self.served, settings=settings, conversation=conversation, seed=seed, name=name)

        return member

    def tokenised(self, trajectories: Sequence[Trajectory]) -> list[Trajectory]:
        """As if this agent had played them; those that are longer than it reads are left out."""
        settings = self.config
        played = (tokenised(each, settings, self.codec, self.end) for each in trajectories)
        return [each for each in played if self.context is None or _longest(each) <= self.context]

    def export(self, folder: Path) -> None:
        """In the standard Hugging Face format, without any adapter; whole or not there."""
        model = self.model
        if hasattr(model, "merge_and_unload"):
            model = copy.deepcopy(model).merge_and_unload()
        _save_whole(model, self.tokenizer, folder)

    def _learning(self) -> dict[str, Any]:
        return {name: weight for name, weight in self.model.named_parameters() if weight.requires_grad}


def same_policy(begun: AgentConfig, wanted: AgentConfig) -> bool:
    """Whether weights that were taught with one of these settings act with the other: same model, same form
    of prompt and reply."""
    return begun.model_copy(update={name: getattr(wanted, name) for name in _FREE}) == wanted


def make_policy(config: Config, trajectories: Sequence[Trajectory], folder: Path) -> PolicyModel:
    """The policy of a run as it was before its first update; made on the first call, read on later ones."""
    agent, base = config.agent, folder / BASE
    quiet_transformers()
    if not agent.model.startswith(PREFIX):
        if agent.adapter != "none":
            raise ConfigError(
                f"agent.adapter={agent.adapter!r} adapts pretrained weights, which "
                f"agent.model={agent.model!r} has none of; choose hf:NAME_OR_PATH, or adapter none"
            )
        if not base.exists():
            _from_scratch(config, trajectories, base)
    return open_policy(config, folder)


def open_policy(config: Config, folder: Path) -> PolicyModel:
    """
    Raises:
        ConfigError: there is no such model.
    """
    from dreamgym.models.local.language_model import LocalLanguageModel
    from dreamgym.models.local.tokenization import TextCodec

    agent = config.agent
    source = agent.model if agent.model.startswith(PREFIX) else f"{PREFIX}{folder / BASE}"
    wanted = ExperienceConfig(
        model=source,
        adapter=agent.adapter,
        lora_rank=agent.lora_rank,
        lora_alpha=2 * agent.lora_rank,
        device=agent.device,
        precision="fp32",
    )
    try:
        student = load_model(wanted, [], config.seed)
    except ConfigError as error:
        raise ConfigError(str(error).replace("experience.", "agent.")) from None
    student.model.eval()
    return PolicyModel(
        model=student.model,
        tokenizer=student.tokenizer,
        codec=TextCodec(student.tokenizer),
        served=LocalLanguageModel(student.model, student.tokenizer),
        config=agent,
    )


@asynccontextmanager
async def opened_policy(name: str, *, device: Device = "auto") -> AsyncIterator[tuple[PolicyModel, str]]:
    """The policy that ``RUN`` or ``RUN@STEP`` names, ready to act, and what to call it."""
    run, step = named_policy(name)
    begun = read_config(run)
    begun = begun.model_copy(update={"agent": begun.agent.model_copy(update={"device": device})})
    folder = RunDir(run)
    step = folder.chosen() if step is None else step
    weights = folder.policy_weights(step)
    policy = open_policy(begun, run)
    try:
        policy.restore(weights)
        yield policy, f"{run}@{step}"
    finally:
        await policy.served.aclose()


def make_learner(config: Config, policy: PolicyModel, refusals: tuple[str, ...] = ()) -> PolicyLearner:
    """The learner that the settings name, over this policy's weights.

    Args:
        refusals: the texts by which the environment says no.
    """
    from dreamgym.rl.grpo import GRPOLearner, GRPOSettings
    from dreamgym.rl.ppo import PPOLearner, PPOSettings

    chosen = config.learner
    shared: dict[str, Any] = {
        name: getattr(chosen, name)
        for name in (
            *("learning_rate", "muon_lr", "gradient_clip", "micro_tokens", "epochs"),
            *("minibatch", "clip_low", "clip_high", "kl", "entropy", "behaviour", "lengths"),
            *("refusal_penalty", "repeat_penalty", "negative_weight", "warmup"),
        )
    } | {"temperature": config.agent.temperature, "seed": config.seed, "refusals": refusals}
    updating = policy.served.updating
    if chosen.algorithm == "grpo":
        own = {name: getattr(chosen, name) for name in ("scale_by_std", "step_weight", "discount")}
        settings = GRPOSettings(**own, **shared)
        return GRPOLearner(policy.model, settings, updating=updating)
    shown = config.agent
    return PPOLearner(
        policy.model,
        PPOSettings(discount=chosen.discount, decay=chosen.decay, value_weight=chosen.value_weight, **shared),
        after=lambda trajectory: tokens_after(trajectory, shown, policy.codec),
        updating=updating,
    )


def _from_scratch(config: Config, trajectories: Sequence[Trajectory], base: Path) -> None:
    from dreamgym.models import tiny

    if not trajectories:
        raise ConfigError(
            f"agent.model={config.agent.model!r} makes its words from trajectories: name some in train.data"
        )
    settings = config.agent
    # The last prompt of an episode holds nearly all the others.
    lasts = ([*examples(each, settings)][-1] for each in trajectories if each.transitions)
    tokenizer = tiny.make_tokenizer(
        (asked + answer for asked, answer in lasts), vocab_size=config.agent.vocabulary
    )
    _save_whole(tiny.make_model(config.agent.model, tokenizer, seed=config.seed), tokenizer, base)


def _save_whole(model: Any, tokenizer: Any, folder: Path) -> None:
    with atomic_directory(folder) as fresh:
        try:
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        except Exception as error:  # libraries report a full disk with exceptions of their own
            raise StoreError(f"{folder}: cannot write: {error}; free some space and run again") from None


def _longest(trajectory: Trajectory) -> int:
    completions = [turn.completion for turn in trajectory.transitions if turn.completion is not None]
    return max((len(c.prompt_token_ids) + len(c.token_ids) for c in completions), default=0)
