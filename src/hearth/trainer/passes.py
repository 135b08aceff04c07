"""Forward and backward passes over micro-batches: the gradient's way from loss to weights.

The loss is a sum over tokens, and an objective looks at one sample at a time. So a micro-batch is
complete in itself: its gradient is taken first with respect to its logprobs, where it can be
counted, and from there through the model.

Legend: T tokens of a datum, K targets per token, R real tokens of a micro-batch; C targets of all
datums, end to end in datum order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.errors import NumericsError
from hearth.losses import BuiltinObjective, GradientCounts, TokenBatch, count_gradients
from hearth.threads import refresh
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.packing import Example, Limits, MicroBatch, PackedBatch, is_same_text

Batch = MicroBatch | PackedBatch


@dataclass(frozen=True)
class PassResult:
    """What a pass gives back."""

    values: NDArray[np.float32]
    """Logprobs of all targets, datum after datum."""
    shapes: Sequence[tuple[int, ...]]
    """Shape of each datum's targets."""
    metrics: dict[str, float]
    """``name:reduction``, always with ``loss:sum``; ``:mean`` is over the trained tokens."""

    @property
    def logprobs(self) -> list[NDArray[np.float32]]:
        """Per datum, in the shape of its targets."""
        cuts = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        parts = np.split(self.values, cuts)
        return [part.reshape(shape) for part, shape in zip(parts, self.shapes, strict=True)]


@dataclass(frozen=True)
class KeptGraph:
    """What a forward pass leaves for the backward pass of the same data: batches and logprobs."""

    parts: Sequence[tuple[Batch, Tensor]]
    """Each batch with its logprobs [R, K], still in their graph."""
    temperature: float

    def fits(self, examples: Sequence[Example], temperature: float) -> bool:
        """Whether it is of these data, in this order."""
        own = [example for batch, _ in self.parts for example in batch.examples]
        if temperature != self.temperature or any(one.index >= len(examples) for one in own):
            return False
        return is_same_text(own, [examples[one.index] for one in own])


