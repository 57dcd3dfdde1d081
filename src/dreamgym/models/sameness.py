"""Notices a server that says the same to everybody: a dead simulator that still answers.

A stub, a cache gone wrong or a collapsed model gives well-formed replies, so nothing else would speak up: the
policy would practise in a world where nothing ever happens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

logger = logging.getLogger("dreamgym.models")

ALARM = 20
"""Different questions in a row with one and the same answer."""


@dataclass(slots=True)
class Sameness:
    """Follows the replies to one role; every request is another one, since equal ones are asked once."""

    role: str
    endpoint: str
    last: str | None = None
    in_a_row: int = field(default=1)

    def seen(self, text: str) -> bool:
        """Whether it is the same reply as the last one; an alarm is given once for a row of them.

        >>> same = Sameness("experience", "strong")
        >>> [same.seen(text) for text in ("It opens.", "It opens.", "It closes.")]
        [False, True, False]
        """
        again = text == self.last
        self.in_a_row = self.in_a_row + 1 if again else 1
        self.last = text
        if self.in_a_row == ALARM:
            logger.warning(
                "endpoint %r gave %s the same reply to %d different questions in a row: %r; is the model "
                "behind it the one you mean? (dreamgym models check)",
                *(self.endpoint, self.role or "its caller", ALARM, text[:80]),
            )
        return again
