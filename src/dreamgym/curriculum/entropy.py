"""Reward entropy (the paper's Eq. 7): the variance of a task's returns, per rollout group (GRPO) or, where
there are no groups (PPO), per cluster of similar tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Embedder, Keys
from dreamgym.types import RolloutGroup


def reward_entropy(returns: Sequence[float]) -> float:
    """The variance of returns; 0 for fewer than two.

    >>> reward_entropy([1.0, 0.0, 0.0, 1.0]), reward_entropy([1.0, 1.0])
    (0.25, 0.0)
    """
    if len(returns) < 2:
        return 0.0
    return float(np.var(np.asarray(returns, dtype=np.float64)))


def returns_by_task(groups: Sequence[RolloutGroup]) -> dict[str, list[float]]:
    """The returns of each task by its id, over all its groups."""
    found: dict[str, list[float]] = {}
    for group in groups:
        found.setdefault(group.task.id, []).extend(each.total_reward for each in group.trajectories)
    return found


def group_entropy(groups: Sequence[RolloutGroup]) -> dict[str, float]:
    """The reward entropy of each task over its own rollouts (GRPO)."""
    return {task: reward_entropy(returns) for task, returns in returns_by_task(groups).items()}


async def cluster_entropy(
    groups: Sequence[RolloutGroup], embedder: Embedder, *, clusters: int
) -> dict[str, float]:
    """The reward entropy of each task over the cluster of its instruction (PPO)."""
    instructions = {group.task.id: group.task.instruction for group in groups}
    keys = await embedder.embed([(instruction, "") for instruction in instructions.values()])
    return clustered_entropy(returns_by_task(groups), list(instructions), cluster(keys, clusters))


def clustered_entropy(
    returns: Mapping[str, Sequence[float]], tasks: Sequence[str], labels: Sequence[int]
) -> dict[str, float]:
    """The reward entropy of each task over all returns with its label.

    >>> clustered_entropy({"a": [1.0], "b": [0.0], "c": [1.0]}, ["a", "b", "c"], [0, 0, 1])
    {'a': 0.25, 'b': 0.25, 'c': 0.0}
    """
    pooled: dict[int, list[float]] = {}
    for task, label in zip(tasks, labels, strict=True):
        pooled.setdefault(label, []).extend(returns[task])
    entropy = {label: reward_entropy(found) for label, found in pooled.items()}
    return {task: entropy[label] for task, label in zip(tasks, labels, strict=True)}


def cluster(keys: Keys, count: int, *, rounds: int = 50) -> list[int]:
    """Deterministic k-means: the first centres are the keys farthest from one another, so equal keys give
    equal labels on every machine. Labels count up in the order of first appearance.

    >>> cluster(np.array([[0, 0], [9, 9], [0, 1], [9, 8]], np.float32), 2)
    [0, 1, 0, 1]

    Args:
        keys: `(n, dimension)`.
        count: upper limit of clusters; there are fewer if keys repeat.
    """
    if count < 1:
        raise ValueError(f"expected at least one cluster, got {count}")
    points = keys.astype(np.float64)
    if not len(points):
        return []
    centres = _far_apart(points, count)
    labels = _nearest(points, centres)
    for _ in range(rounds):
        # A centre without keys stays where it is; no key has its label.
        centres = np.stack(
            [
                points[labels == number].mean(axis=0) if (labels == number).any() else centre
                for number, centre in enumerate(centres)
            ]
        )
        moved = _nearest(points, centres)
        if (moved == labels).all():
            break
        labels = moved
    order: dict[int, int] = {}
    return [order.setdefault(int(label), len(order)) for label in labels]


def _far_apart(points: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    chosen = [0]
    distance = ((points - points[0]) ** 2).sum(axis=1)
    while len(chosen) < min(count, len(points)) and distance.max() > 0:
        chosen.append(int(distance.argmax()))
        distance = np.minimum(distance, ((points - points[chosen[-1]]) ** 2).sum(axis=1))
    return points[chosen]


def _nearest(points: npt.NDArray[np.float64], centres: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    distances = np.stack([((points - centre) ** 2).sum(axis=1) for centre in centres], axis=1)
    found: npt.NDArray[np.int64] = distances.argmin(axis=1)
    return found