@dataclass(frozen=True)
class Pass:
    """One request: its data, its objective, and how to run them.

    Raises:
        ConfigError: the objective lacks a field of a datum.
        NumericsError: a trained token has an unusable value; nothing has run yet.
    """

    scorer: TargetScorer
    objective: BuiltinObjective
    examples: Sequence[Example]
    limits: Limits
    token_budget: int
    """Most padded tokens of a micro-batch."""
    temperature: float = 1.0
    """Divides the logits: the logprobs are those of the distribution that was sampled from."""

    def __post_init__(self) -> None:
        self._unscored.validate()

    @torch.no_grad()
    def forward(self) -> PassResult:
        """Logprobs, loss and metrics, without a gradient.

        Raises:
            NumericsError: a logprob is not finite.
        """
        found = self._score(self.examples)
        self._check_finite(found)
        return self._result(found)

    def forward_keeping(self) -> tuple[PassResult, KeptGraph]:
        """The same, with the graph for a backward pass, of one micro-batch's tokens at most.

        Raises:
            NumericsError: a logprob is not finite.
        """
        room = self.token_budget
        found = self._blank()
        parts: list[tuple[Batch, Tensor]] = []
        for batch in self.scorer.batches(self.examples, self.token_budget, self.limits):
            room -= batch.num_rows
            with self.scorer.replaying(batch.routing), torch.set_grad_enabled(room >= 0):
                logprobs = self._score_batch(batch)
            found[self._cells(batch)] = logprobs.detach().cpu()
            if room >= 0:
                parts.append((batch, logprobs))
        self._check_finite(found)
        with torch.no_grad():
            return self._result(found), KeptGraph(parts, self.temperature)

    def forward_backward(self, kept: KeptGraph | None = None) -> tuple[PassResult, GradientCounts]:
        """The same, with the loss's gradient added to the parameters', and what it counts as.

        Only trained tokens are in the graph, and samples without any run without one. A
        micro-batch whose gradient is zero skips its backward pass. What ``kept`` holds of these
        data is not computed again, and is used up.

        Raises:
            NumericsError: a logprob is not finite; earlier micro-batches' gradients stay.
        """
        found = self._blank()
        counts = GradientCounts()
        known: set[int] = set()
        for batch, logprobs in kept.parts if kept is not None else ():
            cells = self._cells(batch)
            found[cells] = logprobs.detach().cpu()
            with self.scorer.replaying(batch.routing):
                counts += self._backward(batch, cells, found, logprobs)
            known |= {example.index for example in batch.examples}
        left = [example for example in self.examples if example.index not in known]
        is_trained = self._trained
        for batch in self.scorer.batches(
            [one for one in left if is_trained[one.index]], self.token_budget, self.limits
        ):
            with self.scorer.replaying(batch.routing):
                counts += self._train(batch, found)
        rest = [one for one in left if not is_trained[one.index]]
        with torch.no_grad():
            found += self._score(rest)
        self._check_finite(found)
        return self._result(found), counts

    @cached_property
    def _unscored(self) -> TokenBatch:
        """The loss's batch of all data, with logprobs of 0."""
        sizes = [example.targets.numel() for example in self.examples]
        return self.objective.make_batch(
            torch.zeros(sum(sizes)).split(sizes),
            [example.inputs for example in self.examples],
            [example.index for example in self.examples],
        )

    @cached_property
    def _active(self) -> Tensor:
        """Which targets are trained, bool [C + 1]."""
        return torch.cat((self._unscored.active, torch.zeros(1, dtype=torch.bool)))

    @cached_property
    def _trained(self) -> list[bool]:
        """Which datums have a target that is trained."""
        return self._unscored.segment_count().ne(0).tolist()

    @cached_property
    def _starts(self) -> Tensor:
        """Where each datum's targets begin, int64 [D]."""
        sizes = torch.tensor([example.targets.numel() for example in self.examples])
        return sizes.cumsum(0) - sizes

    def _blank(self) -> Tensor:
        """Room for a value of each target [C + 1]; the last one is of no target."""
        return torch.zeros(self._unscored.mask.numel() + 1)

    def _cells(self, batch: Batch) -> Tensor:
        """Where a micro-batch's targets stand in ``_blank``, int64 [R, K].

        A candidate that a datum does not have stands at the last place.
        """
        width = batch.targets.shape[1]
        starts = self._starts.index_select(
            0, torch.tensor([example.index for example in batch.examples])
        )
        if width == 1:
            lengths = torch.tensor([example.length for example in batch.examples])
            skipped = starts - (lengths.cumsum(0) - lengths)
            return (skipped.repeat_interleave(lengths) + torch.arange(len(batch.targets)))[:, None]
        nowhere = self._unscored.mask.numel()
        parts: list[Tensor] = []
        for one, start in zip(batch.examples, starts.tolist(), strict=True):
            own = torch.arange(one.targets.numel()).reshape(one.targets.shape) + start
            missing = width - one.targets.shape[1]
            parts.append(torch.nn.functional.pad(own, (0, missing), value=nowhere))
        return torch.cat(parts)

    def _score(self, examples: Sequence[Example]) -> Tensor:
        """Logprobs of some data [C + 1], 0 elsewhere."""
        found = self._blank()
        for batch in self.scorer.batches(examples, self.token_budget, self.limits):
            with self.scorer.replaying(batch.routing):
                logprobs = self._score_batch(batch)
            found[self._cells(batch)] = logprobs.cpu()
        found[-1] = 0.0
        return found

    def _train(self, batch: Batch, found: Tensor) -> GradientCounts:
        """Add one micro-batch's gradient, and its logprobs to what is ``found``."""
        cells = self._cells(batch)
        is_live = self._active[cells].any(dim=1)
        live, rest = is_live.nonzero().squeeze(1), (~is_live).nonzero().squeeze(1)
        refresh()
        states = self.scorer.states(batch)
        scored = self._score_places(states, batch, live)
        found[cells[live]] = scored.detach().cpu()
        with torch.no_grad():
            found[cells[rest]] = self._score_places(states, batch, rest).cpu()
        found[-1] = 0.0
        self._check_finite(found, cells)
        return self._backward(batch, cells, found, scored, live)

    def _backward(
        self,
        batch: Batch,
        cells: Tensor,
        found: Tensor,
        scored: Tensor,
        places: Tensor | None = None,
    ) -> GradientCounts:
        """Add the gradient by way of the ``scored`` logprobs, those at ``places`` or all."""
        gradient = self._loss_gradient(batch, cells, found)
        counts = count(batch, gradient)
        if counts.tokens:
            chosen = gradient if places is None else gradient[places]
            scored.backward(chosen.to(scored.device))
        return counts

    def _score_batch(self, batch: Batch) -> Tensor:
        """Logprobs [R, K] of all targets."""
        refresh()
        every = torch.arange(batch.targets.shape[0])
        return self._score_places(self.scorer.states(batch), batch, every)

    def _score_places(self, states: Tensor, batch: Batch, places: Tensor) -> Tensor:
        """Logprobs [len(places), K]; a token that several examples share is scored once."""
        rows, targets = batch.rows[places], batch.targets[places]
        if isinstance(batch, PackedBatch):
            pairs = rows * self.limits.vocab_size + targets[:, 0]
            pairs, copies = pairs.unique(return_inverse=True)
            rows, targets = pairs // self.limits.vocab_size, pairs % self.limits.vocab_size
            scored = self._score_rows(states, rows, targets[:, None])
            return scored.index_select(0, copies.to(scored.device))
        return self._score_rows(states, rows, targets)

    def _score_rows(self, states: Tensor, rows: Tensor, targets: Tensor) -> Tensor:
        chosen = states.index_select(0, rows.to(states.device))
        return self.scorer.logprobs(chosen, targets, self.temperature)

    def _loss_gradient(self, batch: Batch, cells: Tensor, found: Tensor) -> Tensor:
        """Gradient of the raw loss sum in each logprob of a micro-batch [R, K]."""
        is_there = cells < self._unscored.mask.numel()
        leaf = found[cells[is_there]].requires_grad_()
        own = self._unscored.select_samples([example.index for example in batch.examples], leaf)
        (gradient,) = torch.autograd.grad(self.objective.evaluate(own).per_token.sum(), leaf)
        whole = torch.zeros(cells.shape)
        whole[is_there] = gradient
        return whole

    def _result(self, found: Tensor) -> PassResult:
        """Loss and metrics of the whole request, in datum order whatever the micro-batches."""
        values = found[:-1]
        every = range(len(self.examples))
        output = self.objective.evaluate(self._unscored.select_samples(every, values))
        metrics = {"loss:sum": float(output.per_token.double().sum())}
        for name, value in output.metrics.items():
            metrics[f"{name}:{'sum' if name == 'active_tokens' else 'mean'}"] = float(value)
        return PassResult(
            values.numpy(), [example.target_shape for example in self.examples], metrics
        )

    def _check_finite(self, found: Tensor, cells: Tensor | None = None) -> None:
        """Refuse logprobs that are none, of some ``cells`` or of all.

        Raises:
            NumericsError: one is not finite; its datum and place are named.
        """
        if bool(torch.isfinite(found[:-1] if cells is None else found[cells]).all()):
            return
        place = int((~torch.isfinite(found[:-1])).nonzero()[0])
        index = int((self._starts <= place).nonzero()[-1])
        raise NumericsError(
            f"datum {index}: the model's logprob of target {place - int(self._starts[index])} must "
            f"be finite, got {float(found[place])}: have the weights diverged?"
        )


def count(batch: Batch, gradient: Tensor) -> GradientCounts:
    """Tokens and samples with a gradient [R, K]; a token's candidates count once."""
    lengths = torch.tensor([example.length for example in batch.examples])
    segments = torch.repeat_interleave(torch.arange(len(batch.examples)), lengths)
    return count_gradients(gradient.abs().sum(dim=1), segments)
