"""The experience model of an environment without world sheet, rules or goal check: it predicts from known
replies, history and demonstrations alone.

What no recording of the task knows is imagined once: the reply to the bare action is sampled with the
episode's seed, without history, and becomes a known reply of the episode. The result depends on nothing but
task, seed, state and action, so every member of a rollout group gets the same one, in any order. Where
nothing of a task is recorded, it also depends on what the episode has disclosed. Every prediction carries a
support score (`support`), and a bound decides what counts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dreamgym.experience.action_forms import ActionForms
from dreamgym.experience.known_replies import (
    IMAGINED,
    Selected,
    is_unrecorded,
    known_replies,
    mentions,
    newest_counts,
    recorded_replies,
    references,
    seed_of,
    select,
    shared_words,
)
from dreamgym.experience.model import CachedModel, ModelVerdict, confidence, make_prediction, retrieve
from dreamgym.experience.recorded_outcomes import Determined
from dreamgym.experience.recorded_patterns import (
    NUMBER,
    NoEffect,
    action_kind,
    first_sentence,
    success_form,
)
from dreamgym.experience.reply_format import (
    ParsedReply,
    PromptSettings,
    escape,
    parse_reply,
    parse_start,
    resolve,
    start_prompt,
)
from dreamgym.experience.shared_outcomes import SharedOutcomes
from dreamgym.experience.support import Evidence, Support
from dreamgym.protocols import Grader, LanguageModel, Retriever
from dreamgym.seeding import derive_seed
from dreamgym.structured import ask_structured, quote_action
from dreamgym.types import (
    Change,
    Completion,
    CompletionRequest,
    Demonstration,
    Fact,
    Outcome,
    Prediction,
    State,
    Task,
    Transition,
    WorldSheet,
)

_REPLIES = 3
"""The newest transitions of a prompt that are shown with their replies."""
_NO_REASONING = "think: \nchange:\n"
UNSUPPORTED = "unsupported"
"""`reward_source` of a prediction below the bound."""
UNKNOWN_ACTION = "unknown action"
"""`reward_source` of a refusal of an action that the environment does not know (`action_forms`)."""


def black_box_prompt(
    task: Task,
    selected: Selected,
    history: Sequence[Transition],
    state: str,
    action: str,
    demonstrations: Sequence[Demonstration] = (),
    *,
    settings: PromptSettings,
    start: str = "",
) -> str:
    """The prompt for one action; what the reply most often copies from comes last. `start` is the text of the
    first state where that says what the task is."""

    def cut(text: str) -> str:
        return escape(text)[: settings.text_limit]

    def pair(action: str, reply: str) -> str:
        return f"{quote_action(action)} => {cut(reply)}"

    lines = [
        f"like: {pair(found.transition.action, found.transition.outcome.next_state.text)}"
        for found in reversed(demonstrations[: settings.demonstrations])
    ]
    recent = history[-settings.history :] if settings.history else ()
    older, newer = recent[:-_REPLIES], recent[-_REPLIES:]
    if older:  # what their replies revealed is among the known replies
        lines.append(f"then: {'; '.join(quote_action(past.action) for past in older)}")
    for past in newer:
        reply = past.outcome.next_state.text
        lines.append(f"then: {quote_action(past.action) if reply == state else pair(past.action, reply)}")
    lines.append(f"task: {escape(task.instruction)}")
    if start and start != state:
        lines.append(f"start: {cut(start)}")
    lines.append(f"state: {cut(state)}")
    if settings.sheet and selected.counts:
        lines.append(f"count: {cut(' '.join(selected.counts))}")
    if settings.sheet:
        lines += [f"known: {pair(fact[2], fact[3])}" for fact in selected.related]
        lines += [f"else: {pair(fact[2], fact[3])}" for fact in selected.elsewhere]
        if selected.here is not None:
            lines.append(f"here: {pair(selected.here[2], selected.here[3])}")
    named = mentions(history, action) if settings.history else ()
    lines += [f"past: {pair(past.action, past.outcome.next_state.text)}" for past in named] or ["past: -"]
    lines.append(f"same: {shared_words(action, f'{task.instruction} {start}', state)}")
    lines.append(f"action: {quote_action(action)}")
    return "\n".join(lines) + "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlackBoxKnowledge:
    """What was mined from the recordings beside the weights."""

    persistent: frozenset[str] = frozenset()
    """Kinds of action whose reply does not depend on the state."""
    counters: frozenset[str] = frozenset()
    """Forms of sentences whose numbers change within episodes."""
    names: frozenset[str] = frozenset()
    """Exchangeable words."""
    start_tells: bool = False
    """Whether tasks differ in the words of their first states, so that prompts have to show these."""
    places: frozenset[str] = frozenset()
    """Forms of first sentences that say which state of a task it is."""
    forms: ActionForms = field(default_factory=ActionForms)
    inert: NoEffect = field(default_factory=NoEffect)
    certain: Determined = field(default_factory=Determined)
    shared: SharedOutcomes = field(default_factory=SharedOutcomes)
    successes: frozenset[str] = frozenset()
    """How recorded successes ended: kinds of action with forms of replies; no other success is granted."""
    support: Support = field(default_factory=Support)
    reasoning: bool = True
    """Whether predictions with reasoning were right more often on held-out recordings."""
    refusal: str = "Nothing happens."
    """The most frequent reply of the recordings that changes nothing."""

    def start(self, text: str) -> str:
        """What a prompt shows of the first state."""
        return text if self.start_tells else ""

    def seen_place(self, text: str, sheet: WorldSheet, history: Sequence[Transition]) -> str:
        """The text as the recordings of the task or this episode know it, where its first sentence names a
        place; else the text itself."""
        first = first_sentence(text)
        if NUMBER.sub("#", first) not in self.places:
            return text
        known = {
            each
            for fact in known_replies(sheet, history)
            if fact[0] != IMAGINED
            for each in (fact[1], fact[3])
            if first_sentence(each) == first
        }
        return known.pop() if len(known) == 1 else text

    def context(
        self, history: Sequence[Transition], state: str
    ) -> tuple[list[Transition], list[Transition], str]:
        """The history with the states that last, what of it a prompt shows, and the state now."""
        turns = self.inert.states(history)
        shown = [each for each in turns if each.outcome.next_state.text not in self.inert.replies]
        return turns, shown, self.inert.state_after(turns, state)


class BlackBoxExperienceModel:
    """Implements `ExperienceModel` over a language model that was fine-tuned on `black_box_prompt`."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        settings: PromptSettings,
        knowledge: BlackBoxKnowledge,
        grader: Grader | None = None,
        retriever: Retriever | None = None,
        refusals: Collection[str] = (),
        cached_replies: int = 0,
    ) -> None:
        self.name = name
        self.language_model = model
        self._model = CachedModel(model, cached_replies) if cached_replies else model
        self._settings = settings
        self._knowledge = knowledge
        self._grader = grader or ModelVerdict()
        self._retriever = retriever
        self._refusals = tuple(refusals)

    def weights_changed(self) -> None:
        """Forget the cached replies, which other weights gave."""
        if isinstance(self._model, CachedModel):
            self._model.clear()

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        text = start_prompt(task, WorldSheet(facts=()), self._settings)
        request = CompletionRequest(prompt=text, max_tokens=self._settings.max_tokens, seed=seed_of(sheet))
        return await ask_structured(
            *(self._model, request, lambda found: State(text=parse_start(found.text))),
            name=self.name,
            attempts=self._settings.attempts,
        )

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        turns, past, now = self._knowledge.context(history, state.text)
        if self._settings.sheet:
            known = self._knowledge.certain.find(sheet, turns, self._knowledge.inert, now, action)
            known = known or self._knowledge.shared.find(task, history, state.text, action)
            if known is not None:
                refused = known.next_state.text in self._refusals
                return Prediction(outcome=known, sheet=sheet, refused=refused)
        if (text := self._knowledge.forms.refusal(action, self._knowledge.names)) is not None:
            return _refused(text, sheet)
        demonstrations = await retrieve(self._retriever, task, state, action, k=self._settings.demonstrations)
        counters = self._knowledge.counters
        selected = recorded = select(known_replies(sheet, turns), now, action, counters)
        if self._settings.imagine and self._settings.sheet and not selected.known:
            unrecorded = is_unrecorded(sheet)
            known_by = known_replies(sheet, turns) if unrecorded else recorded_replies(sheet)
            sheet = await self._imagine(task, sheet, known_by, history, now, action, demonstrations)
            selected = select(known_replies(sheet, turns), now, action, counters)
            if unrecorded:  # what is imagined is all that is true of this task
                recorded = selected
        selected = replace(selected, counts=newest_counts(counters, past, now))
        start = self._knowledge.start(history[0].state.text if history else state.text)
        text = black_box_prompt(
            *(task, selected, past, now, action, demonstrations), settings=self._settings, start=start
        )
        reply = await self._ask(text, references(selected, now, demonstrations))
        if self._settings.sheet and not reply.terminated:
            place = self._knowledge.seen_place(reply.next_state, sheet, turns)
            reply = replace(reply, next_state=place)
        form = success_form(action, reply.next_state, self._knowledge.names, task.instruction)
        if reply.success and form not in self._knowledge.successes:
            reply = replace(reply, success=False, terminated=False)  # no recorded success ended like this
        prediction = await make_prediction(
            *(reply, task, sheet, state, action),
            grader=self._grader,
            refusals=self._refusals,
            demonstrations=demonstrations,
        )
        return self._supported(prediction, reply, recorded, demonstrations, action)

    async def _imagine(
        self,
        task: Task,
        sheet: WorldSheet,
        known: Sequence[Fact],
        history: Sequence[Transition],
        state: str,
        action: str,
        demonstrations: Sequence[Demonstration],
    ) -> WorldSheet:
        """The sheet with an imagined reply to this action. From recorded replies as `known`, it is the same
        for every member of the group: history and earlier imagined replies do not matter."""
        persistent = action_kind(action) in self._knowledge.persistent
        where = history[0].state.text if persistent and history else state
        selected = select(known, where, action, self._knowledge.counters)
        start = self._knowledge.start(history[0].state.text if history else state)
        text = black_box_prompt(
            *(task, selected, (), where, action, demonstrations), settings=self._settings, start=start
        )
        seed = derive_seed(seed_of(sheet), task.id, "" if persistent else where, action)
        named = references(selected, where, demonstrations)
        reply = await self._ask(text, named, temperature=self._settings.imagine_temperature, seed=seed)
        fact = (IMAGINED, "" if persistent else where, action, reply.next_state)
        return WorldSheet(facts=(*sheet.facts, fact))

    async def _ask(
        self, text: str, named: Mapping[str, str], *, temperature: float = 0.0, seed: int = 0
    ) -> ParsedReply:
        reasons = self._settings.reasoning and self._knowledge.reasoning
        start = "" if reasons else _NO_REASONING
        request = CompletionRequest(
            prompt=text + start, max_tokens=self._settings.max_tokens, temperature=temperature, seed=seed
        )

        def parse(found: Completion) -> ParsedReply:
            reply = parse_reply(start + found.text)
            # What recordings replied is no fact that a reply could change.
            reply = replace(reply, change=Change(), confidence=confidence(found))
            return replace(reply, next_state=resolve(reply.next_state, named))

        attempts = self._settings.attempts
        return await ask_structured(self._model, request, parse, name=self.name, attempts=attempts)

    def _supported(
        self,
        prediction: Prediction,
        reply: ParsedReply,
        selected: Selected,
        demonstrations: Sequence[Demonstration],
        action: str,
    ) -> Prediction:
        """The prediction with its support score, and without what too little supports."""
        evidence = Evidence(
            confidence=reply.confidence or 0.0,
            here=selected.here is not None,
            known=selected.known,
            similarity=demonstrations[0].similarity if demonstrations else 0.0,
            seen=self._knowledge.support.times_seen(action),
        )
        score = self._knowledge.support.score(evidence)
        outcome, bound = prediction.outcome, self._settings.min_support
        info = {**outcome.info, "evidence": evidence, "support": score, "supported": score >= bound}
        outcome = replace(outcome, info=info)
        if score >= bound or self._settings.unsupported == "ignore":
            return replace(prediction, outcome=outcome)
        if self._settings.unsupported in ("no_success", "penalize"):
            reward = score - bound if self._settings.unsupported == "penalize" else 0.0
            doubted = replace(outcome, reward=reward, success=False, reward_source=UNSUPPORTED)
            return replace(prediction, outcome=doubted)
        refused = Outcome(
            next_state=State(text=self._knowledge.refusal),
            reward=0.0,
            terminated=self._settings.unsupported == "end",
            reasoning=outcome.reasoning,
            confidence=outcome.confidence,
            reward_source=UNSUPPORTED,
            info={**info, "supported": True},  # what was not supported did not happen
        )
        return replace(prediction, outcome=refused, refused=True)


def _refused(text: str, sheet: WorldSheet) -> Prediction:
    """An action whose form the environment does not know."""
    info = {"support": 1.0, "supported": True}
    outcome = Outcome(
        next_state=State(text=text),
        reward=0.0,
        terminated=False,
        confidence=1.0,
        reward_source=UNKNOWN_ACTION,
        info=info,
    )
    return Prediction(outcome=outcome, sheet=sheet, refused=True)
