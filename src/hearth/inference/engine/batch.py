"""The running batch: prefills prompts, samples one token per slot and step, frees slots that end.

Owns the slots, the cache and the prefilled prompts. One thread uses it; ``deliver`` resolves the
futures of what has ended.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from hearth.errors import EngineError
from hearth.inference.backend import SampledSequence
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.prompts import Prompt, PromptStore
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.sampler import sample
from hearth.inference.engine.scheduler import Admission, PrefillBatch
from hearth.inference.engine.sequence import SequenceState
from hearth.inference.engine.slots import DecodeSlots
from hearth.inference.sync_tracker import ServingState, resolve_future
from hearth.wire.completions import FinishReason

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """Counts since the start; ``running`` and ``waiting`` are of this moment."""

    steps: int = 0
    """Decoding steps; each samples one token per active slot."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed, padding included."""
    cached_prompt_tokens: int = 0
    """Prompt tokens that needed no prefill of their own."""
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    most_slots: int = 0
    running: int = 0
    waiting: int = 0


class DecodeBatch:
    """Sequences that run together on one model.

    ``serving`` returns the state whose version is written into results.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: SlotCache,
        prompts: PromptStore,
        *,
        serving: Callable[[], ServingState],
    ) -> None:
        self.slots = DecodeSlots()
        self.cache = cache
        self.prompts = prompts
        self.stats = EngineStats()
        self._runner = runner
        self._serving = serving
        self._results: list[tuple[SequenceState, SampledSequence | Exception]] = []

    @torch.inference_mode()
    def start(self, admission: Admission) -> None:
        """Prefill admitted requests and sample their first tokens; one that fails fails alone."""
        now_s = time.perf_counter()
        for sequence in admission.sequences:
            sequence.started_s = now_s
            self.stats.cached_prompt_tokens += sequence.cached_prompt_tokens
        for batch in admission.batches(packs=self._runner.packs):
            try:
                self._prefill(admission, batch)
            except Exception:
                logger.exception("prefill of %d prompts failed", len(batch.prompts))
                self._prefill_each(admission, batch)
        ready = [sequence for sequence in admission.sequences if sequence.prompt is not None]
        try:
            self._assign_slots([sequence for sequence in ready if sequence.needs_slot])
        except Exception as error:
            logger.exception("admission of %d requests failed", len(ready))
            self.drop(ready)
            self._fail(ready, error)
        for sequence in ready:
            if not sequence.needs_slot:
                self._finish(sequence, self._result(sequence, ([], [], []), "length"))

    @torch.inference_mode()
    def advance(self) -> None:
        """Sample one token for every slot; a failure fails all of them."""
        count = len(self.slots)
        try:
            tokens, positions = self.slots.inputs(self._runner.least_rows)
            with self._runner.recording(self.slots.want_routing) as record:
                logits = self._runner.decode(tokens, positions, self.cache, self.slots.adapters)
            self.stats.steps += 1
            self.slots.append_routing(record.choices())
            self._sample(slice(0, count), logits[:count])
        except Exception as error:
            logger.exception("decoding step of %d slots failed", count)
            self.fail_all(error)

    def drop(self, sequences: Iterable[SequenceState]) -> None:
        """Free the slots of those ``sequences`` that have one; futures stay as they are."""
        dropped = {id(sequence) for sequence in sequences}
        active = enumerate(self.slots.sequences)
        self._free([slot for slot, sequence in active if id(sequence) in dropped])

    def fail_all(self, error: Exception) -> None:
        """Fail every running sequence and empty the batch."""
        running = list(self.slots.sequences)
        self._free(range(len(running)))
        self.cache.clear()
        self._fail(running, error)

    @property
    def has_results(self) -> bool:
        """Whether a future is still to be resolved."""
        return bool(self._results)

    def deliver(self) -> None:
        """Resolve the futures of what has ended."""
        results, self._results = self._results, []
        for sequence, result in results:
            if isinstance(result, Exception):
                resolve_future(sequence.future, error=result)
            else:
                resolve_future(sequence.future, result=result)

    def weights_changed(self) -> None:
        """Drop what the old weights computed, except the caches of running sequences.

        To be called before ``serving`` returns the new version: tokens that exist already get the
        old one.
        """
        self._runner.weights_changed()
        self.prompts.clear()
        if not self.slots and self._runner.reads_masked_keys:
            self.cache.clear()
        for slot, sequence in enumerate(self.slots.sequences):
            sequence.end_run(self._serving(), self.slots.count(slot))

    def _prefill(self, admission: Admission, batch: PrefillBatch) -> None:
        prefilled, computed = self._runner.prefill(batch.prompts, batch.extras, batch.adapter)
        self.stats.prefill_tokens += computed
        done = {prompt.tokens: prompt for prompt in prefilled}
        for prompt in done.values():
            self.prompts.put(prompt)
        for sequence in admission.sequences:
            if sequence.adapter is batch.adapter:
                sequence.prompt = sequence.prompt or done.get(sequence.tokens)

    def _prefill_each(self, admission: Admission, batch: PrefillBatch) -> None:
        """Prefill prompts one by one after they failed together."""
        for prompt in batch.prompts:
            try:
                self._prefill(admission, replace(batch, prompts=[prompt]))
            except Exception as error:
                logger.exception("prefill of a prompt of %d tokens failed", len(prompt))
                key = (batch.adapter, prompt)
                failed = [
                    sequence
                    for sequence in admission.sequences
                    if (sequence.adapter, sequence.tokens) == key
                ]
                self._fail(failed, error)

    def _assign_slots(self, sequences: Sequence[SequenceState]) -> None:
        """Give each sequence a slot with its prompt in the cache, and sample its first token."""
        if not sequences:
            return
        before = len(self.slots)
        longest = max(self.slots.longest_limit, *(sequence.limit for sequence in sequences))
        self.cache.reserve(before + len(sequences), longest, active=before)
        slots = self.slots.add(sequences)
        self.stats.most_slots = max(self.stats.most_slots, len(self.slots))
        places: dict[int, tuple[Prompt, list[int]]] = {}
        for slot, sequence in enumerate(sequences, before):
            assert sequence.prompt is not None
            sequence.num_concurrent = len(self.slots)
            sequence.notify_prefill()
            if sequence.request.routing and sequence.prompt.routing is not None:
                sequence.routing.append(sequence.prompt.routing[-1])
            places.setdefault(id(sequence.prompt), (sequence.prompt, []))[1].append(slot)
        for prompt, targets in places.values():
            self.cache.fill(targets, prompt.keys, prompt.values)
        logits = [sequence.prompt.logits for sequence in sequences if sequence.prompt is not None]
        self._sample(slots, torch.stack(logits))

    def _sample(self, slots: slice, logits: torch.Tensor) -> None:
        sampled = sample(logits, *self.slots.sampling_inputs(slots))
        ended = self.slots.append(slots, sampled)
        self.slots.notify(slots, sampled)
        self.stats.generated_tokens += slots.stop - slots.start
        if not ended:
            return
        results = [
            (self.slots.sequences[slot], self._result_of_slot(slot, reason))
            for slot, reason in ended
        ]
        self.cache.wipe([slot for slot, _ in ended if not self.slots.is_finite(slot)])
        self._free([slot for slot, _ in ended])
        for sequence, result in results:
            if isinstance(result, EngineError):
                self._fail([sequence], result)
            else:
                self._finish(sequence, result)

    def _free(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        longest = self.slots.longest
        sources, targets = self.slots.remove(slots)
        if sources:
            self.cache.move(sources, targets, longest)

    def _result_of_slot(self, slot: int, reason: FinishReason) -> SampledSequence | EngineError:
        completion = self.slots.completion(slot)
        if self.slots.is_finite(slot):
            return self._result(self.slots.sequences[slot], completion, reason)
        return EngineError(
            f"logits must be numbers, got NaN after {len(completion[0])} tokens: the weights of "
            f"version {self._serving().weight_version} are broken, or overflow in this dtype"
        )

    def _result(
        self,
        sequence: SequenceState,
        completion: tuple[list[int], list[float], list[float]],
        reason: FinishReason,
    ) -> SampledSequence:
        tokens, logprobs, sampling_logprobs = completion
        sequence.end_run(self._serving(), len(tokens))
        oldest = min(sequence.runs, key=lambda run: run.weight_version)
        text = sequence.text_of(tokens)
        return SampledSequence(
            token_ids=tokens,
            logprobs=logprobs,
            sampling_logprobs=sampling_logprobs,
            prompt_logprobs=sequence.prompt_logprobs(),
            prompt_top_logprobs=sequence.prompt_top_logprobs(),
            top_logprobs=sequence.top_logprobs if sequence.request.top_logprobs else None,
            routing=sequence.routing if sequence.request.routing else None,
            prompt_routing=sequence.prompt_routing(),
            text=sequence.stop_text.cut(text) if sequence.stop_text else text,
            finish_reason=reason,
            weight_version=oldest.weight_version,
            snapshot_identity=oldest.snapshot_identity,
            versions=[[run.weight_version, run.tokens] for run in sequence.runs if run.tokens],
            seed=sequence.seed,
            queue_s=sequence.started_s - sequence.arrived_s,
            generation_s=time.perf_counter() - sequence.started_s,
            cached_prompt_tokens=sequence.cached_prompt_tokens,
            num_concurrent=max(1, sequence.num_concurrent),
        )

    def _finish(self, sequence: SequenceState, result: SampledSequence) -> None:
        self.stats.finished += 1
        self._results.append((sequence, result))

    def _fail(self, sequences: Iterable[SequenceState], error: Exception) -> None:
        for sequence in sequences:
            self.stats.failed += 1
            self._results.append((sequence, error))
