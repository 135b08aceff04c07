"""A deployment's backend on vLLM's servers.

One thread runs an event loop for all calls to the servers; its methods are called from others.
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
from hearth.inference.backend import InferenceBackend, SampledSequence, SampleRequest, Tokenizer
from hearth.inference.sync_tracker import ServingState, closed_error
from hearth.inference.texts import special_tokens
from hearth.inference.vllm.balancing import hash_blocks
from hearth.inference.vllm.client import LostError
from hearth.inference.vllm.completion import CompletionRun, RequestRules, ServerCompletion
from hearth.inference.vllm.model import VllmModelFacts
from hearth.inference.vllm.plugin.node_copy import NodeCopies
from hearth.inference.vllm.replicas import Fleet
from hearth.inference.vllm.server import ServerPlan
from hearth.inference.vllm.snapshot_cache import CachedSnapshot, SnapshotCache
from hearth.inference.vllm.weights import FIRST_LABEL, ReplicaPublisher, Target
from hearth.sidecars import Sidecars
from hearth.sync.store import Snapshot
from hearth.wire.completions import RunningRequests

logger = logging.getLogger(__name__)

_MOST_ATTEMPTS = 16
"""How many servers one request may lose before it fails."""

T = TypeVar("T")


@dataclass(frozen=True)
class Version:
    """The weight version of a server's label."""

    number: int
    identity: str | None


class VllmBackend(InferenceBackend):
    """Runs completions on vLLM's servers, which are ``sidecars``. Starts them, and waits.

    ``folder`` holds the files that the servers load, and is removed at the end. ``failed`` gets an
    error when the deployment has failed.

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
        super().__init__(tokenizer, plan.max_seq_len)
        self._facts = facts
        self._options = plan.options
        self._rules = RequestRules(facts, plan.max_seq_len, tokenizer, special_tokens(tokenizer))
        self._folder = folder
        self._snapshot_cache = SnapshotCache(folder)
        self._publisher = ReplicaPublisher(
            str(self._snapshot_cache.root),
            vocab_size=facts.vocab_size,
            dtype=plan.dtype,
            drain=plan.options.drain,
        )
        self._versions: dict[str, asyncio.Future[Version | None]] = {}
        self._num_syncs = 0
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

    def submit(self, request: SampleRequest) -> Future[SampledSequence]:
        """Queue one completion. Cancelling the future ends it on its server."""
        self._rules.check(request)
        seed = secrets.randbits(63) if request.seed is None else request.seed % 2**63
        return self._call(
            self._complete(CompletionRun(request, seed, self._rules), time.perf_counter())
        )

    def hot_load(
        self,
        identity: str,
        fetch: Callable[[], Snapshot],
        *,
        weight_version: int | None = None,
        running_requests: RunningRequests = "drain",
    ) -> Future[ServingState]:
        """Serve the snapshot that ``fetch`` returns on all replicas, or change nothing on all.

        Snapshots are loaded in the order of the calls. With ``keep`` running requests continue on
        the new weights; vLLM computes their keys and values again.
        """
        if self._is_closed:
            raise closed_error()
        if self._tracker.begin(identity, weight_version):
            self._snapshot_thread.submit(self._sync, identity, fetch, running_requests)
        return self._tracker.watch_sync(identity)

    def close(self) -> None:
        """Stop the servers; requests that are left fail with ``ClosedError``."""
        if self._is_closed:
            return
        self._is_closed = True
        self._tracker.close()
        self._snapshot_thread.shutdown(wait=False, cancel_futures=True)
        with contextlib.suppress(ClosedError):
            asyncio.run_coroutine_threadsafe(self._shut_down(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        NodeCopies(self._snapshot_cache.root).remove()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def _call(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        if self._is_closed:
            work.close()
            raise closed_error()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _shut_down(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._fleet.close()
        # Closed transports have callbacks left on the loop.
        await asyncio.sleep(0)

    async def _complete(self, run: CompletionRun, arrived_s: float) -> SampledSequence:
        """Run it on one replica after the other until one completes it."""
        blocks = hash_blocks(run.request.prompt)
        self._count_running(1)
        try:
            for _ in range(_MOST_ATTEMPTS):
                replica = await self._fleet.acquire(blocks)
                began_s = time.perf_counter()
                concurrent = replica.lane.running
                try:
                    completion = await replica.run(run.run_on(replica.client))
                    versions = await self._read_versions(completion)
                except LostError as error:
                    logger.info("a request is run again: %s", error)
                    self._fleet.suspend(replica)
                    continue
                finally:
                    self._fleet.release(replica)
                return run.result(
                    completion,
                    versions,
                    queue_s=began_s - arrived_s,
                    generation_s=time.perf_counter() - began_s,
                    num_concurrent=concurrent,
                )
            raise EngineError(
                f"request must be completed by one of {_MOST_ATTEMPTS} servers, got all of them "
                "lost: see the deployment's log"
            )
        except asyncio.CancelledError:
            if self._is_closed:
                raise closed_error() from None
            raise
        finally:
            self._count_running(-1)

    async def _read_versions(
        self, completion: ServerCompletion
    ) -> list[tuple[int, str | None, int]]:
        """Weight version, snapshot and number of tokens, in the order of the tokens.

        Raises:
            LostError: the weights of some tokens were taken back.
        """
        if not completion.labels:
            state = self.state()
            return [(state.weight_version, state.current_identity, 0)]
        versions: list[tuple[int, str | None, int]] = []
        for label, count in completion.labels:
            version = await asyncio.shield(self._versions[label])
            if version is None:
                raise LostError("its weights were taken back")
            versions.append((version.number, version.identity, count))
        return versions

    def _sync(self, identity: str, fetch: Callable[[], Snapshot], running: RunningRequests) -> None:
        """Read a snapshot and publish it; runs on the snapshot thread, one after the other."""
        self._note_phase()
        try:
            snapshot = replace(fetch(), identity=identity)
            self._facts.check(snapshot)
            self._options.check(snapshot)
            cached = self._snapshot_cache.add(snapshot)
            self._call(self._publish(cached, running)).result()
        except Exception as error:  # noqa: BLE001 - the boundary: the state of the weight sync has it
            self._tracker.fail(identity, error)
        else:
            self._tracker.finish(identity, is_adapter=cached.adapter is not None)
        self._note_phase()

    async def _publish(self, cached: CachedSnapshot, running: RunningRequests) -> None:
        before = self._publisher.current
        self._num_syncs += 1
        number = self._tracker.next_version(cached.identity)
        # A number that failed may be used again, for other weights.
        label = f"{number}-{self._num_syncs}"
        target = Target(label=label, identity=cached.identity)
        if cached.adapter is not None:
            target = replace(before, label=label, adapter=str(cached.adapter))
        version: asyncio.Future[Version | None] = self._loop.create_future()
        self._versions[label] = version
        try:
            await self._publisher.publish(self._fleet, target, running)
        except BaseException:
            version.set_result(None)
            raise
        version.set_result(Version(number, cached.identity))
        kept = {other.identity for other in (target, before) if other.identity is not None}
        kept |= {Path(other.adapter).name for other in (target, before) if other.adapter}
        self._snapshot_cache.keep(kept)

    def _fail(self, error: EngineError) -> None:
        if not self.failed.done():
            self.failed.set_result(error)

    def _count_running(self, change: int) -> None:
        self._running += change
        self._note_phase()

    def _note_phase(self) -> None:
        if self._running:
            self._report_phase("sampling")
        else:
            is_loading = self._tracker.state().stage == "loading"
            self._report_phase("load_snapshot" if is_loading else "idle")
