"""How much of something may be in flight at once, and how much of it one client may have."""

from __future__ import annotations

import threading
from collections import Counter

from hearth.errors import BusyError


class Room:
    """``size`` of something for all clients together, counted by client. Any thread may call it.

    A client may take what is left, unless it then has more than is left before it: one client alone
    gets half of the room, so that the next one finds some, and n clients get about 1 / (n + 1) each
    (dynamic thresholds of Choudhury and Hahne, IEEE/ACM Transactions on Networking, 1998).
    """

    def __init__(self, size: int, what: str) -> None:
        self._size = size
        self._what = what
        self._taken = Counter[str]()
        self._lock = threading.Lock()

    def take(self, client: str, amount: int) -> None:
        """Count ``amount`` as in flight.

        Raises:
            BusyError: the client would have more in flight than its part.
        """
        with self._lock:
            wanted, free = self._taken[client] + amount, self._size - self._taken.total()
            if wanted > free:
                raise BusyError(
                    f"{self._what} in flight of one client must be at most {free} now, got "
                    f"{wanted}: send fewer at once, or ask again soon"
                )
            self._taken[client] = wanted

    def in_flight(self) -> int:
        """How much is in flight, of all clients."""
        with self._lock:
            return self._taken.total()

    def give_back(self, client: str, amount: int) -> None:
        """Count ``amount`` as in flight no more."""
        with self._lock:
            self._taken[client] -= amount
            if not self._taken[client]:
                del self._taken[client]
