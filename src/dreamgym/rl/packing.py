"""From trajectories to strips: token sequences in which several turns of one episode stand one after another.

A turn's prompt often begins with all of the turn before. Then both are computed in one forward pass over the
longer one, and an episode of many turns costs one reading instead of many. What was sampled last in a turn is
only predicted, never read, so it does not matter that a closing token is missing from the next prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from dreamgym.errors import ConfigError
from dreamgym.types import Completion, Trajectory, Transition


@dataclass(slots=True, kw_only=True)
class PackedSequence:
    """Input tokens of one forward pass, and what is to be predicted where.

    Slots number the trained tokens, and turn slots the turns, of the whole batch: quantities of a token or a
    turn (log-probs, advantages, values) are kept in one flat tensor each.
    """

    tokens: list[int]
    places: list[int] = field(default_factory=list)
    """Of each trained token: the input position that predicts it."""
    targets: list[int] = field(default_factory=list)
    allowed: list[tuple[int, ...]] = field(default_factory=list)
    """Of each trained token: among which tokens it was drawn; empty for the whole vocabulary."""
    slots: list[int] = field(default_factory=list)
    turn_places: list[int] = field(default_factory=list)
    """Of each turn: the position of its prompt's last token, which has read all that the turn knows."""
    turn_slots: list[int] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    """Tokens that follow when the episode was truncated, up to the turn that did not come; only valued."""
    after_slot: int | None = None


@dataclass(slots=True, kw_only=True)
class PackedBatch:
    """All strips of a batch of trajectories, and where each quantity is found."""

    of_trajectory: list[list[PackedSequence]] = field(default_factory=list)
    slots_of_trajectory: list[range] = field(default_factory=list)
    turns_of_trajectory: list[range] = field(default_factory=list)
    after_of_trajectory: list[int | None] = field(default_factory=list)
    """The turn slot of the turn that did not come."""
    turn_slots: int = 0
    turn_of_slot: list[int] = field(default_factory=list)
    behaviour: list[float] = field(default_factory=list)
    """Log-prob of each trained token when it was sampled; 0 where it was not recorded."""
    recorded: bool = True
    """Whether `behaviour` is the distribution that every token was drawn from."""

    @property
    def tokens(self) -> int:
        return len(self.turn_of_slot)

    @property
    def turns(self) -> int:
        return sum(map(len, self.turns_of_trajectory))

    @property
    def all(self) -> list[PackedSequence]:
        return self.of(range(len(self.of_trajectory)))

    def of(self, trajectories: Iterable[int]) -> list[PackedSequence]:
        return [strip for trajectory in trajectories for strip in self.of_trajectory[trajectory]]


After = Callable[[Trajectory], Sequence[int]]
"""The prompt, in tokens, of the turn that would have come after a trajectory's last one."""
Untaught = Callable[[Transition], bool]
"""Whether a turn is only read."""


def cut(
    trajectories: Sequence[Trajectory], after: After | None = None, untaught: Untaught | None = None
) -> PackedBatch:
    """
    Args:
        after: if given, truncated trajectories get a slot for the value of the state they were left in.
        untaught: turns whose tokens are read by later turns but not trained.

    Raises:
        ConfigError: a turn does not have its tokens.
    """
    made = PackedBatch()
    for trajectory in trajectories:
        first_slot, first_turn = made.tokens, made.turn_slots
        strips: list[PackedSequence] = []
        for position, transition in enumerate(trajectory.transitions):
            completion = transition.completion
            if completion is None or not completion.token_ids or not completion.prompt_token_ids:
                raise ConfigError(
                    f"expected the exact tokens of every turn, trajectory {trajectory.id!r} has none in turn "
                    f"{position}: roll out with a model that tells them, or give them with agents.tokenize"
                )
            _add(made, strips, completion, trained=untaught is None or not untaught(transition))
        made.slots_of_trajectory.append(range(first_slot, made.tokens))
        made.turns_of_trajectory.append(range(first_turn, made.turn_slots))
        made.after_of_trajectory.append(None)
        if after is not None and trajectory.transitions[-1].outcome.truncated:
            _add_after(made, strips, list(after(trajectory)))
        made.of_trajectory.append(strips)
    return made


def _add(made: PackedBatch, strips: list[PackedSequence], completion: Completion, *, trained: bool) -> None:
    prompt, sampled = list(completion.prompt_token_ids), list(completion.token_ids)
    strip = _going_on(strips, prompt)
    strip.tokens = prompt + sampled[:-1]
    strip.turn_places.append(len(prompt) - 1)
    strip.turn_slots.append(made.turn_slots)
    if not completion.logprobs or completion.allowed:
        made.recorded = False
    for offset, token in enumerate(sampled if trained else ()):
        among = completion.allowed[offset] if completion.allowed else ()
        if len(among) == 1:  # there was no other: it teaches nothing
            continue
        strip.places.append(len(prompt) - 1 + offset)
        strip.targets.append(token)
        strip.allowed.append(among)
        strip.slots.append(made.tokens)
        made.turn_of_slot.append(made.turn_slots)
        made.behaviour.append(completion.logprobs[offset] if completion.logprobs else 0.0)
    made.turn_slots += 1


def _add_after(made: PackedBatch, strips: list[PackedSequence], prompt: list[int]) -> None:
    strip = _going_on(strips, prompt)
    strip.after = prompt[len(strip.tokens) :]
    strip.after_slot = made.after_of_trajectory[-1] = made.turn_slots
    made.turn_slots += 1


def _going_on(strips: list[PackedSequence], prompt: list[int]) -> PackedSequence:
    """The last strip if the prompt begins with it, else a new one."""
    if not strips or prompt[: len(strips[-1].tokens)] != strips[-1].tokens:
        strips.append(PackedSequence(tokens=[]))
    return strips[-1]


def micro_batches(strips: Sequence[PackedSequence], most: int) -> list[list[PackedSequence]]:
    """Sequences of similar length together, at most `most` tokens per micro-batch with padding.

    >>> lots = micro_batches([PackedSequence(tokens=[0] * n) for n in (5, 1, 2, 6)], 12)
    >>> [[len(strip.tokens) for strip in lot] for lot in lots]
    [[1, 2], [5, 6]]
    """
    lots: list[list[PackedSequence]] = []
    for strip in sorted(strips, key=lambda strip: len(strip.tokens)):
        if not lots or len(strip.tokens) * (len(lots[-1]) + 1) > most:
            lots.append([])
        lots[-1].append(strip)
    return lots
