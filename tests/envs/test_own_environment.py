"""Environments that are given as objects: classes, functions, Gymnasium environments and factories."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from dreamgym.envs import registry
from dreamgym.envs.registry import (
    as_environment,
    environment_horizon,
    environment_names,
    find_environment,
    make,
    register,
)
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.wrappers import StepCounter, TimeLimit
from dreamgym.errors import ConfigError, EpisodeFailedError, EpisodeOverError
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.protocols import Environment, find_expert, find_world_sheet
from dreamgym.rollouts import run_episode
from dreamgym.testing import check_environment
from dreamgym.testing.corridor import CorridorFactory
from dreamgym.types import Outcome, State, Trajectory, WorldSheet


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    before = dict(registry._registered)
    yield
    registry._registered.clear()
    registry._registered.update(before)


class Safe:
    """Open the safe: the label states the digit."""

    name = "safe"
    horizon = 3
    refusals = ("Nothing happens.",)

    def __init__(self, seed: int, digits: int = 3) -> None:
        self.digit = str(random.Random(seed).randrange(digits))

    def admissible_actions(self) -> list[str]:
        return ["read label", *(f"dial {digit}" for digit in range(3))]

    def start(self) -> str:
        return "A safe with a label."

    def step(self, action: str) -> tuple[str, float, bool]:
        if action == "read label":
            return f"The label says {self.digit}.", 0.0, False
        if action == f"dial {self.digit}":
            return "The safe opens.", 1.0, True
        if action.removeprefix("dial ").isdecimal():
            return "The safe stays shut.", 0.0, False
        return "Nothing happens.", 0.0, False

    def world_sheet(self) -> list[tuple[str, str, str]]:
        return [("code", "safe", self.digit)]

    def expert_action(self) -> str:
        return f"dial {self.digit}"


class AsyncSafe:
    """The same with async methods, states, outcomes and tasks of its own."""

    tasks: ClassVar = {"train": ["Open the safe."], "held_out": ["Open it quickly.", "Open it quietly."]}

    def __init__(self) -> None:
        self.closed = 0

    async def start(self) -> State:
        return State(text="A safe.", admissible_actions=("open",))

    async def step(self, action: str) -> Outcome:
        done = action == "open"
        return Outcome(
            next_state=State(text="Open." if done else "No."),
            reward=float(done),
            terminated=done,
            success=done,
        )

    async def aclose(self) -> None:
        self.closed += 1


class TextGymnasium:
    """A text environment with Gymnasium's methods."""

    def __init__(self) -> None:
        self._steps = 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        self._seed, self._steps = seed, 0
        return f"Room {seed}.", {"admissible_actions": ["wait", "leave"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._steps += 1
        left = action == "leave"
        return (
            "Outside." if left else "Waiting." if action == "wait" else "What?",
            float(left),
            left,
            self._steps >= 3,
            {"steps": self._steps},
        )


def make_gymnasium() -> TextGymnasium:
    return TextGymnasium()


async def test_a_plain_class_keeps_the_contract_of_an_environment() -> None:
    report = await check_environment(Safe, episodes=20)
    assert report.passed, [check for check in report.checks if check.status == "fail"]
    skipped = [check.name for check in report.checks if check.status == "skip"]
    assert not [name for name in skipped if "expert" in name or "sheet" in name]


async def test_async_classes_and_gymnasium_environments_keep_it_too() -> None:
    for thing in (AsyncSafe, TextGymnasium, TextGymnasium(), make_gymnasium):
        report = await check_environment(thing, episodes=10)
        assert report.passed, [check for check in report.checks if check.status == "fail"]


async def test_a_class_becomes_a_factory_with_tasks_roles_and_facts() -> None:
    factory = make(Safe)
    assert (factory.name, factory.splits) == ("safe", ("train", "test"))
    spec = find_environment("safe")
    assert (spec.refusals, environment_horizon(spec, {})) == (Safe.refusals, Safe.horizon)
    assert spec.summary == "Open the safe: the label states the digit."
    first, again = await factory.tasks("train", 3), await factory.tasks("train", 3)
    assert first == again
    environment = factory.make(first[0])
    facts, expert = find_world_sheet(environment), find_expert(environment)
    assert facts is not None
    assert expert is not None
    state = await environment.start()
    assert state.text == "A safe with a label."
    (fact,) = (await facts.world_sheet()).facts
    outcome = await environment.step(await expert.expert_action())
    assert (outcome.success, outcome.reward, fact[:2]) == (True, 1.0, ("code", "safe"))
    assert find_expert(make(TextGymnasium).make(first[0])) is None
    assert find_world_sheet(make(TextGymnasium).make(first[0])) is None


async def test_episodes_are_collected_from_a_plain_class() -> None:
    factory = make(Safe)
    (task,) = await factory.tasks("test", 1)
    for policy in ("expert", "random"):
        played = await run_episode(
            lambda: factory.make(task),
            lambda environment, policy=policy: make_policy(policy, environment, seed=0),  # type: ignore[misc]
            trajectory_id="t",
            task=task,
            seed=0,
        )
        assert isinstance(played, Trajectory)
        assert played.success or policy == "random"
        assert len(played) == 1 or policy == "random"
        assert played.sheet is not None


async def test_options_are_arguments_of_the_constructor_and_unknown_ones_are_refused() -> None:
    factory = make(Safe, digits=1)
    (task,) = await factory.tasks("train", 1)
    environment = factory.make(task)
    await environment.start()
    assert (await environment.step("dial 0")).success
    with pytest.raises(ConfigError, match="unknown option 'digit'; did you mean 'digits'"):
        make(Safe, digit=1)


async def test_tasks_can_be_listed_by_the_class_or_by_the_caller() -> None:
    assert [task.instruction for task in await make(AsyncSafe).tasks("train")] == ["Open the safe."]
    assert len(await make(AsyncSafe).tasks("held_out")) == 2
    factory = as_environment(Safe, tasks=["Open it.", "Open it now."]).open(registry.AnyOptions())
    assert {task.instruction for task in await factory.tasks("train")} == {"Open it.", "Open it now."}
    with pytest.raises(ConfigError, match="unknown split 'valid' of environment 'safe'; it has: train"):
        await factory.tasks("valid")


def test_roles_are_found_on_the_object_or_passed() -> None:
    def goal_met(task: object, sheet: WorldSheet) -> bool:
        return True

    spec = as_environment(Safe, name="vault", goal_met=goal_met, annotator=PlainAnnotator())
    assert spec.name == "vault"
    assert spec.goal_met is goal_met
    assert spec.annotator is not None
    assert isinstance(spec.annotator(), PlainAnnotator)
    assert as_environment(Safe, annotator=PlainAnnotator).annotator is PlainAnnotator
    with pytest.raises(ConfigError, match="unknown role 'goal_meet'"):
        as_environment(Safe, goal_meet=goal_met)


def test_a_registered_environment_is_found_by_name() -> None:
    assert "safe" not in environment_names()
    register(as_environment(Safe))
    assert "safe" in environment_names()
    assert make("safe").name == "safe"


async def test_factories_specs_and_names_are_environments_too() -> None:
    assert make(CorridorFactory()).name == "corridor"
    spec = as_environment(CorridorFactory(), refusals=("Nothing happens.",))
    assert (spec.name, spec.splits, spec.refusals) == ("corridor", ("train", "test"), ("Nothing happens.",))
    assert as_environment("textworld").name == "textworld"
    with pytest.raises(ConfigError, match="expected an environment"):
        make(3)


def test_a_factory_of_a_known_environment_is_used_as_it_is_and_keeps_the_roles_of_its_name() -> None:
    pytest.importorskip("textworld")
    factory = make("textworld", family="cooking")
    assert make(factory) is factory
    assert find_environment("textworld").goal_met is not None
    assert make("textworld", family="treasure") is not factory
    with pytest.raises(ConfigError, match="takes no options"):
        make(factory, family="treasure")


class Broken(Safe):
    name = "broken"

    def step(self, action: str) -> Any:
        if action == "crash":
            raise KeyError("lid")
        return {"observation": action}


async def test_an_exception_of_a_plain_class_is_a_failed_episode_and_a_wrong_reply_is_named() -> None:
    factory = make(Broken)
    (task,) = await factory.tasks("train", 1)

    async def started() -> Environment:
        environment = factory.make(task)
        await environment.start()
        return environment

    with pytest.raises(EpisodeFailedError, match=r"broken: step\('crash'\) raised KeyError: 'lid'"):
        await (await started()).step("crash")
    with pytest.raises(ConfigError, match="expected step to return an Outcome"):
        await (await started()).step("look")


async def test_wrappers_can_be_stacked_and_keep_the_roles() -> None:
    factory = StepCounter(TimeLimit(make(Safe), steps=2))
    (task,) = await factory.tasks("train", 1)
    environment = factory.make(task)
    assert find_expert(environment) is not None
    assert find_world_sheet(environment) is not None
    await environment.start()
    assert not (await environment.step("wait")).over
    assert (await environment.step("wait")).truncated
    assert (factory.steps, factory.episodes) == (2, 1)
    with pytest.raises(EpisodeOverError):
        await environment.step("wait")


async def test_gymnasium_environments_need_text_spaces() -> None:
    gymnasium = pytest.importorskip("gymnasium")
    from dreamgym.integrations.gymnasium import from_gymnasium

    class Texts(gymnasium.Env):  # type: ignore[misc,name-defined]
        observation_space = gymnasium.spaces.Text(100)
        action_space = gymnasium.spaces.Text(100)

        def reset(self, *, seed: int | None = None, options: object = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return f"Number {self.np_random.integers(1000)}.", {}

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            done = action == "finish"
            return ("Done." if done else "What?"), float(done), done, False, {}

    spec = from_gymnasium(Texts)
    report = await check_environment(spec.name, episodes=5)
    assert report.passed, [check for check in report.checks if check.status == "fail"]
    with pytest.raises(ConfigError, match="expected a Text observation_space"):
        from_gymnasium("CartPole-v1")
