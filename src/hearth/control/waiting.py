"""Questions that are held until the answer is the one waited for."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import TypeVar

from hearth.control.store import Changes
from hearth.errors import RequestError
from hearth.wire.fireworks import Deployment, TrainerJob

T = TypeVar("T")
ResourceT = TypeVar("ResourceT", TrainerJob, Deployment)

LONGEST_WAIT_S = 25.0
"""How long a question for a state is held; clients' read timeout is 30 s."""


async def settled(
    read: Callable[[], ResourceT], changes: Changes, id: str, states: str, timeout_s: float
) -> ResourceT:
    """The resource; with ``states`` (a comma list) once it is in one of them, or time is over.

    Raises:
        RequestError: the time is no number.
    """
    if math.isnan(timeout_s):
        raise RequestError("timeoutS must be a number of seconds, got nan")
    if not states:
        return await asyncio.to_thread(read)
    wanted = states.split(",")
    wait_s = min(max(timeout_s, 0.0), LONGEST_WAIT_S)
    return await once(read, changes, id, lambda one: one.state in wanted, wait_s)


async def once(
    read: Callable[[], T],
    changes: Changes,
    id: str,
    is_met: Callable[[T], bool],
    wait_s: float | None,
) -> T:
    """What ``read`` gives as soon as that is as asked for; as it stands when the time is over.

    The time is over for everyone when the platform ends.

    It is read again when the row ``id`` changes, not from time to time. None waits for ever.
    """
    deadline = math.inf if wait_s is None else time.monotonic() + wait_s
    while True:
        # Asked for before it is read, so that no change falls between the two.
        changed = asyncio.wrap_future(changes.next(id))
        try:
            found = await asyncio.to_thread(read)
            left_s = deadline - time.monotonic()
            if is_met(found) or left_s <= 0 or changes.is_over:
                return found
            await asyncio.wait([changed], timeout=None if wait_s is None else left_s)
        finally:
            changed.cancel()
