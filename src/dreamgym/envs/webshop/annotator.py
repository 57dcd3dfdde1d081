"""Annotates visits by rules from the hidden facts, without a language model."""

from __future__ import annotations

from dreamgym.envs.webshop.facts import VisitFacts, state_texts
from dreamgym.envs.webshop.pages import REFUSALS
from dreamgym.types import Annotation, Note, Task, Trajectory, Transition, WorldSheet


class WebShopAnnotator:
    """States where the agent is, whether the action is possible there, and which page it leads to."""

    name = "webshop-rules"

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        if trajectory.sheet is None:
            raise ValueError(f"trajectory {trajectory.id!r} has no world sheet to explain it from")
        sheet, notes = trajectory.sheet, []
        for transition in trajectory.transitions:
            note = explain(trajectory.task, sheet, transition)
            sheet = sheet.after(note.change)
            notes.append(note)
        return Annotation(
            plan="search for the product, open a hit that fits, choose the options asked for, buy it",
            success_mode="a product with all attributes and options below the price limit is bought",
            failure_mode="another product is bought, or an option is missing",
            notes=tuple(notes),
        )


def explain(task: Task, sheet: WorldSheet, transition: Transition) -> Note:
    step, text = VisitFacts(sheet.facts).step(transition.action), transition.outcome.next_state.text
    if text in REFUSALS:
        return Note(reasoning=f"{step.reason if step.refusal else 'the page is not known'}. not possible.")
    if step.refusal or text not in state_texts(task, sheet.after(step.change)).values():
        return Note(reasoning="the facts do not have this page.")
    end = " the task is done." if transition.outcome.success else ""
    return Note(reasoning=f"{step.reason}.{end}", change=step.change)
