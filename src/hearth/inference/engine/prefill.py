"""Packed prefill of prompts in a plain decoder: a prefix that prompts share is computed once.

Legend: T tokens of a prompt, S packed tokens of all prompts, R chosen ones of these, H hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hearth.inference.engine.cache import MIN_ROWS
from hearth.inference.engine.prompts import Extras, Prompt
from hearth.inference.engine.sampler import TopTokens, find_top, split_top
from hearth.kernels.training import score
from hearth.models.loading import LoadedModel
from hearth.models.packed import PackedDecoder, pack
from hearth.models.prefixes import find_clusters

_MAX_LOGITS = 2**26
"""Most logits in memory at one time (256 MiB in float32)."""


class PackedPrefill:
    """Prefills prompts of any lengths together; ``for_model`` makes it for plain decoders."""

    def __init__(self, loaded: LoadedModel, decoder: PackedDecoder) -> None:
        self._decoder = decoder
        self._chunk_size = max(2 * MIN_ROWS, _MAX_LOGITS // loaded.vocab_size)

    @classmethod
    def for_model(cls, loaded: LoadedModel) -> PackedPrefill | None:
        """The packed prefill of a model; None for another than a plain one on a CPU."""
        decoder = PackedDecoder.from_model(loaded)
        return None if decoder is None else cls(loaded, decoder)

    @torch.inference_mode()
    def run(
        self, prompts: Sequence[tuple[int, ...]], extras: Extras, adapter: int = 0
    ) -> tuple[list[Prompt], int]:
        """Prefilled prompts with their ``extras``, and the number of tokens that were computed.

        ``adapter`` is that of ``Prompt``.
        """
        sequences = [torch.tensor(prompt) for prompt in prompts]
        prefixes = find_clusters(sequences)
        packed = pack(sequences, prefixes)
        order = [member for cluster in prefixes for member in cluster.members]
        places_of = dict(zip(order, packed.places, strict=True))
        cache: list[tuple[Tensor, Tensor]] = []
        states = self._decoder.states(packed.tokens, packed.positions, packed.tree, cache=cache)
        places = [places_of[index] for index in range(len(prompts))]
        logits = self._logits(states, torch.stack([place[-1] for place in places]))
        scores = self._scores(states, sequences, places, extras) if extras.scored else None
        prefilled = [
            Prompt(
                tokens=prompt,
                keys=torch.stack([keys[places[index]].transpose(0, 1) for keys, _ in cache]),
                values=torch.stack([values[places[index]].transpose(0, 1) for _, values in cache]),
                logits=logits[index].clone(),
                logprobs=None if scores is None else scores[index][0],
                top=None if scores is None else scores[index][1],
                adapter=adapter,
            )
            for index, prompt in enumerate(prompts)
        ]
        return prefilled, packed.tokens.numel()

    def _logits(self, states: Tensor, places: Tensor) -> Tensor:
        """Logits [R, V] after the tokens at ``places`` [R] of states [S, H]."""
        # The head's rounding depends on the number of rows, while they are few.
        missing = max(0, MIN_ROWS - places.numel())
        chosen = states[torch.nn.functional.pad(places, (0, missing))]
        return self._decoder.logits(chosen)[: places.numel()]

    def _scores(
        self, states: Tensor, sequences: Sequence[Tensor], places: Sequence[Tensor], extras: Extras
    ) -> list[tuple[list[float], TopTokens | None]]:
        """Logprobs of the last ``extras.scored`` tokens of each sequence, except its first, and
        the most probable tokens there."""
        counts = [min(extras.scored, sequence.numel() - 1) for sequence in sequences]
        pairs = list(zip(sequences, places, counts, strict=True))
        before = torch.cat([place[-count - 1 : -1] for _, place, count in pairs])
        targets = torch.cat([tokens[tokens.numel() - count :] for tokens, _, count in pairs])
        size = self._chunk_size
        chunks = zip(before.split(size), targets.split(size), strict=True)
        parts: list[Tensor] = []
        tops: list[TopTokens] = []
        for chunk, expected in chunks:
            logits = self._logits(states, chunk)
            parts.append(score(logits, expected))
            if extras.top:
                tops.append(find_top(logits, extras.top))
        listed = split_top(tops, counts) if extras.top else [None] * len(counts)
        logprobs = [part.tolist() for part in torch.cat(parts).split(counts)]
        return list(zip(logprobs, listed, strict=True))
