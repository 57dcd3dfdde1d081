"""Packs the turns of an episode into as few token sequences as possible: a prompt that begins with the whole
turn before shares its forward pass. The last sampled token of a turn is predicted and never an input."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dreamgym.errors import ConfigError
from dreamgym.types import Completion, Trajectory, Transition

_MAX_LENGTH_RATIO = 1.3
"""Longest to shortest sequence of a micro-batch: more would waste time on padding."""


@dataclass(slots=True, kw_only=True)
class PackedSequence:
    """One row of a forward pass. `token_ids` and `turn_ids` are the places of its trained tokens and
    turns in the flat tensors of the batch (log-probs, advantages, values)."""

    tokens: list[int]
    positions: list[int] = field(default_factory=list)
    """Per trained token: the input position that predicts it."""
    targets: list[int] = field(default_factory=list)
    allowed: list[tuple[int, ...]] = field(default_factory=list)
    """Per trained token: the tokens that constrained decoding allowed; empty: the whole vocabulary."""
    token_ids: list[int] = field(default_factory=list)
    turn_positions: list[int] = field(default_factory=list)
    """Per turn: the position of its prompt's last token, where the value head reads."""
    turn_ids: list[int] = field(default_factory=list)
    next_prompt: list[int] = field(default_factory=list)
    """The rest of the prompt after a truncated episode's last turn; input of the bootstrap value only."""
    bootstrap_id: int | None = None


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """The packed sequences of several trajectories, and the flat numbering of their tokens and turns."""

    sequences: list[list[PackedSequence]] = field(default_factory=list)
    """Per trajectory."""
    token_ranges: list[range] = field(default_factory=list)
    """Per trajectory: its trained tokens."""
    turn_ranges: list[range] = field(default_factory=list)
    bootstrap_ids: list[int | None] = field(default_factory=list)
    """Per trajectory: where the value of the state it was truncated in is found."""
    turn_count: int = 0
    """Turns and bootstrap values."""
    turn_of_token: list[int] = field(default_factory=list)
    old_logprobs: list[float] = field(default_factory=list)
    """Per trained token, as sampled; 0 where not recorded."""
    has_old_logprobs: bool = True
    """Whether `old_logprobs` come from the distribution that each token was sampled from."""

    @property
    def tokens(self) -> int:
        return len(self.turn_of_token)

    @property
    def turns(self) -> int:
        return sum(map(len, self.turn_ranges))

    @property
    def all(self) -> list[PackedSequence]:
        return self.of(range(len(self.sequences)))

    def of(self, trajectories: Iterable[int]) -> list[PackedSequence]:
        return [sequence for trajectory in trajectories for sequence in self.sequences[trajectory]]


NextPrompt = Callable[[Trajectory], Sequence[int]]
"""The prompt, in tokens, of the turn that would follow a trajectory's last one."""
LossMask = Callable[[Transition], bool]
"""Whether a turn's tokens are trained; the others are context only."""


def pack(
    trajectories: Sequence[Trajectory],
    *,
    next_prompt: NextPrompt | None = None,
    loss_mask: LossMask | None = None,
) -> PackedBatch:
    """With `next_prompt`, truncated trajectories get a bootstrap value of the state they ended in."""
    batch = PackedBatch()
    for trajectory in trajectories:
        masks = [loss_mask is None or loss_mask(transition) for transition in trajectory.chosen]
        sequences = _add_episode(batch, zip(exact_tokens(trajectory), masks, strict=True))
        if next_prompt is not None and trajectory.transitions[-1].outcome.truncated:
            _add_bootstrap(batch, sequences, list(next_prompt(trajectory)))
    return batch


def pack_turns(episodes: Iterable[Iterable[tuple[Completion, bool]]]) -> PackedBatch:
    """Packs episodes given as the tokens of their turns, and whether each is trained."""
    batch = PackedBatch()
    for turns in episodes:
        _add_episode(batch, turns)
    return batch


