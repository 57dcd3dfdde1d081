"""What the processes of tests share: the one that forks them imports this module first.

Importing torch and transformers, and parsing the grammars of TextWorld for the first game, take longer than
most of what the tests then run.
"""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module

for name in (
    "dreamgym.cli",
    "dreamgym.learning.pipeline",
    "dreamgym.training.trainer",
    "dreamgym.training.agent",
    "dreamgym.training.dream_loading",
    "dreamgym.models.tiny",
    "dreamgym.models.local.language_model",
    "dreamgym.rl.optimizers",
    "dreamgym.rl.policy_gradient",
    "dreamgym.rl.sft",
    "transformers.models.lfm2.modeling_lfm2",
    "transformers.models.llama.modeling_llama",
):
    import_module(name)

with suppress(ImportError):
    from dreamgym.envs.textworld.task_source import CookingGame, TreasureGame, make_game

    make_game(CookingGame(split="train", seed=0))
    make_game(TreasureGame(split="train", seed=0))
