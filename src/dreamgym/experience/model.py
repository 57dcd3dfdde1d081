"""The fine-tuned experience model (the paper's Eq. 4). Comparisons and quotes in its reasoning are checked,
and it continues from the corrected text. The same prompt always gets the same reply."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

from dreamgym.experience.recorded_rules import RecordedRules
from dreamgym.experience.reply_format import (
    ParsedReply,
    PromptSettings,
    corrected,
    parse_reply,
    parse_start,
    prompt,
    prompt_facts,
    resolve_state,
    start_prompt,
)
from dreamgym.experience.world_sheet import environment_texts, violation
from dreamgym.protocols import Grader, LanguageModel, Retriever
from dreamgym.single_flight import SingleFlight
from dreamgym.structured import ask_structured
from dreamgym.types import (
    Change,
    Completion,
    CompletionRequest,
    Demonstration,
    Outcome,
    Prediction,
    RetrievalFilter,
    State,
    Task,
    Transition,
    Verdict,
    WorldSheet,
)

_MAX_CORRECTIONS = 8
"""Of one reply; each is another request to the model."""
REFUSAL = "Nothing happens."
"""Where the environment has no text of its own for a refusal."""
VIOLATION = "violation"
"""In `Outcome.info`: the check that a reply failed."""
_NO_REASONING = "think: \nchange:"
"""The start of a reply without reasoning, however the model was fine-tuned."""


class ModelVerdict:
    """The experience model's own verdict, as in the paper."""

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        return Verdict(reward=float(claimed), success=claimed, source="model")


