"""Every setting: name, default, limits, description. Stages take these sections directly."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, model_validator

from dreamgym.config.databases import without_password
from dreamgym.config.endpoints import BudgetConfig, EndpointConfig
from dreamgym.config.section import Section
from dreamgym.errors import ConfigError

Device: TypeAlias = Literal["auto", "cpu", "cuda", "mps"]
Precision: TypeAlias = Literal["auto", "fp32", "bf16"]
HF_PREFIX = "hf:"
"""Begins the name of a model that transformers loads: a folder, or a name on the hub."""


class EnvironmentConfig(Section):
    """The real environment and its options (`dreamgym envs describe NAME` lists them)."""

    name: str = "alfworld"
    options: dict[str, Any] = Field(default_factory=dict)


class CollectConfig(Section):
    """How trajectories are recorded from the real environment."""

    policy: str = Field(
        "mix",
        description="expert[:NAME], random, explore, noisy:S, clumsy:S, careless:S, mix or endpoint:NAME",
    )
    episodes: int = Field(100, ge=1)
    episodes_per_task: int = Field(1, ge=1, description="episodes of one task; 8 for a black box")
    actions: tuple[str, ...] = Field(
        (), description="explore: example actions where none are listed; {} is any word"
    )
    split: str = "train"
    out: Path = Path("trajectories")
    concurrency: int = Field(64, ge=1, description="episodes in flight")
    workers: int = Field(0, ge=0, description="processes or Ray actors that play them; 0: this process")
    admissible_actions: bool = Field(True, description="record the admissible actions of each state")
    world_sheet: bool = Field(True, description="record the hidden facts of each episode")


class ReplayConfig(Section):
    """Where experience is kept and how it is found again."""

    store: Annotated[str, AfterValidator(without_password)] = Field(
        "replay.sqlite", description="a file, or postgresql://…, where each training run has its own schema"
    )
    reconnect_seconds: float = Field(120.0, ge=0, description="PostgreSQL: wait for a lost server")
    embedder: str = Field("lexical", description="lexical, sentence:PATH_OR_NAME or endpoint:MODEL@URL")
    index: Literal["auto", "exact", "approximate"] = "auto"
    exact_limit: int = Field(300_000, ge=0, description="rows of one environment up to which auto is exact")
    capacity: int | None = Field(None, ge=1, description="rows kept; synthetic ones are evicted first")
    k: int | None = Field(None, ge=0, description="demonstrations; None: 1 if fine-tuned, 8 if prompted")
    max_synthetic: int | None = Field(None, ge=0, description="synthetic demonstrations among the k")

    def demonstrations(self, *, prompted: bool) -> int:
        """`k`, or its default for a fine-tuned or a prompted experience model.

        >>> ReplayConfig().demonstrations(prompted=True), ReplayConfig(k=3).demonstrations(prompted=True)
        (8, 3)
        """
        return self.k if self.k is not None else 8 if prompted else 1


Part: TypeAlias = Literal["history", "reasoning", "demonstrations", "sheet"]
"""A part of an experience model's prompt or reply that an ablation can leave out."""

WITHOUT: Mapping[Part, int | bool] = {"history": 0, "reasoning": False, "sheet": False}
"""The setting that leaves a part out; for demonstrations it is `replay.k`."""


