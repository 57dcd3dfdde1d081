"""Tasks and check for `warehouse_server.py`. Prints 240 tasks, 40 of them in the split test:

python examples/environments/warehouse_tasks.py > tasks.jsonl
"""

import json
import random
from typing import Any

ITEMS = ("lamp", "rope", "kettle", "ladder", "mirror", "pillow", "radio", "shovel")
SHELVES = range(1, 10)


def task(number: int, split: str) -> dict[str, Any]:
    """Four items on random shelves, which only the setup knows."""
    chance = random.Random(f"{split}-{number}")
    items = chance.sample(ITEMS, 4)
    shelves = chance.sample(SHELVES, 4)
    wanted, shelf = items[0], shelves[0]
    placed = sorted(zip(items, shelves, strict=True))
    return {
        "id": f"{split}-{number}",
        "instruction": f"Ship the {wanted}.",
        "split": split,
        "parameters": {"item": wanted},
        "setup": [f"put {json.dumps({'item': item, 'shelf': at})}" for item, at in placed],
        "solution": [f"find {json.dumps({'item': wanted})}", f"ship {json.dumps({'shelf': shelf})}"],
    }


def shipped(episode: Any) -> bool:
    """The check. `episode` has `task`, `answer`, `folder`, and `calls` (action, tool, arguments, result)."""
    wanted = f"Shipped {episode.task.parameters['item']}."
    return any(call.tool == "ship" and call.result == wanted for call in episode.calls)


if __name__ == "__main__":
    for split, count in (("train", 200), ("test", 40)):
        for number in range(count):
            print(json.dumps(task(number, split)))
