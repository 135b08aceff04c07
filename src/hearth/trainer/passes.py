"""Forward and backward passes over micro-batches: the gradient's way from loss to weights.

The loss is a sum over tokens, and an objective looks at one sample at a time. So a micro-batch is
complete in itself: its gradient is taken first with respect to its logprobs, where it can be
counted, and from there through the model.

Legend: T tokens of a datum, K targets per token, R real tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.errors import NumericsError
from hearth.losses import BuiltinObjective, GradientCounts, TokenBatch, gradient_counts
from hearth.threads import refresh
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.packing import Example, Limits, MicroBatch, PackedBatch

Batch = MicroBatch | PackedBatch
Rows = dict[int, Tensor]
"""Datum index to its values, flat [T * K]."""


@dataclass(frozen=True)
class PassResult:
    """What a pass gives back."""

    logprobs: list[NDArray[np.float32]]
    """Per datum, in the shape of its targets."""
    metrics: dict[str, float]
    """``name:reduction``, always with ``loss:sum``; ``:mean`` is over the trained tokens."""


@dataclass(frozen=True)
class KeptGraph:
    """What a forward pass leaves for the backward pass of the same data: batches and logprobs."""

    parts: Sequence[tuple[Batch, Tensor]]
    """Each batch with its logprobs [R, K], still in their graph."""
    temperature: float

    def fits(self, examples: Sequence[Example], temperature: float) -> bool:
        """Whether it is of these data, in this order."""
        own = {one.index: one for batch, _ in self.parts for one in batch.examples}
        return temperature == self.temperature and all(
            index < len(examples) and one.is_same_text(examples[index])
            for index, one in own.items()
        )


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
        return self._result(self._score(self.examples))

    def forward_keeping(self) -> tuple[PassResult, KeptGraph]:
        """The same, with the graph for a backward pass, of one micro-batch's tokens at most.

        Raises:
            NumericsError: a logprob is not finite.
        """
        room = self.token_budget
        found: Rows = {}
        parts: list[tuple[Batch, Tensor]] = []
        for batch in self.scorer.batches(self.examples, self.token_budget, self.limits):
            room -= batch.num_rows
            with self.scorer.replaying(batch.routing), torch.set_grad_enabled(room >= 0):
                logprobs = self._score_batch(batch)
            found |= split(batch, logprobs.detach().cpu())
            if room >= 0:
                parts.append((batch, logprobs))
        check_finite(found)
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
        found: Rows = {}
        counts = GradientCounts()
        for scored, logprobs in kept.parts if kept is not None else ():
            # The same text, with the loss inputs of now.
            batch = replace(scored, examples=[self.examples[one.index] for one in scored.examples])
            rows = split(batch, logprobs.detach().cpu())
            with self.scorer.replaying(batch.routing):
                counts += self._backward(batch, rows, logprobs)
            found |= rows
        trained = [
            one
            for one in self.examples
            if one.index not in found and bool(self._active[one.index].any())
        ]
        for batch in self.scorer.batches(trained, self.token_budget, self.limits):
            with self.scorer.replaying(batch.routing):
                rows, added = self._train(batch)
            found |= rows
            counts += added
        with torch.no_grad():
            found |= self._score([one for one in self.examples if one.index not in found])
        return self._result(found), counts

    @cached_property
    def _unscored(self) -> TokenBatch:
        """The loss's batch of all data, with logprobs of 0."""
        sizes = [one.targets.numel() for one in self.examples]
        return self.objective.batch(
            torch.zeros(sum(sizes)).split(sizes),
            [one.inputs for one in self.examples],
            [one.index for one in self.examples],
        )

    @cached_property
    def _places(self) -> dict[int, int]:
        """Where each datum stands among the examples."""
        return {one.index: place for place, one in enumerate(self.examples)}

    @cached_property
    def _active(self) -> Rows:
        """Which targets are trained."""
        return _by_datum(self.examples, self._unscored.active)

    def _batch(self, examples: Sequence[Example], rows: Mapping[int, Tensor]) -> TokenBatch:
        """The loss's batch of some data, with their logprobs."""
        parts = [rows[one.index] for one in examples]
        logprobs = torch.cat(parts) if parts else torch.zeros(0)
        return self._unscored.of_samples([self._places[one.index] for one in examples], logprobs)

    def _score(self, examples: Sequence[Example]) -> Rows:
        found: Rows = {}
        for batch in self.scorer.batches(examples, self.token_budget, self.limits):
            with self.scorer.replaying(batch.routing):
                logprobs = self._score_batch(batch)
            found |= split(batch, logprobs.cpu())
        check_finite(found)
        return found

    def _train(self, batch: Batch) -> tuple[Rows, GradientCounts]:
        """Add one micro-batch's gradient; its logprobs, and what the gradient counts as."""
        is_live = join(batch, self._active).any(dim=1)
        live, rest = is_live.nonzero().squeeze(1), (~is_live).nonzero().squeeze(1)
        refresh()
        states = self.scorer.states(batch)
        scored = self._score_places(states, batch, live)
        logprobs = torch.zeros(batch.targets.shape)
        logprobs[live] = scored.detach().cpu()
        with torch.no_grad():
            logprobs[rest] = self._score_places(states, batch, rest).cpu()
        rows = split(batch, logprobs)
        check_finite(rows)
        return rows, self._backward(batch, rows, scored, live)

    def _backward(
        self, batch: Batch, rows: Rows, scored: Tensor, places: Tensor | None = None
    ) -> GradientCounts:
        """Add the gradient by way of the ``scored`` logprobs, those at ``places`` or all."""
        gradient = join(batch, self._loss_gradient(batch.examples, rows))
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

    def _loss_gradient(self, examples: Sequence[Example], rows: Rows) -> Rows:
        """Gradient of the raw loss sum in each logprob."""
        leaf = torch.cat([rows[one.index] for one in examples]).requires_grad_()
        places = [self._places[one.index] for one in examples]
        batch = self._unscored.of_samples(places, leaf)
        loss = self.objective.per_token(batch).per_token.sum()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return _by_datum(examples, gradient)

    def _result(self, rows: Rows) -> PassResult:
        """Loss and metrics of the whole request, in datum order whatever the micro-batches."""
        output = self.objective.per_token(self._batch(self.examples, rows))
        metrics = {"loss:sum": float(output.per_token.double().sum())}
        for name, value in output.metrics.items():
            metrics[f"{name}:{'sum' if name == 'active_tokens' else 'mean'}"] = float(value)
        logprobs = [rows[one.index].reshape(one.target_shape).numpy() for one in self.examples]
        return PassResult(logprobs, metrics)


