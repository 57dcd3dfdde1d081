"""TextWorld's PDDL environment, with the text of each operator cached for the whole game.

Imports the simulator at import time, so only `episode_process` imports this module, inside a process.
"""

from __future__ import annotations

import re
from typing import Any

import fast_downward
from textworld.envs import PddlEnv
from textworld.envs.pddl import logic as pddl_logic

from dreamgym.envs.alfworld.pddl_cache import TranslationCache

_QUERIED = re.compile(r"(\w+)\(")
_CONSTANT = {"receptacleatlocation"}
"""Predicates in command templates that no action changes."""


class CachedPddlEnv(PddlEnv):  # type: ignore[misc]
    """A `PddlEnv` that renders the command of an operator once per game instead of at every step."""

    def __init__(self, infos: Any, translations: TranslationCache) -> None:
        super().__init__(infos)
        self._translations = translations
        self._load_plan = self.downward_lib.load_sas_replan
        # The planner's copy of the game is loaded at its first use.
        self.downward_lib.load_sas_replan = lambda text: None

    def load(self, data: Any) -> None:
        self._game_file = None
        self._game_data = data
        self.walkthrough = data.get("walkthrough")
        self._logic = pddl_logic.GameLogic(domain=data["pddl_domain"], grammar=data["grammar"])
        self._pddl_state = pddl_logic.PddlState(self.downward_lib, data["pddl_problem"], self._logic)
        self._entity_infos = self._get_entity_infos()
        self._commands: dict[str, tuple[Any, str]] = {}
        self._plan_loaded = False
        self._untouched = True

    def reset(self) -> Any:
        # `reset` would build the state that `load` has just built.
        built, build = self._pddl_state, pddl_logic.PddlState
        if self._untouched:
            pddl_logic.PddlState = lambda *_: built
        try:
            return super().reset()
        finally:
            pddl_logic.PddlState = build
            self._untouched = False

    def plan(self) -> list[str]:
        if not self._plan_loaded:
            data = self._game_data
            text = self._translations.plan_text(data["pddl_domain"], data["pddl_problem"])
            self._load_plan(text.encode())
            self._plan_loaded = True
        return [action.strip() for action in self._pddl_state.replan(self._entity_infos)]

    def _gather_infos(self) -> None:
        state = self.state
        state["won"] = self._pddl_state.check_goal()
        state["lost"] = False
        state["_facts"] = list(self._pddl_state.facts)
        actions, commands = self._applicable()
        state["_valid_actions"], state["_valid_commands"] = actions, commands
        state["admissible_commands"] = sorted(set(commands))

    def _applicable(self) -> tuple[list[Any], list[str]]:
        library = self.downward_lib
        count = library.get_applicable_operators_count()
        operators = (fast_downward.Operator * count)()
        library.get_applicable_operators(operators)
        self._pddl_state._operators = {operator.id: operator for operator in operators}
        found: dict[str, tuple[Any, str]] = {}
        for operator in operators:
            name = operator.name
            if name not in found:
                found[name] = self._commands.get(name) or self._render(name, operator.id)
        return [action for action, _ in found.values()], [command for _, command in found.values()]

    def _render(self, name: str, identity: int) -> tuple[Any, str]:
        """The command of an operator; cached if its template depends on nothing that changes."""
        kind, *arguments = name.split()
        state, grammar = self._pddl_state, self._logic.grammar
        action = pddl_logic.textworld.logic.Action(name=kind, preconditions=[], postconditions=[])
        action.id = identity
        action.mapping = {
            pddl_logic.Placeholder(p.name.strip("?"), p.type_name): pddl_logic.Variable(argument, p.type_name)
            for p, argument in zip(state._actions[kind].parameters, arguments, strict=False)
        }
        action.feedback_rule = self._logic.actions[kind].feedback_rule
        action.command_template = grammar.derive(self._logic.actions[kind].template, self._context(action))
        command = action.format_command({key: info.name for key, info in self._entity_infos.items()})
        if set(_QUERIED.findall(self._logic.actions[kind].template)) <= _CONSTANT:
            self._commands[name] = action, command
        return action, command

    def _context(self, action: Any) -> dict[str, Any]:
        infos = self._entity_infos
        return {
            "state": self._pddl_state,
            "facts": [],
            "variables": {ph.name: infos[variable.name] for ph, variable in action.mapping.items()},
            "mapping": action.mapping,
            "entity_infos": infos,
        }