class ReasoningExperienceModel:
    """Implements `ExperienceModel` over a language model that was fine-tuned on the format of
    `reply_format`."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        settings: PromptSettings,
        grader: Grader | None = None,
        retriever: Retriever | None = None,
        refusals: Sequence[str] = (),
        rules: RecordedRules | None = None,
        cached_replies: int = 0,
    ) -> None:
        """`cached_replies` are kept for equal prompts, which rollouts of one task often have; call
        `weights_changed` after an update. Changes that contradict the `rules` are refused."""
        self.name = name
        self.language_model = model
        """The weights; the task generator shares them."""
        self._model = CachedModel(model, cached_replies) if cached_replies else model
        self._checked = _CheckedReasoning(self._model, "" if settings.reasoning else _NO_REASONING)
        self._settings = settings
        self._grader = grader or ModelVerdict()
        self._retriever = retriever
        self._refusals = tuple(refusals)
        self._rules = rules

    @property
    def corrections(self) -> int:
        """Comparisons and quotes that were corrected so far."""
        return self._checked.corrections

    def weights_changed(self) -> None:
        """Forget the cached replies, which other weights gave."""
        if isinstance(self._model, CachedModel):
            self._model.clear()

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        text = start_prompt(task, sheet, self._settings)
        return await ask_structured(
            self._model,
            CompletionRequest(prompt=text, max_tokens=self._settings.max_tokens),
            lambda completion: State(
                text=resolve_state(parse_start(completion.text), task, sheet, self._settings)
            ),
            name=self.name,
            attempts=self._settings.attempts,
        )

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        demonstrations = await retrieve(self._retriever, task, state, action, k=self._settings.demonstrations)
        text = prompt(task, sheet, history, state.text, action, demonstrations, settings=self._settings)
        reply = await ask_structured(
            self._checked,
            CompletionRequest(prompt=text, max_tokens=self._settings.max_tokens),
            lambda completion: self._parse(completion, task, sheet),
            name=self.name,
            attempts=self._settings.attempts,
        )
        return await make_prediction(
            *(reply, task, sheet, state, action),
            grader=self._grader,
            refusals=self._refusals,
            demonstrations=demonstrations,
            history=history,
            rules=self._rules,
        )

    def _parse(self, completion: Completion, task: Task, sheet: WorldSheet) -> ParsedReply:
        reply = parse_reply(completion.text)
        after = sheet.after(reply.change)
        text = resolve_state(reply.next_state, task, after, self._settings)
        return replace(reply, next_state=text, confidence=confidence(completion))


async def make_prediction(
    reply: ParsedReply,
    task: Task,
    sheet: WorldSheet,
    state: State,
    action: str,
    *,
    grader: Grader,
    refusals: Sequence[str] = (),
    demonstrations: Sequence[Demonstration] = (),
    history: Sequence[Transition] = (),
    rules: RecordedRules | None = None,
    supported: bool = True,
) -> Prediction:
    """Check a reply, apply its changes and grade it. A refusal changes nothing and earns nothing, whatever
    the grader says; a reply that fails a check is one (`world_sheet.violation`).

    Args:
        supported: whether recordings resemble the action; without it no success is granted.
    """
    problem: str | None = None
    refused = reply.next_state in refusals
    if refused:
        reply = replace(reply, change=Change(), terminated=False, success=False)
    else:
        texts = environment_texts(task, history, state.text)
        claims = reply.success is True
        problem = violation(reply.change, sheet, action, texts=texts, rules=rules, success=claims)
    if problem is not None:
        # An end without success stays an end: a check must not save an episode that the model calls lost.
        lost, text = reply.terminated and not reply.success, next(iter(refusals), REFUSAL)
        reply = replace(reply, next_state=text, change=Change(), terminated=lost, success=False)
        refused = True
    after = sheet.after(reply.change)
    outcome = Outcome(
        next_state=State(text=reply.next_state),
        reward=0.0,
        terminated=reply.terminated,
        reasoning=reply.reasoning,
        confidence=reply.confidence,
        info={VIOLATION: problem} if problem is not None else {},
    )
    claimed = reply.success is not False and supported
    transition = Transition(state=state, action=action, outcome=outcome)
    verdict = await grader.verdict(task, after, transition, claimed=claimed)
    success = verdict.success and supported and not refused
    return Prediction(
        outcome=replace(
            outcome,
            reward=verdict.reward if supported and not refused else 0.0,
            # The grader decides: its success ends the episode, and it can overrule a success that ended it.
            terminated=success or (reply.terminated and not reply.success),
            success=success,
            reward_source=verdict.source,
        ),
        sheet=after,
        demonstrations=tuple(demonstrations),
        refused=refused,
    )


async def retrieve(
    retriever: Retriever | None, task: Task, state: State, action: str, *, k: int
) -> Sequence[Demonstration]:
    """The k nearest past transitions, never of the same task."""
    if retriever is None or not k:
        return ()
    wanted = RetrievalFilter(environment=task.environment, exclude_task=task.id)
    [found] = await retriever.search([(state.text, action)], k=k, filters=[wanted])
    return found


class CachedModel:
    """A language model with a cache of replies. Equal requests that run at the same time share one
    completion.

    A reply is kept as its text and the log-prob of the whole: tokens and prompts would take twenty times the
    memory, and nothing here reads them."""

    def __init__(self, model: LanguageModel, size: int) -> None:
        self._model = model
        self._size = size
        self._replies: dict[bytes, Completion] = {}
        self._single_flight: SingleFlight[Completion] = SingleFlight()

    def clear(self) -> None:
        self._replies.clear()

    async def complete(self, request: CompletionRequest) -> Completion:
        asked = f"{request.seed}\0{request.prompt}".encode("utf-8", "surrogatepass")
        key = hashlib.blake2b(asked, digest_size=16).digest()
        if (known := self._replies.get(key)) is not None:
            return known
        reply = await self._single_flight.do(key, lambda: self._model.complete(request))
        whole = (sum(reply.logprobs),) if reply.logprobs else ()
        kept = Completion(text=reply.text, logprobs=whole, finish_reason=reply.finish_reason)
        if len(self._replies) >= self._size:
            self._replies.pop(next(iter(self._replies)))
        self._replies[key] = kept
        return kept


class _CheckedReasoning:
    """A language model whose reasoning is checked while it is written, see `reply_format.corrected`."""

    def __init__(self, model: LanguageModel, start: str) -> None:
        self._model = model
        self._start = start
        self.corrections = 0

    async def complete(self, request: CompletionRequest) -> Completion:
        facts, written = prompt_facts(request.prompt), self._start
        for _ in range(_MAX_CORRECTIONS):
            completion = await self._model.complete(replace(request, prompt=request.prompt + written))
            text = written + completion.text
            correction = corrected(text, facts)
            if correction is None:
                break
            self.corrections += 1
            written = correction
        return replace(completion, text=text)


def confidence(completion: Completion) -> float | None:
    """The probability of the sampled reply, where the model reports log-probs."""
    return math.exp(sum(completion.logprobs)) if completion.logprobs else None
