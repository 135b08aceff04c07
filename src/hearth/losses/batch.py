"""Flat token batches: the one input of every objective. Owns masking and checking, no formula.

Legend: T target tokens of all samples, end to end; N samples. Values are target-aligned: value t of
a sample belongs to its token t + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from hearth.errors import ConfigError, NumericsError

LOGPROB_TOLERANCE = 1e-4
"""How far above 0 a logprob may be: a log-softmax in low precision rounds."""

RATIO_LOG_CAP = 20.0
"""exp(20) is about 5e8: beyond any useful ratio, well short of float32 overflow."""

_CONSTANTS = ("advantages", "mask", "old_logprobs", "behavior_logprobs", "ref_logprobs")
_LOGPROBS = ("policy_logprobs", "old_logprobs", "behavior_logprobs", "ref_logprobs")


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenBatch:
    """Per-token fields [T] of N samples, clean from construction on.

    Where ``mask`` is 0 every field becomes 0, so that masked values reach neither a loss nor a
    gradient. Fields are float32, or float64 when ``policy_logprobs`` are; all but
    ``policy_logprobs`` are constants. Values on active tokens are kept; ``validate`` checks them.

    Raises:
        ConfigError: a field is not one-dimensional or not as long as ``policy_logprobs``.
    """

    policy_logprobs: Tensor
    """Under the weights being trained; carries the gradient."""
    advantages: Tensor
    """What each token earned; for cross-entropy, its weight."""
    mask: Tensor
    """1 where the token is trained, else 0."""
    segment_ids: Tensor
    """Sample of each token, int64 in [0, N)."""
    num_samples: int
    """N; a sample may have no token."""
    old_logprobs: Tensor | None = None
    """Trainer's, before this step; None means the current ones, a ratio of exactly 1."""
    behavior_logprobs: Tensor | None = None
    """Sampler's, when it sampled the token."""
    ref_logprobs: Tensor | None = None
    """Frozen reference's."""
    datum_ids: Sequence[int] | None = None
    """Names of the N samples in errors; None names them 0, 1, ..."""

    def __post_init__(self) -> None:
        policy = self.policy_logprobs
        dtype = torch.float64 if policy.dtype == torch.float64 else torch.float32
        for name in ("policy_logprobs", *_CONSTANTS, "segment_ids"):
            value = getattr(self, name)
            if value is not None and (value.dim() != 1 or value.shape != policy.shape):
                raise ConfigError(
                    f"{name} must have shape [{policy.numel()}] as policy_logprobs, "
                    f"got {list(value.shape)}: fields are flat over all target tokens"
                )
        active = self.mask.to(policy.device) != 0
        object.__setattr__(self, "segment_ids", self.segment_ids.to(policy.device).long())
        for name in ("policy_logprobs", *_CONSTANTS):
            value = getattr(self, name)
            if value is not None:
                value = value if name == "policy_logprobs" else value.detach()
                # where, not a product: a masked NaN times 0 is NaN, in the gradient too.
                clean = torch.where(active, value.to(policy.device, dtype), 0.0)
                object.__setattr__(self, name, clean)

    @classmethod
    def concat(
        cls,
        policy_logprobs: Sequence[Tensor],
        *,
        advantages: Sequence[Tensor | float],
        mask: Sequence[Tensor],
        old_logprobs: Sequence[Tensor] | None = None,
        behavior_logprobs: Sequence[Tensor] | None = None,
        ref_logprobs: Sequence[Tensor] | None = None,
    ) -> TokenBatch:
        """Join tensors of one sample each; an advantage may be one number for its whole sample.

        Raises:
            ConfigError: a field lacks a sample, or a sample's fields differ in length.
        """
        policy = list(policy_logprobs)

        def join(name: str, parts: Sequence[Tensor | float]) -> Tensor:
            return _join(name, parts, policy)

        def join_given(name: str, parts: Sequence[Tensor] | None) -> Tensor | None:
            return None if parts is None else _join(name, parts, policy)

        lengths = torch.tensor([values.numel() for values in policy], dtype=torch.int64)
        device = policy[0].device if policy else torch.device("cpu")
        return cls(
            policy_logprobs=torch.cat(policy) if policy else torch.zeros(0),
            advantages=join("advantages", advantages),
            mask=join("mask", mask),
            segment_ids=torch.arange(len(policy)).repeat_interleave(lengths).to(device),
            num_samples=len(policy),
            old_logprobs=join_given("old_logprobs", old_logprobs),
            behavior_logprobs=join_given("behavior_logprobs", behavior_logprobs),
            ref_logprobs=join_given("ref_logprobs", ref_logprobs),
        )

    def select_samples(self, samples: Sequence[int], policy_logprobs: Tensor) -> TokenBatch:
        """The batch of some samples, in that order, with new logprobs for their tokens.

        Requires that each sample's tokens stand together, as in ``concat``'s batches.

        Raises:
            ConfigError: there are more or fewer logprobs than tokens.
        """
        if list(samples) == list(range(self.num_samples)):
            return replace(self, policy_logprobs=policy_logprobs)
        chosen = torch.tensor(samples, dtype=torch.int64)
        lengths = self._lengths.index_select(0, chosen)
        skipped = self._starts.index_select(0, chosen) - (lengths.cumsum(0) - lengths)
        places = skipped.repeat_interleave(lengths) + torch.arange(int(lengths.sum()))

        def take(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.index_select(0, places.to(values.device))

        names = range(self.num_samples) if self.datum_ids is None else self.datum_ids
        return replace(
            self,
            policy_logprobs=policy_logprobs,
            num_samples=len(samples),
            segment_ids=torch.arange(len(samples)).repeat_interleave(lengths),
            datum_ids=[names[sample] for sample in samples],
            **{name: take(getattr(self, name)) for name in _CONSTANTS},
        )

    @cached_property
    def _lengths(self) -> Tensor:
        """Tokens of each sample, int64 [N]."""
        return self.segment_ids.cpu().bincount(minlength=self.num_samples)

    @cached_property
    def _starts(self) -> Tensor:
        """Each sample's first token, int64 [N]."""
        return self._lengths.cumsum(0) - self._lengths

    @cached_property
    def active(self) -> Tensor:
        """Which tokens are trained, bool [T]."""
        return self.mask != 0

    @cached_property
    def num_active(self) -> Tensor:
        """Number of trained tokens, a float scalar of at least 1 so that it can divide."""
        return self.active.sum().clamp(min=1).to(self.mask.dtype)

    @cached_property
    def anchor(self) -> Tensor:
        """``old_logprobs``, or the current ones without their gradient, [T]."""
        return self.policy_logprobs.detach() if self.old_logprobs is None else self.old_logprobs

    def zero_masked(self, values: Tensor) -> Tensor:
        """``values`` [T] with an exact 0, and no gradient, on masked tokens."""
        return torch.where(self.active, values, 0.0)

    def active_mean(self, values: Tensor) -> Tensor:
        """Mean of ``values`` [T] over active tokens, without gradient; 0 when there are none."""
        return self.zero_masked(values.detach()).sum() / self.num_active

    def segment_sum(self, values: Tensor) -> Tensor:
        """Sum over each sample's active tokens, float64 [N]."""
        totals = torch.zeros(self.num_samples, dtype=torch.float64, device=values.device)
        return totals.index_add(0, self.segment_ids, self.zero_masked(values).double())

    def segment_count(self) -> Tensor:
        """Active tokens of each sample, float64 [N]."""
        return self.segment_sum(torch.ones_like(self.mask))

    def segment_mean(self, values: Tensor) -> Tensor:
        """Mean over each sample's active tokens, float64 [N]; 0 for a sample without any."""
        return self.segment_sum(values) / self.segment_count().clamp(min=1)

    def at_tokens(self, per_sample: Tensor) -> Tensor:
        """A value per sample [N] at each of its tokens [T]."""
        return per_sample[self.segment_ids].to(self.mask.dtype)

    def validate(self) -> None:
        """Refuse values that no objective may see on an active token.

        Raises:
            ConfigError: a mask entry is neither 0 nor 1, or a segment id is out of range.
            NumericsError: a NaN, an infinity or a positive logprob, or an advantage that is not
                finite. The message names datum, field, position in the datum, and value.
        """
        faults = {"mask": (self.mask != 0) & (self.mask != 1)}
        faults["segment_ids"] = (self.segment_ids < 0) | (self.segment_ids >= self.num_samples)
        for name in _LOGPROBS:
            value = getattr(self, name)
            if value is not None:
                faults[name] = ~torch.isfinite(value) | (value > LOGPROB_TOLERANCE)
        faults["advantages"] = ~torch.isfinite(self.advantages)
        # One transfer from the device in the normal case.
        if not bool(torch.stack([fault.any() for fault in faults.values()]).any()):
            return
        name = next(name for name, fault in faults.items() if bool(fault.any()))
        raise self._describe_fault(name, int(faults[name].nonzero()[0]))

    def _describe_fault(self, name: str, index: int) -> Exception:
        segment = int(self.segment_ids[index])
        position = int((self.segment_ids[:index] == segment).sum())
        is_sample = 0 <= segment < self.num_samples
        datum = self.datum_ids[segment] if self.datum_ids and is_sample else segment
        value = float(getattr(self, name).detach()[index])
        where = f"datum {datum}: {name} at position {position}"
        if name == "mask":
            return ConfigError(f"{where} must be 0 or 1, got {value:g}")
        if name == "segment_ids":
            return ConfigError(f"{where} must be in [0, {self.num_samples}), got {value:g}")
        if name == "advantages":
            return NumericsError(f"{where} must be finite on an active token, got {value:g}")
        why = "a probability above 1" if value > 0 else "no usable probability"
        return NumericsError(
            f"{where} must be finite and <= 0 on an active token, got {value:g}: {why}; mask the "
            "token, or check that the values are target-aligned"
        )


def _join(name: str, parts: Sequence[Tensor | float], policy: Sequence[Tensor]) -> Tensor:
    """One field of all samples, end to end; a number counts for each token of its sample."""
    if len(parts) != len(policy):
        raise ConfigError(
            f"{name} must have one entry per sample, got {len(parts)} for {len(policy)} samples"
        )
    spread = [
        part if isinstance(part, Tensor) and part.dim() else torch.full_like(values, float(part))
        for part, values in zip(parts, policy, strict=True)
    ]
    for datum, (part, values) in enumerate(zip(spread, policy, strict=True)):
        if part.shape != values.shape:
            raise ConfigError(
                f"datum {datum}: {name} must have {values.numel()} target-aligned values as "
                f"policy_logprobs, got {list(part.shape)}"
            )
    return torch.cat(spread) if policy else torch.zeros(0)
