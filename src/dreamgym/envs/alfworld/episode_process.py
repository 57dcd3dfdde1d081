"""One ALFWorld episode inside its process: the original simulator behind JSON requests.

Runs in a child of the fork server (`envs.process_worker`), which has imported the simulator and played a few
actions of it, so that caches are filled.
"""

from __future__ import annotations

import contextlib
import functools
import json
import re
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

from dreamgym.envs.alfworld import engine_cache
from dreamgym.envs.alfworld.experts import HandcodedExpert, Planner
from dreamgym.envs.alfworld.pddl_cache import TranslationCache
from dreamgym.errors import ConfigError

_GOAL = re.compile(r"Your task is to: (.*?)\.\"")

# Facts that name a class or follow from others are redundant in a world sheet.
_LEFT_OUT = {"cancontain", "objecttype", "receptacletype", "objectatlocation"}


@contextlib.contextmanager
def _no_games_of_textworld() -> Iterator[None]:
    """TextWorld parses the rules of its own games while it is imported, which takes as long as all the rest;
    this process plays other games. It looks for rules in the working directory first, and finds none."""
    with tempfile.TemporaryDirectory() as folder:
        for kind in ("logic", "text_grammars"):
            Path(folder, "textworld_data", kind).mkdir(parents=True)
        with contextlib.chdir(folder):
            yield


class EpisodeHandler:
    """Handles `start`, `step`, `sheet`, `solve` and `expert`; a fork of it plays one episode."""

    def __init__(self, cache: str, warm_games: list[str], wording: str = "as_is") -> None:
        """Runs once, in the fork server.

        `wording` selects the grammar and domain, see `complete_game`.
        """
        import fast_downward

        with _no_games_of_textworld():
            import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

        from dreamgym.envs.alfworld.pddl_env import CachedPddlEnv

        engine_cache.install()
        self._wording = wording
        translations = TranslationCache(Path(cache) / "translations")
        fast_downward.pddl2sas = translations.pddl2sas
        self._game = CachedPddlEnv(textworld.EnvInfos(won=True, admissible_commands=True), translations)
        self._env = AlfredDemangler(self._game)
        for game in warm_games:
            self.handle({"do": "start", "game": game, "goal": None})
            for action in [*self._admissible[:3], "look", "inventory"]:
                self.handle({"do": "step", "action": action})

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, f"_{request.pop('do')}")(**request)  # type: ignore[no-any-return]

    def _start(self, game: str, goal: dict[str, Any] | None) -> dict[str, Any]:
        self._goal = goal
        self._handcoded_expert: HandcodedExpert | None = None
        self._planner = Planner()
        self._unseen: list[tuple[str, list[str], list[Any], str | None]] = []
        self._last_action: str | None = None
        self._env.load(complete_game(json.loads(Path(game).read_text(encoding="utf-8")), self._wording))
        state = self._env.reset()
        self._initial_facts = state["_facts"]
        return self._reply(state)

    def _step(self, action: str) -> dict[str, Any]:
        state, _, done = self._env.step(action)
        self._last_action = action.strip()
        return {**self._reply(state), "won": bool(state["won"]), "done": bool(done)}

    def _reply(self, state: Any) -> dict[str, Any]:
        self._admissible: list[str] = state["admissible_commands"]
        if self._goal is not None:
            self._unseen.append((state.feedback, self._admissible, state["_facts"], self._last_action))
        return {"text": state.feedback.strip("\n"), "admissible": self._admissible}

    def _sheet(self) -> dict[str, Any]:
        """The facts at the start, sorted, with the names that the texts use."""
        facts = {
            (fact.name, *(name.strip() for name in fact.names))
            for fact in map(self._game._get_human_readable_fact, self._initial_facts)
            if fact.name not in _LEFT_OUT and not fact.name.startswith("new-axiom@")
        }
        return {"facts": sorted(facts)}

    def _solve(self, limit: int) -> dict[str, Any]:
        """Play with the hand-coded expert until it succeeds or has used `limit` actions."""
        actions: list[str] = []
        won = False
        while not won and len(actions) < limit:
            actions.append(self._handcoded())
            won = self._step(actions[-1])["won"]
        return {"actions": actions, "won": won}

    def _expert(self, name: str) -> dict[str, Any]:
        if name == "planner":
            return {"action": self._planner.next_action(self._last_action, self._game.plan)}
        return {"action": self._handcoded()}

    def _handcoded(self) -> str:
        """The expert has to observe every step, so first it receives those that it has not seen, in order."""
        if self._handcoded_expert is None:
            assert self._goal is not None
            # The seed with which the game was solved.
            self._handcoded_expert = HandcodedExpert(self._goal, Random(0))
        for feedback, admissible, facts, last_action in self._unseen:
            named = list(map(self._game._get_human_readable_fact, facts))
            self._next_action = self._handcoded_expert.follow(feedback, admissible, named, last_action)
        self._unseen.clear()
        return self._next_action


def complete_game(data: dict[str, Any], wording: str) -> dict[str, Any]:
    """A game with grammar and domain: its own where it has them (``as_is``), the wheel's (``current``), or
    the wheel's rules in the words of official games (``older``)."""
    if "grammar" in data and wording == "as_is":
        return data
    domain, grammar = _older() if wording == "older" else _shipped()
    instruction = data["instruction"] if "instruction" in data else instruction_of(data["grammar"])
    return {**data, "pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", instruction)}


@functools.cache
def _shipped() -> tuple[str, str]:
    folder = files("alfworld") / "data"
    return tuple((folder / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2"))  # type: ignore[return-value]


_OLDER_GRAMMAR = {
    "You arrive at {r.name}.": "You arrive at {lend.name}.",
    "You move the {o.name} to the {r.name}.": "You put the {o.name} in/on the {r.name}.",
    "move {o} to {r}": "put {o} in/on {r}",
}
_HELP = {"domain": "\n(:action help\n", "grammar": "\n\naction help {\n"}
"""The last action of both files, which official games do not have."""


@functools.cache
def _older() -> tuple[str, str]:
    """The wheel's domain, and the grammar of official games; both without ``help``.

    Raises:
        ConfigError: the wheel has other texts than alfworld 0.4.
    """
    domain, grammar = _shipped()
    expected = [*((grammar, text) for text in (*_OLDER_GRAMMAR, _HELP["grammar"])), (domain, _HELP["domain"])]
    for text, part in expected:
        if part not in text:
            raise ConfigError(
                f"environment.options.wording='older' needs the texts of alfworld 0.4: the installed version "
                f"has no {part.strip()!r}; choose wording current"
            )
    for now, before in _OLDER_GRAMMAR.items():
        grammar = grammar.replace(now, before)
    domain = domain.partition(_HELP["domain"])[0] + "\n)\n"
    return domain, grammar.partition(_HELP["grammar"])[0]


def instruction_of(grammar: str) -> str:
    """The task's sentence inside a game's grammar.

    >>> instruction_of('"task": [{"rhs": "Your task is to: put a mug in desk."}]')
    'put a mug in desk'
    """
    found = _GOAL.search(grammar)
    return found.group(1) if found else ""
