"""The simulation behind docs/scale.md: its stations are right, and it agrees with measured runs."""

from __future__ import annotations

import json

import pytest

from scale import COSTS, Delay, Layout, Station, check, play, simulate
from tests.conftest import ROOT


def test_requests_share_servers_and_wait_apart_from_them() -> None:
    def three(servers: float) -> float:
        stations: dict[str, Station | Delay] = {"model": Station(servers), "wait": Delay()}
        return play(stations, lambda episode: [("model", 2.0), ("wait", 1.0)], 3, at_once=3)

    assert [three(1), three(2), three(3), three(9)] == pytest.approx([7.0, 4.0, 3.0, 3.0])


def test_a_station_does_the_work_that_it_was_given() -> None:
    found = simulate(Layout(learners=2, policy=2, experience=1), 64)
    more = simulate(Layout(learners=4, policy=4, experience=2), 64)
    assert found["rollout"] >= found["busy"]["experience"] * 3600 / found["steps_per_hour"]
    assert more["rollout"] < found["rollout"]
    assert more["update"] == pytest.approx(found["update"] / 2)
    assert found["tokens"] == 64 * COSTS.turns * COSTS.tokens


def test_it_predicts_the_measured_rates_of_one_two_and_four_workers() -> None:
    """Computing, a worker uses more than one core: the engine's thread and the event loop overlap."""
    measured = json.loads((ROOT / "results" / "scaling.json").read_text(encoding="utf-8"))
    rows = {(row["kind"], row["workers"]): row["error"] for row in check(measured)}
    assert all(abs(rows["latency", workers]) < 0.1 for workers in (1, 2, 4))
    assert all(abs(rows["compute", workers]) < 0.2 for workers in (1, 2))
