"""The scripted policies: what their names mean, and that a seed fixes what they do."""

from __future__ import annotations

from collections import Counter

import pytest

from dreamgym.envs.scripted_policies import MIX, ExpertPolicy, make_policy, resolve_policy
from dreamgym.errors import ConfigError
from dreamgym.testing import Corridor, CorridorFactory
from dreamgym.types import Outcome, State, Task, Transition


async def corridor() -> Corridor:
    factory = CorridorFactory(length=6)
    return factory.make((await factory.tasks("train", 1))[0])


async def played(name: str, seed: int) -> list[str]:
    environment = await corridor()
    policy = make_policy(name, environment, seed=seed)
    state, actions = await environment.start(), []
    while True:
        decision = await policy.act(environment.task, (), state)
        actions.append(decision.action)
        outcome = await environment.step(decision.action)
        if outcome.over:
            return actions
        state = outcome.next_state


async def test_the_expert_takes_the_shortest_way() -> None:
    assert await played("expert", seed=0) == await played("expert:walker", seed=1)
    assert len(await played("expert", seed=0)) < len(await played("random", seed=0))


@pytest.mark.parametrize("name", ["random", "noisy:0.3"])
async def test_the_seed_fixes_what_a_policy_does(name: str) -> None:
    assert await played(name, seed=3) == await played(name, seed=3)
    assert len({tuple(await played(name, seed=seed)) for seed in range(8)}) > 1


async def test_a_noisy_expert_without_noise_is_the_expert_and_with_nothing_else_is_random() -> None:
    assert await played("noisy:0", seed=5) == await played("expert", seed=5)
    environment = await corridor()
    state = await environment.start()
    policy = make_policy("noisy:1", environment, seed=0)
    chosen = Counter([(await policy.act(environment.task, (), state)).action for _ in range(400)])
    assert set(chosen) == set(state.admissible_actions or ())
    assert min(chosen.values()) > 400 / len(chosen) / 2


async def test_a_clumsy_expert_is_refused_now_and_then_and_still_gets_there() -> None:
    """Names are exchanged for others that it has seen, so it acts on the wrong thing, or elsewhere."""
    assert await played("clumsy:0", seed=5) == await played("expert", seed=5)
    task = Task(id="house", instruction="put the mug on the desk", environment="house")
    state = State(
        text="",
        admissible_actions=("go to desk 1", "look", "move mug 1 to shelf 1", "take pen 2 from shelf 1"),
    )
    policy = make_policy("clumsy:1", await corridor(), seed=0)
    chosen = Counter([(await policy.act(task, (), state)).action for _ in range(400)])
    assert not set(chosen).intersection(state.admissible_actions or ())
    assert {action.split()[0] for action in chosen} == {"go", "move", "take"}
    assert chosen["take mug 1 from shelf 1"] > 20
    again = make_policy("clumsy:1", await corridor(), seed=0)
    assert Counter([(await again.act(task, (), state)).action for _ in range(400)]) == chosen
    assert "take shelf 1 from shelf 1" not in chosen


async def test_a_clumsy_expert_also_walks_to_no_place_and_to_where_it_stands() -> None:
    """Both are refused in reality, and nothing else would show it: what is recorded arrives somewhere."""
    task = Task(id="house", instruction="put the mug on the desk", environment="house")
    earlier = State(text="", admissible_actions=("go to desk 1", "go to shelf 1", "go to shelf 2"))
    state = State(text="", admissible_actions=("go to shelf 1", "go to shelf 2", "open desk 1"))
    here = Transition(
        state=earlier, action="go to desk 1", outcome=Outcome(next_state=state, reward=0.0, terminated=False)
    )
    policy = make_policy("clumsy:1", await corridor(), seed=0)
    chosen = Counter([(await policy.act(task, (here,), state)).action for _ in range(400)])
    assert chosen["go to desk 1"] > 10
    nowhere = [action for action in chosen if action.startswith(("go to shelf", "go to desk"))]
    assert len(nowhere) > 5
    assert not {"go to shelf 1", "go to shelf 2"}.intersection(nowhere)


async def test_a_careless_expert_does_what_is_possible_and_almost_right() -> None:
    assert await played("careless:0", seed=5) == await played("expert", seed=5)
    environment = await corridor()
    state = await environment.start()
    right = await environment.expert_action()
    policy = make_policy("careless:1", environment, seed=0)
    chosen = {(await policy.act(environment.task, (), state)).action for _ in range(50)}
    assert right not in chosen
    assert chosen <= set(state.admissible_actions or ())


async def test_policies_carry_the_name_they_are_made_by() -> None:
    for name in ("expert", "expert:walker", "noisy:0.25", "clumsy:0.5", "careless:0.5", "random"):
        assert make_policy(name, await corridor(), seed=0).name == name


def test_every_ten_episodes_of_a_mix_hold_the_documented_blend() -> None:
    names = [resolve_policy("mix", seed=4, episode=episode) for episode in range(40)]
    for start in range(0, 40, 10):
        assert sorted(names[start : start + 10]) == sorted(MIX)
    assert names[:10] != names[10:20]
    assert names != [resolve_policy("mix", seed=5, episode=episode) for episode in range(40)]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("exprt", "did you mean 'expert'"),
        ("noisy", "did you mean 'noisy:SHARE'"),
        ("noisy:1.5", "share from 0 to 1, got '1.5'"),
        ("noisy:nan", "share from 0 to 1, got 'nan'"),
        ("noisy:", "share from 0 to 1, got ''"),
        ("random:3", "unknown policy 'random:3'"),
        ("", "expected one of"),
    ],
)
def test_a_wrong_policy_name_is_refused_with_what_would_be_right(name: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        resolve_policy(name, seed=0, episode=0)


async def test_an_unknown_expert_is_refused_with_the_nearest_one() -> None:
    environment = await corridor()
    with pytest.raises(ConfigError, match="did you mean 'walker'"):
        ExpertPolicy(environment, "wlker")


async def test_a_mix_must_be_resolved_before_a_policy_is_made() -> None:
    environment = await corridor()
    with pytest.raises(ConfigError, match="resolve_policy"):
        make_policy("mix", environment, seed=0)


async def test_where_no_actions_are_listed_random_ones_are_words_or_near_misses_of_the_expert() -> None:
    environment = await corridor()
    state = State(text="door 7")
    words = set(f"{environment.task.instruction} {state.text}".replace(".", "").split())
    found = await make_policy("random", environment, seed=0).act(environment.task, (), state)
    assert set(found.action.split()) <= words
    environment = await corridor()
    state = await environment.start()
    right = await environment.expert_action()
    unlisted = State(text="You can go to 4, or 5.")
    noisy = make_policy("noisy:1", environment, seed=0)
    found = await noisy.act(environment.task, (), unlisted)
    assert found.action != right
    if " " in right:
        assert found.action.split()[0] == right.split()[0]
