"""Generates TextWorld games from a seed: cook a meal, or find a treasure.

TextWorld's own generators make the games (as ``tw-make tw-cooking --seed N``), in memory. Two substitutes
make them 10 to 30 times faster without changing a game: a knowledge base that is parsed once, and following a
walkthrough without compiling the game (`docs/decisions/0003-textworld-in-process.md`).
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from dreamgym.config import Section
from dreamgym.envs.textworld.text_rendering import named_facts
from dreamgym.errors import EpisodeFailedError
from dreamgym.types import Fact, FailureKind, JsonValue, Task

NAME = "textworld"

Split: TypeAlias = Literal["train", "validation", "test"]

SEEDS: dict[Split, range] = {
    "train": range(100_000),
    "validation": range(100_000, 110_000),
    "test": range(200_000, 210_000),
}
"""The seeds of each split; no game is in two of them."""

_NEXT_TRY = 1_000_000
"""A seed whose map has no quest is replaced by seed + this, which is in no split."""
_TRIES = 30

_GAMES_KEPT = 128
"""Of about 0.2 MB each."""

# Constraints that hold on every grid map. Checking them for each action of a quest took 90% of the time to
# generate a treasure game.
_TRUE_ON_A_GRID = ("dr", "link", "nav_", "too_many_doors")


class CookingOptions(Section):
    """What a cooking game requires of the agent."""

    ingredients: int = Field(1, ge=1, le=5, description="cooking: how many to find and prepare")
    rooms: Literal[1, 6, 9, 12] = Field(6, description="cooking: rooms of the house")
    cook: bool = Field(True, description="cooking: ingredients must be fried, roasted or grilled")
    cut: bool = Field(True, description="cooking: ingredients must be chopped, sliced or diced")
    open: bool = Field(True, description="cooking: doors and containers start closed")
    foods: Literal["own", "train"] = Field(
        "own",
        description="cooking: each split has foods of its own (the official ones), or all those of train",
    )


class CookingGame(CookingOptions):
    """Find the kitchen, read the cookbook, prepare the ingredients as it says, cook the meal, eat it."""

    family: Literal["cooking"] = "cooking"
    split: Split
    """The official split of foods: held-out splits have foods and preparations that training has not."""
    seed: int = Field(ge=0, lt=_NEXT_TRY)

    @property
    def id(self) -> str:
        skills = "".join(f"-{skill}" for skill in ("open", "cook", "cut") if getattr(self, skill))
        known = "-known" if self.foods == "train" and self.split != "train" else ""
        return f"cooking-{self.ingredients}of{self.rooms}{skills}{known}-{self.split}-{self.seed}"


class TreasureGame(Section):
    """Find one object in a house of many rooms and take it, not the other one."""

    family: Literal["treasure"] = "treasure"
    split: Split
    seed: int = Field(ge=0, lt=_NEXT_TRY)
    level: int = Field(15, ge=1, le=25)

    @property
    def id(self) -> str:
        return f"treasure-{self.level}-{self.split}-{self.seed}"


GameSettings: TypeAlias = CookingGame | TreasureGame

_SETTINGS: TypeAdapter[GameSettings] = TypeAdapter(
    Annotated[CookingGame | TreasureGame, Field(discriminator="family")]
)


def task_of(settings: GameSettings) -> Task:
    """The task of a game. The instruction of a treasure game needs the game itself."""
    parameters: dict[str, JsonValue] = settings.model_dump(mode="json")
    return Task(
        id=settings.id,
        instruction=instruction_of(settings),
        environment=NAME,
        split=settings.split,
        family=settings.family,
        parameters=parameters,
    )


def settings_of(task: Task) -> GameSettings:
    """The settings of a task's game.

    Raises:
        EpisodeFailedError: the task is not of this environment.
    """
    try:
        return _SETTINGS.validate_python(dict(task.parameters))
    except ValidationError as error:
        problem = error.errors()[0]
        raise EpisodeFailedError(
            FailureKind.INVALID_TASK,
            f"task {task.id!r}: parameter {'.'.join(map(str, problem['loc']))!r}: {problem['msg']}, "
            f"got {problem.get('input')!r}; take tasks from this environment's factory",
        ) from None


@functools.lru_cache(maxsize=100_000)
def instruction_of(settings: GameSettings) -> str:
    if isinstance(settings, CookingGame):
        return (
            "You are hungry! Let's cook a delicious meal. Check the cookbook in the kitchen for the recipe. "
            "Once done, enjoy your meal!"
        )
    wanted, _ = _treasures(make_game(settings))
    # TextWorld's own objective lists every step.
    return f"Find the {wanted} and take it. Taking the wrong thing loses the game."


def hidden_facts(settings: GameSettings) -> tuple[Fact, ...]:
    """The facts at the start of a game, and those that win and lose a treasure game."""
    game = make_game(settings)
    facts = named_facts(game.infos, game.world.state.facts)
    if isinstance(settings, TreasureGame):
        wanted, wrong = _treasures(game)
        facts += [("wins", wanted), ("loses", wrong)]
    return tuple(facts)


def _treasures(game: Any) -> tuple[str, str]:
    """The objects that win and lose a treasure game."""
    quest = game.quests[0]
    conditions = (quest.win_events[0].condition, quest.fail_events[0].condition)
    wanted, wrong = (
        next(fact.arguments[0].name for fact in condition.preconditions if fact.name == "in")
        for condition in conditions
    )
    return game.infos[wanted].name, game.infos[wrong].name


@functools.lru_cache(maxsize=_GAMES_KEPT)
def make_game(settings: GameSettings) -> Any:
    """The `textworld.Game`; equal settings give equal games, in every process and on every machine."""
    generators = _generators()
    for attempt in range(_TRIES):
        options = generators.options()
        options.seeds = settings.seed + attempt * _NEXT_TRY
        try:
            with warnings.catch_warnings(action="ignore"):  # of names running out and adjectives added
                if isinstance(settings, CookingGame):
                    return generators.cooking(_cooking_arguments(settings), options)
                return generators.treasure({"level": settings.level}, options)
        except generators.no_quest:
            continue
    raise EpisodeFailedError(FailureKind.INVALID_TASK, f"no quest fits the map of {settings.id!r}")


def _cooking_arguments(settings: CookingGame) -> dict[str, Any]:
    split = settings.split
    return {
        "split": "train" if settings.foods == "train" else {"validation": "valid"}.get(split, split),
        "recipe": settings.ingredients,
        "take": settings.ingredients,
        "go": settings.rooms,
        "open": settings.open,
        "cook": settings.cook,
        "cut": settings.cut,
        "drop": False,
        "recipe_seed": 0,
    }


@functools.cache
def _generators() -> SimpleNamespace:
    """TextWorld's generators, bound to a namespace with both substitutes; TextWorld is not patched."""
    import textworld
    from textworld.challenges.tw_cooking import cooking
    from textworld.challenges.tw_treasure_hunter import treasure_hunter

    def load_knowledge(
        folder: str | None = None, logic_path: str = "", grammar_path: str = ""
    ) -> Any:  # the signature of KnowledgeBase.load
        if folder:
            return _knowledge(f"{folder}/logic", f"{folder}/text_grammars", drop=_TRUE_ON_A_GRID)
        return _knowledge(logic_path, grammar_path)

    knowledge = SimpleNamespace(load=load_knowledge)
    substitute = SimpleNamespace(GameMaker=_quick_maker(), generator=textworld.generator)
    cooking_names = {**vars(cooking), "KnowledgeBase": knowledge, "textworld": substitute}
    hunt_names = {**vars(treasure_hunter), "KnowledgeBase": knowledge}
    return SimpleNamespace(
        cooking=FunctionType(cooking.make.__code__, cooking_names),
        treasure=FunctionType(treasure_hunter.make.__code__, hunt_names),
        options=textworld.GameOptions,
        no_quest=textworld.generator.QuestGenerationError,
    )


