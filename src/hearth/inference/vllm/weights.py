"""One weight sync for all replicas of a deployment: every one of them takes it, or none does.

Requests meet one version at a time: nobody is given a replica from the moment that new weights are
loaded until every server has said which version it serves and scored a few tokens like the others.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hearth.errors import EngineError, RequestError
from hearth.inference.vllm.client import LostError, UnchangedError, VllmClient
from hearth.inference.vllm.replicas import Fleet, Replica
from hearth.wire.completions import RunningRequests

logger = logging.getLogger(__name__)

_PROBE_TOKENS = 16
_TOLERANCES = {"float32": 1e-3, "bfloat16": 0.1}
"""How far two servers with the same weights may be apart: their kernels round by the batch."""
FIRST_LABEL = "0"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What servers are to serve."""

    label: str = FIRST_LABEL
    """What the servers call it; no two targets share one."""
    identity: str | None = None
    """Snapshot of whole weights; None is the model's own."""
    adapter: str | None = None
    """Folder of the adapter on top; None is none."""


class ReplicaPublisher:
    """Brings servers to a target. Snapshots are looked for under ``root``."""

    def __init__(
        self, root: str, *, vocab_size: int, dtype: str, drain: Literal["wait", "abort"]
    ) -> None:
        self.current = Target()
        self._root = root
        self._drain = drain
        self._tolerance = _TOLERANCES[dtype]
        self._probe_tokens = [(7 * n + 1) % vocab_size for n in range(_PROBE_TOKENS)]
        self._expected: list[float] | None = None
        """The probe's logprobs under ``current``."""

    async def bring_up(self, replica: Replica) -> None:
        """Have a server that has just started serve ``current``.

        Raises:
            LostError, EngineError: it cannot.
        """
        client = replica.client
        await self._apply(client, self.current)
        self._expected = self._agree([await self._probe(client)], self._expected)

    async def publish(self, fleet: Fleet, target: Target, running: RunningRequests) -> None:
        """Have all replicas serve ``target``, or all go on with what they serve.

        With ``keep`` what runs goes on with the new weights, on keys and values that are computed
        again. A replica that dies meanwhile is replaced by one that serves the outcome.

        Raises:
            EngineError: a replica refuses it, or they do not agree on it; ``current`` is served.
        """
        async with fleet.lock:
            fleet.shut()
            try:
                if running == "drain":
                    if self._drain == "abort":
                        fleet.interrupt()
                    await fleet.idle()
                replicas = fleet.ready()
                await self._all(fleet, replicas, lambda one: one.pause(_pause_mode(running)))
                for replica in replicas:
                    replica.lane.forget()
                await self._switch(fleet, target)
            finally:
                fleet.open()

    async def _switch(self, fleet: Fleet, target: Target) -> None:
        """Load into paused servers, and have them run again."""
        before, expected = self.current, self._expected
        outcomes = await self._all(fleet, fleet.ready(), lambda one: self._apply(one, target))
        failures = [error for _, error in outcomes if error is not None]
        if not failures and not fleet.ready():
            failures = [EngineError("deployment must have a replica to take new weights, got none")]
        if not failures:
            await self._all(fleet, fleet.ready(), lambda one: one.resume())
            try:
                self._expected = await self._compare(fleet)
                self.current = target
                return
            except (EngineError, RequestError) as error:
                failures = [error]
                # What has run on since the swap was drawn with weights that nobody is to see.
                fleet.interrupt()
                await self._all(fleet, fleet.ready(), lambda one: one.pause("abort"))
                outcomes = [(one, None) for one in fleet.ready()]
        self._expected = expected
        await self._roll_back(fleet, outcomes, before)
        raise failures[0]

    async def _roll_back(
        self, fleet: Fleet, outcomes: Sequence[tuple[Replica, Exception | None]], before: Target
    ) -> None:
        """Have servers that took a target go back, and end those of which nobody knows."""
        for replica, error in outcomes:
            if not replica.serves:
                continue
            try:
                if error is None:
                    await self._apply(replica.client, before)
                elif not isinstance(error, UnchangedError):
                    raise error
                await replica.client.resume()
            except (EngineError, RequestError, LostError) as reason:
                logger.warning("%s did not go back, and is replaced: %s", replica.name, reason)
                await fleet.discard(replica)

    async def _apply(self, client: VllmClient, target: Target) -> None:
        if client.identity != target.identity:
            await client.load(self._root, target.identity)
        if target.adapter is not None:
            await client.load_adapter(target.adapter)
        else:
            await client.drop_adapter()
        await client.label(target.label)

    async def _compare(self, fleet: Fleet) -> list[float]:
        """The probe's logprobs, on which all replicas agree."""
        found: list[list[float]] = []

        async def score(client: VllmClient) -> None:
            found.append(await self._probe(client))

        outcomes = await self._all(fleet, fleet.ready(), score)
        for _, error in outcomes:
            if error is not None:
                raise error
        return self._agree(found, None)

    async def _probe(self, client: VllmClient) -> list[float]:
        body: dict[str, Any] = {
            "token_ids": self._probe_tokens,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
        }
        rows = (await client.draw(body)).prompt or []
        return [
            row[token]
            for row, token in zip(rows, self._probe_tokens, strict=True)
            if row is not None
        ]

    def _agree(
        self, found: Sequence[Sequence[float]], expected: Sequence[float] | None
    ) -> list[float]:
        """What all have found.

        Raises:
            EngineError: a number is none, or two servers are too far apart.
        """
        if not found:
            raise EngineError("deployment must have a replica to take new weights, got none")
        wanted = list(expected if expected is not None else found[0])
        for one in found:
            if any(not -1000 < value <= 0 for value in one):
                raise EngineError(
                    f"logprobs of the probe must be numbers, got {list(one)}: the weights are "
                    "broken, or overflow in this dtype"
                )
            apart = max(abs(a - b) for a, b in zip(one, wanted, strict=True))
            if math.isnan(apart) or apart > self._tolerance:
                raise EngineError(
                    f"replicas must score the probe within {self._tolerance} of each other, got "
                    f"{apart:.3g}: they do not serve the same weights"
                )
        return wanted

    @staticmethod
    async def _all(
        fleet: Fleet, replicas: Sequence[Replica], call: Callable[[VllmClient], Awaitable[None]]
    ) -> list[tuple[Replica, Exception | None]]:
        """Call each server at once; one that is lost leaves, and is replaced by its own watch."""

        async def one(replica: Replica) -> tuple[Replica, Exception | None]:
            try:
                await call(replica.client)
            except LostError as error:
                logger.warning("%s left a weight sync: %s", replica.name, error)
                await fleet.discard(replica)
            except (EngineError, RequestError) as error:
                return replica, error
            return replica, None

        return list(await asyncio.gather(*map(one, replicas)))


def _pause_mode(running: RunningRequests) -> Literal["wait", "keep"]:
    return "keep" if running == "keep" else "wait"
