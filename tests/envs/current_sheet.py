"""The world sheet after some annotated transitions."""

from __future__ import annotations

from collections.abc import Iterable

from dreamgym.experience.world_sheet import apply_change
from dreamgym.types import Note, WorldSheet


def current_sheet(sheet: WorldSheet, notes: Iterable[Note]) -> WorldSheet:
    for note in notes:
        sheet = apply_change(sheet, note.change)
    return sheet
