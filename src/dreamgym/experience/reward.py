"""Three ways to say what an action earned; the choice is recorded with every outcome.

Left to itself, a loop that trains both player and grader learns to please the grader. So the reward is a role
of its own: the experience model's word (as in the paper), another language model as judge, or a check of the
task on the world sheet, where the environment has one.
"""

from __future__ import annotations

from collections.abc import Callable

from dreamgym.errors import EpisodeFailedError
from dreamgym.protocols import LanguageModel
from dreamgym.types import CompletionRequest, FailureKind, Task, Transition, Verdict, WorldSheet

TaskCheck = Callable[[Task, WorldSheet], bool]
"""Whether a task is done on these facts."""


class OwnWord:
    """The experience model's own verdict, as in the paper."""

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        return Verdict(reward=float(claimed), success=claimed, source="model")


class SheetCheck:
    """A programmatic check of the task on the world sheet: no opinion, but only as good as the sheet."""

    def __init__(self, check: TaskCheck) -> None:
        self._check = check

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        try:
            success = self._check(task, sheet)
        except (KeyError, ValueError) as error:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK, f"task {task.id!r} cannot be checked on a sheet: {error}"
            ) from None
        return Verdict(reward=float(success), success=success, source="sheet")


class Judge:
    """Another language model decides, with one word. Asked only where the experience model claims success.

    A judge that was asked at every step would mostly be asked about steps that cannot succeed, and each of
    its errors there would be a reward for nothing.
    """

    QUESTION = (
        "task: {task}\naction: {action}\nresult: {result}\nIs the task done now? Answer yes or no.\nanswer:"
    )

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        success = False
        if claimed:
            question = self.QUESTION.format(
                task=task.instruction,
                action=transition.action,
                result=transition.outcome.next_state.text,
            )
            request = CompletionRequest(prompt=question, choices=(" yes", " no"), max_tokens=8)
            success = (await self._model.complete(request)).text.strip() == "yes"
        return Verdict(reward=float(success), success=success, source="judge")
