"""A deployment's backend on vLLM's servers (``InferenceBackend``).

One thread runs an event loop, on which all servers are asked; whoever calls does so from any other.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from hearth.errors import ClosedError, EngineError
from hearth.inference.backend import Phase, SampledSequence, SampleRequest, ServingState, Tokenizer
from hearth.inference.engine.sync_tracker import SyncTracker, closed_error
from hearth.inference.texts import special_tokens
from hearth.inference.vllm.balancing import blocks_of
from hearth.inference.vllm.client import LostError
from hearth.inference.vllm.completion import CompletionRun, RequestRules, ServerCompletion
from hearth.inference.vllm.model import VllmModelFacts
from hearth.inference.vllm.replicas import Fleet
from hearth.inference.vllm.server import ServerPlan
from hearth.inference.vllm.snapshot_cache import CachedSnapshot, SnapshotCache
from hearth.inference.vllm.weights import FIRST_LABEL, ReplicaPublisher, Target
from hearth.sidecars import Sidecars
from hearth.sync.store import Snapshot
from hearth.wire.completions import RunningRequests

logger = logging.getLogger(__name__)

_MOST_LOSSES = 16
"""Servers that one request may lose before it is given up."""

T = TypeVar("T")


@dataclass(frozen=True)
class Version:
    """What a server's label stands for."""

    number: int
    identity: str | None


