"""Which replica runs a request: the least loaded one, or one that has cached the prompt's prefix.

Pure: no clock, no server. Prefixes are compared, so requests need no session id: the turns of a
conversation and the completions of a prompt go to the same replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

BLOCK = 32
"""Tokens per block of a prefix."""
SLACK = 8
"""A replica with a longer cached prefix may have this many requests more than the least loaded."""
_MOST_BLOCKS = 16384
"""Prefixes that are remembered of each replica, the latest."""


@dataclass(eq=False)
class Lane:
    """One replica as the balancer sees it."""

    number: int
    room: int
    """Requests that it may run at a time."""
    running: int = 0
    is_open: bool = False
    """Whether it may get requests."""
    _cached: OrderedDict[int, None] = field(default_factory=lambda: OrderedDict())

    def remember(self, blocks: Iterable[int]) -> None:
        """Note that it computes these prefixes."""
        for block in blocks:
            self._cached[block] = None
            self._cached.move_to_end(block)
        while len(self._cached) > _MOST_BLOCKS:
            self._cached.popitem(last=False)

    def forget(self) -> None:
        """Note that its keys and values were dropped."""
        self._cached.clear()

    def count_cached(self, blocks: Sequence[int]) -> int:
        """How many of a prompt's first blocks it has computed."""
        missing = (number for number, block in enumerate(blocks) if block not in self._cached)
        return next(missing, len(blocks))


def hash_blocks(prompt: Sequence[int]) -> list[int]:
    """A hash for each prefix of a prompt that is a multiple of ``BLOCK`` long."""
    blocks: list[int] = []
    last = 0
    for start in range(0, len(prompt) - BLOCK + 1, BLOCK):
        last = hash((last, *prompt[start : start + BLOCK]))
        blocks.append(last)
    return blocks


def choose(lanes: Iterable[Lane], blocks: Sequence[int]) -> Lane | None:
    """The lane for a prompt; None while no open lane has room."""
    free = [lane for lane in lanes if lane.is_open and lane.running < lane.room]
    if not free:
        return None
    least = min(lane.running for lane in free)
    near = [lane for lane in free if lane.running <= least + SLACK]
    return min(near, key=lambda lane: (-lane.count_cached(blocks), lane.running, lane.number))
