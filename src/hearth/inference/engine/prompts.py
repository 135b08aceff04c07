"""Prefilled prompts, kept for whoever asks for the same prompt next (a group's completions).

Legend: N layers, H kv heads, T prompt tokens, D head size, V vocabulary.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt after its prefill: ``keys`` and ``values`` [N, H, T, D], last ``logits`` [V].

    ``logprobs`` are the model's own, one per token after the first; None when nobody asked.
    """

    tokens: tuple[int, ...]
    keys: Tensor
    values: Tensor
    logits: Tensor
    logprobs: list[float] | None = None

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        tensors = (self.keys, self.values, self.logits)
        return sum(tensor.nbytes for tensor in tensors) + 40 * len(self.tokens)


class PromptStore:
    """The most recently used prompts of one weight version, within ``budget_bytes``."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._size = 0
        self._prompts: OrderedDict[tuple[int, ...], Prompt] = OrderedDict()

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, tokens: tuple[int, ...], *, scored: bool) -> Prompt | None:
        """The prefilled prompt; None when it is not here, or ``scored`` and has no logprobs."""
        found = self._prompts.get(tokens)
        if found is None or (scored and found.logprobs is None):
            return None
        self._prompts.move_to_end(tokens)
        return found

    def put(self, prompt: Prompt) -> None:
        """Keep a prompt and drop the least recently used beyond the budget."""
        self._drop(prompt.tokens)
        if prompt.size_bytes > self._budget:
            return
        self._prompts[prompt.tokens] = prompt
        self._size += prompt.size_bytes
        while self._size > self._budget:
            self._drop(next(iter(self._prompts)))

    def clear(self) -> None:
        """Forget everything; called when the weights change."""
        self._prompts.clear()
        self._size = 0

    def _drop(self, tokens: tuple[int, ...]) -> None:
        old = self._prompts.pop(tokens, None)
        if old is not None:
            self._size -= old.size_bytes
