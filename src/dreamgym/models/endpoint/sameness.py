"""Notices a server that says the same to everybody: a dead simulator that still answers.

A stub, a cache gone wrong or a collapsed model gives well-formed replies, so nothing else would speak up: the
policy would practise in a world where nothing ever happens.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger("dreamgym.models")

ALARM = 20
"""Different questions in a row with one and the same answer."""


@dataclass(slots=True)
class Sameness:
    """Follows the replies to one role."""

    role: str
    endpoint: str
    question: str = ""
    reply: str | None = None
    in_a_row: int = 1

    def seen(self, question: str, reply: str) -> bool:
        """Whether another question got the same reply as the last one; an alarm is given once for a row of
        them.

        >>> same = Sameness("experience", "strong")
        >>> [same.seen(question, "Yes.") for question in ("open?", "open?", "shut?")]
        [False, False, True]
        """
        if reply != self.reply:
            self.in_a_row = 0
        again = reply == self.reply and question != self.question
        self.in_a_row += again or not self.in_a_row
        self.question, self.reply = question, reply
        if again and self.in_a_row == ALARM:
            logger.warning(
                "endpoint %r gave %s the same reply to %d different questions in a row: %r; is the model "
                "behind it the one you mean? (dreamgym models check)",
                *(self.endpoint, self.role or "its caller", ALARM, reply[:80]),
            )
        return again
