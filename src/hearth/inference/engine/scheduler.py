"""Which requests join the batch next: first come, first served, within slots, cache and prefill."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.prompts import Extras, PromptStore
from hearth.inference.engine.runner import padded_length
from hearth.inference.engine.sequence import SequenceState
from hearth.inference.engine.slots import DecodeSlots


@dataclass
class Admission:
    """Requests that join in this step, and the prompts to prefill for them."""

    sequences: list[SequenceState] = field(default_factory=lambda: [])
    prompts: dict[tuple[int, ...], Extras] = field(default_factory=lambda: {})

    def batches(self, *, packs: bool) -> list[tuple[Extras, list[tuple[int, ...]]]]:
        """(extras, prompts) of each forward: unpacked prompts must have one padded length."""
        groups: dict[tuple[Extras, int], list[tuple[int, ...]]] = {}
        for prompt, extras in self.prompts.items():
            length = 0 if packs else padded_length(len(prompt))
            groups.setdefault((extras, length), []).append(prompt)
        return [(extras, prompts) for (extras, _), prompts in groups.items()]


class Scheduler:
    """The waiting requests. If the first lacks room, all behind it wait as well."""

    def __init__(self, *, prefill_tokens: int) -> None:
        self.waiting: deque[SequenceState] = deque()
        self._prefill_tokens = prefill_tokens

    def admit(self, slots: DecodeSlots, cache: SlotCache, store: PromptStore) -> Admission:
        """Take the requests from the queue that fit now; at least one prompt is prefilled.

        A request whose prompt is in ``store``, or is prefilled for another, costs no prefill.
        """
        admission = Admission()
        count, longest, spent = len(slots), slots.longest_limit, 0
        while self.waiting:
            sequence = self.waiting[0]
            reach = max(longest, sequence.limit) if sequence.needs_slot else longest
            if sequence.needs_slot and not cache.fits(count + 1, reach):
                break
            cost = self._prompt_cost(sequence, admission, store)
            if spent > 0 and spent + cost > self._prefill_tokens:
                break
            self._join(sequence, admission, fresh=cost > 0)
            count, longest, spent = count + int(sequence.needs_slot), reach, spent + cost
        return admission

    def remove(self, sequences: Iterable[SequenceState]) -> None:
        """Take requests out of the queue."""
        removed = {id(sequence) for sequence in sequences}
        self.waiting = deque(other for other in self.waiting if id(other) not in removed)

    def _prompt_cost(
        self, sequence: SequenceState, admission: Admission, store: PromptStore
    ) -> int:
        tokens = sequence.tokens
        sequence.prompt = store.get(tokens, sequence.extras)
        if sequence.prompt is not None or tokens in admission.prompts:
            return 0
        return padded_length(len(tokens))

    def _join(self, sequence: SequenceState, admission: Admission, *, fresh: bool) -> None:
        self.waiting.popleft()
        admission.sequences.append(sequence)
        tokens = sequence.tokens
        if not fresh:
            sequence.cached_prompt_tokens = len(tokens)
        if sequence.prompt is None:
            others = admission.prompts.get(tokens, Extras())
            admission.prompts[tokens] = others | sequence.extras