class ExperienceConfig(Section):
    """The fine-tuned experience model: its weights, its fine-tuning and its prompt."""

    model: str = Field("tiny", description="nano, tiny or small from scratch, or hf:NAME_OR_PATH")
    family: Literal["lfm2", "llama"] = Field("lfm2", description="architecture of a model from scratch")
    vocabulary: int = Field(1024, ge=300, description="tokens of a model from scratch")
    adapter: Literal["none", "lora"] = Field("none", description="train all pretrained weights, or LoRA")
    lora_rank: int = Field(16, ge=1, description="rank of the LoRA matrices; alpha is twice the rank")
    learning_rate: float | None = Field(None, gt=0, description="None: 3e-3; pretrained 2e-5, LoRA 2e-4")
    device: Device = Field("auto", description="auto: a CUDA GPU if there is one, else the CPU")
    precision: Precision = Field("auto", description="auto: bf16 for pretrained weights on a GPU, else fp32")
    exchange_numbers: bool = Field(
        True, description="exchange numbers in the examples of a model from scratch, so that it copies them"
    )
    exchange_names: bool = Field(
        True, description="known replies: exchange words that are names in the examples, likewise"
    )

    steps: int = Field(1500, ge=1, description="weight updates")
    batch: int = Field(32, ge=1, description="examples per update")
    validation: float = Field(0.05, ge=0, lt=1, description="share of tasks held out to measure agreement")
    history: int = Field(1, ge=0, description="newest transitions in a prompt")
    facts: Literal["auto", "sheet", "replies"] = Field(
        "auto",
        description="facts of a prompt: the world sheet, or replies that other recordings of the task know; "
        "auto: the sheet where the trajectories or the environment's rules have one",
    )
    sheet: bool = Field(True, description="show the facts that the action touches")
    imagine: bool = Field(True, description="known replies: imagine an unknown one once per rollout group")
    imagine_temperature: float = Field(1.0, ge=0, description="of an imagined reply")
    min_support: float = Field(0.5, ge=0, le=1, description="known replies: bound of the support score")
    unsupported: Literal["no_success", "refuse", "end", "penalize", "ignore"] = Field(
        "no_success",
        description="a prediction below min_support: no later success counts, refuse the action, end the "
        "episode, subtract what is missing from the reward, or ignore the bound",
    )
    reasoning: bool = Field(True, description="reason before the next state")
    text_limit: int = Field(64, ge=1, description="characters of a past or present state in a prompt")
    max_tokens: int = Field(400, ge=1, description="of a reply, reasoning included")
    attempts: int = Field(3, ge=1, description="the most requests for a reply that parses")
    refusal_ends: bool = Field(False, description="a refused action ends the imagined episode")

    def without(self, parts: Collection[Part]) -> Self:
        """The same settings with these parts left out, for ablations.

        >>> ExperienceConfig(history=2).without(["history", "reasoning"]).history
        0
        """
        return self.model_copy(update={part: WITHOUT[part] for part in parts if part in WITHOUT})


class PromptedConfig(Section):
    """The prompted experience model: the prompt of a language model that is not fine-tuned."""

    prompt: str = Field("auto", description="the description of the environment: auto, or a text file")
    history: int = Field(20, ge=0, description="newest transitions in a prompt")
    sheet: bool = Field(True, description="show the facts that the action touches")
    reasoning: bool = Field(True, description="reason before the next state")
    text_limit: int = Field(2000, ge=1, description="characters of each state in a prompt")
    max_tokens: int = Field(2048, ge=1, description="of a reply, reasoning included")
    attempts: int = Field(3, ge=1, description="the most requests for a reply that parses")

    def without(self, parts: Collection[Part]) -> Self:
        return self.model_copy(update={part: WITHOUT[part] for part in parts if part in WITHOUT})


class AgentConfig(Section):
    """The policy's model, its prompt and its replies."""

    model: str = Field("tiny", description="nano, tiny or small from scratch, or hf:NAME_OR_PATH")
    vocabulary: int = Field(2048, ge=300, description="tokens of a model from scratch")
    adapter: Literal["none", "lora"] = Field("none", description="train all pretrained weights, or LoRA")
    lora_rank: int = Field(16, ge=1, description="rank of the LoRA matrices; alpha is twice the rank")
    device: Device = Field("auto", description="auto: a CUDA GPU if there is one, else the CPU")
    precision: Precision = Field("auto", description="auto: bf16 for pretrained weights on a GPU, else fp32")
    gradient_checkpointing: bool = Field(False, description="less memory, a third more time")
    history: int = Field(20, ge=0, description="transitions in a prompt, after the first state; 0: all")
    show_actions: Literal["never", "now", "always"] = Field(
        "never", description="admissible actions in the prompt, of the present or of every state"
    )
    enforce_actions: bool = Field(False, description="constrain replies to the admissible actions")
    thought: bool = Field(False, description="a thought before each action, on the same line")
    text_limit: int = Field(2000, ge=1, description="characters per state")
    max_tokens: int = Field(32, ge=1, description="per reply")
    temperature: float = Field(1.0, ge=0, description="in training; losses use the same temperature")
    evaluation_temperature: float = Field(0.4, ge=0, description="in evaluation; 0: greedy")

    @model_validator(mode="after")
    def _thought_or_choice(self) -> Self:
        if self.thought and self.enforce_actions:
            raise ConfigError(
                "expected agent.thought or agent.enforce_actions, got both: listed actions have no thought"
            )
        return self

    def at_temperature(self, temperature: float | None) -> Self:
        """The same settings with another sampling temperature; None for the same."""
        return self if temperature is None else self.model_copy(update={"temperature": temperature})


