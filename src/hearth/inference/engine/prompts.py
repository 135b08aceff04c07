"""Prefilled prompts, kept for later requests with the same prompt (a group's completions).

Legend: N layers, H kv heads, T prompt tokens, D head size, V vocabulary; M layers with experts, K
experts per token.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hearth.inference.engine.sampler import TopTokens

EVERY = 2**62
"""More tokens than any prompt has."""


@dataclass(frozen=True)
class Extras:
    """What a request needs of a prompt beside its cache: logprobs, and the experts it used."""

    scored: int = 0
    """How many of its last tokens get logprobs."""
    routed: bool = False
    top: int = 0
    """How many of the most probable tokens are listed beside each scored one."""

    def __or__(self, other: Extras) -> Extras:
        top = max(self.top, other.top)
        return Extras(max(self.scored, other.scored), self.routed or other.routed, top)


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt after its prefill: ``keys`` and ``values`` [N, H, T, D], last ``logits`` [V].

    ``logprobs`` are the model's own, of as many last tokens as were requested, of all after the
    first at most; ``top`` has the most probable tokens at the same places. ``routing`` [T, M, K]
    are the experts of each token. They are None without a request for them.
    """

    tokens: tuple[int, ...]
    keys: Tensor
    values: Tensor
    logits: Tensor
    logprobs: list[float] | None = None
    routing: NDArray[np.unsignedinteger] | None = None
    top: TopTokens | None = None
    adapter: int = 0
    """The serial number of the adapter that computed it; 0 for the base weights."""

    @property
    def size_bytes(self) -> int:
        """Memory that it holds."""
        tensors = (self.keys, self.values, self.logits)
        routing = 0 if self.routing is None else self.routing.nbytes
        top = 0 if self.top is None else self.top.tokens.nbytes + self.top.logprobs.nbytes
        return sum(tensor.nbytes for tensor in tensors) + routing + top + 40 * len(self.tokens)

    def has(self, extras: Extras) -> bool:
        """Whether it holds these extras."""
        known = -1 if self.logprobs is None else len(self.logprobs)
        lacks_scores = extras.scored > 0 and min(extras.scored, len(self.tokens) - 1) > known
        listed = 0 if self.top is None else self.top.tokens.shape[1]
        lacks_top = extras.scored > 0 and min(extras.top, self.logits.shape[0]) > listed
        return not (lacks_scores or lacks_top or (extras.routed and self.routing is None))


class PromptStore:
    """The most recently used prompts of one weight version, within ``budget_bytes``."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget = budget_bytes
        self._size = 0
        self._prompts: OrderedDict[tuple[int, tuple[int, ...]], Prompt] = OrderedDict()
        """By adapter and tokens."""

    def __len__(self) -> int:
        return len(self._prompts)

    def get(self, tokens: tuple[int, ...], extras: Extras, adapter: int = 0) -> Prompt | None:
        """The prefilled prompt; None when it is not stored, or lacks one of the ``extras``.

        ``adapter`` is that of ``Prompt``.
        """
        prompt = self._prompts.get((adapter, tokens))
        if prompt is None or not prompt.has(extras):
            return None
        self._prompts.move_to_end((adapter, tokens))
        return prompt

    def put(self, prompt: Prompt) -> None:
        """Keep a prompt and drop the least recently used beyond the budget."""
        key = (prompt.adapter, prompt.tokens)
        self._drop(key)
        if prompt.size_bytes > self._budget:
            return
        self._prompts[key] = prompt
        self._size += prompt.size_bytes
        while self._size > self._budget:
            self._drop(next(iter(self._prompts)))

    def clear(self) -> None:
        """Drop all prompts; called when the weights change."""
        self._prompts.clear()
        self._size = 0

    def _drop(self, key: tuple[int, tuple[int, ...]]) -> None:
        old = self._prompts.pop(key, None)
        if old is not None:
            self._size -= old.size_bytes
