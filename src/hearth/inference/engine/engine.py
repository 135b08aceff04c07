"""The engine: takes requests from any thread and runs the model on a thread of its own.

Each step admits the requests that fit, prefills their prompts and samples their first tokens; then
it samples one more token for every slot. Weights are swapped between two steps: either after all
running requests have ended, or while they run, as each weight sync asks.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from hearth.errors import EngineError, RequestError
from hearth.inference.backend import (
    AdapterSource,
    InferenceBackend,
    Phase,
    SampledSequence,
    SampleRequest,
    Tokenizer,
)
from hearth.inference.engine.adapter_pool import AdapterPool
from hearth.inference.engine.adapters import Adapter, AdapterLayers
from hearth.inference.engine.batch import DecodeBatch, EngineStats
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.graphs import CudaRecorder
from hearth.inference.engine.options import EngineOptions
from hearth.inference.engine.prompts import PromptStore
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.scheduler import Scheduler
from hearth.inference.engine.sequence import (
    RequestLimits,
    SequenceState,
    StopText,
    check_request,
    total_limit,
)
from hearth.inference.engine.weights import PreparedSnapshot, ServedWeights
from hearth.inference.sync_tracker import ServingState, closed_error, resolve_future
from hearth.inference.texts import special_tokens, text_decoder
from hearth.models.loading import LoadedModel
from hearth.sync.store import Snapshot
from hearth.threads import refresh
from hearth.wire.completions import RunningRequests

logger = logging.getLogger(__name__)

_MIB = 2**20
LONGEST_DEFAULT = 32768
"""Longest sequence without ``max_seq_len``, of a model that has more positions."""
_MOST_WAITS = 20
"""An idle engine starts after this many times ``gather_s``, even while requests keep coming."""


class InferenceEngine(InferenceBackend):
    """Samples completions from one model. The module must be its own.

    ``recorder`` records decoding steps; None takes CUDA's where the model is on a GPU.

    Raises:
        ConfigError: the model is of a kind that the engine cannot run.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        tokenizer: Tokenizer | None = None,
        options: EngineOptions | None = None,
        on_phase: Callable[[Phase], None] | None = None,
        recorder: CudaRecorder | None = None,
    ) -> None:
        self.options = options or EngineOptions()
        longest = self.options.max_seq_len or min(loaded.max_position, LONGEST_DEFAULT)
        super().__init__(tokenizer, longest)
        self._loaded = loaded
        self._special = special_tokens(tokenizer)
        device = torch.device(loaded.device)
        if recorder is None and self.options.cuda_graphs and device.type == "cuda":
            recorder = CudaRecorder(device)
        self._adapters: AdapterPool | None = None
        layers = AdapterLayers(loaded) if self.options.max_adapters else None
        if layers is not None:
            self._adapters = AdapterPool(self.options.max_adapters, layers.read)
        runner = ModelRunner(
            loaded,
            max_seq_len=self.max_seq_len,
            recorder=recorder,
            decoder=self.options.decoder,
            adapters=layers,
        )
        budgets = self.options.budgets(device)
        cache = SlotCache(
            runner.cache_shape,
            budget_bytes=budgets.cache_mb * _MIB,
            max_slots=self.options.max_slots,
        )
        self._weights = ServedWeights(loaded, takes_adapter=self.options.max_adapters == 0)
        self._batch = DecodeBatch(
            runner, cache, PromptStore(budgets.prompt_cache_mb * _MIB), serving=self._tracker.state
        )
        self._is_routed = runner.routers is not None
        self._has_warned_dense = False
        self._limits = RequestLimits(
            vocab_size=loaded.vocab_size,
            max_seq_len=self.max_seq_len,
            fits=lambda tokens: cache.fits(1, tokens),
            cache_size=f"{budgets.cache_mb} MiB",
            has_tokenizer=tokenizer is not None,
        )
        self._scheduler = Scheduler(prefill_tokens=budgets.prefill_tokens)
        self._wake = threading.Condition()
        self._inbox: deque[SequenceState] = deque()
        self._cancelled: deque[SequenceState] = deque()
        self._pending_loads: deque[_PendingLoad] = deque()
        self._on_phase = on_phase
        self._is_woken = False
        self._closing = False
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="hearth-snapshots")
        self._thread = threading.Thread(target=self._run, name="hearth-inference", daemon=True)
        self._thread.start()

    def submit(self, request: SampleRequest) -> Future[SampledSequence]:
        """Queue one completion. Cancelling the future frees its slot."""
        check_request(request, self._limits)
        if request.adapter is not None and self._adapters is None:
            raise RequestError(
                f"adapter must be absent, got {request.adapter.identity!r}: this deployment has "
                "max_adapters 0"
            )
        sequence = self._sequence(self._without_useless_routing(request))
        with self._wake:
            if self._closing:
                raise closed_error()
            if request.adapter is None:
                self._inbox.append(sequence)
                self._wake.notify()
        sequence.future.add_done_callback(lambda future: self._note_cancel(future, sequence))
        if request.adapter is not None and self._adapters is not None:
            self._queue_with_adapter(sequence, request.adapter, self._adapters)
        return sequence.future

    def hot_load(
        self,
        identity: str,
        fetch: Callable[[], Snapshot],
        *,
        weight_version: int | None = None,
        running_requests: RunningRequests = "drain",
    ) -> Future[ServingState]:
        """Serve the snapshot that ``fetch`` returns; it is called on a thread of its own.

        Once it is read, running requests end on the old weights while new ones wait for the new
        weights. With ``keep`` nothing waits: all sequences go on with the new weights on top of
        their old keys and values (PipelineRL, arXiv:2509.19128), and each logprob is of the
        distribution from which its token was sampled.

        Snapshots are swapped in in the order in which they were read.
        """
        with self._wake:
            if self._closing:
                raise closed_error()
            if self._tracker.begin(identity, weight_version):
                self._request_wake()
                self._fetcher.submit(self._fetch, identity, fetch, running_requests)
        return self._tracker.watch_sync(identity)

    def load_snapshot(
        self, snapshot: Snapshot, *, running_requests: RunningRequests = "drain"
    ) -> Future[ServingState]:
        """Serve a snapshot that is in memory: requests submitted from now on are run on it.

        ``running_requests`` is that of ``hot_load``.
        """
        with self._wake:
            if self._closing:
                raise closed_error()
            if self._tracker.begin(snapshot.identity):
                self._pending_loads.append(_PendingLoad(snapshot, running_requests))
                self._wake.notify()
        return self._tracker.watch_sync(snapshot.identity)

    def stats(self) -> EngineStats:
        """Counts since the start, and how many requests run and wait now."""
        waiting = len(self._scheduler) + len(self._inbox)
        return replace(self._batch.stats, running=len(self._batch.slots), waiting=waiting)

    def close(self) -> None:
        """Stop; requests that are left fail with ``ClosedError``."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._fetcher.shutdown(wait=False, cancel_futures=True)

    def _queue_with_adapter(
        self, sequence: SequenceState, source: AdapterSource, pool: AdapterPool
    ) -> None:
        """Queue a request as soon as its adapter is loaded; it is kept until the request ends."""

        def queue(loaded: Future[Adapter]) -> None:
            if (error := loaded.exception()) is not None:
                failure = error if isinstance(error, Exception) else EngineError(str(error))
                resolve_future(sequence.future, error=failure)
                return
            sequence.adapter = loaded.result()
            with self._wake:
                is_closed = self._closing
                # A request that is cancelled later is taken out by the engine thread.
                if not is_closed and not sequence.future.done():
                    self._inbox.append(sequence)
                    self._wake.notify()
            if is_closed:
                resolve_future(sequence.future, error=closed_error())

        adapter = pool.acquire(source)
        sequence.future.add_done_callback(lambda _: pool.release(source.identity, adapter))
        adapter.add_done_callback(queue)

    def _without_useless_routing(self, request: SampleRequest) -> SampleRequest:
        """The request; of a dense model it asks for no experts."""
        if not request.routing or self._is_routed:
            return request
        with self._wake:
            is_first, self._has_warned_dense = not self._has_warned_dense, True
        if is_first:
            logger.warning(
                "requests ask for the experts of %s, which has none that can be recorded: the "
                "answers have none",
                self._loaded.name,
            )
        return replace(request, routing=False)

    def _sequence(self, request: SampleRequest) -> SequenceState:
        stop_ids = {
            *request.stop_token_ids,
            *(() if request.ignore_eos else self._loaded.eos_token_ids),
        }
        # Special tokens are left out of the text, so these stop strings are compared by their ids.
        stop_ids.update(self._special[text] for text in request.stop if text in self._special)
        text_of = text_decoder(self.tokenizer, request.visible_tokens)
        return SequenceState(
            request=request,
            tokens=tuple(request.prompt),
            future=Future(),
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            stop_ids=tuple(sorted(stop_ids)),
            limit=total_limit(request, self.max_seq_len),
            arrived_s=time.perf_counter(),
            text_of=text_of,
            stop_text=StopText(text_of, tuple(request.stop)) if request.stop else None,
        )

    def _note_cancel(self, future: Future[SampledSequence], sequence: SequenceState) -> None:
        if future.cancelled():
            with self._wake:
                self._cancelled.append(sequence)
                self._wake.notify()

    def _fetch(
        self, identity: str, fetch: Callable[[], Snapshot], running_requests: RunningRequests
    ) -> None:
        """Read a snapshot while the engine runs; called on the fetching thread."""
        try:
            snapshot = replace(fetch(), identity=identity)
            if snapshot.kind == "delta":
                # Its parent may still be loading.
                self._tracker.wait_turn(identity)
            prepared = self._weights.prepare(snapshot)
        except Exception as error:  # noqa: BLE001 - the boundary: the state of the weight sync has it
            self._tracker.fail(identity, error)
            with self._wake:
                self._request_wake()
            return
        with self._wake:
            self._pending_loads.append(_PendingLoad(prepared, running_requests))
            self._wake.notify()

    def _request_wake(self) -> None:
        """Wake the engine thread to report its phase; call it with the lock held."""
        self._is_woken = True
        self._wake.notify()

    def _run(self) -> None:
        """The engine thread: steps until closed."""
        end: Exception = closed_error()
        failure: EngineError | None = None
        try:
            while self._await_work():
                self._step()
        except Exception as error:
            logger.exception("the engine has ended")
            end = failure = EngineError(f"the engine has ended: {type(error).__name__}: {error}")
        with self._wake:
            self._closing = True
            left = [*self._scheduler, *self._inbox]
        self._batch.fail_all(end)
        self._batch.deliver()
        for sequence in left:
            resolve_future(sequence.future, error=end)
        if self._adapters is not None:
            self._adapters.close()
        self._tracker.close()
        if failure is not None:
            self.failed.set_result(failure)

    def _step(self) -> None:
        refresh()
        if self._pending_loads and (
            self._pending_loads[0].running_requests == "keep" or not self._batch.slots
        ):
            self._report_phase("load_snapshot")
            self._swap_weights(self._pending_loads.popleft().item)
        # While new weights wait for running requests to end, no request starts on the old ones.
        if self._scheduler and not self._pending_loads:
            self._report_phase("sampling")
            batch = self._batch
            batch.start(self._scheduler.admit(batch.slots, batch.cache, batch.prompts))
        if self._batch.slots:
            self._report_phase("sampling")
            self._batch.advance()
        if self._batch.has_results:
            # First, since the receiver of the last result may start to compute at once.
            self._report_rest()
            self._batch.deliver()

    def _await_work(self) -> bool:
        """Wait for work, then queue new requests and drop cancelled ones; False once closing."""
        self._report_rest()
        with self._wake:
            if not self._has_work():
                self._wake.wait_for(lambda: self._closing or self._has_work())
                self._wait_for_more()
            self._is_woken = False
            self._scheduler.add(self._inbox)
            self._inbox.clear()
            cancelled = list(self._cancelled)
            self._cancelled.clear()
        if cancelled:
            self._scheduler.remove(cancelled)
            self._batch.drop(cancelled)
            self._batch.stats.cancelled += len(cancelled)
        return not self._closing

    def _has_work(self) -> bool:
        return bool(
            self._inbox
            or self._cancelled
            or self._pending_loads
            or self._batch.slots
            or self._scheduler
            or self._is_woken
        )

    def _wait_for_more(self) -> None:
        """Requests come in groups: while they keep coming, wait for ``gather_s`` for the next."""
        seen, end_s = 0, time.perf_counter() + _MOST_WAITS * self.options.gather_s
        while len(self._inbox) > seen and not self._closing and time.perf_counter() < end_s:
            seen = len(self._inbox)
            self._wake.wait(self.options.gather_s)

    def _report_rest(self) -> None:
        """Report that nothing is computed, if nothing runs or waits."""
        if not (self._batch.slots or self._scheduler or self._inbox):
            is_loading = self._tracker.state().stage == "loading"
            self._report_phase("load_snapshot" if is_loading else "idle")

    def _swap_weights(self, item: Snapshot | PreparedSnapshot) -> None:
        """Swap the weights; if that fails, the old ones stay."""
        snapshot = item.snapshot if isinstance(item, PreparedSnapshot) else item
        try:
            prepared = item if isinstance(item, PreparedSnapshot) else self._weights.prepare(item)
            self._weights.swap_in(prepared)
        except Exception as error:  # noqa: BLE001 - the boundary: the state of the weight sync has it
            self._tracker.fail(snapshot.identity, error)
            return
        self._batch.weights_changed()
        self._tracker.finish(snapshot.identity, is_adapter=snapshot.kind == "lora")


@dataclass(frozen=True, eq=False)
class _PendingLoad:
    """A snapshot that waits to be swapped in."""

    item: Snapshot | PreparedSnapshot
    running_requests: RunningRequests