@functools.cache
def _knowledge(logic_folder: str, grammar_folder: str, drop: tuple[str, ...] = ()) -> Any:
    """Rules and grammar, parsed once and shared by all games.

    Files are read in the order of their names. TextWorld reads them in directory order, so that a seed could
    give another game on another machine.
    """
    from textworld.generator.data import KnowledgeBase
    from textworld.logic import GameLogic

    logic = GameLogic.load([str(path) for path in sorted(Path(logic_folder).glob("*.twl"))])
    for name in [name for name in logic.constraints if name.startswith(drop or ("\0",))]:
        del logic.constraints[name]
    knowledge = KnowledgeBase(logic, grammar_folder)
    knowledge.logic_path = logic_folder
    return knowledge


@functools.cache
def _quick_maker() -> type:
    """TextWorld's `GameMaker`; follows a walkthrough with the game's logic instead of compiling it."""
    from textworld import GameMaker
    from textworld.generator.game import GameProgression

    class QuickMaker(GameMaker):  # type: ignore[misc]
        def set_walkthrough(self, commands: list[str]) -> None:
            game = self.build()
            names = {key: info.name for key, info in game.infos.items()}
            progress = GameProgression(game)
            awaited = [event for quest in progress.quest_progressions for event in quest.win_events]
            actions: list[Any] = []
            for position, command in enumerate(commands, start=1):
                meant = [a for a in progress.valid_actions if a.format_command(names) == command]
                if not meant:
                    continue  # already open
                # "prepare meal" stands for five rules: the one with most preconditions wins.
                actions.append(max(meant, key=lambda action: len(action.preconditions)))
                waiting = [event for event in awaited if not event.triggered]
                progress.update(actions[-1])
                for event in waiting:
                    if event.triggered:
                        event.event.actions = actions
                        event.event.commands = commands[:position]

    return QuickMaker
