"""A search over a small text collection: the tool that the policy asks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

NOTHING_FOUND = "nothing found ."
TITLE_WEIGHT = 2.0
"""How much more a word counts where it is the document's title."""


class SearchIndex:
    """Finds the document that shares the rarest words with a query.

    ``documents`` are texts by title.
    """

    def __init__(self, documents: Mapping[str, str]) -> None:
        self._documents = dict(documents)
        self._words = {title: frozenset(text.split()) for title, text in documents.items()}
        counts = Counter(word for words in self._words.values() for word in words)
        self._rarity = {word: math.log(len(documents) / count) for word, count in counts.items()}

    def search(self, query: str) -> str:
        """The text of the best document, the first of equal ones; ``NOTHING_FOUND`` without any."""
        words = set(query.split())
        scores = {title: self._score(title, words) for title in self._documents}
        best = max(scores, key=lambda title: scores[title])
        return self._documents[best] if scores[best] > 0 else NOTHING_FOUND

    def _score(self, title: str, words: set[str]) -> float:
        shared = sum(self._rarity[word] for word in words & self._words[title])
        return shared + (TITLE_WEIGHT * self._rarity[title] if title in words else 0.0)
