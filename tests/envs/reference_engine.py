"""Plays games with the untouched engine, as its authors do, and prints what it says. A process of its own.

    python reference_engine.py STEPS SEED GAME…

Each line of the output is one game: its random actions, and (text, admissible actions) of each state.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path
from typing import Any


def play(game: str, steps: int, rng: random.Random) -> dict[str, Any]:
    env.load(game)
    state = env.reset()
    states, actions = [(state.feedback, list(state["admissible_commands"]))], []
    for _ in range(steps):
        # Now and then something the engine does not understand, or does not understand any more.
        nonsense = rng.random() < 0.1
        action = rng.choice(["sing", *states[0][1]] if nonsense else states[-1][1])
        state, _, done = env.step(action)
        actions.append(action)
        states.append((state.feedback, list(state["admissible_commands"])))
        if done:
            break
    return {"game": game, "actions": actions, "states": states, "won": bool(state["won"])}


if __name__ == "__main__":
    import textworld
    from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
    from textworld.envs import PddlEnv

    env = AlfredInfos(AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))))
    steps, seed, *games = sys.argv[1:]  # now: the engine's translator overwrites sys.argv
    dice = random.Random(int(seed))
    for name in games:
        assert Path(name).is_file()
        sys.stdout.write(json.dumps(play(name, int(steps), dice)) + "\n")
