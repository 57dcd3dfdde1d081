"""Constrained decoding: the tokens that may come next so that the completion is one of the given strings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class TrieNode:
    """A node of the trie of tokenized choices."""

    children: dict[int, TrieNode] = field(default_factory=dict)
    choice: str | None = None
    """The choice that is complete here."""

    def allowed(self, terminator: int) -> list[int]:
        """Tokens that may come next; the terminator only where a choice is a prefix of another."""
        return [*self.children, terminator] if self.choice is not None else list(self.children)

    def after(self, token: int) -> TrieNode:
        """The next node; the terminator ends at the choice that is complete here."""
        return self.children.get(token) or TrieNode(choice=self.choice)

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def needs_terminator(self) -> bool:
        """Whether a choice is a prefix of another (or empty), here or below."""
        below = self.children.values()
        return (self.choice is not None and bool(below)) or any(child.needs_terminator for child in below)


def build_trie(choices: Sequence[tuple[str, Sequence[int]]]) -> TrieNode:
    """The trie of choices, each with its tokens.

    >>> root = build_trie([("go", [5]), ("go on", [5, 6]), ("stop", [7])])
    >>> root.allowed(0), root.after(5).allowed(0), root.after(5).after(0).choice, root.after(7).is_leaf
    ([5, 7], [6, 0], 'go', True)
    """
    root = TrieNode()
    for choice, tokens in choices:
        node = root
        for token in tokens:
            node = node.children.setdefault(token, TrieNode())
        node.choice = choice
    return root
