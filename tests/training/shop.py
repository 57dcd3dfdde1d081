"""A language model that knows a shop by rule, for a scripted server: it answers in every role it is asked in.

What it is asked is reported apart by what the question holds, as a real model would have to.
"""

from __future__ import annotations

import json
import re
from typing import Any

from dreamgym.types import CompletionRequest

COLOURS = ("red", "blue", "green")


def shop(request: CompletionRequest) -> str:
    """The same valid reply to every request."""
    return json.dumps(_reply(request))


def _reply(request: CompletionRequest) -> dict[str, Any]:
    if request.system.startswith("You play the environment"):
        return _imagined(request.prompt) if "# Action" in request.prompt else {"first_state": "A shop."}
    if request.system.startswith("You act in the environment"):
        return _acted(request.prompt)
    if "You judge a simulator" in request.prompt:
        return {"consistency": 2, "diversity": 2, "informativeness": 1, "hallucination": 2}
    if "You decide whether an agent" in request.prompt:
        return _decided(request.prompt)
    if "You plan state transitions" in request.prompt:
        return _explained(request.prompt)
    raise AssertionError(f"who asks this? {request.prompt[:200]}")


def _section(prompt: str, title: str) -> str:
    found = re.search(rf"^# {title}\n\n(.*?)(?=\n\n# |\Z)", prompt, re.M | re.S)
    assert found is not None, title
    return found[1]


def _imagined(prompt: str) -> dict[str, Any]:
    task, action = (json.loads(_section(prompt, title)) for title in ("Task", "Action"))
    reported = {"reasoning": f"{action} in a shop.", "ended": [], "begun": [], "confidence": 0.9}
    wanted = re.fullmatch(r"Buy the (\w+) (\w+)\.", task)
    words = action.split()
    if len(words) == 2 and words[0] == "search":
        seen, over, success = f"Found: {words[1]} in {', '.join(COLOURS)}.", False, False
    elif len(words) == 3 and words[0] == "buy" and words[1] in COLOURS:
        seen, over = f"You bought the {words[1]} {words[2]}.", True
        success = wanted is not None and wanted.groups() == (words[1], words[2])
    else:
        seen, over, success = "The shop has no such thing.", False, False
    return {**reported, "next_state": seen, "terminated": over, "success": success}


def _acted(prompt: str) -> dict[str, Any]:
    wanted = re.search(r"Buy the (\w+) (\w+)\.", prompt)
    assert wanted is not None
    searched = "action: search" in prompt
    return {"thought": "", "action": f"buy {wanted[1]} {wanted[2]}" if searched else f"search {wanted[2]}"}


def _decided(prompt: str) -> dict[str, Any]:
    lines = dict(line.split(": ", 1) for line in prompt.splitlines() if ": " in line)
    task, after = json.loads(lines["Task"]), json.loads(lines["State after"])
    done = after == task.replace("Buy", "You bought")
    return {"evidence": after if done else "", "done": done}


def _explained(prompt: str) -> dict[str, Any]:
    steps = [int(number) for number in re.findall(r"^Step (\d+), action:", prompt, re.M)]
    return {
        "tutorial": {
            "plan": "search, then buy.",
            "success_mode": "the right one.",
            "failure_mode": "another.",
        },
        "transitions": [{"step": number, "plan": "the shop sells it."} for number in steps],
    }
