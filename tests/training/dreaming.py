"""Experience models that answer as recorded trajectories did, except where a fault is planted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from dreamgym.evaluation.one_step import step_questions
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings, prompt, reply_text, start_prompt, start_text
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import Completion, CompletionRequest, Note, Trajectory

SETTINGS = PromptSettings(actor=AGENT, history=50)
"""The whole history, so that no two steps of the recorded episodes ask the same question."""

Fault = Callable[[Trajectory, int, str], str]
"""(trajectory, position, true reply) → the reply to give."""

IMPOSSIBLE = "think: not possible.\nchange:\nnext: Nothing happens.\nend: no"
"""What a question that was never recorded is answered with."""


def faithful(trajectory: Trajectory, position: int, reply: str) -> str:
    return reply


async def recited(
    trajectories: Sequence[Trajectory],
    fault: Fault = faithful,
    *,
    unknown: Callable[[CompletionRequest], str] = lambda request: IMPOSSIBLE,
) -> ReasoningExperienceModel:
    """A model that knows the replies of these trajectories by heart."""
    return ReasoningExperienceModel(
        ScriptedLanguageModel(await _script(trajectories, fault, unknown)), name="recited", settings=SETTINGS
    )


async def _script(
    trajectories: Sequence[Trajectory], fault: Fault, unknown: Callable[[CompletionRequest], str]
) -> Callable[[CompletionRequest], str]:
    replies: dict[str, str] = {}
    annotator = HouseholdAnnotator()
    for trajectory in trajectories:
        assert trajectory.sheet is not None
        replies[start_prompt(trajectory.task, trajectory.sheet, SETTINGS)] = start_text(trajectory.start.text)
        notes: tuple[Note, ...] = (await annotator.annotate(trajectory)).notes
        for question, note in zip(await step_questions(annotator, [trajectory]), notes, strict=True):
            step = question.transition
            asked = prompt(
                question.task,
                question.sheet,
                question.history,
                step.state.text,
                step.action,
                settings=SETTINGS,
            )
            replies[asked] = fault(trajectory, len(question.history), reply_text(note, step.outcome))
    return lambda request: replies.get(request.prompt) or unknown(request)


class ConfidentLanguageModel:
    """Answers like another model, and states how likely it found its words."""

    def __init__(self, script: Callable[[CompletionRequest], str], logprob: Callable[[str], float]) -> None:
        self._inner = ScriptedLanguageModel(script)
        self._logprob = logprob

    async def complete(self, request: CompletionRequest) -> Completion:
        completion = await self._inner.complete(request)
        return replace(completion, logprobs=(self._logprob(completion.text),))


async def confident(
    trajectories: Sequence[Trajectory], fault: Fault, logprob: Callable[[str], float]
) -> ReasoningExperienceModel:
    model = ConfidentLanguageModel(await _script(trajectories, fault, lambda request: IMPOSSIBLE), logprob)
    return ReasoningExperienceModel(model, name="confident", settings=SETTINGS)