class LearnerConfig(Section):
    """How rollout groups change the weights: all learners take this section as it is."""

    algorithm: Literal["grpo", "ppo", "expert_iteration", "dpo"] = Field(
        "grpo",
        description="expert_iteration: imitate own successes; dpo: no rollouts, only pairs of a recorded "
        "success and failure on one task",
    )
    learning_rate: float = Field(3e-4, gt=0, description="of AdamW")
    muon_lr: float | None = Field(None, gt=0, description="of Muon for weight matrices (models from scratch)")
    warmup_steps: int = Field(0, ge=0, description="updates over which the learning rate rises")
    decay_steps: int = Field(
        0, ge=0, description="training steps over which it falls to a tenth; 0: it stays constant"
    )
    max_grad_norm: float = Field(1.0, gt=0, description="gradients are clipped at this norm")
    micro_tokens: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        8192, description="tokens per forward and backward pass; auto: as many as fit into free memory"
    )
    processes: int = Field(1, ge=1, description="processes that compute gradients, one GPU each")
    epochs: int = Field(1, ge=1, description="passes over the trajectories of a step")
    minibatch_size: int | None = Field(None, ge=1, description="trajectories per update; None: all")
    clip_low: float = Field(0.2, ge=0, lt=1, description="lower bound of the importance ratio is 1 - this")
    clip_high: float = Field(0.28, ge=0, description="upper bound is 1 + this; above clip_low: DAPO")
    kl_coef: float = Field(0.0, ge=0, description="weight of the KL term to the initial policy")
    kl_bias_correction: bool = Field(False, description="weight the KL term by the importance ratio")
    entropy_coef: float = Field(0.0, ge=0, description="weight of the entropy bonus")
    old_logprobs: Literal["recorded", "recomputed"] = Field(
        "recomputed", description="for importance ratios; recorded ones differ in the last bits"
    )
    loss_normalization: Literal["token", "trajectory", "constant"] = Field(
        "token", description="mean over tokens (DAPO), per trajectory (GRPO), or a constant (Dr. GRPO)"
    )
    scale_by_std: bool = Field(True, description="GRPO: divide advantages by the group's standard deviation")
    refusal_penalty: float = Field(0.0, ge=0, description="subtracted from the reward of a refused turn")
    negative_advantage_weight: float = Field(1.0, ge=0, description="0: only positive advantages (RAFT++)")
    mask_refused_turns: bool | None = Field(
        None,
        description="a refused turn gets no positive advantage and is not imitated; None: only in expert "
        "iteration",
    )
    return_gamma: float = Field(
        1.0, gt=0, le=1, description="GRPO: discount per turn of a return; below 1 a short success earns more"
    )
    gamma: float = Field(0.95, gt=0, le=1, description="PPO: discount per turn")
    gae_lambda: float = Field(0.95, ge=0, le=1, description="PPO: the λ of GAE")
    value_coef: float = Field(0.5, ge=0, description="PPO: weight of the value loss")
    value_clip: float | None = Field(0.2, gt=0, description="PPO: clipping range of values; None: none")
    value_lr: float | None = Field(
        None, gt=0, description="PPO: learning rate of the value head; None: learning_rate"
    )
    selection: Literal["shortest_success", "random"] = Field(
        "shortest_success", description="expert iteration: the member of each rollout group to imitate"
    )
    pooled_steps: int = Field(
        4, ge=1, description="expert iteration: imitate the selected episodes of this many steps together"
    )
    recorded_successes: int = Field(
        0, ge=0, description="GRPO, expert iteration: recorded successes imitated in each step (DynaWeb)"
    )
    own_successes: int = Field(
        0, ge=0, description="GRPO, expert iteration: own earlier successes imitated in each step (SPEAR)"
    )
    beta: float = Field(0.1, gt=0, description="DPO: strength of the pull to the initial policy")


