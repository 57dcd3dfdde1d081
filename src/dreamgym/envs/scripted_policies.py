"""Scripted policies for collecting trajectories: an expert, a random policy, and experts with errors.

A policy plays one episode; its randomness comes from its seed. Names on the command line:

    expert         the environment's default expert
    expert:NAME    another of its experts
    noisy:SHARE    the expert, but with probability SHARE a random action
    clumsy:SHARE   the expert, but with probability SHARE an action on a wrong object or in a wrong place
    careless:SHARE the expert, but with probability SHARE the admissible action most similar to it
    random         any admissible action; with probability 0.1 one that is no longer admissible
    mix            a fixed mixture of the above, see `MIX`
    explore        admissible actions and errors on purpose, for an unknown environment, see `exploration`

Where an environment lists no admissible actions, a random action is the expert's, or the last one, with one
argument exchanged; without any, words of the task and the state.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Sequence

from dreamgym.config import nearest_name
from dreamgym.envs.episode import check_expert
from dreamgym.envs.exploration import ExplorePolicy
from dreamgym.errors import ConfigError
from dreamgym.protocols import Environment, HasExpert, Policy, find_expert
from dreamgym.types import Decision, State, Task, Transition

MIX = ("expert",) * 5 + ("noisy:0.3",) * 3 + ("random",) * 2
"""The policies of every ten episodes of `mix`."""

STALE_SHARE = 0.1
"""Fraction of random actions that were admissible earlier and are not now: without them no trajectory would
show a refusal."""

_IN_PLACE = 0.5
"""Fraction of clumsy actions at the agent's place on an absent object. Elsewhere an action is refused because
of the place, so no trajectory would show that the object has to be present, too."""
_PREMATURE = 0.2
"""Fraction of clumsy actions that would finish the task if it were prepared, where an environment names such
actions (`finishing`): they show what is still missing."""
_WRONG_DESTINATION = 0.2
"""Fraction of clumsy moves to a place that does not exist, or to the current one."""
_NUMBERS = 13
"""Upper bound of the numbers of such places."""
_ERRORS = ("noisy", "clumsy", "careless")
_WAYS = ("north", "east", "south", "west")
_PATTERNS = (
    "careless:SHARE",
    "clumsy:SHARE",
    "expert",
    "expert:NAME",
    "explore",
    "mix",
    "noisy:SHARE",
    "random",
)
_NAME = re.compile(r"[a-z]+ [0-9]+")
"""Objects in actions: ``mug 1``, ``desk 2``."""


class RandomPolicy:
    """A uniform choice of the admissible actions; sometimes one that is no longer admissible."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        return Decision(action=_any_action(self._random, task, history, state))


class ExpertPolicy:
    """The actions of the environment's expert."""

    def __init__(self, environment: HasExpert, expert: str | None = None) -> None:
        check_expert(expert, environment.experts)
        self.name = "expert" if expert is None else f"expert:{expert}"
        self._environment = environment
        self._expert = expert

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        return Decision(action=await self._environment.expert_action(self._expert))


