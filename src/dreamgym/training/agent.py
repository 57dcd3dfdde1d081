"""The agent: a language model that acts and learns, from scratch or from pretrained weights.

A run directory keeps a model from scratch, or one from a local directory whose weights are all trained, in
`base/` as it was before its first update, with its tokenizer; `run_dir.RunDir` keeps the trained weights.
Other pretrained weights are not copied: the run's settings name them.
"""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from dreamgym.agents import next_prompt_tokens, policy_factory, prompt_reply_pairs, tokenize
from dreamgym.config import HF_PREFIX, AgentConfig, Config, Device, TrainConfig, validate
from dreamgym.errors import ConfigError, StoreError
from dreamgym.files import atomic_directory
from dreamgym.rollouts import PolicyFactory
from dreamgym.training.model_setup import (
    Precision,
    check_adapter,
    load_pretrained,
    quiet_transformers,
    sft_rates,
)
from dreamgym.training.run_dir import BASE, CONFIG, RunDir, parse_policy_name, read_config
from dreamgym.types import Trajectory

if TYPE_CHECKING:
    from dreamgym.rl.policy_gradient import PolicyGradient

_FREE = (
    *("device", "precision", "gradient_checkpointing"),
    *("temperature", "evaluation_temperature", "max_tokens"),
)
"""Settings of an agent that may differ from those of the run whose policy it starts from."""


