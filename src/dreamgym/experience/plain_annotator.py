"""The annotator of last resort: explains by what can be seen, for traces of environments that nobody knows.

It claims nothing that the trace does not show: which lines a state has that the one before had not, and those
facts that a reader of the texts finds to have begun or ended. A language model as annotator explains better.
"""

from __future__ import annotations

from dreamgym.experience.world_sheet import StateReader
from dreamgym.types import Annotation, Note, Trajectory, Transition

_LONGEST = 200
"""Characters of a note."""


class PlainAnnotator:
    """Needs neither rules nor a language model."""

    name = "plain"

    def __init__(self, reader: StateReader | None = None) -> None:
        self._reader = reader or StateReader()

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        return Annotation(
            plan=trajectory.task.instruction,
            success_mode="not explained",
            failure_mode="not explained",
            notes=tuple(
                Note(reasoning=_told(step), change=self._reader.change(step.outcome.next_state))
                for step in trajectory.transitions
            ),
        )


def _told(step: Transition) -> str:
    before, after = (
        [line.strip() for line in state.text.splitlines() if line.strip()]
        for state in (step.state, step.outcome.next_state)
    )
    new = [line for line in after if line not in before]
    if not new:
        return "nothing changes." if before == after else "less is to be seen."
    if len(new) == len(after):
        return "all that is to be seen is new."  # naming it would be the next state, twice
    return f"new: {'; '.join(new)}"[:_LONGEST]
