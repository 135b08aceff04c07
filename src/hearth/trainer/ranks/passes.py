"""A pass of one rank: its share of the examples, in as many collective steps as on other ranks.

A layer's weights are whole only while all ranks run that layer, so all ranks run the same number of
forward and backward passes; a rank without further examples runs a blank one. Errors are raised
after the last pass: a rank that stopped earlier would leave the others waiting.

Legend: T tokens of a datum, K targets per token, R real tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

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
    """One request, of which this rank computes a part; every rank has the whole result."""

    scorer: RankScorer
    group: RankGroup = field(kw_only=True)

    @torch.no_grad()
    def forward(self) -> PassResult:
        """Logprobs, loss and metrics of the whole request, without a gradient.

        Raises:
            NumericsError: a logprob is not finite, on any rank.
        """
        return self._make_result(self._sum_logprobs(self._score(self.examples)))

    def forward_backward(self, kept: KeptGraph | None = None) -> tuple[PassResult, GradientCounts]:
        """As ``forward``; adds the loss's gradient to the parameters' parts and counts all ranks.

        Ranks reduce gradients in the last micro-batch only, or in each one
        (``ShardedModel.sums_whole``).

        Raises:
            NumericsError: a logprob is not finite, on any rank; the gradient stays.
        """
        is_trained = self._trained
        batches = self._make_own_batches(
            [example for example in self.examples if is_trained[example.index]]
        )
        values = self._make_buffer()
        own = GradientCounts()
        for number, batch in enumerate(batches, start=1):
            self.scorer.model.reduce_gradients(is_last=number == len(batches))
            with self.scorer.replaying(batch.routing):
                own += self._train(batch, values)
        with torch.no_grad():
            values += self._score(
                [example for example in self.examples if not is_trained[example.index]]
            )
        total = self.group.reduce_sum(torch.tensor([own.tokens, own.sequences]))
        tokens, sequences = total.tolist()
        return self._make_result(self._sum_logprobs(values)), GradientCounts(tokens, sequences)

    def _make_own_batches(self, examples: Sequence[Example]) -> list[MicroBatch]:
        """This rank's batches, and blank ones up to the largest number of any rank."""
        if not examples:
            return []
        by_rank = assign_sequences(
            [example.tokens for example in examples],
            self.group.ranks,
            shares_prefixes=self.scorer.shares_prefixes,
        )
        own = [examples[place] for place in by_rank[self.group.rank]]
        batches = list(self.scorer.batches(own, self.token_budget, self.limits))
        missing = self.group.reduce_max(len(batches)) - len(batches)
        if missing:
            (blank,) = self.scorer.batches([_make_blank_example()], self.token_budget, self.limits)
            batches += [blank] * missing
        return batches

    def _score(self, examples: Sequence[Example]) -> Tensor:
        """Logprobs of this rank's share of the examples, which are the same on all ranks."""
        values = self._make_buffer()
        for batch in self._make_own_batches(examples):
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

    def _sum_logprobs(self, values: Tensor) -> Tensor:
        """The logprobs of all ranks; ``values`` are 0 where this rank scored nothing."""
        values = self.group.reduce_sum(values)
        self._check_finite(values)
        return values


def assign_sequences(
    sequences: Sequence[Tensor], ranks: int, *, shares_prefixes: bool
) -> list[list[int]]:
    """For each rank, the places of its token sequences (int64 [T] each), in rising order.

    The longest go first, each to the rank with the fewest tokens, so that no rank has more than a
    fair share plus the longest piece. Where a pass computes a common prefix once
    (``shares_prefixes``), sequences with one stay together, up to a fair share. The result is the
    same on all ranks.
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
