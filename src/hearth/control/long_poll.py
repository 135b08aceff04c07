"""Requests that are held until a resource is in the wanted state."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from hearth.control.deployments import Deployments
from hearth.control.jobs import Jobs
from hearth.control.store import Changes
from hearth.errors import RequestError
from hearth.wire.fireworks import LONGEST_WAIT_S, Deployment, TrainerJob, WaitQuery

T = TypeVar("T")


async def wait_for_state(
    resources: Jobs | Deployments, id: str, query: WaitQuery
) -> TrainerJob | Deployment:
    """The resource, once it is in one of the wanted states or the time is over.

    Raises:
        RequestError: the time is not a number.
    """
    if math.isnan(query.timeout_s):
        raise RequestError("timeoutS must be a number of seconds, got nan")
    read = partial(resources.get, id)
    if not query.wait_for_state:
        return await asyncio.to_thread(read)
    wanted = query.wait_for_state.split(",")
    wait_s = min(max(query.timeout_s, 0.0), LONGEST_WAIT_S)
    changes = resources.records.changes
    return await wait_until(read, changes, id, lambda resource: resource.state in wanted, wait_s)


async def wait_until(
    read: Callable[[], T],
    changes: Changes,
    id: str,
    is_met: Callable[[T], bool],
    wait_s: float | None,
) -> T:
    """What ``read`` returns once ``is_met`` holds of it, or when the time is over.

    The time is over for all when the platform ends.

    It is read again when the record ``id`` changes, not from time to time. None waits for ever.
    """
    deadline = math.inf if wait_s is None else time.monotonic() + wait_s
    while True:
        # Before the read, so that no change is missed between the two.
        change = asyncio.wrap_future(changes.next_change(id))
        try:
            value = await asyncio.to_thread(read)
            left_s = deadline - time.monotonic()
            if is_met(value) or left_s <= 0 or changes.is_closed:
                return value
            await asyncio.wait([change], timeout=None if wait_s is None else left_s)
        finally:
            change.cancel()
