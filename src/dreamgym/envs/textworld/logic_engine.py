"""Plays a TextWorld game with TextWorld's logic: admissible actions, their effects, win and loss.

TextWorld's rules change the facts; this module maps action texts to rules. Where the rules allow more than
the compiled game (a meal from raw ingredients, which makes the game unwinnable), the compiled game's reply is
used.
"""

from __future__ import annotations

from typing import Any

from dreamgym.envs.textworld.facts import PLAYER, SHUT, GameFacts
from dreamgym.envs.textworld.text_rendering import COOKING, CUTTING, SceneRenderer, named_facts
from dreamgym.types import Fact

INVALID = "Invalid command."
"""TextWorld's reply to an unknown command."""
_ELSEWHERE = "Can only prepare meal in the kitchen."
_MISSING = "You still miss something."
_UNREADY = {"cooked": "Something still needs to be cooked.", "cut": "Something still needs to be cut."}
REFUSALS = (INVALID, _ELSEWHERE, _MISSING, *_UNREADY.values())
"""Every reply to an action without effect."""
_COOKBOOK = "cookbook"
_READ = f"examine {_COOKBOOK}"


class GameSession:
    """A game in progress."""

    def __init__(self, game: Any) -> None:
        from textworld.generator.game import GameProgression

        self._game = game
        self._names = {key: info.name for key, info in game.infos.items()}
        self._named = {key: f"the {name}" for key, name in self._names.items()}
        # Tracking quests plans after every action; `expert_action` turns it on at its first use.
        self._progress = GameProgression(game, track_quests=False)
        self._done: list[Any] = []
        self._open_quests = list(game.quests)
        self.won = self.lost = False
        self._has_read = False
        self._observe()

    @property
    def actions(self) -> tuple[str, ...]:
        return tuple(sorted(command for command, _ in self._meanings.values()))

    @property
    def facts(self) -> list[Fact]:
        """The current facts, with the names in the texts."""
        return named_facts(self._game.infos, self._progress.state.facts)

    def look(self) -> str:
        seen = self._scene.look()
        return f"{seen} {self._scene.inventory()}" if self._scene.held_by("I") else seen

    def act(self, action: str) -> str:
        """The text after an action, which may be any string."""
        wanted = " ".join(action.lower().split())
        if wanted not in self._meanings:
            return (self._why_no_meal() if wanted == "prepare meal" else None) or INVALID
        command, meaning = self._meanings[wanted]
        if command == "look":
            return self._scene.look()
        if command == "inventory":
            return self._scene.inventory()
        if command.startswith("examine "):
            self._has_read |= command == _READ
            return self._scene.examine(command.removeprefix("examine "))
        self._progress.update(meaning)
        self._done.append(meaning)
        self._observe()
        self._check_quests()
        ending = " You have lost." if self.lost else " You have won!" if self.won else ""
        return self._render(meaning) + ending

    def reader_action(self) -> str:
        """Reads the recipe first, as an agent has to; then the planner's action."""
        if not self._scene.recipe or self._has_read:
            return self.expert_action()
        return _READ if _READ in self._meanings else _way_to(_COOKBOOK, GameFacts(self.facts))

    def expert_action(self) -> str:
        """The first action of TextWorld's plan; "look" if the game cannot be won any more."""
        from textworld.generator.game import GameProgression

        if not self._progress.tracking_quests:
            self._progress = GameProgression(self._game)
            for action in self._done:
                self._progress.update(action)
        plan = self._progress.winning_policy
        return str(plan[0].format_command(self._names)) if plan else "look"

    def _observe(self) -> None:
        self._scene = SceneRenderer(self._game.infos, self._progress.state.facts)
        meal = None if self._why_no_meal() else f"make/recipe/{len(self._scene.recipe)}"
        self._meanings: dict[str, tuple[str, Any]] = {}
        """(command, TextWorld action) by the command in lower case."""
        # Of two rules for one command the one with more preconditions wins, as in the compiled game.
        for action in sorted(self._progress.valid_actions, key=lambda action: len(action.preconditions)):
            if not action.name.startswith("make/recipe/") or action.name == meal:
                command = action.format_command(self._names)
                self._meanings[command.lower()] = command, action
        for thing in self._scene.held_by("I"):  # TextWorld's rule for this has a bug and never applies
            command = f"examine {self._names[thing]}"
            self._meanings[command.lower()] = command, None

    def _why_no_meal(self) -> str | None:
        """The compiled game's reply while the meal cannot be prepared; None if it can."""
        scene = self._scene
        if not scene.recipe:
            return INVALID
        if self._names[scene.room] != "kitchen":
            return _ELSEWHERE
        for food, wanted in sorted(scene.recipe, key=lambda pair: pair[1]):
            if scene.holder.get(food) != "I":
                return _MISSING
            for treatment, needed in ((COOKING, "cooked"), (CUTTING, "cut")):
                if (scene.marks[food] ^ scene.marks[wanted]) & treatment:
                    return _UNREADY[needed]
        return None

    def _check_quests(self) -> None:
        """Won when every quest is done, lost when one fails; a finished quest cannot fail."""
        state = self._progress.state
        self.lost = any(
            event.is_triggering(state) for quest in self._open_quests for event in quest.fail_events
        )
        self._open_quests = [quest for quest in self._open_quests if not quest.is_winning(state)]
        self.won = not self.lost and not any(quest.win_events for quest in self._open_quests)

    def _render(self, action: Any) -> str:
        kind = action.name
        if kind.startswith("go/"):
            return self._scene.look()
        if kind.startswith("make/"):
            return "Adding the meal to your inventory."
        sentence = f"You {action.format_command(self._named)}."
        thing = action.command_template.partition("{")[2].partition("}")[0]
        if kind == "open/c":
            return f"{sentence} {self._scene.contents(thing) or 'It is empty.'}"
        if kind.startswith("cook/"):
            return f"{sentence} It is {self._scene.condition(thing)[-1]} now."
        return sentence


def _way_to(thing: str, known: GameFacts) -> str:
    """The first action on the shortest path to where an object is visible; "look" if there is none."""
    chain = [where for _, where in known.chain(thing)]
    ways: dict[str, tuple[str, str | None] | None] = {known.room: None}
    rooms = [known.room]
    for room in rooms:
        for direction, there, door in known.exits(room):
            if there not in ways:
                ways[there] = ways[room] or (direction, door)
                rooms.append(there)
    if not chain or chain[-1] not in (*ways, PLAYER):
        return "look"
    first = ways.get(chain[-1])
    if first is None:
        shut = next((where for where in chain if known.marks[where] & SHUT), None)
        return f"open {shut}" if shut else "look"
    direction, door = first
    return f"open {door}" if door is not None and known.marks[door] & SHUT else f"go {direction}"
