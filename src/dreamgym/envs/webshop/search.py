"""Full-text search over a catalogue: BM25, Porter stems and stop words, as Lucene has them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from dreamgym.envs.webshop.catalogue import Product

HITS = 50
"""Results of one search, as in WebShop."""
STOP_WORDS = frozenset({
    "a", "an", "and", "are", "as", "at", "be", "but", "by", "for", "if", "in", "into", "is", "it", "no",
    "not", "of", "on", "or", "such", "that", "the", "their", "then", "there", "these", "they", "this",
    "to", "was", "will", "with",
})  # fmt: skip
_WORD = re.compile(r"[^\W_]+(?:[.,'’][^\W_]+)*")
_MAX_WORDS = 60
"""Of a query; the rest is ignored."""


class ProductSearch:
    """An index of the texts of all products."""

    def __init__(self, products: Sequence[Product]) -> None:
        import bm25s

        self._index: Any = bm25s.BM25(method="lucene", k1=0.9, b=0.4)
        self._index.index([tokens(_document(each)) for each in products], show_progress=False)
        self._known = set(self._index.vocab_dict)

    def search(self, query: str) -> list[int]:
        """Positions of the best products, best first; equal scores in the order of the catalogue."""
        words = [word for word in tokens(query)[:_MAX_WORDS] if word in self._known]
        if not words:
            return []
        scores = self._index.get_scores(words)
        kept = min(HITS, len(scores))
        bound = np.partition(scores, -kept)[-kept]
        candidates = np.flatnonzero((scores >= bound) & (scores > 0))
        order = np.argsort(-scores[candidates], kind="stable")[:kept]
        return [int(each) for each in candidates[order]]


def tokens(text: str) -> list[str]:
    """
    >>> tokens("The women's running shoes, size 7.5")
    ['women', 'run', 'shoe', 'size', '7.5']
    """
    words = (re.sub(r"['’]s$", "", word) for word in _WORD.findall(text.lower()))
    return [_stem(word) for word in words if word not in STOP_WORDS]


@lru_cache(maxsize=100_000)
def _stem(word: str) -> str:
    return str(_stemmer().stemWord(word))


@lru_cache(maxsize=1)
def _stemmer() -> Any:
    import snowballstemmer

    return snowballstemmer.stemmer("porter")


def _document(product: Product) -> str:
    options = ", and ".join(f"{name}: {', '.join(values)}" for name, values in product.options.items())
    return " ".join([product.title, product.description, *product.features[:1], options])
