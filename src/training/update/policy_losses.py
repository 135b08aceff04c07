"""Loss closures for ``forward_backward_custom``: the client's callers of ``hearth.losses``.

A closure takes ``(data, logprobs)``, the datums and their policy logprobs with gradient, and
gives ``(loss, metrics)``. The loss is a raw sum; the optimizer call divides, nobody else. The
functions of document 003, which divide by the number of samples, are in ``document_losses``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import tinker
import torch
from torch import Tensor

from hearth.errors import ConfigError
from hearth.losses import TIS, Objective, TokenBatch, policy_loss_per_token, resolve_objective
from hearth.losses.corrections import WithReference
from training.config.objective import objective_options, tis_options
from training.config.rl import RLConfig
from training.samples.groups import TrainSample
from training.update.builtin_loss import BuiltinLoss

LossFunction = Callable[[list[tinker.Datum], list[Tensor]], tuple[Tensor, dict[str, float]]]
Rows = Sequence[float] | Tensor
"""Target-aligned rows of one sample: as many as its datum has target tokens."""

_MASK_INPUTS = ("weights", "loss_mask")


def make_policy_loss_fn(
    name: str,
    *,
    advantages: Sequence[float | Rows],
    behavior_logprobs: Sequence[Rows | None] | None,
    old_logprobs: Sequence[Rows] | None = None,
    ref_logprobs: Sequence[Rows] | None = None,
    prompt_lens: int | Sequence[int] | None = None,
    config: Objective | None = None,
    tis: TIS | None = None,
) -> LossFunction:
    """The closure of a policy loss over samples in the order of their datums.

    An advantage is one number for its sample or rows of its own. ``behavior_logprobs=None`` says
    that there are none: REINFORCE is then plain, and ``tis`` an error. ``old_logprobs=None`` takes
    the current ones, a ratio of exactly 1. ``ref_logprobs`` are needed when ``kl_beta > 0``.
    The mask is the datum's ``weights``, else ``loss_mask``, else everything after ``prompt_lens``;
    where those are given, the rows before the completion are masked in any case.

    The closure raises ConfigError or NumericsError, both ValueErrors, naming the datum whose
    rows are missing, of another length, or unusable on an active token. Without any active token
    the loss is a 0 that can be differentiated, and all metrics are there.

    Raises:
        ConfigError: unknown name (the message lists the policy losses), a config of another
            loss, lists that are not as long as ``advantages``, ``tis`` without behavior logprobs,
            or a KL penalty without reference logprobs.
    """
    count = len(advantages)
    starts = _response_starts(prompt_lens, count)
    loss = _PolicyLoss(
        name,
        resolve_objective(name, config),
        tis,
        advantages=[_advantage(advantage) for advantage in advantages],
        behavior=_constants("behavior_logprobs", behavior_logprobs, count),
        old=_constants("old_logprobs", old_logprobs, count),
        reference=_constants("ref_logprobs", ref_logprobs, count),
    )

    def loss_fn(
        data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        require_counts(count, data, logprobs)
        masks = [
            _mask(index, datum, policy, start)
            for index, (datum, policy, start) in enumerate(zip(data, logprobs, starts, strict=True))
        ]
        return loss.evaluate(logprobs, masks, starts)

    return loss_fn


@dataclass(frozen=True)
class StepBatch:
    """Samples of a step that go through forward and backward in one call."""

    samples: Sequence[TrainSample]
    kl_beta: float
    """Weight of the KL in force."""
    begins_minibatch: bool = False
    """Whether an optimizer step comes before it."""
    ratio_to_sampler: bool = False
    """Whether ratios are to the policy that sampled, not to the trainer's before the step."""


