"""One ALFWorld episode inside an engine process: the benchmark's own engine, asked with plain messages.

Everything here runs in a process of its own (see `envs.process`), forked for one episode from a parent that
has imported the engine and played a little of it, so the memos are warm and nothing can leak.
"""

from __future__ import annotations

import functools
import json
import re
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

from dreamgym.envs.alfworld import engine_cache
from dreamgym.envs.alfworld.experts import HandcodedExpert, Planner
from dreamgym.envs.alfworld.pddl_cache import Translations

_GOAL = re.compile(r"Your task is to: (.*?)\.\"")

# Facts that only name a class, or that follow from others, would swell every world sheet for nothing.
_LEFT_OUT = {"cancontain", "objecttype", "receptacletype", "objectatlocation"}


class Engine:
    """Answers `start`, `step`, `sheet` and `expert`; one instance plays one episode."""

    def __init__(self, cache: str, warm_games: list[str], wording: str = "as_is") -> None:
        """Runs once, in the process that the engines are forked from.

        `wording` is ``current`` to give every game the grammar and domain that the wheel ships.
        """
        import fast_downward
        import textworld
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler

        from dreamgym.envs.alfworld.pddl_env import Game

        engine_cache.install()
        self._wording = wording
        translations = Translations(Path(cache) / "translations")
        fast_downward.pddl2sas = translations.pddl2sas
        self._game = Game(textworld.EnvInfos(won=True, admissible_commands=True), translations)
        self._env = AlfredDemangler(self._game)
        for game in warm_games:
            self.handle({"do": "start", "game": game, "goal": None})
            for action in [*self._admissible[:3], "look", "inventory"]:
                self.handle({"do": "step", "action": action})

    def handle(self, request: dict[str, Any]) -> dict[str, Any]:
        return getattr(self, f"_{request.pop('do')}")(**request)  # type: ignore[no-any-return]

    def _start(self, game: str, goal: dict[str, Any] | None) -> dict[str, Any]:
        self._goal = goal
        self._expert_at_work: HandcodedExpert | None = None
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
        """The facts at the start, by the names that the texts use, sorted."""
        facts = {
            (fact.name, *(name.strip() for name in fact.names))
            for fact in map(self._game._get_human_readable_fact, self._initial_facts)
            if fact.name not in _LEFT_OUT and not fact.name.startswith("new-axiom@")
        }
        return {"facts": sorted(facts)}

    def _solve(self, limit: int) -> dict[str, Any]:
        """Play on with the hand-coded expert until it has won or `limit` actions are spent."""
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
        """The expert must have followed every step; what it has not seen yet, it sees now, in order."""
        if self._expert_at_work is None:
            assert self._goal is not None
            self._expert_at_work = HandcodedExpert(
                self._goal, Random(0)
            )  # the dice with which the game was proven
        for feedback, admissible, facts, last_action in self._unseen:
            named = list(map(self._game._get_human_readable_fact, facts))
            self._wish = self._expert_at_work.follow(feedback, admissible, named, last_action)
        self._unseen.clear()
        return self._wish


def complete_game(data: dict[str, Any], wording: str) -> dict[str, Any]:
    """Attach the wheel's domain and grammar where a game has none, or where today's wording is asked for."""
    if "grammar" in data and wording == "as_is":
        return data
    domain, grammar = _shipped()
    instruction = data["instruction"] if "instruction" in data else instruction_of(data["grammar"])
    return {**data, "pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", instruction)}


@functools.cache
def _shipped() -> tuple[str, str]:
    folder = files("alfworld") / "data"
    return tuple((folder / name).read_text(encoding="utf-8") for name in ("alfred.pddl", "alfred.twl2"))  # type: ignore[return-value]


def instruction_of(grammar: str) -> str:
    """The task's sentence inside a game's grammar.

    >>> instruction_of('"task": [{"rhs": "Your task is to: put a mug in desk."}]')
    'put a mug in desk'
    """
    found = _GOAL.search(grammar)
    return found.group(1) if found else ""
