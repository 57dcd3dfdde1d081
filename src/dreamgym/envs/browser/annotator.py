"""Annotates visits by rules from the facts of a site, without a language model."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from dreamgym.envs.browser.facts import SiteFacts, Step, state_texts
from dreamgym.envs.browser.perform import REFUSALS
from dreamgym.types import Annotation, Note, Task, Trajectory, Transition, WorldSheet


def site_step(task: Task, sheet: WorldSheet, action: str) -> Step:
    return SiteFacts(sheet.facts).step(action)


class SiteAnnotator:
    """States on which page the agent is, what the action does there, and whether the form is right."""

    name = "site-rules"
    step: Callable[[Task, WorldSheet, str], Step] = staticmethod(site_step)
    texts: Callable[[Task, WorldSheet], Mapping[str, str]] = staticmethod(state_texts)

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        if trajectory.sheet is None:
            raise ValueError(f"trajectory {trajectory.id!r} has no world sheet to explain it from")
        sheet, notes = trajectory.sheet, []
        for transition in trajectory.transitions:
            note = self.explain(trajectory.task, sheet, transition)
            sheet = sheet.after(note.change)
            notes.append(note)
        return Annotation(
            plan=trajectory.task.instruction,
            success_mode="everything is chosen as the task asks, and the right element ends the visit",
            failure_mode="another element ends the visit, or something else was chosen",
            notes=tuple(notes),
        )

    def explain(self, task: Task, sheet: WorldSheet, transition: Transition) -> Note:
        step, text = self.step(task, sheet, transition.action), transition.outcome.next_state.text
        if text in REFUSALS:
            return Note(reasoning=f"{step.reason if step.refusal else 'not known'}. not possible.")
        if step.refusal or text not in self.texts(task, sheet.after(step.change)).values():
            return Note(reasoning="the facts do not have this page.")
        end = " the task is done." if transition.outcome.success else ""
        return Note(reasoning=f"{step.reason}.{end}", change=step.change)
