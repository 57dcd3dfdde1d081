"""Makes TextWorld games from a seed: cooking a meal, hunting a treasure.

The games are those of TextWorld's own generators (what ``tw-make tw-cooking --seed N`` makes), in memory. Two
things are lent to the generators, which change nothing about a game and make it 10 to 30 times faster to
make: a knowledge base that is parsed once, and a way to follow a walkthrough without compiling the game
(`docs/decisions/0003-textworld-in-process.md`).
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, TypeAdapter, ValidationError

from dreamgym.config import Section
from dreamgym.envs.textworld.text_rendering import facts_told
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
"""A seed whose map permits no quest is replaced by seed + this, which lies in no split's range."""
_TRIES = 30

_GAMES_KEPT = 128
"""At about 0.2 MB a game."""

# A map is a grid, where a room cannot have five exits nor two rooms in one direction. Checking that again for
# every action of a quest took nine tenths of the time to make a treasure game.
_TRUE_ON_A_GRID = ("dr", "link", "nav_", "too_many_doors")


class CookingGame(Section):
    """Find the kitchen, read the cookbook, prepare the ingredients as it says, cook the meal, eat it."""

    family: Literal["cooking"] = "cooking"
    split: Split
    """The official split of foods: held-out splits have foods and preparations that training has not."""
    seed: int = Field(ge=0, lt=_NEXT_TRY)
    ingredients: int = Field(1, ge=1, le=5)
    rooms: Literal[1, 6, 9, 12] = 6
    open: bool = True
    cook: bool = True
    cut: bool = True
    foods: Literal["own", "train"] = "own"
    """``train``: the foods and preparations of training, in a game that training does not have."""

    @property
    def id(self) -> str:
        skills = "".join(f"-{skill}" for skill in ("open", "cook", "cut") if getattr(self, skill))
        known = "-known" if self.foods == "train" and self.split != "train" else ""
        return f"cooking-{self.ingredients}of{self.rooms}{skills}{known}-{self.split}-{self.seed}"


class TreasureGame(Section):
    """Find one thing in a house of many rooms and take it, and not the other one."""

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
    """The task of a game; makes the game, where only that tells what is to be done."""
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
    """The game that a task names; a task from elsewhere may name none."""
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
    # TextWorld's own objective spells out the way there, which leaves nothing to search for.
    return f"Find the {wanted} and take it. Taking the wrong thing loses the game."


def hidden_facts(settings: GameSettings) -> tuple[Fact, ...]:
    """What is true at the start of a game, and what wins and loses it where the instruction does not say."""
    game = make_game(settings)
    facts = facts_told(game.infos, game.world.state.facts)
    if isinstance(settings, TreasureGame):
        wanted, wrong = _treasures(game)
        facts += [("wins", wanted), ("loses", wrong)]
    return tuple(facts)


def _treasures(game: Any) -> tuple[str, str]:
    """What to take and what not to take in a treasure game."""
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
    """TextWorld's generators, bound to a namespace that has our maker and knowledge instead of its own.

    The engine itself stays as it is: only these copies of its two `make` functions see the substitutes.
    """
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
    engine = SimpleNamespace(GameMaker=_quick_maker(), generator=textworld.generator)
    cooking_names = {**vars(cooking), "KnowledgeBase": knowledge, "textworld": engine}
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

    The files are read in the order of their names: the engine takes the order of the directory, which may
    differ from machine to machine, and with it the game that a seed gives.
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
    """TextWorld's `GameMaker`, following a walkthrough by the game's logic instead of compiling it."""
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
                    continue  # opening what an earlier command has opened
                # "prepare meal" is one command for five rules; the one that uses most is meant.
                actions.append(max(meant, key=lambda action: len(action.preconditions)))
                waiting = [event for event in awaited if not event.triggered]
                progress.update(actions[-1])
                for event in waiting:
                    if event.triggered:
                        event.event.actions = actions
                        event.event.commands = commands[:position]

    return QuickMaker
