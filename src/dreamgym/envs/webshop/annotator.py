"""Annotates visits by rules from the hidden facts, without a language model."""

from __future__ import annotations

from dreamgym.envs.webshop.facts import VisitFacts
from dreamgym.envs.webshop.pages import REFUSALS, parse_action
from dreamgym.types import Annotation, Note, Trajectory, Transition


class WebShopAnnotator:
    """States where the agent is, whether the action is possible there, and which page it leads to."""

    name = "webshop-rules"

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        if trajectory.sheet is None:
            raise ValueError(f"trajectory {trajectory.id!r} has no world sheet to explain it from")
        facts = dict.fromkeys(trajectory.sheet.facts)
        notes = []
        for transition in trajectory.transitions:
            note = explain(VisitFacts(facts), transition)
            for fact in note.change.ended:
                facts.pop(fact, None)
            facts.update(dict.fromkeys(note.change.begun))
            notes.append(note)
        return Annotation(
            plan="search for the product, open a hit that fits, choose the options asked for, buy it",
            success_mode="a product with all attributes and options below the price limit is bought",
            failure_mode="another product is bought, or an option is missing",
            notes=tuple(notes),
        )


def explain(known: VisitFacts, transition: Transition) -> Note:
    step, action = known.step(transition.action), parse_action(transition.action)
    refused = transition.outcome.next_state.text in REFUSALS
    unlisted = action is not None and action.verb == "search" and action.words not in known.searches.values()
    if refused:
        return Note(reasoning=f"{step.reason if step.refusal else 'the page is not known'}. not possible.")
    if step.refusal or unlisted:
        return Note(reasoning="the facts do not have this page.")
    end = " the task is done." if transition.outcome.success else ""
    return Note(reasoning=f"{step.reason}.{end}", change=step.change)
