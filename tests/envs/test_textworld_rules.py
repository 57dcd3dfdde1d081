"""The rules that explain TextWorld agree with its engine: what is possible, what changes, who has won."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.config import load_config, validate
from dreamgym.envs.registry import find_environment
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.textworld import TextWorldFactory, TextWorldOptions
from dreamgym.envs.textworld.annotator import TextWorldAnnotator, checks, explain
from dreamgym.envs.textworld.facts import GameFacts, facts_for, parsed
from dreamgym.envs.textworld.goals import can_succeed, goal_met, lost
from dreamgym.envs.textworld.logic_engine import REFUSALS, GameSession
from dreamgym.envs.textworld.task_source import (
    CookingGame,
    GameSettings,
    TreasureGame,
    hidden_facts,
    make_game,
    task_of,
)
from dreamgym.experience.reply_format import corrected, prompt, start_prompt
from dreamgym.rollouts import run_episode
from dreamgym.training.experience_loading import prompt_settings
from dreamgym.types import Fact, Outcome, State, Trajectory, Transition, WorldSheet
from tests.envs.current_sheet import current_sheet

COOKING = CookingGame(split="train", seed=3)


def compare(settings: GameSettings, seed: int, *, led: float, jumbled: float = 0.2) -> Counter[str]:
    """Play one episode with the rules and fail where they differ; what happened, counted.

    Args:
        led: share of actions that the expert chooses.
        jumbled: share of the other actions that are words thrown together.
    """
    task, play, chance = task_of(settings), GameSession(make_game(settings)), random.Random(seed)
    hidden = hidden_facts(settings)
    verdicts = [fact for fact in hidden if fact[0] in ("wins", "loses")]
    sheet, known, happened = WorldSheet(facts=hidden), set(play.actions), Counter({"episodes": 1})
    assert can_succeed(task, sheet)
    for _ in range(30):
        known.update(play.actions)
        action = chance.choice([*play.actions, "prepare meal"])
        if chance.random() < led:
            action = play.reader_action()
        elif chance.random() < jumbled:
            action = jumble(chance, sorted(known))
        text = play.act(action)
        kind, *names = parsed(action)
        facts = GameFacts(sheet.facts)
        one, other = (facts.named(name) for name in names)
        possible = all(met for _, met in checks(facts, kind, one, other))
        assert possible == (text not in REFUSALS), (action, text)
        outcome = Outcome(
            next_state=State(text=text), reward=0.0, terminated=play.won or play.lost, success=play.won
        )
        note = explain(facts, Transition(state=State(text=""), action=action, outcome=outcome))
        assert note.reasoning.endswith("not possible.") == (text in REFUSALS)
        assert corrected(f"think: {note.reasoning}", [*facts_for(sheet, action)]) is None, note.reasoning
        assert ("the task is done" in note.reasoning) == play.won
        assert ("all is lost" in note.reasoning) == play.lost
        sheet = current_sheet(sheet, (note,))
        assert set(sheet.facts) == {*play.facts, *verdicts}, action
        assert goal_met(task, sheet) == play.won, action
        assert lost(sheet) == play.lost, action
        happened.update(refused=int(text in REFUSALS), steps=1, won=int(play.won), lost=int(play.lost))
        if play.won or play.lost:
            assert not can_succeed(task, sheet)
            break
        assert can_succeed(task, sheet), "nothing but a loss makes a game hopeless"
    return happened


def jumble(chance: random.Random, known: list[str]) -> str:
    words = chance.choice(known).split()
    words[chance.randrange(len(words))] = chance.choice(chance.choice(known).split())
    return " ".join(words)


def test_rules_and_simulator_agree_at_every_step() -> None:
    seen: Counter[str] = Counter()
    for seed in range(3):
        for led in (0.0, 0.9):
            seen += compare(CookingGame(split="train", seed=seed, ingredients=1 + seed % 2), seed, led=led)
        seen += compare(TreasureGame(split="train", seed=seed, level=5 * seed + 1), seed, led=0.0)
    assert min(seen["won"], seen["lost"], seen["refused"]) > 0, seen


@pytest.mark.slow
def test_rules_and_simulator_agree_over_sixty_episodes() -> None:
    seen: Counter[str] = Counter()
    for seed in range(12):
        for led in (0.0, 0.5, 0.8, 1.0):
            cooking = CookingGame(
                split=("train", "validation", "test")[seed % 3],
                seed=seed,
                ingredients=1 + seed % 3,
                rooms=(1, 6, 9, 12)[seed % 4],
            )
            seen += compare(cooking, seed, led=led)
        seen += compare(TreasureGame(split="train", seed=seed, level=1 + seed % 25), seed, led=0.7)
    assert seen["episodes"] == 60
    assert min(seen["won"], seen["lost"]) > 7, seen


def test_a_key_in_its_own_chest_and_a_missing_stove_make_a_game_hopeless() -> None:
    hunt = task_of(TreasureGame(split="train", seed=3))
    chest: tuple[Fact, ...] = (
        ("at", "player", "hall"),
        ("at", "chest", "hall"),
        ("locked", "chest"),
        ("in", "ring", "chest"),
        ("wins", "ring"),
        ("match", "key", "chest"),
    )
    assert can_succeed(hunt, WorldSheet(facts=(*chest, ("at", "key", "hall"))))
    assert not can_succeed(hunt, WorldSheet(facts=(*chest, ("in", "key", "chest"))))
    cooking = hidden_facts(COOKING)
    heater = {"fried": "stove", "roasted": "oven"}[
        next(f[2] for f in cooking if f[2:] in [("fried",), ("roasted",)])
    ]
    without = tuple(fact for fact in cooking if fact[:2] != ("at", heater))
    assert not can_succeed(task_of(COOKING), WorldSheet(facts=without))


async def played(policy: str, settings: GameSettings = COOKING) -> Trajectory:
    factory, task = TextWorldFactory(TextWorldOptions()), task_of(settings)
    found = await run_episode(
        lambda: factory.make(task),
        lambda environment: make_policy(policy, environment, seed=0),
        trajectory_id="one",
        task=task,
        seed=0,
    )
    assert isinstance(found, Trajectory)
    return found


async def test_the_expert_reads_the_recipe_before_it_follows_it() -> None:
    for seed in range(4):
        trajectory = await played("expert", CookingGame(split="train", seed=seed))
        actions = [turn.action for turn in trajectory.transitions]
        read = actions.index("examine cookbook")
        assert all(action.startswith(("go ", "open ")) for action in actions[:read])
        assert trajectory.success
        planned = await played("expert:planner", CookingGame(split="train", seed=seed))
        assert "examine cookbook" not in [turn.action for turn in planned.transitions]


async def test_a_clumsy_expert_shows_what_is_refused_and_still_wins() -> None:
    trajectory = await played("clumsy:0.4")
    texts = [turn.outcome.next_state.text for turn in trajectory.transitions]
    assert trajectory.success
    assert sum(text in REFUSALS for text in texts) >= 2


async def test_a_clumsy_expert_prepares_and_eats_meals_that_are_not_ready() -> None:
    refused = [
        turn.action
        for seed in range(8)
        for turn in (await played("clumsy:0.5", CookingGame(split="train", seed=seed))).transitions
        if turn.outcome.next_state.text in REFUSALS
    ]
    assert refused.count("prepare meal") >= 3
    assert refused.count("eat meal") >= 3


async def test_a_careless_expert_shows_how_a_meal_is_lost() -> None:
    lost = 0
    for seed in range(6):
        trajectory = await played("careless:0.4", CookingGame(split="train", seed=seed))
        texts = [turn.outcome.next_state.text for turn in trajectory.transitions]
        assert not any(text in REFUSALS for text in texts)
        lost += not trajectory.success and "You have lost" in texts[-1]
    assert lost >= 1


async def test_a_question_tells_all_that_the_answer_names() -> None:
    """Whatever thing or room the next state names stands among the facts, the task or the action."""
    spec = find_environment("textworld")
    settings = prompt_settings(load_config().experience, 1, spec.actor, "textworld")
    for policy in ("expert", "noisy:0.5", "random"):
        trajectory = await played(policy)
        sheet = trajectory.sheet
        assert sheet is not None
        names = {name for fact in sheet.facts for name in fact[1:] if len(name) > 3 and fact[0] != "recipe"}
        annotation = await TextWorldAnnotator().annotate(trajectory)
        begin = start_prompt(trajectory.task, sheet, settings)
        assert all(name in begin for name in names if name in trajectory.start.text)
        for number, turn in enumerate(trajectory.transitions):
            now = current_sheet(sheet, annotation.notes[:number])
            asked = prompt(trajectory.task, now, (), "", turn.action, settings=settings)
            assert all(name in asked for name in names if name in turn.outcome.next_state.text)
            assert len(asked) < 1500


@given(action=st.text(), drop=st.sets(st.integers(0, 60)))
def test_no_action_and_no_muddled_sheet_breaks_the_rules(action: str, drop: set[int]) -> None:
    """Sheets are kept by a model's own words: anything may be missing, or stand there twice."""
    facts = [fact for number, fact in enumerate(hidden_facts(COOKING)) if number not in drop]
    muddled: list[Fact] = [
        *facts,
        ("in", "knife", "knife"),
        ("at", "player", "moon"),
        ("odd",),
        ("a", "b", "c", "d"),
    ]
    for sheet in (WorldSheet(facts=tuple(facts)), WorldSheet(facts=tuple(muddled))):
        for said in (action, f"take {action} from counter", "go north", "prepare meal", "examine knife"):
            assert facts_for(sheet, said)
            kind, *names = parsed(said)
            list(checks(GameFacts(sheet.facts), kind, names[0], names[1]))
        can_succeed(task_of(COOKING), sheet)


async def test_held_out_games_may_keep_the_foods_of_training_and_a_split_may_be_cut_short() -> None:
    from textworld.challenges.tw_cooking.cooking import FOODS_SPLITS

    options = validate(TextWorldOptions, {"family": "cooking", "foods": "train", "games": 12})
    factory = TextWorldFactory(options)
    tasks = await factory.tasks("test", seed=5)
    assert len(tasks) == 12
    found = {
        fact[1]
        for task in tasks
        for fact in hidden_facts(CookingGame(**dict(task.parameters)))
        if fact[0] == "recipe"
    }
    assert found <= set(FOODS_SPLITS["train"])
    assert all("-known-test-" in task.id for task in tasks)
