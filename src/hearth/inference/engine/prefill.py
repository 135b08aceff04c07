"""Prompts through a plain decoder in packed rows: a beginning that prompts share is computed once.

Legend: T tokens of a prompt, S rows of all prompts, R of those, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hearth.inference.engine.cache import MIN_ROWS
from hearth.inference.engine.prompts import Prompt
from hearth.kernels.training import score
from hearth.models.loading import LoadedModel
from hearth.models.packed import PackedDecoder, pack
from hearth.models.prefixes import clusters

_MAX_LOGITS = 2**26
"""Most logits at a time (256 MiB in float32)."""


class PackedPrefill:
    """Prefills prompts of any lengths together; made by ``of`` where model and machine allow it."""

    def __init__(self, loaded: LoadedModel, decoder: PackedDecoder) -> None:
        self._module: Any = loaded.module
        self._decoder = decoder
        self._chunk_rows = max(2 * MIN_ROWS, _MAX_LOGITS // loaded.vocab_size)

    @classmethod
    def of(cls, loaded: LoadedModel) -> PackedPrefill | None:
        """The packed prefill of a model; None for another than a plain float32 one on a CPU."""
        decoder = PackedDecoder.of(loaded)
        return None if decoder is None else cls(loaded, decoder)

    @torch.inference_mode()
    def run(self, prompts: Sequence[tuple[int, ...]], *, scored: int) -> tuple[list[Prompt], int]:
        """Prefilled prompts, with logprobs of each one's last ``scored`` tokens, and the rows that
        were computed."""
        sequences = [torch.tensor(prompt) for prompt in prompts]
        found = clusters(sequences)
        rows = pack(sequences, found)
        order = [member for cluster in found for member in cluster.members]
        places = dict(zip(order, rows.places, strict=True))
        cache: list[tuple[Tensor, Tensor]] = []
        states = self._decoder.states(rows.tokens, rows.positions, rows.tree, cache=cache)
        at = [places[one] for one in range(len(prompts))]
        logits = self._logits(states, torch.stack([one[-1] for one in at]))
        logprobs = self._scores(states, sequences, at, scored) if scored else None
        done = [
            Prompt(
                tokens=prompt,
                keys=torch.stack([keys[at[one]].transpose(0, 1) for keys, _ in cache]),
                values=torch.stack([values[at[one]].transpose(0, 1) for _, values in cache]),
                logits=logits[one].clone(),
                logprobs=None if logprobs is None else logprobs[one],
            )
            for one, prompt in enumerate(prompts)
        ]
        return done, rows.tokens.numel()

    def _logits(self, states: Tensor, rows: Tensor) -> Tensor:
        """Logits [R, V] after the ``rows`` [R] of states [S, H]."""
        # The head's rounding depends on the number of rows, while they are few.
        missing = max(0, MIN_ROWS - rows.numel())
        chosen = states[torch.nn.functional.pad(rows, (0, missing))]
        return self._module.get_output_embeddings()(chosen)[: rows.numel()]

    def _scores(
        self, states: Tensor, sequences: Sequence[Tensor], at: Sequence[Tensor], scored: int
    ) -> list[list[float]]:
        """Logprobs of the last ``scored`` tokens of each sequence, but for its first."""
        counts = [min(scored, sequence.numel() - 1) for sequence in sequences]
        pairs = list(zip(sequences, at, counts, strict=True))
        rows = torch.cat([place[-count - 1 : -1] for _, place, count in pairs])
        targets = torch.cat([tokens[tokens.numel() - count :] for tokens, _, count in pairs])
        parts = [
            score(self._logits(states, some), wanted)
            for some, wanted in zip(
                rows.split(self._chunk_rows), targets.split(self._chunk_rows), strict=True
            )
        ]
        return [part.tolist() for part in torch.cat(parts).split(counts)]