def _by_datum(examples: Sequence[Example], flat: Tensor) -> Rows:
    parts = flat.split([one.targets.numel() for one in examples])
    return {one.index: part for one, part in zip(examples, parts, strict=True)}


def split(batch: Batch, values: Tensor) -> Rows:
    """Values [R, K] of a micro-batch by datum."""
    parts = values.split([one.length for one in batch.examples])
    return {
        one.index: part[:, : one.targets.shape[1]].reshape(-1)
        for one, part in zip(batch.examples, parts, strict=True)
    }


def join(batch: Batch, rows: Mapping[int, Tensor]) -> Tensor:
    """The reverse of ``split``, with 0 for candidates that a datum does not have."""
    width = batch.targets.shape[1]
    parts: list[Tensor] = []
    for one in batch.examples:
        part = rows[one.index].reshape(one.targets.shape)
        parts.append(torch.nn.functional.pad(part, (0, width - part.shape[1])))
    return torch.cat(parts)


def count(batch: Batch, gradient: Tensor) -> GradientCounts:
    """Tokens and samples with a gradient [R, K]; a token's candidates count once."""
    lengths = torch.tensor([one.length for one in batch.examples])
    segments = torch.repeat_interleave(torch.arange(len(batch.examples)), lengths)
    return gradient_counts(gradient.abs().sum(dim=1), segments)


def check_finite(rows: Rows) -> None:
    """Refuse logprobs that are none.

    Raises:
        NumericsError: one is not finite; its datum and place are named.
    """
    for index, row in rows.items():
        if not bool(torch.isfinite(row).all()):
            place = int((~torch.isfinite(row)).nonzero()[0])
            raise NumericsError(
                f"datum {index}: the model's logprob of target {place} must be finite, got "
                f"{float(row[place])}: have the weights diverged?"
            )