class ImperfectExpertPolicy:
    """The expert's actions; with probability `share` an error of one kind.

    ``noisy``: a random action, so that episodes show recovery. ``clumsy``: a known action on other objects,
    so that they show refusals of every verb. ``careless``: an admissible action similar to the expert's (the
    oven for the stove), so that they show near misses.
    """

    def __init__(self, kind: str, share: float, environment: HasExpert, seed: int) -> None:
        self.name = f"{kind}:{share:g}"
        self._kind = kind
        self._share = share
        self._expert = ExpertPolicy(environment)
        self._finishing: tuple[str, ...] = getattr(environment, "finishing", ())
        self._random = random.Random(seed)

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        if self._kind == "careless":
            return self._careless(await self._expert.act(task, history, state), state)
        if self._random.random() < self._share:
            if self._kind == "noisy":
                listed = bool(state.admissible_actions)
                right = "" if listed else (await self._expert.act(task, history, state)).action
                return Decision(action=_any_action(self._random, task, history, state, like=right))
            wrong = self._clumsy(history, state)
            if wrong is not None:
                return Decision(action=wrong)
        return await self._expert.act(task, history, state)

    def _careless(self, right: Decision, state: State) -> Decision:
        others = [action for action in state.admissible_actions or () if action != right.action]
        if not others or self._random.random() >= self._share:
            return right
        likeness = [_common_words(action, right.action) for action in others]
        likest = [action for action, like in zip(others, likeness, strict=True) if like == max(likeness)]
        return Decision(action=self._random.choice(likest))

    def _clumsy(self, history: Sequence[Transition], state: State) -> str | None:
        if self._finishing and self._random.random() < _PREMATURE:
            return self._random.choice(self._finishing)
        now = set(state.admissible_actions or ())
        known = sorted(now.union(*(past.state.admissible_actions or () for past in history)))
        chance = self._random.random()
        kinds = [_wrong_action, _wrong_word]
        if chance < _WRONG_DESTINATION:
            kinds = [_absent_name, _stale_action, *kinds]
        elif chance < _WRONG_DESTINATION + _IN_PLACE:
            kinds = [_missing_thing, _wrong_action, _stale_action, _wrong_word]
        found = (kind(self._random, now, known) for kind in kinds)
        return next((wrong for wrong in found if wrong is not None), None)


def resolve_policy(name: str, *, seed: int, episode: int) -> str:
    """The policy of an episode: `mix` becomes one of its policies, other names stay.

    It depends only on the seed and the number of the episode, so a resumed collection is the same as one that
    never stopped. Every ten episodes have exactly the mixture, in a random order.

    >>> [resolve_policy("mix", seed=0, episode=episode) for episode in range(10)].count("expert")
    5
    >>> resolve_policy("noisy:0.1", seed=0, episode=7)
    'noisy:0.1'
    """
    _parse(name)
    if name != "mix":
        return name
    block, place = divmod(episode, len(MIX))
    return random.Random(f"mix:{seed}:{block}").sample(MIX, len(MIX))[place]


def make_policy(name: str, environment: Environment, *, seed: int) -> Policy:
    """The named policy for one episode of `environment`; resolve `mix` first.

    Raises:
        ConfigError: the name is unknown or malformed, or the environment has no such expert.
    """
    kind, argument = _parse(name)
    if kind == "mix":
        raise ConfigError("policy 'mix' is a mixture: resolve_policy('mix', …) selects one for each episode")
    if kind == "random":
        return RandomPolicy(seed)
    if kind == "explore":
        return ExplorePolicy(seed)
    expert = find_expert(environment)
    if expert is None:
        raise ConfigError(
            f"policy {name!r} needs an expert, and {environment.task.environment!r} has none; "
            "use 'explore' or 'random'"
        )
    if kind in _ERRORS:
        return ImperfectExpertPolicy(kind, float(argument), expert, seed)
    return ExpertPolicy(expert, argument or None)


def _parse(name: str) -> tuple[str, str]:
    """(kind, argument) of a policy name."""
    kind, colon, argument = name.partition(":")
    if name in ("expert", "explore", "mix", "random") or (kind == "expert" and argument):
        return kind, argument
    if kind in _ERRORS and colon:
        try:
            share = float(argument)
        except ValueError:
            share = -1.0
        if 0 <= share <= 1:
            return kind, argument
        raise ConfigError(f"policy {name!r}: expected a share from 0 to 1, got {argument!r}")
    raise ConfigError(f"unknown policy {name!r}{nearest_name(name, _PATTERNS)}")


def _any_action(
    source: random.Random, task: Task, history: Sequence[Transition], state: State, *, like: str = ""
) -> str:
    """`like` is the expert's action."""
    if not state.admissible_actions:
        explorer = ExplorePolicy(source.getrandbits(32))
        known = like or (history[-1].action if history else "")
        return explorer.near_miss(known, task, state) or explorer.free_text(task, state)
    if source.random() < STALE_SHARE:
        earlier = {action for past in history for action in past.state.admissible_actions or ()}
        stale = sorted(earlier.difference(state.admissible_actions))
        if stale:
            return source.choice(stale)
    return source.choice(state.admissible_actions)


