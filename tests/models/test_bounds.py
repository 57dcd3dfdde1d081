"""Replies that are held to a schema end in time where servers take lengths; others are asked plainly."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.config import EndpointConfig
from dreamgym.experience.annotate import LanguageModelAnnotator
from dreamgym.models.endpoint import bounds
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.models.endpoint.language_model import EndpointLanguageModel
from dreamgym.models.http_server import Answer, Asked, HttpServer
from dreamgym.types import CompletionRequest, Outcome, Provenance, State, Task, Trajectory, Transition

TEXT = {"type": "string"}
FACTS = {"type": "array", "items": {"type": "array", "items": TEXT, "minItems": 1, "maxItems": 8}}
STORY: dict[str, Any] = {
    "$defs": {"Change": {"type": "object", "properties": {"ended": FACTS, "begun": FACTS}}},
    "type": "object",
    "properties": {
        "reasoning": TEXT,
        "change": {"$ref": "#/$defs/Change"},
        "next_state": {"type": "string", "minLength": 1},
        "success": {"type": "boolean"},
        "confidence": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    },
}
Handle = Callable[[dict[str, Any]], tuple[int, str, str]]
"""From a request's body to a status, a text and why it ended."""


@asynccontextmanager
async def asking(handle: Handle) -> AsyncIterator[tuple[Endpoint, list[dict[str, Any]]]]:
    """An endpoint, and the bodies that its server was sent."""
    bodies: list[dict[str, Any]] = []

    async def answer(asked: Asked) -> Answer:
        bodies.append(json.loads(asked.body))
        status, text, ended = handle(bodies[-1])
        if status != 200:
            return Answer.json({"error": {"message": text}}, status)
        return Answer.json({"choices": [{"message": {"content": text}, "finish_reason": ended}]})

    server = HttpServer(answer)
    await server.start()
    endpoint = Endpoint("x", EndpointConfig(url=server.url, model="m", pause_seconds=0.01))
    try:
        yield endpoint, bodies
    finally:
        await endpoint.aclose()
        await server.aclose()


def longest(schema: dict[str, Any]) -> Any:
    """The longest value that a schema without references allows, as a model that never stops writes it."""
    for each in schema.get("anyOf", ())[:1]:
        return longest(each)
    if schema["type"] == "string":
        return "x" * schema["maxLength"]
    if schema["type"] == "array":
        return [longest(schema["items"])] * schema["maxItems"]
    if schema["type"] == "object":
        return {name: longest(each) for name, each in schema["properties"].items()}
    return {"boolean": False, "number": 0.123}[schema["type"]]


@given(st.integers(min_value=500, max_value=20_000))
def test_the_longest_reply_that_is_allowed_fits_the_room(room: int) -> None:
    told = bounds.bounded(STORY, room)
    assert told is not None
    written = json.dumps(longest(told))
    assert len(written) <= room
    assert len(json.loads(written)["next_state"]) >= room // 10


def test_what_has_no_end_is_left_as_it_is_and_what_is_named_is_counted() -> None:
    endless = {"$defs": {"Box": {"properties": {"box": {"$ref": "#/$defs/Box"}}}}, "$ref": "#/$defs/Box"}
    assert bounds.bounded(endless, 1000) is None
    listed = {"type": "array", "items": TEXT, "prefixItems": [{"enum": [1]}, FACTS], "minItems": 2}
    wrapped = {"properties": {"items": listed, "maxLength": TEXT}}
    exact = bounds.exact(wrapped)["properties"]
    assert "items" not in exact["items"]
    assert exact["items"]["prefixItems"][1] == FACTS
    plain = bounds.plain(wrapped)["properties"]
    assert plain == {"items": {"type": "array", "items": TEXT}, "maxLength": TEXT}


async def test_a_reply_that_was_cut_off_is_asked_for_once_more_with_lengths_that_fit() -> None:
    def runaway(body: dict[str, Any]) -> tuple[int, str, str]:
        schema = body["response_format"]["json_schema"]["schema"]
        if "maxLength" not in schema["properties"]["reasoning"]:
            return 200, '{"reasoning": "' + "on and " * 200, "length"
        return 200, json.dumps(longest(schema)), "stop"

    request = CompletionRequest(prompt="What now?", schema=STORY, max_tokens=400)
    async with asking(runaway) as (endpoint, bodies):
        reply = await endpoint.ask(request, role="experience")
        total = endpoint.spending.total
    assert json.loads(reply.text)["next_state"]
    assert len(reply.text) <= 800  # two characters a token
    assert len(bodies) == total.requests == 2  # and both are on the bill


async def test_a_reply_that_ends_by_itself_is_never_cut_shorter() -> None:
    text = json.dumps({"reasoning": "r" * 5000})
    async with asking(lambda body: (200, text, "stop")) as (endpoint, bodies):
        request = CompletionRequest(prompt="What now?", schema=STORY, max_tokens=400)
        assert (await endpoint.ask(request, role="experience")).text == text
        reply = await endpoint.ask(CompletionRequest(prompt="Talk.", max_tokens=4), role="agent")
    assert reply.text == text
    assert len(bodies) == 2


@pytest.mark.parametrize(
    "complaint",
    [
        "Invalid schema for response_format 'reply': 'maxLength' is not permitted.",  # as OpenAI's
        'Grammar error: Unimplemented keys: ["prefixItems"]',  # as vLLM's
    ],
)
async def test_a_server_that_refuses_lengths_is_sent_the_schema_without(complaint: str) -> None:
    def strict(body: dict[str, Any]) -> tuple[int, str, str]:
        told = json.dumps(body["response_format"])
        if any(f'"{word}"' in told for word in bounds.WORDS):
            return 400, complaint, ""
        step = {"step": 1, "plan": "Buy it.", "changes": {"ended": [], "begun": []}}
        modes = {"plan": "Buy.", "success_mode": "Bought.", "failure_mode": "Not."}
        return 200, json.dumps({"tutorial": modes, "transitions": [step]}), "stop"

    seen = Outcome(next_state=State(text="Sold."), reward=1.0, terminated=True, success=True)
    episode = Trajectory(
        id="e",
        task=Task(id="t", instruction="Buy it.", environment="shop"),
        start=State(text="A shop."),
        transitions=(Transition(state=State(text="A shop."), action="buy", outcome=seen),),
        provenance=Provenance(source="real", policy="human"),
    )
    async with asking(strict) as (endpoint, bodies):
        annotator = LanguageModelAnnotator(EndpointLanguageModel(endpoint, role="annotator"), name="m")
        for _ in range(2):
            assert (await annotator.annotate(episode)).notes[0].reasoning == "Buy it."
        assert endpoint.dialect.json_schema
    assert len(bodies) == 3  # refused once
    steps = bodies[0]["response_format"]["json_schema"]["schema"]["properties"]["transitions"]
    assert [each["properties"]["step"]["enum"] for each in steps["prefixItems"]] == [[1]]
    assert "items" not in steps