class TrainConfig(Section):
    """One training run: environment, tasks, length, output."""

    out: Path = Field(Path("runs/agent"), description="run directory")
    data: list[str] = Field(["builtin:alfworld"], description="trajectories: warm start, tasks, world sheets")
    mode: Literal["dream", "real"] = Field("dream", description="the environment to train in")
    experience: str | None = Field(None, description="run directory, endpoint:NAME or hf:NAME_OR_PATH")
    reward: str = Field(
        "auto",
        description="grader in the dream: model, sheet, a judge (endpoint:NAME, hf:NAME_OR_PATH), or auto: "
        "sheet where the environment defines goals on world sheets, else model",
    )
    start_states: Literal["recorded", "recombined", "imagined"] = Field(
        "recorded",
        description="world sheets as recorded, or with objects placed anew within their room; of a black box "
        "also imagined: without what recordings of the task know",
    )
    imagined_fraction: float = Field(
        0.5, gt=0, le=1, description="start_states=imagined: share of the rollout groups that begin so"
    )
    resets: Literal["none", "backward", "branch"] = Field(
        "none",
        description="in the dream, groups that begin within a known episode: backward: ever further before "
        "the end of a recorded success; branch: within an episode of the step before",
    )
    reset_fraction: float = Field(
        0.5, gt=0, le=1, description="share of the groups of a step; not of all of them with branch"
    )
    reset_success: float = Field(
        0.5, gt=0, le=1, description="backward: success of these groups at which they begin one turn earlier"
    )
    horizon: int | None = Field(None, ge=1, description="actions per synthetic episode; None: as in reality")
    init_from: str | None = Field(None, description="RUN or RUN@STEP to start from, without a warm start")
    warm_start_steps: int = Field(300, ge=0, description="SFT updates on recorded successes")
    warm_start_batch_size: int = Field(16, ge=1, description="trajectories per SFT update")
    warm_start_successes: int | None = Field(
        None, ge=1, description="imitate only this many recorded successes, sampled by the seed; None for all"
    )
    warm_start_lr: float | None = Field(None, gt=0, description="None: 3e-3; pretrained 2e-5, LoRA 2e-4")
    warm_start_muon_lr: float | None = Field(None, gt=0, description="None: 0.02 from scratch, else no Muon")
    warm_start_success: float | None = Field(
        None, gt=0, le=1, description="in the dream: the warm start ends soon after this success is reached"
    )
    warm_start_check_every: int = Field(15, ge=1, description="updates between two measurements of it")
    warm_start_evaluated: bool = Field(
        False, description="measure it at agent.evaluation_temperature instead of that of practice"
    )
    warm_start_cooldown: float = Field(
        0.33,
        ge=0,
        description="further updates, as a share of those before, over which the rate falls; 0: none, and of "
        "the last two measured policies the one nearer to warm_start_success is the start",
    )
    split: str = Field("train", description="split of the training tasks")
    tasks_from: Literal["data", "environment"] = Field("data", description="environment: needs mode real")
    num_tasks: int | None = Field(None, ge=1, description="number of training tasks; None for all")
    steps: int = Field(100, ge=0, description="training steps")
    real_steps: int | None = Field(
        None, ge=1, description="budget of real environment steps, in the dream of its audits; never exceeded"
    )
    seconds: float | None = Field(None, gt=0, description="stop after this many seconds of training")
    tasks_per_step: int = Field(8, ge=1)
    group_size: int = Field(8, ge=2, description="rollouts per task (the paper's n)")
    concurrency: int = Field(256, ge=1, description="concurrent episodes")
    workers: int = Field(0, ge=0, description="processes or Ray actors that play rollouts; 0: this process")
    max_staleness: int = Field(
        0, ge=0, description="steps whose rollouts begin before the update of the current one; needs workers"
    )
    policy_servers: tuple[str, ...] = Field(
        (), description="endpoint:NAME of each vLLM replica that samples rollouts; none: the workers do"
    )
    sampling_tolerance: float | None = Field(
        None, gt=0, description="nats between their log-probs and the learner's; None: 0.1, or 0.005 in fp32"
    )
    retries: int = Field(2, ge=0, description="retries of an episode whose environment failed")
    failure_pause_seconds: float = Field(10.0, ge=0, description="each pause after too many failures")
    update_replay_buffer: bool = Field(True, description="add fresh transitions to the run's replay buffer")
    save_groups: int = Field(1, ge=0, description="rollout groups saved per step")
    checkpoint_every: int = Field(1, ge=1, description="steps between checkpoints")
    save_policy_every: int = Field(10, ge=1, description="steps between saved policies")
    evaluate_every: int = Field(0, ge=0, description="steps between evaluations in reality; 0: none")
    evaluate_episodes: int = Field(50, ge=1, description="of the validation split; they select a policy")
    audit_every: int = Field(0, ge=0, description="steps between audits of the dream in reality; 0: none")
    audit_steps: int = Field(200, ge=1, description="the most real environment steps of an audit")
    gate: Literal["refuse", "warn", "off"] = Field(
        "refuse", description="reaction to a dream that fails the measurement before training"
    )
    gate_exact: float = Field(
        0.5, ge=0, le=1, description="least share of exact next states, overall and of each frequent action"
    )
    gate_false: float = Field(0.2, ge=0, le=1, description="largest share of false successes")
    gate_episodes: float = Field(
        0.3, ge=0, le=1, description="least share of recorded successes that succeed in the dream again"
    )
    monitors: Literal["stop", "warn", "off"] = Field("stop", description="reaction to a collapse")
    monitor_patience: int = Field(
        10, ge=1, description="bad steps before a warning; training stops after twice as many"
    )


