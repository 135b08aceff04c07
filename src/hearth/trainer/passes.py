"""Forward and backward passes over micro-batches, from the loss to the gradient of the weights.

The loss is a sum over tokens, and an objective looks at one sample at a time. A micro-batch is
therefore complete in itself: its gradient is taken first with respect to its logprobs, where
trained tokens are counted, and from there through the model.

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


@dataclass(frozen=True)
class PassResult:
    """The result of a pass."""

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
    """Batches and logprobs of a forward pass, kept for the backward pass of the same data."""

    parts: Sequence[tuple[MicroBatch, Tensor]]
    """Each batch with its logprobs [R, K], still in their graph."""
    temperature: float

    def fits(self, examples: Sequence[Example], temperature: float) -> bool:
        """Whether it was computed for these data, in this order."""
        own = [example for batch, _ in self.parts for example in batch.examples]
        places = [example.index for example in own]
        if temperature != self.temperature or max(places, default=-1) >= len(examples):
            return False
        return is_same_text(own, [examples[place] for place in places])


@dataclass(frozen=True)
class Pass:
    """One request: its data, its objective, and how they run.

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
        values = self._score(self.examples)
        self._check_finite(values)
        return self._make_result(values)

    def forward_keeping_graph(self) -> tuple[PassResult, KeptGraph]:
        """As ``forward``; also keeps the graph of the first ``token_budget`` tokens.

        Raises:
            NumericsError: a logprob is not finite.
        """
        room = self.token_budget
        values = self._make_buffer()
        parts: list[tuple[MicroBatch, Tensor]] = []
        for batch in self.scorer.batches(self.examples, self.token_budget, self.limits):
            room -= batch.num_tokens
            with self.scorer.replaying(batch.routing), torch.set_grad_enabled(room >= 0):
                logprobs = self._score_batch(batch)
            values[self._locate_targets(batch)] = logprobs.detach().cpu()
            if room >= 0:
                parts.append((batch, logprobs))
        self._check_finite(values)
        with torch.no_grad():
            return self._make_result(values), KeptGraph(parts, self.temperature)

    def forward_backward(self, kept: KeptGraph | None = None) -> tuple[PassResult, GradientCounts]:
        """As ``forward``; adds the loss's gradient to the parameters' and returns what it counts.

        Only trained tokens are in the graph; samples without any run without a graph. A
        micro-batch whose gradient is zero skips its backward pass. Forward passes that ``kept``
        holds are not computed again; their graphs are freed.

        Raises:
            NumericsError: a logprob is not finite; earlier micro-batches' gradients stay.
        """
        values = self._make_buffer()
        counts = GradientCounts()
        known: set[int] = set()
        for batch, logprobs in kept.parts if kept is not None else ():
            cells = self._locate_targets(batch)
            values[cells] = logprobs.detach().cpu()
            with self.scorer.replaying(batch.routing):
                counts += self._backward(batch, cells, values, logprobs)
            known |= {example.index for example in batch.examples}
        left = [example for example in self.examples if example.index not in known]
        is_trained = self._trained
        for batch in self.scorer.batches(
            [example for example in left if is_trained[example.index]],
            self.token_budget,
            self.limits,
        ):
            with self.scorer.replaying(batch.routing):
                counts += self._train(batch, values)
        rest = [example for example in left if not is_trained[example.index]]
        with torch.no_grad():
            values += self._score(rest)
        self._check_finite(values)
        return self._make_result(values), counts

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

    def _make_buffer(self) -> Tensor:
        """Zeros for the logprobs of all targets [C + 1]; the last place belongs to no target."""
        return torch.zeros(self._unscored.mask.numel() + 1)

    def _locate_targets(self, batch: MicroBatch) -> Tensor:
        """Places of a micro-batch's targets in ``_make_buffer``, int64 [R, K].

        A candidate that a datum does not have gets the last place.
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
        for example, start in zip(batch.examples, starts.tolist(), strict=True):
            own = torch.arange(example.targets.numel()).reshape(example.targets.shape) + start
            missing = width - example.targets.shape[1]
            parts.append(torch.nn.functional.pad(own, (0, missing), value=nowhere))
        return torch.cat(parts)

    def _score(self, examples: Sequence[Example]) -> Tensor:
        """Logprobs of some data [C + 1], 0 elsewhere."""
        values = self._make_buffer()
        for batch in self.scorer.batches(examples, self.token_budget, self.limits):
            with self.scorer.replaying(batch.routing):
                logprobs = self._score_batch(batch)
            values[self._locate_targets(batch)] = logprobs.cpu()
        values[-1] = 0.0
        return values

    def _train(self, batch: MicroBatch, values: Tensor) -> GradientCounts:
        """Add one micro-batch's gradient, and write its logprobs into ``values``."""
        cells = self._locate_targets(batch)
        is_trained = self._active[cells].any(dim=1)
        trained, rest = is_trained.nonzero().squeeze(1), (~is_trained).nonzero().squeeze(1)
        refresh()
        states = self.scorer.states(batch)
        scored = self._score_places(states, batch, trained)
        values[cells[trained]] = scored.detach().cpu()
        with torch.no_grad():
            values[cells[rest]] = self._score_places(states, batch, rest).cpu()
        values[-1] = 0.0
        self._check_finite(values, cells)
        return self._backward(batch, cells, values, scored, trained)

    def _backward(
        self,
        batch: MicroBatch,
        cells: Tensor,
        values: Tensor,
        scored: Tensor,
        places: Tensor | None = None,
    ) -> GradientCounts:
        """Run backward from the ``scored`` logprobs, those at ``places`` or all of them."""
        gradient = self._compute_gradient(batch, cells, values)
        counts = count(batch, gradient)
        if counts.tokens:
            chosen = gradient if places is None else gradient[places]
            scored.backward(chosen.to(scored.device))
        return counts

    def _score_batch(self, batch: MicroBatch) -> Tensor:
        """Logprobs [R, K] of all targets."""
        refresh()
        places = torch.arange(batch.targets.shape[0])
        return self._score_places(self.scorer.states(batch), batch, places)

    def _score_places(self, states: Tensor, batch: MicroBatch, places: Tensor) -> Tensor:
        """Logprobs [len(places), K]; a target that several examples share is scored once."""
        tokens, targets = batch.token_places[places], batch.targets[places]
        if isinstance(batch, PackedBatch):
            pairs = tokens * self.limits.vocab_size + targets[:, 0]
            pairs, copies = pairs.unique(return_inverse=True)
            tokens, targets = pairs // self.limits.vocab_size, pairs % self.limits.vocab_size
            scored = self._score_tokens(states, tokens, targets[:, None])
            return scored.index_select(0, copies.to(scored.device))
        return self._score_tokens(states, tokens, targets)

    def _score_tokens(self, states: Tensor, tokens: Tensor, targets: Tensor) -> Tensor:
        chosen = states.index_select(0, tokens.to(states.device))
        return self.scorer.logprobs(chosen, targets, self.temperature)

    def _compute_gradient(self, batch: MicroBatch, cells: Tensor, values: Tensor) -> Tensor:
        """Gradient of the raw loss sum in each logprob of a micro-batch [R, K]."""
        is_there = cells < self._unscored.mask.numel()
        leaf = values[cells[is_there]].requires_grad_()
        own = self._unscored.select_samples([example.index for example in batch.examples], leaf)
        (gradient,) = torch.autograd.grad(self.objective.evaluate(own).per_token.sum(), leaf)
        whole = torch.zeros(cells.shape)
        whole[is_there] = gradient
        return whole

    def _make_result(self, values: Tensor) -> PassResult:
        """Loss and metrics of the whole request, in datum order whatever the micro-batches."""
        logprobs = values[:-1]
        everything = self._unscored.select_samples(range(len(self.examples)), logprobs)
        output = self.objective.evaluate(everything)
        metrics = {"loss:sum": float(output.per_token.double().sum())}
        for name, value in output.metrics.items():
            metrics[f"{name}:{'sum' if name == 'active_tokens' else 'mean'}"] = float(value)
        return PassResult(
            logprobs.numpy(), [example.target_shape for example in self.examples], metrics
        )

    def _check_finite(self, values: Tensor, cells: Tensor | None = None) -> None:
        """Refuse infinite or NaN logprobs, at some ``cells`` or anywhere.

        Raises:
            NumericsError: one is not finite; its datum and place are named.
        """
        if bool(torch.isfinite(values[:-1] if cells is None else values[cells]).all()):
            return
        place = int((~torch.isfinite(values[:-1])).nonzero()[0])
        index = int((self._starts <= place).nonzero()[-1])
        raise NumericsError(
            f"datum {index}: the model's logprob of target {place - int(self._starts[index])} must "
            f"be finite, got {float(values[place])}: have the weights diverged?"
        )


def count(batch: MicroBatch, gradient: Tensor) -> GradientCounts:
    """Tokens and samples with a gradient [R, K]; a token's candidates count once."""
    lengths = torch.tensor([example.length for example in batch.examples])
    segments = torch.repeat_interleave(torch.arange(len(batch.examples)), lengths)
    return count_gradients(gradient.abs().sum(dim=1), segments)
