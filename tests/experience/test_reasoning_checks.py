"""Whether two pieces of text are the same needs no model: wrong verdicts are put right in mid-thought."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings, corrected
from dreamgym.models import tiny
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import State, Task, WorldSheet

TASK = Task(id="t", instruction="open the safe", environment="house")
NAMES = st.text("abc xy", min_size=1).filter(str.strip)


def model(*replies: str) -> tuple[ReasoningExperienceModel, ScriptedLanguageModel]:
    answers = iter(replies)
    spoken = ScriptedLanguageModel(lambda request: next(answers))
    return ReasoningExperienceModel(spoken, name="x", settings=PromptSettings()), spoken


async def test_the_model_continues_from_the_right_verdict() -> None:
    hasty = "think: safe in hall, hall = attic: yes.\nchange: + open safe;\nnext: It opens.\nend: no"
    asked, spoken = model(hasty, ". not possible.\nchange:\nnext: Nothing happens.\nend: no")
    found = await asked.predict(TASK, WorldSheet(facts=()), (), State(text="The attic."), "open safe")
    assert found.outcome.next_state.text == "Nothing happens."
    assert found.outcome.reasoning == "safe in hall, hall = attic: no. not possible."
    assert found.sheet == WorldSheet(facts=())
    assert asked.corrections == 1
    first, second = spoken.requests
    assert second.prompt == first.prompt + "think: safe in hall, hall = attic: no"


async def test_the_model_continues_from_the_fact_in_the_prompt_where_it_quotes_something_else() -> None:
    wishful = "think: safe 1: open; safe is, open = open: yes.\nchange:\nnext: You see gold.\nend: yes"
    asked, spoken = model(wishful, "; safe is, closed = open: no. not possible.\nchange:\nnext: No.\nend: no")
    sheet = WorldSheet(facts=(("closed", "safe 1"),))
    found = await asked.predict(TASK, sheet, (), State(text="The hall."), "look into safe 1")
    assert "fact: safe 1: closed" in spoken.requests[0].prompt.splitlines()
    assert found.outcome.next_state.text == "No."
    assert found.outcome.reasoning == "safe 1: closed; safe is, closed = open: no. not possible."
    assert asked.corrections == 1


def test_a_quote_stands_at_the_beginning_of_a_clause_and_ends_with_it() -> None:
    facts = ["knife: on table, sharp", "key: in 3. box"]
    for right in ("knife: on table, sharp; so", "knife is on counter: no", "the knife: yes", "key: in hand"):
        assert corrected(f"think: {right}.", facts) is None
    wrong = "think: it is late. knife: carried, sharp"
    assert corrected(f"{wrong}; go on.", facts) == corrected(wrong, facts)
    assert corrected(wrong, facts) == "think: it is late. knife: on table, sharp"
    assert corrected("think: a = b: yes. knife: no", facts) == "think: a = b: no", "what comes first"


async def test_a_right_verdict_and_other_reasoning_are_left_alone() -> None:
    right = "think: safe in hall, hall = hall: yes. it is late: yes.\nchange:\nnext: a = b: yes.\nend: no"
    asked, spoken = model(right)
    found = await asked.predict(TASK, WorldSheet(facts=()), (), State(text="The hall."), "open safe")
    assert found.outcome.next_state.text == "a = b: yes."
    assert (asked.corrections, len(spoken.requests)) == (0, 1)


async def test_a_model_that_never_learns_is_asked_a_bounded_number_of_times() -> None:
    spoken = ScriptedLanguageModel(lambda request: ". so, a = b: yes")
    asked = ReasoningExperienceModel(spoken, name="x", settings=PromptSettings(attempts=1))
    with pytest.raises(EpisodeFailedError, match="1 attempts"):
        await asked.predict(TASK, WorldSheet(facts=()), (), State(text="The hall."), "open safe")
    assert len(spoken.requests) == 8


@given(NAMES, NAMES, st.booleans())
def test_a_verdict_is_corrected_exactly_when_it_is_wrong(left: str, right: str, said: bool) -> None:
    reply = f"think: first, {left} = {right}: {'yes' if said else 'no'}. and so on."
    same = left.strip() == right.strip()
    found = corrected(reply)
    assert (found is None) == (said == same)
    if found is not None:
        assert reply.startswith(found.rpartition(":")[0])
        assert corrected(found) is None


def test_going_on_reads_as_if_it_had_been_said_at_once() -> None:
    """Otherwise the model would continue from tokens that it was not fine-tuned on."""
    question, begun = "state: The hall.\naction: open safe 1\n", "think: safe 1 in hall, hall = attic: no"
    tokenizer = tiny.make_tokenizer([question + begun] * 3)
    together = tokenizer.encode(question + begun, add_special_tokens=False)
    apart = [tokenizer.encode(part, add_special_tokens=False) for part in (question, begun)]
    assert together == [*apart[0], *apart[1]]
