"""Which requests join the batch next, within slots, cache and prefill: clients take turns, and each
client's requests come in their order."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from hearth.inference.engine.adapters import Adapter
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.prompts import Extras, PromptStore
from hearth.inference.engine.runner import pad_length
from hearth.inference.engine.sequence import SequenceState
from hearth.inference.engine.slots import DecodeSlots


@dataclass
class Admission:
    """Requests that join in this step, and the prompts to prefill for them."""

    sequences: list[SequenceState] = field(default_factory=lambda: [])
    prompts: dict[tuple[Adapter | None, tuple[int, ...]], Extras] = field(
        default_factory=lambda: {}
    )

    def batches(self, *, packs: bool) -> list[PrefillBatch]:
        """The forwards: each has one adapter, and unpacked prompts must have one padded length."""
        groups: dict[tuple[Adapter | None, Extras, int], list[tuple[int, ...]]] = {}
        for (adapter, prompt), extras in self.prompts.items():
            length = 0 if packs else pad_length(len(prompt))
            groups.setdefault((adapter, extras, length), []).append(prompt)
        return [
            PrefillBatch(prompts, extras, adapter)
            for (adapter, extras, _), prompts in groups.items()
        ]


@dataclass(frozen=True)
class PrefillBatch:
    """Prompts that are prefilled in one forward."""

    prompts: list[tuple[int, ...]]
    extras: Extras
    adapter: Adapter | None


class Scheduler:
    """The waiting requests. If the next one lacks room, all others wait as well."""

    def __init__(self, *, prefill_tokens: int) -> None:
        self._queues: dict[str, deque[SequenceState]] = {}
        """By client; the first one's turn is next. None is empty."""
        self._prefill_tokens = prefill_tokens

    def __len__(self) -> int:
        return sum(map(len, self._queues.copy().values()))

    def __iter__(self) -> Iterator[SequenceState]:
        return itertools.chain.from_iterable(self._queues.values())

    def add(self, sequences: Iterable[SequenceState]) -> None:
        """Queue requests behind those of their clients."""
        for sequence in sequences:
            self._queues.setdefault(sequence.request.client, deque()).append(sequence)

    def admit(self, slots: DecodeSlots, cache: SlotCache, store: PromptStore) -> Admission:
        """Take the requests from the queue that fit now; at least one prompt is prefilled.

        A request whose prompt is in ``store``, or is prefilled for another, costs no prefill.
        """
        admission = Admission()
        count, longest, spent = len(slots), slots.longest_limit, 0
        while self._queues:
            client = next(iter(self._queues))
            sequence = self._queues[client][0]
            reach = max(longest, sequence.limit) if sequence.needs_slot else longest
            if sequence.needs_slot and not cache.fits(count + 1, reach):
                break
            cost = self._prompt_cost(sequence, admission, store)
            if spent > 0 and spent + cost > self._prefill_tokens:
                break
            self._end_turn(client)
            self._join(sequence, admission, fresh=cost > 0)
            count, longest, spent = count + int(sequence.needs_slot), reach, spent + cost
        return admission

    def remove(self, sequences: Iterable[SequenceState]) -> None:
        """Take requests out of the queue."""
        removed = {id(sequence) for sequence in sequences}
        for client, queue in list(self._queues.items()):
            left = deque(other for other in queue if id(other) not in removed)
            if left:
                self._queues[client] = left
            else:
                del self._queues[client]

    def _end_turn(self, client: str) -> None:
        """Take the client's first request out, and put its others behind those of all clients."""
        queue = self._queues.pop(client)
        queue.popleft()
        if queue:
            self._queues[client] = queue

    def _prompt_cost(
        self, sequence: SequenceState, admission: Admission, store: PromptStore
    ) -> int:
        tokens = sequence.tokens
        sequence.prompt = store.get(tokens, sequence.extras, sequence.serial)
        if sequence.prompt is not None or (sequence.adapter, tokens) in admission.prompts:
            return 0
        return pad_length(len(tokens))

    def _join(self, sequence: SequenceState, admission: Admission, *, fresh: bool) -> None:
        admission.sequences.append(sequence)
        tokens = sequence.tokens
        if not fresh:
            sequence.cached_prompt_tokens = len(tokens)
        if sequence.prompt is None:
            key = (sequence.adapter, tokens)
            others = admission.prompts.get(key, Extras())
            admission.prompts[key] = others | sequence.extras
