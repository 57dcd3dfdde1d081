"""Errors that cross from a worker to the driver."""

from __future__ import annotations

import pickle
import traceback
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An error that a job raised. Errors with arguments of their own cannot be pickled as they are."""

    kind: type[BaseException]
    message: str
    state: dict[str, Any] = field(default_factory=dict)
    trace: str = ""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        trace = "".join(traceback.format_exception(error))
        made = cls(kind=type(error), message=str(error), state=dict(vars(error)), trace=trace)
        try:
            pickle.loads(pickle.dumps(made))
        except Exception:  # whatever the error holds
            return cls(kind=RuntimeError, message=f"{type(error).__name__}: {error}", trace=trace)
        return made

    def error(self) -> BaseException:
        """The error as it was raised, with the worker's traceback as a note."""
        made = self.kind.__new__(self.kind, self.message)
        made.__dict__.update({name: value for name, value in self.state.items() if name != "__notes__"})
        made.add_note(f"in a worker:\n{self.trace}")
        return made