def pack_replies(examples: Iterable[tuple[Sequence[int], Sequence[int]]]) -> PackedBatch:
    """Packs (prompt, reply) pairs in tokens, one sequence each; the reply is trained."""
    batch = PackedBatch()
    for prompt, reply in examples:
        completion = Completion(text="", prompt_token_ids=tuple(prompt), token_ids=tuple(reply))
        _add_episode(batch, [(completion, True)])
    return batch


def exact_tokens(trajectory: Trajectory) -> list[Completion]:
    """Of every turn that the policy chose."""
    return [_exact(trajectory, turn) for turn in range(trajectory.given, len(trajectory.transitions))]


def _exact(trajectory: Trajectory, turn: int) -> Completion:
    completion = trajectory.transitions[turn].completion
    if completion is None or not completion.token_ids or not completion.prompt_token_ids:
        raise ConfigError(
            f"expected the exact tokens of every turn, trajectory {trajectory.id!r} has none in turn "
            f"{turn}: roll out with a model that returns them, or add them with agents.tokenize"
        )
    return completion


def _add_episode(batch: PackedBatch, turns: Iterable[tuple[Completion, bool]]) -> list[PackedSequence]:
    first_token, first_turn = batch.tokens, batch.turn_count
    sequences: list[PackedSequence] = []
    for completion, trained in turns:
        _add_turn(batch, sequences, completion, trained=trained)
    batch.sequences.append(sequences)
    batch.token_ranges.append(range(first_token, batch.tokens))
    batch.turn_ranges.append(range(first_turn, batch.turn_count))
    batch.bootstrap_ids.append(None)
    return sequences


def _add_turn(
    batch: PackedBatch, sequences: list[PackedSequence], completion: Completion, *, trained: bool
) -> None:
    prompt, sampled = list(completion.prompt_token_ids), list(completion.token_ids)
    sequence = _continued(sequences, prompt)
    sequence.tokens = prompt + sampled[:-1]
    sequence.turn_positions.append(len(prompt) - 1)
    sequence.turn_ids.append(batch.turn_count)
    if not completion.logprobs or completion.allowed:
        batch.has_old_logprobs = False
    for offset, token in enumerate(sampled if trained else ()):
        allowed = completion.allowed[offset] if completion.allowed else ()
        if len(allowed) == 1:  # no alternative: its log-prob is 0 whatever the weights
            continue
        sequence.positions.append(len(prompt) - 1 + offset)
        sequence.targets.append(token)
        sequence.allowed.append(allowed)
        sequence.token_ids.append(batch.tokens)
        batch.turn_of_token.append(batch.turn_count)
        batch.old_logprobs.append(completion.logprobs[offset] if completion.logprobs else 0.0)
    batch.turn_count += 1


def _add_bootstrap(batch: PackedBatch, sequences: list[PackedSequence], prompt: list[int]) -> None:
    sequence = _continued(sequences, prompt)
    sequence.next_prompt = prompt[len(sequence.tokens) :]
    sequence.bootstrap_id = batch.bootstrap_ids[-1] = batch.turn_count
    batch.turn_count += 1


def _continued(sequences: list[PackedSequence], prompt: list[int]) -> PackedSequence:
    """The last sequence if the prompt begins with it, else a new one."""
    if not sequences or prompt[: len(sequences[-1].tokens)] != sequences[-1].tokens:
        sequences.append(PackedSequence(tokens=[]))
    return sequences[-1]


def micro_batches(sequences: Sequence[PackedSequence], max_tokens: float) -> list[list[PackedSequence]]:
    """Sequences of similar length together, at most `max_tokens` per micro-batch with padding, longest first.

    >>> parts = micro_batches([PackedSequence(tokens=[0] * n) for n in (5, 1, 2, 6)], 12)
    >>> [[len(sequence.tokens) for sequence in part] for part in parts]
    [[6, 5], [2], [1]]
    """
    parts: list[list[PackedSequence]] = []
    for sequence in sorted(sequences, key=lambda sequence: -len(sequence.tokens)):
        width = len(parts[-1][0].tokens) if parts else 0
        full = width * (len(parts[-1]) + 1) > max_tokens if parts else True
        if full or width > _MAX_LENGTH_RATIO * len(sequence.tokens):
            parts.append([])
        parts[-1].append(sequence)
    return parts
