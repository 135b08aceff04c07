"""A pass of one rank: its share of the examples, in as many collective steps as on other ranks.

A layer's weights are whole only while all ranks run that layer, so all ranks run the same number of
forward and backward passes; a rank without further examples runs a blank one. Errors are raised
after the last pass: a rank that stopped earlier would leave the others waiting.

Legend: T tokens of a datum, K targets per token, R real tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from hearth.errors import NumericsError
from hearth.losses import GradientCounts
from hearth.models.loading import LoadedModel
from hearth.models.packed import PackedDecoder
from hearth.models.parallel import ShardedModel
from hearth.models.prefixes import Cluster, find_clusters
from hearth.threads import refresh
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.options import TrainerOptions
from hearth.trainer.packed_module import PackedModule
from hearth.trainer.packing import Example, MicroBatch
from hearth.trainer.passes import KeptGraph, Pass, PassResult, count
from hearth.trainer.ranks.group import RankGroup
from hearth.trainer.segments import Kernel

_BLANK = -1
"""The index of a blank example."""


class RankScorer(TargetScorer):
    """Scores targets under a model that ranks share; all ranks make theirs at the same time.

    Raises:
        ConfigError: as ``TargetScorer``.
    """

    def __init__(self, loaded: ShardedModel, options: TrainerOptions) -> None:
        self.model = loaded
        with torch.no_grad():
            loaded.run(lambda: super(RankScorer, self).__init__(loaded, options))

    @property
    def shares_prefixes(self) -> bool:
        """Whether a common prefix of examples is computed once."""
        return self._packed is not None

    def _find_packed(
        self, loaded: LoadedModel, kernel: Kernel | None
    ) -> PackedDecoder | PackedModule | None:
        # The loops in C read weights outside of their modules, where a rank has only its part.
        return PackedModule.from_model(loaded, kernel)


@dataclass(frozen=True)
class RankPass(Pass):
    """One request, of which this rank computes a part.

    Rank 0 has all of its examples and makes the result; another rank has its share alone.
    """

    scorer: RankScorer
    group: RankGroup = field(kw_only=True)

    @cached_property
    def shares(self) -> list[list[int]]:
        """On rank 0: for each rank, the places of its examples, in rising order.

        Examples that are trained and others are divided each by itself.
        """
        shares: list[list[int]] = [[] for _ in range(self.group.ranks)]
        for is_trained in (True, False):
            places = [place for place, is_one in enumerate(self._trained) if is_one == is_trained]
            divided = assign_sequences(
                [self.examples[place].tokens for place in places],
                self.group.ranks,
                shares_prefixes=self.scorer.shares_prefixes,
            )
            for share, own in zip(shares, divided, strict=True):
                share += [places[place] for place in own]
        return [sorted(share) for share in shares]

    @torch.no_grad()
    def forward(self) -> PassResult:
        """Logprobs, loss and metrics of the examples, without a gradient.

        Raises:
            NumericsError: a logprob is not finite, on any rank.
        """
        return self._make_result(self._collect_logprobs(self._score(self._own)))

    def forward_backward(self, kept: KeptGraph | None = None) -> tuple[PassResult, GradientCounts]:
        """As ``forward``; adds the loss's gradient to the parameters' parts and counts all ranks.

        Ranks reduce gradients in the last micro-batch only, or in each one
        (``ShardedModel.sums_whole``).

        Raises:
            NumericsError: a logprob is not finite, on any rank; the gradient stays.
        """
        is_trained = self._trained
        batches = self._make_batches(
            [example for example in self._own if is_trained[example.index]]
        )
        values = self._make_buffer()
        own = GradientCounts()
        for number, batch in enumerate(batches, start=1):
            self.scorer.model.reduce_gradients(is_last=number == len(batches))
            with self.scorer.replaying(batch.routing):
                own += self._train(batch, values)
        with torch.no_grad():
            values += self._score(
                [example for example in self._own if not is_trained[example.index]]
            )
        total = self.group.reduce_sum(torch.tensor([own.tokens, own.sequences]))
        tokens, sequences = total.tolist()
        return self._make_result(self._collect_logprobs(values)), GradientCounts(tokens, sequences)

    @property
    def _own(self) -> Sequence[Example]:
        if self.group.rank:
            return self.examples
        return [self.examples[place] for place in self.shares[0]]

    def _make_batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        """Batches of this rank's examples, and blank ones up to the largest number of any rank."""
        batches = list(self.scorer.batches(examples, self.token_budget, self.limits))
        missing = self.group.reduce_max(len(batches)) - len(batches)
        if missing:
            (blank,) = self.scorer.batches([_make_blank_example()], self.token_budget, self.limits)
            batches += [blank] * missing
        return batches

    def _score(self, examples: Sequence[Example]) -> Tensor:
        """Logprobs of some of this rank's examples [C + 1], 0 elsewhere."""
        values = self._make_buffer()
        for batch in self._make_batches(examples):
            with self.scorer.replaying(batch.routing):
                logprobs = self.scorer.model.run(lambda batch=batch: self._score_batch(batch))
            if not _is_blank(batch):
                values[self._locate_targets(batch)] = logprobs.cpu()
        values[-1] = 0.0
        return values

    def _train(self, batch: MicroBatch, values: Tensor) -> GradientCounts:
        refresh()
        if _is_blank(batch):
            scored = self.scorer.model.run(lambda: self._score_batch(batch))
            scored.backward(torch.zeros_like(scored))
            return GradientCounts()
        cells = self._locate_targets(batch)
        is_trained = self._active[cells].any(dim=1)
        trained, rest = is_trained.nonzero().squeeze(1), (~is_trained).nonzero().squeeze(1)
        scored, others = self.scorer.model.run(lambda: self._score_both(batch, trained, rest))
        logprobs = torch.zeros(batch.targets.shape)
        logprobs[trained] = scored.detach().cpu()
        logprobs[rest] = others.cpu()
        values[cells] = logprobs
        gradient = torch.zeros(batch.targets.shape)
        if bool(torch.isfinite(logprobs).all()):
            gradient = self._compute_gradient(batch, cells, values)
        scored.backward(gradient[trained].to(scored.device))
        return count(batch, gradient)

    def _score_both(
        self, batch: MicroBatch, trained: Tensor, rest: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Logprobs of the trained places, and of the others without a graph."""
        states = self.scorer.states(batch)
        scored = self._score_places(states, batch, trained)
        with torch.no_grad():
            return scored, self._score_places(states, batch, rest)

    def _collect_logprobs(self, values: Tensor) -> Tensor:
        """On rank 0 the logprobs of all ranks, on every other one its own."""
        is_finite = bool(torch.isfinite(values).all())
        if self.group.rank:
            self.group.send(0, values[:-1].numpy().tobytes())
        else:
            for rank, places in enumerate(self.shares):
                if rank:
                    self._take_logprobs(values, self.group.receive_from(rank), places)
        if self.group.reduce_max(not is_finite):
            self._check_finite(values)
            raise NumericsError("a logprob of the model must be finite, got others on another rank")
        return values

    def _take_logprobs(self, values: Tensor, received: bytes, places: Sequence[int]) -> None:
        """Write another rank's logprobs, those of the examples at ``places``, into ``values``."""
        numbers = torch.from_numpy(np.frombuffer(received, np.float32).copy())
        sizes = [self.examples[place].targets.numel() for place in places]
        starts = self._starts.tolist()
        for place, part in zip(places, numbers.split(sizes), strict=True):
            values[starts[place] : starts[place] + len(part)] = part


def assign_sequences(
    sequences: Sequence[Tensor], ranks: int, *, shares_prefixes: bool
) -> list[list[int]]:
    """For each rank, the places of its token sequences (int64 [T] each), in rising order.

    The longest go first, each to the rank with the fewest tokens, so that no rank has more than a
    fair share plus the longest piece. Where a pass computes a common prefix once
    (``shares_prefixes``), sequences with one stay together, up to a fair share.
    """
    lengths = [sequence.numel() for sequence in sequences]
    if shares_prefixes:
        whole = find_clusters(sequences)
        fair = -(-sum(cluster.tokens(lengths) for cluster in whole) // ranks)
        pieces = [part for cluster in whole for part in cluster.split(lengths, fair)]
    else:
        pieces = [Cluster((place,), length) for place, length in enumerate(lengths)]
    pieces.sort(key=lambda piece: (-piece.tokens(lengths), piece.members))
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for piece in pieces:
        rank = min(range(ranks), key=lambda rank: (loads[rank], rank))
        shares[rank] += piece.members
        loads[rank] += piece.tokens(lengths)
    return [sorted(places) for places in shares]


def _is_blank(batch: MicroBatch) -> bool:
    return any(example.index == _BLANK for example in batch.examples)


def _make_blank_example() -> Example:
    """An example of one token, without a loss."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return Example(
        index=_BLANK, tokens=nothing, targets=nothing[:, None], target_shape=(1,), inputs={}
    )
