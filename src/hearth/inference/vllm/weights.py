"""One weight sync for all replicas of a deployment: all of them load it, or none does.

Requests see one version at a time: from the start of the swap no replica gets requests until every
server has confirmed its version and scored a few probe tokens like the others.
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
"""Largest difference between servers with the same weights: rounding depends on the batch."""
FIRST_LABEL = "0"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What servers should serve."""

    label: str = FIRST_LABEL
    """The servers' name of it; no two targets share one."""
    identity: str | None = None
    """Snapshot of whole weights; None is the model's own."""
    adapter: str | None = None
    """Folder of the adapter on top; None is none."""


class ReplicaPublisher:
    """Has servers serve a target, whose snapshots are under ``root``."""

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
        self._expected = self._check_probes([await self._probe(client)], self._expected)

    async def publish(self, fleet: Fleet, target: Target, running: RunningRequests) -> None:
        """Have all replicas serve ``target``, or all continue to serve ``current``.

        Servers read its snapshot and verify it while they sample, and pause for the swap alone.
        With ``keep`` running requests continue on the new weights, with keys and values computed
        again. A replica that dies meanwhile is replaced by one that serves the result.

        Raises:
            EngineError: a replica refuses it, or their probes differ; ``current`` is served.
        """
        await self._prepare(fleet, target)
        async with fleet.lock:
            fleet.shut()
            try:
                if running == "drain":
                    if self._drain == "abort":
                        fleet.interrupt()
                    await fleet.wait_until_idle()
                replicas = fleet.ready()
                mode = "keep" if running == "keep" else "wait"
                await self._call_all(fleet, replicas, lambda client: client.pause(mode))
                for replica in replicas:
                    replica.lane.forget()
                await self._switch(fleet, target)
            finally:
                fleet.open()

    async def _prepare(self, fleet: Fleet, target: Target) -> None:
        """Have all servers read the target's snapshot, those that do not serve it already.

        Raises:
            EngineError: a server cannot use it; all continue as they were.
        """

        async def prepare(client: VllmClient) -> None:
            if target.identity is not None and client.identity != target.identity:
                await client.prepare(self._root, target.identity)

        for _, error in await self._call_all(fleet, fleet.ready(), prepare):
            if error is not None:
                raise error

    async def _switch(self, fleet: Fleet, target: Target) -> None:
        """Load into paused servers, then resume them."""
        before, expected = self.current, self._expected
        results = await self._call_all(
            fleet, fleet.ready(), lambda client: self._apply(client, target)
        )
        failures = [error for _, error in results if error is not None]
        if not failures and not fleet.ready():
            failures = [EngineError("deployment must have a replica to take new weights, got none")]
        if not failures:
            await self._call_all(fleet, fleet.ready(), lambda client: client.resume())
            try:
                self._expected = await self._compare(fleet)
                self.current = target
                return
            except (EngineError, RequestError) as error:
                failures = [error]
                # Requests that have run since the swap used weights that are taken back.
                fleet.interrupt()
                await self._call_all(fleet, fleet.ready(), lambda client: client.pause("abort"))
                results = [(replica, None) for replica in fleet.ready()]
        self._expected = expected
        await self._roll_back(fleet, results, before)
        raise failures[0]

    async def _roll_back(
        self, fleet: Fleet, results: Sequence[tuple[Replica, Exception | None]], before: Target
    ) -> None:
        """Load ``before`` again into servers that loaded a target; end those in unknown states."""
        for replica, error in results:
            if not replica.serves:
                continue
            try:
                if error is None:
                    await self._apply(replica.client, before)
                elif not isinstance(error, UnchangedError):
                    raise error
                await replica.client.resume()
            except (EngineError, RequestError, LostError) as reason:
                logger.warning(
                    "%s could not go back to its weights and is replaced: %s", replica.name, reason
                )
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
        probes: list[list[float]] = []

        async def score(client: VllmClient) -> None:
            probes.append(await self._probe(client))

        for _, error in await self._call_all(fleet, fleet.ready(), score):
            if error is not None:
                raise error
        return self._check_probes(probes, None)

    async def _probe(self, client: VllmClient) -> list[float]:
        body: dict[str, Any] = {
            "token_ids": self._probe_tokens,
            "sampling_params": {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0},
        }
        listed = (await client.generate(body)).prompt or []
        return [
            logprobs[token]
            for logprobs, token in zip(listed, self._probe_tokens, strict=True)
            if logprobs is not None
        ]

    def _check_probes(
        self, probes: Sequence[Sequence[float]], expected: Sequence[float] | None
    ) -> list[float]:
        """The logprobs on which all probes agree.

        Raises:
            EngineError: a logprob is not a number, or two servers differ too much.
        """
        if not probes:
            raise EngineError("deployment must have a replica to take new weights, got none")
        reference = list(expected if expected is not None else probes[0])
        for probe in probes:
            if any(not -1000 < value <= 0 for value in probe):
                raise EngineError(
                    f"logprobs of the probe must be numbers, got {list(probe)}: the weights are "
                    "broken, or overflow in this dtype"
                )
            difference = max(abs(a - b) for a, b in zip(probe, reference, strict=True))
            if math.isnan(difference) or difference > self._tolerance:
                raise EngineError(
                    f"replicas must score the probe within {self._tolerance} of each other, got "
                    f"{difference:.3g}: they do not serve the same weights"
                )
        return reference

    @staticmethod
    async def _call_all(
        fleet: Fleet, replicas: Sequence[Replica], call: Callable[[VllmClient], Awaitable[None]]
    ) -> list[tuple[Replica, Exception | None]]:
        """Call all servers at once; one that is lost is discarded, and its watch replaces it."""

        async def call_one(replica: Replica) -> tuple[Replica, Exception | None]:
            try:
                await call(replica.client)
            except LostError as error:
                logger.warning("%s was lost during a weight sync: %s", replica.name, error)
                await fleet.discard(replica)
            except (EngineError, RequestError) as error:
                return replica, error
            return replica, None

        return list(await asyncio.gather(*map(call_one, replicas)))
