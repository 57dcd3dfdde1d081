"""The world sheet after some annotated transitions."""

from __future__ import annotations

from collections.abc import Iterable

from dreamgym.types import Note, WorldSheet


def current_sheet(sheet: WorldSheet, notes: Iterable[Note]) -> WorldSheet:
    for note in notes:
        sheet = sheet.after(note.change)
    return sheet
