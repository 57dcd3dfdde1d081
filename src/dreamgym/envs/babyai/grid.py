"""One game of a BabyAI level: what the agent sees, in words, and its actions."""

from __future__ import annotations

from contextlib import redirect_stdout
from functools import cache
from io import StringIO
from typing import Any, cast

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "open")
"""In the order of MiniGrid's actions."""
_PREFIX, _SUFFIX = "BabyAI-", "-v0"
_UNLIMITED = 1_000_000
"""MiniGrid's own limit of steps; the horizon truncates instead."""


@cache
def level_names() -> list[str]:
    _load()
    from gymnasium.envs.registration import registry

    return sorted(
        name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
        for name in registry
        if name.startswith(_PREFIX) and name.endswith(_SUFFIX)
    )


@cache
def _load() -> None:
    """MiniGrid registers its levels when it is imported."""
    import gymnasium
    import minigrid

    gymnasium.register_envs(minigrid)


class GridGame:
    """The agent's view is 7 by 7 cells: three to either side, six ahead."""

    def __init__(self, level: str, seed: int) -> None:
        _load()
        import gymnasium

        name = f"{_PREFIX}{level}{_SUFFIX}"
        made = gymnasium.make(name, disable_env_checker=True, max_episode_steps=_UNLIMITED)
        self._game = cast(Any, made.unwrapped)
        with redirect_stdout(StringIO()):  # it prints each attempt at a map
            self._game.reset(seed=seed)
        self._game.max_steps = _UNLIMITED

    @property
    def mission(self) -> str:
        """The instruction: ``go to the red ball``."""
        return str(self._game.mission)

    def act(self, action: str) -> tuple[str, bool, bool]:
        """(text, success, over) of one of `ACTIONS`."""
        before = self._facts()
        _, reward, over, _, _ = self._game.step(ACTIONS.index(action))
        if over:
            return ("You have done it." if reward > 0 else "You have failed."), reward > 0, True
        if self._facts() == before:
            return f"Nothing happens. {self.view()}", False, False
        return self.view(), False, False

    def actions(self) -> tuple[str, ...]:
        """Those that have an effect."""
        ahead, carrying = self._game.grid.get(*self._game.front_pos), self._game.carrying
        free = ahead is None or ahead.can_overlap()
        possible = {
            "turn left": True,
            "turn right": True,
            "go forward": free,
            "pick up": ahead is not None and ahead.can_pickup() and carrying is None,
            "drop": carrying is not None and ahead is None,
            "open": ahead is not None and (ahead.type == "box" or self._opens(ahead)),
        }
        return tuple(action for action in ACTIONS if possible[action])

    def view(self) -> str:
        """``You see a red ball 2 steps forward and 1 step left.``"""
        grid, visible = self._game.gen_obs_grid()
        width, height = grid.width, grid.height
        seen = []
        for distance in range(height):
            row = height - 1 - distance
            for side in sorted(range(width), key=lambda column: (abs(column - width // 2), column)):
                thing = grid.get(side, row)
                if (distance or side != width // 2) and visible[side, row] and thing is not None:
                    ahead = side == width // 2
                    if thing.type not in ("wall", "floor") or (ahead and thing.type == "wall"):
                        seen.append(f"{_name(thing)} {_where(distance, side - width // 2)}")
        carried = self._game.carrying
        hand = f" You carry {_name(carried)}." if carried is not None else ""
        return f"You see {', '.join(seen) or 'nothing'}.{hand}"

    def _opens(self, door: Any) -> bool:
        if door.type != "door":
            return False
        key = self._game.carrying
        return not door.is_locked or (key is not None and key.type == "key" and key.color == door.color)

    def _facts(self) -> tuple[object, ...]:
        """All that an action can change."""
        game = self._game
        return (tuple(game.agent_pos), game.agent_dir, game.carrying, game.grid.encode().tobytes())


def _name(thing: Any) -> str:
    if thing.type == "wall":
        return "a wall"
    if thing.type == "door":
        state = "open" if thing.is_open else "locked" if thing.is_locked else "closed"
        return f"{_article(state)} {state} {thing.color} door"
    return f"a {thing.color} {thing.type}"


def _article(word: str) -> str:
    return "an" if word[0] in "aeiou" else "a"


def _where(forward: int, right: int) -> str:
    """
    >>> _where(2, -1), _where(0, 1)
    ('2 steps forward and 1 step left', '1 step right')
    """
    parts = []
    for count, way in ((forward, "forward"), (abs(right), "left" if right < 0 else "right")):
        if count:
            parts.append(f"{count} step{'s' if count > 1 else ''} {way}")
    return " and ".join(parts)
