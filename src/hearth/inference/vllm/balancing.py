"""Which replica draws a request: the least loaded, or the one that knows its beginning.

Pure: no clock, no server. Requests carry no session of their own, and none is needed: what a second
replica would have to compute again is a prompt's beginning, and that is looked for itself. So the
turns of one conversation find each other whoever asks, and so do the completions of one prompt.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BLOCK = 32
"""Tokens that are looked at together."""
SLACK = 8
"""A replica that knows the beginning may have this many requests more than the least loaded."""
_MOST_BLOCKS = 16384
"""Beginnings that are remembered of each replica, the latest."""


@dataclass(eq=False)
class Lane:
    """One replica as the router sees it."""

    number: int
    room: int
    """Requests that it may run at a time."""
    running: int = 0
    is_open: bool = False
    """Whether it may be given requests."""
    _known: OrderedDict[int, None] = field(default_factory=lambda: OrderedDict())

    def remember(self, blocks: Iterable[int]) -> None:
        """Note that it computes these beginnings."""
        for block in blocks:
            self._known[block] = None
            self._known.move_to_end(block)
        while len(self._known) > _MOST_BLOCKS:
            self._known.popitem(last=False)

    def forget(self) -> None:
        """Its keys and values are gone."""
        self._known.clear()

    def shared(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's blocks it knows from the beginning on."""
        return next((n for n, one in enumerate(blocks) if one not in self._known), len(blocks))


def blocks_of(prompt: Sequence[int]) -> list[int]:
    """A hash for each beginning of a prompt that is a multiple of ``BLOCK`` long."""
    found: list[int] = []
    last = 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[start : start + BLOCK]))
        found.append(last)
    return found


def choose(lanes: Iterable[Lane], blocks: Sequence[int]) -> Lane | None:
    """The lane for a prompt; None while no open one has room."""
    free = [lane for lane in lanes if lane.is_open and lane.running < lane.room]
    if not free:
        return None
    least = min(one.running for one in free)
    near = [one for one in free if one.running <= least + SLACK]
    return min(near, key=lambda one: (-one.shared(blocks), one.running, one.number))