class ClusterConfig(Section):
    """Where workers run, and what happens when one of them is late or lost."""

    address: str = Field(
        "none", description="none: processes of this machine; auto, HOST:PORT or ray://…: a Ray cluster"
    )
    worker_cpus: float = Field(1.0, ge=0, description="Ray: cores of a worker")
    worker_gpus: float = Field(0.0, ge=0, description="Ray: GPUs of a worker")
    group_seconds: float = Field(1800.0, gt=0, description="deadline of a rollout group on one worker")
    late_groups: Literal["retry", "drop"] = Field(
        "retry", description="a group that misses it is played on another worker, or counted as failed"
    )
    attempts: int = Field(3, ge=1, description="workers that a group is tried on; then it has failed")
    start_seconds: float = Field(300.0, gt=0, description="for a worker to get ready")


class CurriculumConfig(Section):
    """Task generation: how many tasks, when, and from which."""

    generator: str = Field(
        "auto", description="experience (the same weights), hf:NAME_OR_PATH, endpoint:NAME, none or auto"
    )
    generated_fraction: float = Field(0.25, ge=0, le=1, description="largest share of a step (the paper's λ)")
    every: int = Field(5, ge=1, description="steps between rounds of generation")
    sources: int = Field(4, ge=1, description="tasks varied per round, highest reward entropy first")
    candidates: int = Field(8, ge=1, description="variations requested per task, up to three times")


class Config(Section):
    """The whole configuration of a run."""

    seed: int = 0
    environment: EnvironmentConfig = EnvironmentConfig()
    collect: CollectConfig = CollectConfig()
    replay: ReplayConfig = ReplayConfig()
    experience: ExperienceConfig = ExperienceConfig()
    prompted: PromptedConfig = PromptedConfig()
    curriculum: CurriculumConfig = CurriculumConfig()
    agent: AgentConfig = AgentConfig()
    learner: LearnerConfig = LearnerConfig()
    train: TrainConfig = TrainConfig()
    cluster: ClusterConfig = ClusterConfig()
    endpoints: dict[str, EndpointConfig] = Field(default_factory=dict)
    budget: BudgetConfig = BudgetConfig()
