"""A pass of one rank: its share of the examples, and as many collective steps as any other's.

Each layer's weights are whole only while all ranks run that layer, so all of them run as many
forward and backward passes; a rank that has nothing left runs a blank one. A failure is told when
all have ended: whoever left earlier would leave the others waiting.

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
from hearth.threads import refresh
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.options import TrainerOptions
from hearth.trainer.packed_module import PackedModule
from hearth.trainer.packing import Example
from hearth.trainer.passes import Batch, KeptGraph, Pass, PassResult, count
from hearth.trainer.ranks.group import RankGroup
from hearth.trainer.ranks.shares import shares
from hearth.trainer.segments import Kernel

_BLANK = -1
"""The index of an example that stands for none."""


class RankScorer(TargetScorer):
    """Scores targets under a model that ranks share; made by all of them at the same time.

    Raises:
        ConfigError: as ``TargetScorer``.
    """

    def __init__(self, loaded: ShardedModel, options: TrainerOptions) -> None:
        self.model = loaded
        with torch.no_grad():
            loaded.run(lambda: super(RankScorer, self).__init__(loaded, options))

    @property
    def shares_prefixes(self) -> bool:
        """Whether a beginning that examples share is computed once."""
        return self._packed is not None

    def _packed_form(
        self, loaded: LoadedModel, kernel: Kernel | None
    ) -> PackedDecoder | PackedModule | None:
        # The loops in C read weights outside of their modules, where there are only parts.
        return PackedModule.from_model(loaded, kernel)


@dataclass(frozen=True)
class RankPass(Pass):
    """One request, of which this rank computes a part and knows the whole result."""

    scorer: RankScorer
    group: RankGroup = field(kw_only=True)

    @torch.no_grad()
    def forward(self) -> PassResult:
        """Logprobs, loss and metrics of the whole request, without a gradient.

        Raises:
            NumericsError: a logprob is not finite, of whatever rank.
        """
        return self._result(self._joined(self._score(self.examples)))

    def forward_backward(self, kept: KeptGraph | None = None) -> tuple[PassResult, GradientCounts]:
        """The same, with the loss's gradient added to the parameters' parts; counts are of all.

        Gradients add up here until the last micro-batch, which alone is reduced over ranks: a
        request of several micro-batches holds a whole model's gradient meanwhile.

        Raises:
            NumericsError: a logprob is not finite, of whatever rank; the gradient is there.
        """
        is_trained = self._trained
        batches = self._own_batches(
            [example for example in self.examples if is_trained[example.index]]
        )
        found = self._blank()
        own = GradientCounts()
        for number, batch in enumerate(batches, start=1):
            self.scorer.model.reduce_gradients(is_last=number == len(batches))
            with self.scorer.replaying(batch.routing):
                own += self._train(batch, found)
        with torch.no_grad():
            found += self._score(
                [example for example in self.examples if not is_trained[example.index]]
            )
        total = self.group.add(torch.tensor([own.tokens, own.sequences]))
        tokens, sequences = total.tolist()
        return self._result(self._joined(found)), GradientCounts(tokens, sequences)

    def _own_batches(self, examples: Sequence[Example]) -> list[Batch]:
        """This rank's batches, and blank ones up to the number of the rank that has most."""
        if not examples:
            return []
        by_rank = shares(
            [example.tokens for example in examples],
            self.group.ranks,
            shares_prefixes=self.scorer.shares_prefixes,
        )
        own = [examples[place] for place in by_rank[self.group.rank]]
        batches = list(self.scorer.batches(own, self.token_budget, self.limits))
        missing = self.group.most(len(batches)) - len(batches)
        if missing:
            (blank,) = self.scorer.batches([_blank()], self.token_budget, self.limits)
            batches += [blank] * missing
        return batches

    def _score(self, examples: Sequence[Example]) -> Tensor:
        """Logprobs of this rank's share of the examples; all ranks have the same examples."""
        found = self._blank()
        for batch in self._own_batches(examples):
            with self.scorer.replaying(batch.routing):
                logprobs = self.scorer.model.run(lambda batch=batch: self._score_batch(batch))
            if not _is_blank(batch):
                found[self._cells(batch)] = logprobs.cpu()
        found[-1] = 0.0
        return found

    def _train(self, batch: Batch, found: Tensor) -> GradientCounts:
        refresh()
        if _is_blank(batch):
            scored = self.scorer.model.run(lambda: self._score_batch(batch))
            scored.backward(torch.zeros_like(scored))
            return GradientCounts()
        cells = self._cells(batch)
        is_live = self._active[cells].any(dim=1)
        live, rest = is_live.nonzero().squeeze(1), (~is_live).nonzero().squeeze(1)
        scored, others = self.scorer.model.run(lambda: self._score_both(batch, live, rest))
        logprobs = torch.zeros(batch.targets.shape)
        logprobs[live] = scored.detach().cpu()
        logprobs[rest] = others.cpu()
        found[cells] = logprobs
        gradient = torch.zeros(batch.targets.shape)
        if bool(torch.isfinite(logprobs).all()):
            gradient = self._loss_gradient(batch, cells, found)
        scored.backward(gradient[live].to(scored.device))
        return count(batch, gradient)

    def _score_both(self, batch: Batch, live: Tensor, rest: Tensor) -> tuple[Tensor, Tensor]:
        """Logprobs of the places that are trained, and of the others without their graph."""
        states = self.scorer.states(batch)
        scored = self._score_places(states, batch, live)
        with torch.no_grad():
            return scored, self._score_places(states, batch, rest)

    def _joined(self, found: Tensor) -> Tensor:
        """Everybody's logprobs; what a rank did not score is 0 there."""
        every = self.group.add(found)
        self._check_finite(every)
        return every


def _is_blank(batch: Batch) -> bool:
    return any(example.index == _BLANK for example in batch.examples)


def _blank() -> Example:
    """The least that there is to compute."""
    nothing = torch.zeros(1, dtype=torch.int64)
    return Example(
        index=_BLANK, tokens=nothing, targets=nothing[:, None], target_shape=(1,), inputs={}
    )
