"""The running batch: prompts are prefilled into it, every step draws one token per row, and rows
leave as they end. Owns rows, cache and prefilled prompts. One thread uses it, and says when futures
are settled (``deliver``).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from hearth.errors import EngineError
from hearth.inference.backend import SampledSequence, ServingState
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.prompts import Extras, Prompt, PromptStore
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.sampler import sample
from hearth.inference.engine.scheduler import Admission
from hearth.inference.engine.sequence import Running
from hearth.inference.engine.slots import DecodeSlots
from hearth.inference.engine.sync_tracker import resolve_future
from hearth.wire.completions import FinishReason

logger = logging.getLogger(__name__)


@dataclass
class EngineStats:
    """Counts since the start; ``running`` and ``waiting`` are of this moment."""

    steps: int = 0
    """Decoding steps; each draws one token per active row."""
    prefill_tokens: int = 0
    """Prompt tokens that were computed, padding included."""
    cached_prompt_tokens: int = 0
    """Prompt tokens that needed no prefill of their own."""
    generated_tokens: int = 0
    finished: int = 0
    cancelled: int = 0
    failed: int = 0
    most_rows: int = 0
    running: int = 0
    waiting: int = 0


class DecodeBatch:
    """Sequences that run together on one model.

    ``serving`` says which version tokens are stamped with.
    """

    def __init__(
        self,
        runner: ModelRunner,
        cache: SlotCache,
        prompts: PromptStore,
        *,
        serving: Callable[[], ServingState],
    ) -> None:
        self.rows = DecodeSlots()
        self.cache = cache
        self.prompts = prompts
        self.stats = EngineStats()
        self._runner = runner
        self._serving = serving
        self._ended: list[tuple[Running, SampledSequence | Exception]] = []

    @torch.inference_mode()
    def start(self, admission: Admission) -> None:
        """Prefill what is admitted and draw its first tokens; a failure fails only its own."""
        now_s = time.perf_counter()
        for sequence in admission.sequences:
            sequence.started_s = now_s
            self.stats.cached_prompt_tokens += sequence.cached_prompt_tokens
        for extras, prompts in admission.batches(packs=self._runner.packs):
            try:
                self._prefill(admission, prompts, extras)
            except Exception:
                logger.exception("prefill of %d prompts failed", len(prompts))
                self._prefill_each(admission, prompts, extras)
        ready = [sequence for sequence in admission.sequences if sequence.prompt is not None]
        try:
            self._enter([one for one in ready if one.draws])
        except Exception as error:
            logger.exception("admission of %d requests failed", len(ready))
            self.drop(ready)
            self._fail(ready, error)
        for sequence in ready:
            if not sequence.draws:
                self._finish(sequence, self._result(sequence, ([], [], []), "length"))

    @torch.inference_mode()
    def advance(self) -> None:
        """Draw one token for every row; a failure fails all of them."""
        count = len(self.rows)
        try:
            tokens, positions = self.rows.inputs()
            with self._runner.recording(self.rows.are_routed) as record:
                logits = self._runner.decode(tokens, positions, self.cache)
            self.stats.steps += 1
            self.rows.take_routing(record.choices())
            self._draw(slice(0, count), logits[:count])
        except Exception as error:
            logger.exception("decoding step of %d rows failed", count)
            self.fail_all(error)

    def drop(self, sequences: Iterable[Running]) -> None:
        """Free the rows of ``sequences``, as far as they have one; futures stay as they are."""
        gone = {id(sequence) for sequence in sequences}
        self._free([row for row, one in enumerate(self.rows.sequences) if id(one) in gone])

    def fail_all(self, error: Exception) -> None:
        """Fail every running sequence and empty the batch."""
        running = list(self.rows.sequences)
        self._free(range(len(running)))
        self.cache.clear()
        self._fail(running, error)

    @property
    def has_outcomes(self) -> bool:
        """Whether something has ended that nobody was told of."""
        return bool(self._ended)

    def deliver(self) -> None:
        """Settle the futures of what has ended."""
        ended, self._ended = self._ended, []
        for sequence, outcome in ended:
            if isinstance(outcome, Exception):
                resolve_future(sequence.future, error=outcome)
            else:
                resolve_future(sequence.future, result=outcome)

    def weights_changed(self) -> None:
        """Forget what the weights before computed, but for the caches of the rows that run.

        To be called before ``serving`` names the new version: what the rows have drawn so far is
        stamped with the one before.
        """
        self._runner.weights_changed()
        self.prompts.clear()
        if not self.rows:
            self.cache.clear()
        for row, sequence in enumerate(self.rows.sequences):
            sequence.end_run(self._serving(), self.rows.count(row))

    def _prefill(
        self, admission: Admission, prompts: Sequence[tuple[int, ...]], extras: Extras
    ) -> None:
        prefilled, computed = self._runner.prefill(prompts, extras)
        self.stats.prefill_tokens += computed
        done = {prompt.tokens: prompt for prompt in prefilled}
        for prompt in done.values():
            self.prompts.put(prompt)
        for sequence in admission.sequences:
            sequence.prompt = sequence.prompt or done.get(sequence.tokens)

    def _prefill_each(
        self, admission: Admission, prompts: Sequence[tuple[int, ...]], extras: Extras
    ) -> None:
        """Prefill prompts one by one, which together have failed."""
        for prompt in prompts:
            try:
                self._prefill(admission, [prompt], extras)
            except Exception as error:
                logger.exception("prefill of a prompt of %d tokens failed", len(prompt))
                self._fail(
                    [sequence for sequence in admission.sequences if sequence.tokens == prompt],
                    error,
                )

    def _enter(self, sequences: Sequence[Running]) -> None:
        """Give each sequence a row with its prompt in the cache, and draw its first token."""
        if not sequences:
            return
        before = len(self.rows)
        longest = max(self.rows.longest_limit, *(sequence.limit for sequence in sequences))
        self.cache.reserve(before + len(sequences), longest, active=before)
        rows = self.rows.add(sequences)
        self.stats.most_rows = max(self.stats.most_rows, len(self.rows))
        places: dict[int, tuple[Prompt, list[int]]] = {}
        for row, sequence in enumerate(sequences, before):
            assert sequence.prompt is not None
            sequence.num_concurrent = len(self.rows)
            sequence.prefilled()
            if sequence.request.routing and sequence.prompt.routing is not None:
                sequence.routing.append(sequence.prompt.routing[-1])
            places.setdefault(id(sequence.prompt), (sequence.prompt, []))[1].append(row)
        for prompt, targets in places.values():
            self.cache.fill(targets, prompt.keys, prompt.values)
        logits = [sequence.prompt.logits for sequence in sequences if sequence.prompt is not None]
        self._draw(rows, torch.stack(logits))

    def _draw(self, rows: slice, logits: torch.Tensor) -> None:
        draw = sample(logits, *self.rows.sampling(rows))
        ended = self.rows.take(rows, draw)
        self.rows.tell(rows, draw)
        self.stats.generated_tokens += rows.stop - rows.start
        if not ended:
            return
        done = [(self.rows.sequences[row], self._outcome(row, reason)) for row, reason in ended]
        self.cache.wipe([row for row, _ in ended if not self.rows.is_finite(row)])
        self._free([row for row, _ in ended])
        for sequence, outcome in done:
            if isinstance(outcome, EngineError):
                self._fail([sequence], outcome)
            else:
                self._finish(sequence, outcome)

    def _free(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        longest = self.rows.longest
        sources, targets = self.rows.remove(rows)
        if sources:
            self.cache.move(sources, targets, longest)

    def _outcome(self, row: int, reason: FinishReason) -> SampledSequence | EngineError:
        drawn = self.rows.drawn(row)
        if self.rows.is_finite(row):
            return self._result(self.rows.sequences[row], drawn, reason)
        return EngineError(
            f"logits must be numbers, got NaN after {len(drawn[0])} tokens: the weights of version "
            f"{self._serving().weight_version} are broken, or overflow in this dtype"
        )

    def _result(
        self,
        sequence: Running,
        drawn: tuple[list[int], list[float], list[float]],
        reason: FinishReason,
    ) -> SampledSequence:
        tokens, logprobs, sampling_logprobs = drawn
        sequence.end_run(self._serving(), len(tokens))
        oldest = min(sequence.runs, key=lambda run: run.weight_version)
        text = sequence.text_of(tokens)
        return SampledSequence(
            token_ids=tokens,
            logprobs=logprobs,
            sampling_logprobs=sampling_logprobs,
            prompt_logprobs=sequence.prompt_logprobs(),
            top_logprobs=sequence.top_logprobs if sequence.request.top_logprobs else None,
            routing=sequence.routing if sequence.request.routing else None,
            prompt_routing=sequence.prompt_routing(),
            text=sequence.watch.cut(text) if sequence.watch else text,
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

    def _finish(self, sequence: Running, result: SampledSequence) -> None:
        self.stats.finished += 1
        self._ended.append((sequence, result))

    def _fail(self, sequences: Iterable[Running], error: Exception) -> None:
        for sequence in sequences:
            self.stats.failed += 1
            self._ended.append((sequence, error))
