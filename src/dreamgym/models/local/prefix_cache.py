"""Cached keys and values of conversations, within a memory limit; the least recently used are evicted.

An eviction costs a recomputation and nothing else: tokens are kept in `tokenization.TokenHistory`.
"""

from __future__ import annotations

from collections import OrderedDict

from dreamgym.models.local.kv_cache import CachedPrefix


class PrefixCache:
    """Maps conversations to `CachedPrefix`."""

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of keys and values in all."""
        self._limit = limit
        self._saved: OrderedDict[str, tuple[CachedPrefix, int]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return len(self._saved)

    @property
    def size(self) -> int:
        """In bytes."""
        return self._size

    def take(self, conversation: str | None) -> CachedPrefix | None:
        """Remove and return an entry."""
        if conversation is None or conversation not in self._saved:
            return None
        saved, size = self._saved.pop(conversation)
        self._size -= size
        return saved

    def get(self, conversation: str | None) -> CachedPrefix | None:
        if conversation is None or conversation not in self._saved:
            return None
        self._saved.move_to_end(conversation)
        return self._saved[conversation][0]

    def put(self, conversation: str, saved: CachedPrefix) -> None:
        self.take(conversation)
        size = saved.size
        self._saved[conversation] = (saved, size)
        self._size += size
        while self._size > self._limit:
            _, (_, size) = self._saved.popitem(last=False)
            self._size -= size

    def clear(self) -> None:
        self._saved.clear()
        self._size = 0
