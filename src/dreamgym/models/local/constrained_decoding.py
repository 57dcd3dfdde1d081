"""Constrained choice: the tokens that may come next so that the completion is one of the given strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Branch:
    """A node of the trie of tokenised choices: the tokens so far, and what may follow them."""

    children: dict[int, Branch] = field(default_factory=dict)
    choice: str | None = None
    """The choice that is complete here."""

    def allowed(self, terminator: int) -> list[int]:
        """Tokens that may come next; the terminator only where a choice is also the beginning of another."""
        return [*self.children, terminator] if self.choice is not None else list(self.children)

    def after(self, token: int) -> Branch:
        """The node below; the terminator leads to the choice that is complete here, and no further."""
        return self.children.get(token) or Branch(choice=self.choice)

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def needs_terminator(self) -> bool:
        """Whether a choice is also the beginning of another (or empty), here or below."""
        below = self.children.values()
        return (self.choice is not None and bool(below)) or any(child.needs_terminator for child in below)


def plant(choices: Sequence[tuple[str, Sequence[int]]]) -> Branch:
    """The trie of choices, each with its tokens.

    >>> root = plant([("go", [5]), ("go on", [5, 6]), ("stop", [7])])
    >>> root.allowed(0), root.after(5).allowed(0), root.after(5).after(0).choice, root.after(7).is_leaf
    ([5, 7], [6, 0], 'go', True)
    """
    root = Branch()
    for choice, tokens in choices:
        node = root
        for token in tokens:
            node = node.children.setdefault(token, Branch())
        node.choice = choice
    return root
