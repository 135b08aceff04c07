"""A search over a small text collection: the tool that the policy asks."""

from __future__ import annotations

import math
from collections import defaultdict
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
        self._places = {title: place for place, title in enumerate(self._documents)}
        self._titles: defaultdict[str, list[str]] = defaultdict(list)
        for title, text in self._documents.items():
            for word in dict.fromkeys(text.split()):
                self._titles[word].append(title)

    def search(self, query: str) -> str:
        """The text of the best document, the first of equal ones; ``NOTHING_FOUND`` without any."""
        scores: defaultdict[str, float] = defaultdict(float)
        # In order: a set's own differs from process to process, and sums round by their order.
        for word in sorted(set(query.split()) & self._titles.keys()):
            titles = self._titles[word]
            rarity = math.log(len(self._documents) / len(titles))
            for title in titles:
                scores[title] += rarity * (1 + TITLE_WEIGHT * (title == word))
        best = min(scores, key=lambda title: (-scores[title], self._places[title]), default=None)
        return self._documents[best] if best is not None and scores[best] > 0 else NOTHING_FOUND