class Agent:
    """A language model that acts and learns. Rollouts and learners share its weights.

    Example::

        agent = dg.Agent.load("tiny", data=dream.trajectories)        # from scratch
        agent = dg.Agent.load("hf:Qwen/Qwen3-0.6B", lora=16)          # pretrained, with LoRA
        agent = dg.Agent.load("runs/agent")                           # the policy of a training run
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: AgentConfig | None = None,
        *,
        precision: Precision = "fp32",
        name: str = "agent",
    ) -> None:
        """`model` is a transformers causal LM; its tokenizer needs an end token."""
        from dreamgym.models.local.language_model import LocalLanguageModel
        from dreamgym.models.local.tokens import TextCodec

        self.model = model
        self.tokenizer = tokenizer
        self.config = config or AgentConfig()
        self.precision = precision
        self.name = name
        self.codec = TextCodec(tokenizer)
        self.language_model = LocalLanguageModel(model, tokenizer)
        self.version = 0
        """Weight updates so far; rollouts record it as the policy's version."""

    @classmethod
    def load(
        cls,
        model: str | Path = "tiny",
        *,
        data: Iterable[Trajectory] | None = None,
        lora: int | None = None,
        device: Device = "auto",
        seed: int = 0,
        **settings: Any,
    ) -> Agent:
        """Load an agent by name.

        Args:
            model: ``nano``, ``tiny`` or ``small`` from scratch; ``hf:NAME_OR_PATH`` for pretrained weights;
                ``RUN`` or ``RUN@STEP`` for the policy of a training run.
            data: trajectories from which a model from scratch gets its tokenizer; required there.
            lora: rank of a LoRA adapter; None trains all weights.
            settings: other settings of the section ``agent`` (`AgentConfig`), as training uses them.

        Raises:
            ConfigError: there is no such model, or a model from scratch was given no data.
        """
        model = str(model)
        run, step = parse_policy_name(model)
        if (run / CONFIG).is_file():
            return cls._load_run(run, step, device, settings)
        adapter = {"adapter": "lora", "lora_rank": lora} if lora else {}
        given = {"model": model, "device": device, **adapter, **settings}
        config = Config(agent=validate(AgentConfig, given, prefix="agent."), seed=seed)
        with tempfile.TemporaryDirectory() as folder:
            return make_agent(config, list(data or ()), Path(folder))

    @classmethod
    def _load_run(cls, run: Path, step: int | None, device: Device, settings: Mapping[str, Any]) -> Agent:
        begun = read_config(run)
        changed = begun.agent.model_dump() | {"device": device} | dict(settings)
        config = begun.model_copy(update={"agent": validate(AgentConfig, changed, prefix="agent.")})
        if not same_policy(begun.agent, config.agent):
            raise ConfigError(f"{run}: its policy was trained with other agent settings than {settings!r}")
        directory = RunDir(run)
        step = directory.selected_policy() if step is None else step
        weights = directory.policy_weights(step)
        agent = open_agent(config, run)
        agent.restore(weights)
        agent.name = f"{run}@{step}"
        return agent

    @property
    def temperature(self) -> float:
        """At which rollouts are sampled; losses use the same."""
        return self.config.temperature

    @property
    def sft_rates(self) -> dict[str, float | None]:
        """Learning rates of supervised fine-tuning that suit this kind of model."""
        return sft_rates(self.config)

    @property
    def end_token(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def context_length(self) -> int | None:
        """The most tokens that the model reads, where its configuration says so."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def policy_factory(self, name: str | None = None, *, temperature: float | None = None) -> PolicyFactory:
        """Makes the policy of each episode."""
        config = self.config.at_temperature(temperature)
        return policy_factory(self.language_model, config, name or self.name)

    def warm_start(
        self, trajectories: Sequence[Trajectory], *, steps: int = 300, seed: int = 0, **settings: Any
    ) -> dict[str, float]:
        """Supervised fine-tuning on the successes, as `train` does before its first step; `settings` are
        those of ``train.warm_start_*`` without the prefix."""
        from dreamgym.training.experience_run import known_environment
        from dreamgym.training.warm_start import make_sft

        chosen = {f"warm_start_{name}": value for name, value in {"steps": steps, **settings}.items()}
        config = Config(agent=self.config, seed=seed, train=validate(TrainConfig, chosen, prefix="train."))
        spec = known_environment(trajectories[0].task.environment) if trajectories else None
        sft = make_sft(
            self,
            trajectories,
            config,
            refusals=spec.refusals if spec is not None else (),
            think=spec.think if spec is not None else None,
        )
        metrics: dict[str, float] = {}
        while not sft.done:
            metrics = sft.step()
        return metrics

    def tokenize(self, trajectories: Iterable[Trajectory]) -> list[Trajectory]:
        """With the tokens that this agent would have read and sampled; episodes that do not fit its context
        are left out."""
        found = (tokenize(each, self.config, self.codec, self.end_token) for each in trajectories)
        limit = self.context_length
        return [each for each in found if limit is None or _longest(each) <= limit]

    def next_prompt_tokens(self, trajectory: Trajectory) -> tuple[int, ...]:
        """Tokens of the prompt after the last turn of a truncated episode."""
        return next_prompt_tokens(trajectory, self.config, self.codec)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Entered while weights change: no request runs meanwhile, and KV caches are dropped."""
        with self.language_model.updating():
            yield
        self.version += 1

    def weights(self) -> dict[str, Any]:
        """A copy of the weights that learn."""
        from dreamgym.rl.gradients import trainable_weights

        return {name: weight.detach().clone() for name, weight in trainable_weights(self.model).items()}

    def restore(self, weights: Mapping[str, Any]) -> None:
        from dreamgym.rl.gradients import trainable_weights
        from dreamgym.rl.optimizers import restore

        with self.language_model.updating():
            restore(trainable_weights(self.model), weights)

    def save(self, folder: Path | str, *, merge: bool = True) -> None:
        """In the Hugging Face format; the directory is replaced as a whole. With `merge` LoRA is merged,
        without it only the adapter is written."""
        model = self.model
        if merge and hasattr(model, "merge_and_unload"):
            model = copy.deepcopy(model).merge_and_unload()
        _save(model, self.tokenizer, Path(folder))

    async def aclose(self) -> None:
        """Stop the worker thread of the language model."""
        await self.language_model.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()


def same_policy(begun: AgentConfig, wanted: AgentConfig) -> bool:
    """Whether weights trained with one of these settings can act with the other: same model, same prompt and
    reply format."""
    return begun.model_copy(update={name: getattr(wanted, name) for name in _FREE}) == wanted


def make_agent(config: Config, trajectories: Sequence[Trajectory], folder: Path) -> Agent:
    """The agent of a run before its first update. A model from scratch is created on the first call and read
    from the run directory on later ones."""
    if not config.agent.model.startswith(HF_PREFIX):
        check_adapter(config.agent, section="agent")
        if not (folder / BASE).exists():
            _from_scratch(config, trajectories, folder / BASE)
    elif config.agent.adapter == "none" and not (folder / BASE).exists():
        source = Path(config.agent.model.removeprefix(HF_PREFIX))
        if source.is_dir():  # copied: the run must not need a directory that may move
            with atomic_directory(folder / BASE) as fresh:
                shutil.copytree(source, fresh, dirs_exist_ok=True)
    return open_agent(config, folder)


def weights_source(config: Config, folder: Path) -> str:
    """Where the run's model before its first update is: ``hf:`` and a directory or a name."""
    return f"{HF_PREFIX}{folder / BASE}" if (folder / BASE).exists() else config.agent.model


def open_agent(config: Config, folder: Path) -> Agent:
    agent, source = config.agent, weights_source(config, folder)
    from_scratch = not agent.model.startswith(HF_PREFIX)
    loaded = load_pretrained(agent, source, config.seed, section="agent", from_scratch=from_scratch)
    loaded.model.eval()
    if agent.gradient_checkpointing:
        loaded.model.gradient_checkpointing_enable({"use_reentrant": False})
    return Agent(loaded.model, loaded.tokenizer, agent, precision=loaded.precision)


def make_learner(
    config: Config, agent: Agent, refusals: tuple[str, ...] = (), recorded: Sequence[Trajectory] = ()
) -> PolicyGradient:
    """The learner that `learner.algorithm` names, over this agent's weights; `recorded` successes with tokens
    are for ``learner.recorded_successes``."""
    from dreamgym.rl.expert_iteration import ExpertIteration
    from dreamgym.rl.grpo import GRPO
    from dreamgym.rl.ppo import PPO

    learners: dict[str, type[PolicyGradient]] = {
        "grpo": GRPO,
        "ppo": PPO,
        "expert_iteration": ExpertIteration,
    }
    make = learners[config.learner.algorithm]
    return make(agent, config.learner, seed=config.seed, refusals=refusals, recorded=recorded)


def _from_scratch(config: Config, trajectories: Sequence[Trajectory], base: Path) -> None:
    from dreamgym.models import tiny

    if not trajectories:
        raise ConfigError(
            f"agent.model={config.agent.model!r} is trained from scratch and takes its vocabulary from "
            "trajectories, got none: pass data=dream.trajectories to Agent.load, or name some in train.data"
        )
    quiet_transformers()
    # The last prompt of an episode contains nearly all earlier ones.
    lasts = ([*prompt_reply_pairs(each, config.agent)][-1] for each in trajectories if each.transitions)
    tokenizer = tiny.make_tokenizer(
        (prompt + reply for prompt, reply in lasts), vocab_size=config.agent.vocabulary
    )
    _save(tiny.make_model(config.agent.model, tokenizer, seed=config.seed), tokenizer, base)


def _save(model: Any, tokenizer: Any, folder: Path) -> None:
    with atomic_directory(folder) as fresh:
        try:
            model.save_pretrained(fresh)
            tokenizer.save_pretrained(fresh)
        except Exception as error:  # libraries report a full disk with exceptions of their own
            raise StoreError(f"{folder}: cannot write: {error}; free some space and run again") from None


def _longest(trajectory: Trajectory) -> int:
    completions = [turn.completion for turn in trajectory.transitions if turn.completion is not None]
    return max((len(c.prompt_token_ids) + len(c.token_ids) for c in completions), default=0)