def _common_words(left: str, right: str) -> float:
    """Jaccard similarity of the words.

    >>> _common_words("cook carrot with oven", "cook carrot with stove")
    0.6
    """
    mine, theirs = set(left.split()), set(right.split())
    return len(mine & theirs) / len(mine | theirs)


def _by_verb(actions: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for action in actions:
        found.setdefault(action.partition(" ")[0], []).append(action)
    return found


def _pick(source: random.Random, by_verb: dict[str, list[str]]) -> str:
    """Verbs are equally likely: places to go to outnumber all the rest."""
    return source.choice(by_verb[source.choice(sorted(by_verb))])


def _destinations(actions: Iterable[str]) -> set[str]:
    """Places that one can go to."""
    return {action.removeprefix("go to ") for action in actions if action.startswith("go to ")}


# Clumsy actions: not admissible `now`, made from all actions `known` in the episode (sorted); None if there
# is none of the kind.


def _wrong_action(source: random.Random, now: set[str], known: list[str]) -> str | None:
    """A known action with one of its names exchanged."""
    by_verb = _by_verb(action for action in known if _NAME.search(action))
    pairs = [names for action in known if len(names := _NAME.findall(action)) == 2]
    handled, places = {first for first, _ in pairs}, {second for _, second in pairs}
    for _ in range(10 if by_verb else 0):
        action = _pick(source, by_verb)
        spots = list(_NAME.finditer(action))
        place = source.randrange(len(spots))
        others = (handled, places)[place] if len(spots) == 2 else handled | places
        if others:
            other = source.choice(sorted(others))
            wrong = f"{action[: spots[place].start()]}{other}{action[spots[place].end() :]}"
            if wrong not in now:
                return wrong
    return None


def _missing_thing(source: random.Random, now: set[str], known: list[str]) -> str | None:
    """A known action on two things, done at a place in reach with something else."""
    pairs = [action for action in known if len(_NAME.findall(action)) == 2]
    things = sorted({_NAME.findall(action)[0] for action in pairs})
    reach = sorted({_NAME.findall(action)[-1] for action in now if _NAME.search(action)} - _destinations(now))
    for _ in range(10 if pairs and reach else 0):
        first, second = _NAME.finditer(action := source.choice(pairs))
        thing, place = source.choice(things), source.choice(reach)
        between = action[first.end() : second.start()]
        wrong = f"{action[: first.start()]}{thing}{between}{place}{action[second.end() :]}"
        if wrong not in now and thing != place:
            return wrong
    return None


def _absent_name(source: random.Random, now: set[str], known: list[str]) -> str | None:
    """A move to a place that is nowhere, as far as known (``shelf 7`` of three), or to the current one."""
    walks = [action for action in known if action.startswith("go to ")]
    if not walks:
        return None
    here = [action for action in walks if action not in now]
    if here and source.random() < _IN_PLACE:
        return source.choice(here)
    names = {name for action in known for name in _NAME.findall(action)}
    kind = source.choice(sorted({name.rpartition(" ")[0] for name in _destinations(walks)}))
    others = [f"{kind} {number}" for number in range(1, _NUMBERS) if f"{kind} {number}" not in names]
    return f"go to {source.choice(others)}" if others else None


def _stale_action(source: random.Random, now: set[str], known: list[str]) -> str | None:
    """`_missing_thing` for names without numbers: an action of an earlier state, or any move."""
    if any(_NAME.search(action) for action in known):
        return None
    moves = {f"go {way}" for way in _WAYS} if any(action.startswith("go ") for action in known) else set()
    by_verb = _by_verb(sorted({*known, *moves} - now))
    return _pick(source, by_verb) if by_verb else None


def _wrong_word(source: random.Random, now: set[str], known: list[str]) -> str | None:
    """`_wrong_action` for names without numbers: replaces one word other than the verb."""
    by_verb = _by_verb(action for action in known if " " in action)
    for _ in range(10 if by_verb else 0):
        words, others = _pick(source, by_verb).split(), _pick(source, by_verb).split()
        words[source.randrange(1, len(words))] = source.choice(others[1:])
        if (wrong := " ".join(words)) not in now:
            return wrong
    return None