def policy_loss(config: RLConfig, batch: StepBatch) -> LossFunction | BuiltinLoss:
    """The loss that ``config`` names, over a batch: to run here, or inside the trainer.

    The one that runs here is ``loss_fn(datums, logprobs) -> (loss, metrics)``: ``logprobs`` are the
    policy's with gradient, one tensor [N - 1] per sample; the loss is a sum over tokens, which the
    optimizer step divides.

    Raises:
        ConfigError: the loss needs logprobs that the samples do not have.
    """
    objective, tis = objective_options(config), tis_options(config)
    if isinstance(objective, WithReference):
        objective = replace(objective, kl_beta=batch.kl_beta)
    if config.runs_builtin_loss:
        return BuiltinLoss(config.policy_loss, objective, tis, batch.ratio_to_sampler)
    samples = batch.samples
    masks, starts = [sample.mask for sample in samples], [None] * len(samples)

    def rows(field: str) -> list[Tensor | None] | None:
        given = _if_all_given([getattr(sample, field) for sample in samples])
        return _constants(field, given, len(samples))

    loss = _PolicyLoss(
        config.policy_loss,
        objective,
        tis,
        advantages=[_advantage(sample.advantage) for sample in samples],
        behavior=rows("behavior_logprobs"),
        old=rows("behavior_logprobs" if batch.ratio_to_sampler else "old_logprobs"),
        reference=rows("ref_logprobs"),
    )

    def loss_fn(
        _data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        result = loss.evaluate(logprobs, masks, starts)
        loss.keep_ratios(samples, logprobs, masks)
        return result

    return loss_fn


@dataclass
class _PolicyLoss:
    """A policy loss over some samples, but for their policy logprobs and masks.

    Raises:
        ConfigError: the objective or ``tis`` needs logprobs that are not there.
    """

    name: str
    objective: Objective
    tis: TIS | None
    advantages: list[float | Tensor]
    behavior: list[Tensor | None] | None
    old: list[Tensor | None] | None
    reference: list[Tensor | None] | None

    def __post_init__(self) -> None:
        # Evaluated without samples: what would fail at the first step fails now.
        self._metrics_of_nothing = _empty_metrics(
            self.name,
            self.objective,
            self.tis,
            self.behavior is not None,
            self.reference is not None,
        )

    def evaluate(
        self, logprobs: list[Tensor], masks: list[Tensor], starts: Sequence[int | None]
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss, a sum over active tokens, and its metrics."""
        if not logprobs:
            return torch.zeros((), requires_grad=True), {**self._metrics_of_nothing}
        batch = self._batch(logprobs, masks)
        output = policy_loss_per_token(self.name, batch, self.objective, self.tis)
        metrics = _as_floats(output.metrics) | _response_metrics(masks, starts)
        return output.per_token.sum(), metrics

    def keep_ratios(
        self, samples: Sequence[TrainSample], logprobs: list[Tensor], masks: list[Tensor]
    ) -> None:
        """Give the samples their ratios and clips, for the record, unless all ratios are 1."""
        if self.old is None or not logprobs:
            return
        batch = self._batch([rows.detach() for rows in logprobs], masks)
        clipping = self.objective.clipping(batch)
        if clipping is None:
            return
        lengths = [len(rows) for rows in logprobs]
        ratios, clips = clipping.ratio.split(lengths), clipping.is_clipped.split(lengths)
        for sample, ratio, is_clipped in zip(samples, ratios, clips, strict=True):
            sample.ratios, sample.clipped = ratio, is_clipped

    def _batch(self, logprobs: list[Tensor], masks: list[Tensor]) -> TokenBatch:
        return TokenBatch.concat(
            logprobs,
            advantages=self.advantages,
            mask=masks,
            old_logprobs=_fill_missing("old_logprobs", self.old, masks),
            behavior_logprobs=_fill_missing("behavior_logprobs", self.behavior, masks),
            ref_logprobs=_fill_missing("ref_logprobs", self.reference, masks),
        )


def _advantage(advantage: float | Rows) -> float | Tensor:
    if isinstance(advantage, int | float):
        return advantage
    return torch.as_tensor(advantage, dtype=torch.float64)


def _if_all_given(samples: Sequence[Rows | None]) -> Sequence[Rows] | None:
    """The logprobs of every sample; None unless all have them."""
    given = [logprobs for logprobs in samples if logprobs is not None]
    return given if len(given) == len(samples) else None


def require_counts(count: int, data: Sequence[tinker.Datum], logprobs: Sequence[Tensor]) -> None:
    """Raise ConfigError unless a closure over ``count`` samples got as many datums and rows."""
    if len(data) != count or len(logprobs) != count:
        raise ConfigError(
            f"the loss must get {count} datums with logprobs, as it was made for, "
            f"got {len(data)} and {len(logprobs)}"
        )


def _constants(
    field: str, samples: Sequence[Rows | None] | None, count: int
) -> list[Tensor | None] | None:
    if samples is None:
        return None
    if len(samples) != count:
        raise ConfigError(
            f"{field} must have one entry per advantage, got {len(samples)} for {count}"
        )
    return [
        None if rows is None else _numbers(field, index, rows) for index, rows in enumerate(samples)
    ]


def _numbers(field: str, index: int, rows: Rows) -> Tensor:
    """Rows as float64; a None inside becomes NaN, which is refused where the token is active."""
    if isinstance(rows, Tensor):
        return rows.detach().double()
    try:
        values = np.array(rows)
        if values.dtype.kind not in "fiubO":
            raise TypeError
        return torch.from_numpy(values.astype(np.float64))
    except (TypeError, ValueError):
        raise ConfigError(f"datum {index}: {field} must be numbers, got {rows!r}") from None


def _response_starts(prompt_lens: int | Sequence[int] | None, count: int) -> list[int | None]:
    """The first completion row of each sample; None where nobody said."""
    if prompt_lens is None:
        return [None] * count
    lengths = [prompt_lens] * count if isinstance(prompt_lens, int) else list(prompt_lens)
    if len(lengths) != count:
        raise ConfigError(
            f"prompt_lens must have one entry per advantage, got {len(lengths)} for {count}"
        )
    return [max(0, length - 1) for length in lengths]


def _mask(index: int, datum: tinker.Datum, row: Tensor, start: int | None) -> Tensor:
    given = next(
        (datum.loss_fn_inputs[input_] for input_ in _MASK_INPUTS if input_ in datum.loss_fn_inputs),
        None,
    )
    if given is None and start is None:
        raise ConfigError(
            f"datum {index}: loss_fn_inputs must hold a mask ({' or '.join(_MASK_INPUTS)}), got "
            f"{sorted(datum.loss_fn_inputs)}: add one, or give prompt_lens"
        )
    mask = torch.ones(row.shape) if given is None else given.to_torch().float()
    if start is not None:
        mask = torch.where(torch.arange(mask.numel()) >= start, mask, 0.0)
    return mask


def _fill_missing(
    field: str, samples: list[Tensor | None] | None, masks: Sequence[Tensor]
) -> list[Tensor] | None:
    """Rows of every sample; one without an active token needs none."""
    if samples is None:
        return None
    filled: list[Tensor] = []
    for index, (rows, mask) in enumerate(zip(samples, masks, strict=True)):
        if rows is None or (not rows.numel() and mask.numel()):
            num_active = int((mask != 0).sum())
            if num_active:
                raise ConfigError(
                    f"datum {index}: {field} must have {mask.numel()} rows, got none for "
                    f"{num_active} active tokens: sample with logprobs"
                )
            rows = torch.zeros(mask.shape)
        filled.append(rows)
    return filled


def _response_metrics(masks: Sequence[Tensor], starts: Sequence[int | None]) -> dict[str, float]:
    """``total_resp_tokens``, from each completion's first row on, and the share that is active.

    Where nobody said how long the prompt is, a completion begins at its first active row.
    """
    total, active = 0, 0
    for mask, start in zip(masks, starts, strict=True):
        flags = (mask.numpy() != 0).tobytes()
        active += flags.count(1)
        if start is None:
            start = flags.find(1) if 1 in flags else len(flags)
        total += max(0, len(flags) - start)
    return {"total_resp_tokens": float(total), "mask_ratio": active / max(1, total)}


@functools.lru_cache
def _empty_metrics(
    name: str, objective: Objective, tis: TIS | None, has_behavior: bool, has_reference: bool
) -> Mapping[str, float]:
    """The metrics of no sample at all.

    Raises:
        ConfigError: the objective or ``tis`` needs logprobs that are not there.
    """
    batch = TokenBatch.concat(
        [],
        advantages=[],
        mask=[],
        behavior_logprobs=[] if has_behavior else None,
        ref_logprobs=[] if has_reference else None,
    )
    output = policy_loss_per_token(name, batch, objective, tis)
    return _as_floats(output.metrics) | _response_metrics([], [])


def _as_floats(metrics: dict[str, Tensor]) -> dict[str, float]:
    values: list[float] = torch.stack(list(metrics.values())).double().tolist()
    return dict(zip(metrics, values, strict=True))
