"""A server that says the same to everybody is noticed, though each of its replies is in good form."""

from __future__ import annotations

import logging

import pytest

from dreamgym.config import EndpointConfig
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.models.endpoint.sameness import ALARM
from dreamgym.testing.scripted_server import ScriptedServer
from dreamgym.types import CompletionRequest


async def asked(server: ScriptedServer, *roles: str) -> Endpoint:
    endpoint = Endpoint("near", EndpointConfig(url=server.url, model="scripted"))
    for number in range(ALARM + 5):
        for role in roles:
            await endpoint.ask(CompletionRequest(prompt=f"What of {number}?", max_tokens=8), role=role)
    await endpoint.aclose()
    return endpoint


async def test_the_same_reply_to_many_questions_gives_one_alarm_and_is_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ScriptedServer(lambda request: "Nothing happens.") as server, caplog.at_level(logging.WARNING):
        endpoint = await asked(server, "experience")
    (alarm,) = caplog.messages
    assert "endpoint 'near' gave experience the same reply to 20 different questions" in alarm
    assert "Nothing happens." in alarm
    assert endpoint.spending.total.repeated == ALARM + 4


async def test_replies_that_differ_give_none_and_roles_are_told_apart(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def script(request: CompletionRequest) -> str:
        return f"You see {len(request.prompt)} and {request.prompt[-2]}."

    with ScriptedServer(script) as server, caplog.at_level(logging.WARNING):
        endpoint = await asked(server, "experience", "judge")
    assert caplog.messages == []
    assert endpoint.spending.total.repeated == 0
