"""The engine: requests in from any thread, completions out, one thread that runs the model.

Each step admits what fits, prefills its prompts and draws their first tokens, and then draws one
more token for every row. New weights are taken between steps: once nothing runs on the old ones, or
amid what runs, as each weight sync asks.
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

from hearth.errors import EngineError
from hearth.inference.backend import Phase, SampledSequence, SampleRequest, ServingState, Tokenizer
from hearth.inference.engine.batch import DecodeBatch, EngineStats
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.graphs import Recorder, recorder_for
from hearth.inference.engine.options import EngineOptions
from hearth.inference.engine.prompts import PromptStore
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.scheduler import Admission, Scheduler
from hearth.inference.engine.sequence import (
    RequestLimits,
    Running,
    StopText,
    check_request,
    total_limit,
)
from hearth.inference.engine.sync_tracker import SyncTracker, closed_error, resolve_future
from hearth.inference.engine.weights import Prepared, ServedWeights
from hearth.inference.texts import special_tokens, text_decoder
from hearth.models.loading import LoadedModel
from hearth.sync.store import Snapshot
from hearth.threads import refresh
from hearth.wire.completions import RunningRequests

logger = logging.getLogger(__name__)

_MIB = 2**20
LONGEST_DEFAULT = 32768
"""Longest sequence where nobody says, of a model that has more positions."""
_MOST_GATHERED = 20
"""An idle engine starts after this many times ``gather_s`` even if requests keep coming."""


class InferenceEngine:
    """Draws completions with one model; an ``InferenceBackend``. Takes the module for itself.

    ``recorder`` records decoding steps; None takes what the model's device has.

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
        recorder: Recorder | None = None,
    ) -> None:
        self.options = options or EngineOptions()
        self.max_seq_len = self.options.max_seq_len or min(loaded.max_position, LONGEST_DEFAULT)
        self._loaded = loaded
        self._tokenizer = tokenizer
        self._special = special_tokens(tokenizer)
        device = torch.device(loaded.device)
        if recorder is None and self.options.cuda_graphs:
            recorder = recorder_for(device)
        runner = ModelRunner(loaded, max_seq_len=self.max_seq_len, recorder=recorder)
        budgets = self.options.budgets(device)
        cache = SlotCache(
            runner.cache_shape, budget_bytes=budgets.cache_mb * _MIB, max_rows=self.options.max_rows
        )
        self._serving = SyncTracker()
        self._weights = ServedWeights(loaded)
        self._batch = DecodeBatch(
            runner, cache, PromptStore(budgets.prompt_cache_mb * _MIB), serving=self._serving.state
        )
        self._is_routed = runner.routers is not None
        self._has_told_dense = False
        self._limits = RequestLimits(
            vocab_size=loaded.vocab_size,
            max_seq_len=self.max_seq_len,
            fits=lambda tokens: cache.fits(1, tokens),
            cache_size=f"{budgets.cache_mb} MiB",
            has_tokenizer=tokenizer is not None,
        )
        self._scheduler = Scheduler(prefill_tokens=budgets.prefill_tokens)
        self._wake = threading.Condition()
        self._inbox: deque[Running] = deque()
        self._cancelled: deque[Running] = deque()
        self._loads: deque[_PendingLoad] = deque()
        self._phase: Phase = "idle"
        self._on_phase = on_phase
        self._nudged = False
        self._closing = False
        self._fetcher = ThreadPoolExecutor(1, thread_name_prefix="hearth-snapshots")
        self._thread = threading.Thread(target=self._run, name="hearth-inference", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """As given."""
        return self._tokenizer

    def submit(self, request: SampleRequest) -> Future[SampledSequence]:
        """Queue one completion. Cancelling the future frees its row.

        Raises:
            RequestError: a field breaks its rule.
            ClosedError: the engine was closed.
        """
        check_request(request, self._limits)
        sequence = self._sequence(self._recordable(request))
        with self._wake:
            if self._closing:
                raise closed_error()
            self._inbox.append(sequence)
            self._wake.notify()
        sequence.future.add_done_callback(lambda future: self._note_cancel(future, sequence))
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

        Once it is read, running requests end on the old weights while new ones wait, and start
        on the new. With ``keep`` nobody waits: the next tokens of all are drawn with the new
        weights, in rows that run on top of their old keys and values (PipelineRL,
        arXiv:2509.19128), and each logprob is of the distribution that its token was drawn from.

        Snapshots are taken in the order in which they were read, each in its own way. One that is
        served or under way is not loaded again, whatever is asked for the second time.
        ``weight_version`` is the number that these weights had before a restart.

        Raises:
            ClosedError: the engine was closed.
        """
        with self._wake:
            if self._closing:
                raise closed_error()
            if self._serving.begin(identity, weight_version):
                self._nudge()
                self._fetcher.submit(self._fetch, identity, fetch, running_requests)
        return self._serving.settled(identity)

    def load_snapshot(
        self, snapshot: Snapshot, *, running_requests: RunningRequests = "drain"
    ) -> Future[ServingState]:
        """Serve a snapshot that is at hand: what is submitted from now on is drawn with it.

        ``running_requests`` is that of ``hot_load``.

        Raises:
            ClosedError: the engine was closed.
        """
        with self._wake:
            if self._closing:
                raise closed_error()
            if self._serving.begin(snapshot.identity):
                self._loads.append(_PendingLoad(snapshot, running_requests))
                self._wake.notify()
        return self._serving.settled(snapshot.identity)

    def state(self) -> ServingState:
        """What is served now."""
        return self._serving.state()

    def settled(self, identity: str) -> Future[ServingState]:
        """The state as soon as ``identity`` is served or could not be loaded."""
        return self._serving.settled(identity)

    def watch_phase(self, on_phase: Callable[[Phase], None]) -> None:
        """Call ``on_phase`` at every change, on the engine's thread, instead of the one before.

        ``load_snapshot`` while one is taken, ``sampling`` while requests run, else
        ``load_snapshot`` while one is read, else ``idle``, as at the start.
        """
        self._on_phase = on_phase

    def stats(self) -> EngineStats:
        """Counts since the start, and how many requests run and wait now."""
        waiting = len(self._scheduler.waiting) + len(self._inbox)
        return replace(self._batch.stats, running=len(self._batch.rows), waiting=waiting)

    def close(self) -> None:
        """Stop; whatever is left fails with ``ClosedError``."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._fetcher.shutdown(wait=False, cancel_futures=True)

    def _recordable(self, request: SampleRequest) -> SampleRequest:
        """The request, without asking for experts where there are none."""
        if not request.routing or self._is_routed:
            return request
        with self._wake:
            is_first, self._has_told_dense = not self._has_told_dense, True
        if is_first:
            logger.warning(
                "requests ask for the experts of %s, which has none that can be recorded: they "
                "get answers without",
                self._loaded.name,
            )
        return replace(request, routing=False)

    def _sequence(self, request: SampleRequest) -> Running:
        stop_ids = {
            *request.stop_token_ids,
            *(() if request.ignore_eos else self._loaded.eos_token_ids),
        }
        # Special tokens seldom show in the text, so they are looked for by their ids.
        stop_ids.update(self._special[text] for text in request.stop if text in self._special)
        text_of = text_decoder(self._tokenizer, request.shown)
        return Running(
            request=request,
            tokens=tuple(request.prompt),
            future=Future(),
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
            stop_ids=tuple(sorted(stop_ids)),
            limit=total_limit(request, self.max_seq_len),
            arrived_s=time.perf_counter(),
            text_of=text_of,
            watch=StopText(text_of, tuple(request.stop)) if request.stop else None,
        )

    def _note_cancel(self, future: Future[SampledSequence], sequence: Running) -> None:
        if future.cancelled():
            with self._wake:
                self._cancelled.append(sequence)
                self._wake.notify()

    def _fetch(
        self, identity: str, fetch: Callable[[], Snapshot], running_requests: RunningRequests
    ) -> None:
        """Read a snapshot while the engine goes on; runs on the fetching thread."""
        try:
            snapshot = replace(fetch(), identity=identity)
            if snapshot.kind == "delta":
                # What it goes on top of may be on its way.
                self._serving.wait_turn(identity)
            prepared = self._weights.prepare(snapshot)
        except Exception as error:
            logger.exception("weight sync: snapshot %s could not be read", identity)
            self._serving.failed(identity, error)
            with self._wake:
                self._nudge()
            return
        with self._wake:
            self._loads.append(_PendingLoad(prepared, running_requests))
            self._wake.notify()

    def _nudge(self) -> None:
        """Have the engine thread look at its phase; to be called with the lock held."""
        self._nudged = True
        self._wake.notify()

    def _run(self) -> None:
        """The engine thread: one step after the other until closed."""
        end: Exception = closed_error()
        try:
            while self._await_work():
                self._step()
        except Exception as error:
            logger.exception("the engine has ended")
            end = EngineError(f"the engine has ended: {type(error).__name__}: {error}")
        with self._wake:
            self._closing = True
            left = [*self._scheduler.waiting, *self._inbox]
        self._batch.fail_all(end)
        self._batch.deliver()
        for sequence in left:
            resolve_future(sequence.future, error=end)
        self._serving.close()

    def _step(self) -> None:
        refresh()
        if self._loads and (self._loads[0].running_requests == "keep" or not self._batch.rows):
            self._tell_phase("load_snapshot")
            self._take(self._loads.popleft().item)
        # With new weights at the door nobody starts on the old ones.
        if self._scheduler.waiting and not self._loads:
            self._tell_phase("sampling")
            self._batch.start(self._admit())
        if self._batch.rows:
            self._tell_phase("sampling")
            self._batch.advance()
        if self._batch.has_outcomes:
            # Whoever gets the last one may be the next to compute.
            self._tell_rest()
            self._batch.deliver()

    def _await_work(self) -> bool:
        """Wait until there is something to do and take in what came; False once closing."""
        self._tell_rest()
        with self._wake:
            if not self._has_work():
                self._wake.wait_for(lambda: self._closing or self._has_work())
                self._gather()
            self._nudged = False
            self._scheduler.waiting.extend(self._inbox)
            self._inbox.clear()
            gone = list(self._cancelled)
            self._cancelled.clear()
        if gone:
            self._scheduler.remove(gone)
            self._batch.drop(gone)
            self._batch.stats.cancelled += len(gone)
        return not self._closing

    def _has_work(self) -> bool:
        return bool(
            self._inbox
            or self._cancelled
            or self._loads
            or self._batch.rows
            or self._scheduler.waiting
            or self._nudged
        )

    def _gather(self) -> None:
        """Requests come in groups: while they keep coming, wait a little for the next."""
        seen, end_s = 0, time.perf_counter() + _MOST_GATHERED * self.options.gather_s
        while len(self._inbox) > seen and not self._closing and time.perf_counter() < end_s:
            seen = len(self._inbox)
            self._wake.wait(self.options.gather_s)

    def _tell_rest(self) -> None:
        """Say that nothing is computed, if that is so."""
        if not (self._batch.rows or self._scheduler.waiting or self._inbox):
            is_loading = self._serving.state().stage == "loading"
            self._tell_phase("load_snapshot" if is_loading else "idle")

    def _tell_phase(self, phase: Phase) -> None:
        if phase == self._phase:
            return
        self._phase = phase
        if self._on_phase is None:
            return
        try:
            self._on_phase(phase)
        except Exception:
            logger.exception("whoever is told the phase failed; the engine goes on")

    def _admit(self) -> Admission:
        batch = self._batch
        return self._scheduler.admit(batch.rows, batch.cache, batch.prompts)

    def _take(self, item: Snapshot | Prepared) -> None:
        """Swap the weights; one that fails leaves what runs as it is."""
        snapshot = item.snapshot if isinstance(item, Prepared) else item
        try:
            prepared = item if isinstance(item, Prepared) else self._weights.prepare(item)
            self._weights.take(prepared)
        except Exception as error:
            logger.exception("weight sync: snapshot %s was refused", snapshot.identity)
            self._serving.failed(snapshot.identity, error)
            return
        self._batch.weights_changed()
        self._serving.served(snapshot.identity, is_adapter=snapshot.kind == "lora")


@dataclass(frozen=True, eq=False)
class _PendingLoad:
    """A snapshot that waits to be taken."""

    item: Snapshot | Prepared
    running_requests: RunningRequests
