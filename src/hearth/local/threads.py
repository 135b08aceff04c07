"""One budget of compute threads for all workers of a process.

Two workers that compute at once with all threads each are slower than one after the other: every
parallel loop waits for a thread that has no core. So who computes alone has all threads, and who
computes beside others has a share.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class ThreadBudget:
    """Splits ``total`` threads among the workers that are busy now.

    torch and its matrix products have one number of threads for the whole process; it is changed
    when a worker begins or ends, and holds from every worker's next operation on.
    """

    def __init__(
        self, total: int | None = None, set_threads: Callable[[int], None] = torch.set_num_threads
    ) -> None:
        self.total = total or torch.get_num_threads()
        self._set_threads = set_threads
        self._lock = threading.Lock()
        self._busy: set[str] = set()
        self._now = self.total

    def note(self, worker_id: str, *, is_busy: bool) -> None:
        """A worker computes from now on, or no longer. To be called on the worker's own thread."""
        with self._lock:
            (self._busy.add if is_busy else self._busy.discard)(worker_id)
            share = max(1, self.total // max(1, len(self._busy)))
            # torch keeps a number for each thread too: this one's may be of before.
            if share != self._now or is_busy:
                self._now = share
                self._set_threads(share)