class VllmBackend:
    """Draws completions with vLLM's servers, which are ``sidecars``. Starts them, and waits.

    ``folder`` holds what the servers load, and is removed at the end. ``failed`` has an error once
    the deployment cannot go on.

    Raises:
        ConfigError: a server does not start; the message says why and what to do.
    """

    def __init__(
        self,
        plan: ServerPlan,
        facts: VllmModelFacts,
        *,
        replicas: int,
        sidecars: Sidecars,
        folder: Path,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.max_seq_len = plan.max_seq_len
        self.failed: Future[EngineError] = Future()
        self._tokenizer = tokenizer
        self._facts = facts
        self._options = plan.options
        self._rules = RequestRules(facts, plan.max_seq_len, tokenizer, special_tokens(tokenizer))
        self._folder = folder
        self._snapshot_cache = SnapshotCache(folder)
        self._serving = SyncTracker()
        self._publisher = ReplicaPublisher(
            str(self._snapshot_cache.root),
            vocab_size=facts.vocab_size,
            dtype=plan.dtype,
            drain=plan.options.drain,
        )
        self._versions: dict[str, asyncio.Future[Version | None]] = {}
        self._syncs = 0
        self._on_phase: Callable[[Phase], None] | None = None
        self._phase: Phase = "idle"
        self._running = 0
        self._is_closed = False
        self._snapshot_thread = ThreadPoolExecutor(1, thread_name_prefix="hearth-snapshots")
        self._loop = asyncio.new_event_loop()
        self._versions[FIRST_LABEL] = self._loop.create_future()
        self._versions[FIRST_LABEL].set_result(Version(0, None))
        self._fleet = Fleet(
            plan, sidecars, replicas, bring_up=self._publisher.bring_up, on_failed=self._fail
        )
        self._thread = threading.Thread(target=self._run, name="hearth-vllm", daemon=True)
        self._thread.start()
        try:
            self._call(self._fleet.start()).result()
        except BaseException:
            self.close()
            raise

    @property
    def tokenizer(self) -> Tokenizer | None:
        """As given."""
        return self._tokenizer

    def submit(self, request: SampleRequest) -> Future[SampledSequence]:
        """Queue one completion. Cancelling the future ends it on its server.

        Raises:
            RequestError: a field breaks its rule, or vLLM cannot do what it asks for.
            ClosedError: the backend was closed.
        """
        self._rules.check(request)
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
        return self._call(
            self._drawn(CompletionRun(request, seed, self._rules), time.perf_counter())
        )

    def hot_load(
        self,
        identity: str,
        fetch: Callable[[], Snapshot],
        *,
        weight_version: int | None = None,
        running_requests: RunningRequests = "drain",
    ) -> Future[ServingState]:
        """Serve the snapshot that ``fetch`` returns on all replicas, or go on as before on all.

        Snapshots are taken in the order in which they were asked for. With ``keep`` what runs goes
        on with the new weights; vLLM computes its keys and values again.

        Raises:
            ClosedError: the backend was closed.
        """
        if self._is_closed:
            raise closed_error()
        if self._serving.begin(identity, weight_version):
            self._snapshot_thread.submit(self._take, identity, fetch, running_requests)
        return self._serving.settled(identity)

    def watch_phase(self, on_phase: Callable[[Phase], None]) -> None:
        """Call ``on_phase`` at every change, instead of the one before."""
        self._on_phase = on_phase

    def state(self) -> ServingState:
        """What is served now."""
        return self._serving.state()

    def settled(self, identity: str) -> Future[ServingState]:
        """The state as soon as ``identity`` is served or could not be loaded."""
        return self._serving.settled(identity)

    def close(self) -> None:
        """Stop the servers; whatever is left fails with ``ClosedError``."""
        if self._is_closed:
            return
        self._is_closed = True
        self._serving.close()
        self._snapshot_thread.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ClosedError):
            asyncio.run_coroutine_threadsafe(self._ended(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_closed:
            work.close()
            raise closed_error()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _ended(self) -> None:
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        await self._fleet.close()
        # What was closed says so to its loop once more.
        await asyncio.sleep(0)

    async def _drawn(self, draw: CompletionRun, arrived_s: float) -> SampledSequence:
        """Draw on one replica after the other until one has done it."""
        blocks = blocks_of(draw.request.prompt)
        self._note(1)
        try:
            for _ in range(_MOST_LOSSES):
                replica = await self._fleet.take(blocks)
                began_s = time.perf_counter()
                concurrent = replica.lane.running
                try:
                    outcome = await replica.run(draw.on(replica.client))
                    versions = await self._versions_of(outcome)
                except LostError as error:
                    logger.info("a request is drawn again: %s", error)
                    self._fleet.doubt(replica)
                    continue
                finally:
                    self._fleet.give(replica)
                return draw.result(
                    outcome,
                    versions,
                    queue_s=began_s - arrived_s,
                    generation_s=time.perf_counter() - began_s,
                    num_concurrent=concurrent,
                )
            raise EngineError(
                f"request must be drawn by one of {_MOST_LOSSES} servers, got all of them lost: "
                "see the deployment's log"
            )
        except asyncio.CancelledError:
            if self._is_closed:
                raise closed_error() from None
            raise
        finally:
            self._note(-1)

    async def _versions_of(self, outcome: ServerCompletion) -> list[tuple[int, str | None, int]]:
        """Weight version, snapshot and number of tokens, in the order of the tokens.

        Raises:
            LostError: a weight sync that drew some of them was taken back.
        """
        if not outcome.labels:
            state = self.state()
            return [(state.weight_version, state.current_identity, 0)]
        found: list[tuple[int, str | None, int]] = []
        for label, count in outcome.labels:
            version = await asyncio.shield(self._versions[label])
            if version is None:
                raise LostError("it was drawn under weights that were taken back")
            found.append((version.number, version.identity, count))
        return found

    def _take(self, identity: str, fetch: Callable[[], Snapshot], running: RunningRequests) -> None:
        """Read a snapshot and publish it; runs on the shelving thread, one after the other."""
        self._tell()
        try:
            snapshot = replace(fetch(), identity=identity)
            self._facts.check(snapshot)
            self._options.check(snapshot)
            cached = self._snapshot_cache.add(snapshot)
            self._call(self._publish(cached, running)).result()
        except Exception as error:  # the boundary: whoever asked for it must hear of it
            logger.exception("weight sync: snapshot %s was refused", identity)
            self._serving.failed(identity, error)
        else:
            self._serving.served(identity, is_adapter=cached.adapter is not None)
        self._tell()

    async def _publish(self, cached: CachedSnapshot, running: RunningRequests) -> None:
        before = self._publisher.current
        self._syncs += 1
        number = self._serving.number_of(cached.identity)
        # A number that failed may be taken again, by other weights.
        label = f"{number}-{self._syncs}"
        target = Target(label=label, identity=cached.identity)
        if cached.adapter is not None:
            target = replace(before, label=label, adapter=str(cached.adapter))
        outcome: asyncio.Future[Version | None] = self._loop.create_future()
        self._versions[label] = outcome
        try:
            await self._publisher.publish(self._fleet, target, running)
        except BaseException:
            outcome.set_result(None)
            raise
        outcome.set_result(Version(number, cached.identity))
        needed = {one.identity for one in (target, before)} | {
            Path(one.adapter).name for one in (target, before) if one.adapter
        }
        self._snapshot_cache.keep({one for one in needed if one is not None})

    def _fail(self, error: EngineError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def _note(self, change: int) -> None:
        self._running += change
        self._tell()

    def _tell(self) -> None:
        """Say what is done now, if that has changed."""
        phase: Phase = "sampling" if self._running else "idle"
        if phase == "idle" and self._serving.state().stage == "loading":
            phase = "load_snapshot"
        if phase == self._phase:
            return
        self._phase = phase
        if self._on_phase is None:
            return
        try:
            self._on_phase(phase)
        except Exception:  # its failure is its own
            logger.exception("whoever is told the phase failed; the deployment goes on")
