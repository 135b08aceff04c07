"""The columns by token of recorded samples, computed for all samples of a step at once.

One pass over all tokens costs a third of what a pass over each sample does: a step has many samples
of few tokens. Legend: T tokens of all samples, end to end; N samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hearth.records.table import make_list_array
from training.samples.groups import TrainSample
from training.samples.rollout import RolloutSample

TRAINED_COLUMNS = ("policy_logprobs", "old_logprobs", "ref_logprobs", "ratios")
"""Target-aligned values of a trained sample, by the names of their columns."""

Flags = NDArray[np.bool_]


class SampleTokens:
    """The tokens of some samples; an entry that is None has none."""

    def __init__(self, samples: Sequence[RolloutSample | None]) -> None:
        given = [sample or _EMPTY for sample in samples]
        self._samples = given
        arrays = [sample.arrays for sample in given]
        self.lengths = np.array([len(of_sample.tokens) for of_sample in arrays], np.int64)
        self.offsets = _add_up(self.lengths)
        self.tokens = _join([of_sample.tokens for of_sample in arrays], np.int32)
        self.mask: Flags = _join([of_sample.is_sampled for of_sample in arrays], np.bool_)
        """Whether the policy sampled the token; bool [T]."""
        logprobs = _join([of_sample.logprobs for of_sample in arrays], np.float32)
        self.behavior = np.where(self.mask, logprobs, np.float32(np.nan))
        """The sampler's logprobs, NaN where it sampled nothing; float32 [T]."""
        self.is_first: Flags = np.zeros(len(self.tokens), np.bool_)
        self.is_first[self.offsets[:-1][self.lengths > 0]] = True
        follows_given = np.concatenate([[False], ~self.mask[:-1]])[: len(self.mask)]
        self.begins: Flags = self.mask & follows_given & ~self.is_first
        """Where a turn of the policy begins; bool [T]."""
        self.counts = np.array([of_sample.completion_len for of_sample in arrays], np.int64)
        """Sampled tokens; [N]."""
        self.turns = self.count(self.begins)
        """How often the policy's turn began; [N]."""

    def columns(self, trained: Sequence[TrainSample | None]) -> dict[str, Any]:
        """The columns by token, and what is counted over them; ``trained`` has None where a sample
        was not trained."""
        counts = self.counts
        sums = np.diff(
            _add_up(np.where(self.mask, self.behavior, 0).astype(np.float64))[self.offsets]
        )
        means = np.divide(sums, counts, out=np.full(len(counts), np.nan), where=counts > 0)
        of_training = {
            name: self._align([sample and getattr(sample, name) for sample in trained])
            for name in TRAINED_COLUMNS
        }
        by_token = [sample and sample.advantage for sample in trained]
        return of_training | {
            "token_advantages": self._align(
                [value if isinstance(value, Sequence) else None for value in by_token]
            ),
            "clipped": self._find_clipped(trained),
            "tokens": make_list_array(self.tokens, self.lengths),
            "loss_mask": make_list_array(self.mask, self.lengths),
            "behavior_logprobs": make_list_array(self.behavior, self.lengths),
            "versions": make_list_array(self._spread_versions(counts), self.lengths),
            "turns": self.turns,
            "length": counts,
            "mean_logprob": pa.array(means, pa.float32(), mask=counts == 0),
        }

    def count(self, flags: Flags) -> NDArray[np.int64]:
        """How many flags by token are up, for each sample; a few in all. [N]."""
        samples = np.searchsorted(self.offsets[1:], np.flatnonzero(flags), side="right")
        return np.bincount(samples, minlength=len(self.lengths))

    def turns_of(self, number: int) -> list[list[int]]:
        """The sampled tokens of each turn of a sample."""
        first, end = self.offsets[number], self.offsets[number + 1]
        begins = np.flatnonzero(self.begins[first:end]) + first
        return [
            self.tokens[begin:stop][self.mask[begin:stop]].tolist()
            for begin, stop in zip(begins, [*begins[1:], end], strict=True)
        ]

    def _spread_versions(self, counts: NDArray[np.int64]) -> NDArray[np.int32]:
        """The weight version of each token; -1 where it is not known, or nothing was sampled."""
        pairs = [sample.versions or [] for sample in self._samples]
        known = counts == [sum(count for _, count in runs) for runs in pairs]
        runs = [
            run for runs, is_known in zip(pairs, known, strict=True) if is_known for run in runs
        ]
        versions = np.full(len(self.tokens), -1, np.int32)
        is_known = self.mask & np.repeat(known, self.lengths)
        versions[is_known] = np.repeat([run[0] for run in runs], [run[1] for run in runs])
        return versions

    def _align(self, values: Sequence[Any]) -> pa.Array | None:
        """Target-aligned values as one for each token, NaN where nothing was sampled."""
        is_given = np.array([value is not None for value in values], bool)
        if not is_given.any():
            return None
        aligned = np.full(len(self.tokens), np.nan, np.float32)
        of_given = np.repeat(is_given, self.lengths)
        aligned[of_given & ~self.is_first] = np.concatenate(
            [np.asarray(value, np.float32) for value in values if value is not None]
        )
        aligned[~self.mask] = np.nan
        return make_list_array(aligned[of_given], self.lengths, is_given)

    def _find_clipped(self, trained: Sequence[TrainSample | None]) -> pa.Array | None:
        """Where the loss's clip was active, for samples in which it was anywhere."""
        flags = [None if sample is None else sample.clipped for sample in trained]
        is_known = np.array([flag is not None for flag in flags], bool)
        if not is_known.any():
            return None
        clipped = np.zeros(len(self.tokens), np.bool_)
        clipped[np.repeat(is_known, self.lengths) & ~self.is_first] = np.concatenate(
            [np.asarray(flag, np.bool_) for flag in flags if flag is not None]
        )
        clipped &= self.mask
        is_clipped = self.count(clipped) > 0
        if not is_clipped.any():
            return None
        return make_list_array(
            clipped[np.repeat(is_clipped, self.lengths)], self.lengths, is_clipped
        )


_EMPTY = RolloutSample(tokens=[], logprobs=[], loss_mask=[], reward=0.0)


def _join(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    """The arrays end to end."""
    return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")


def _add_up(values: NDArray[Any]) -> NDArray[Any]:
    """Sums of all values before each place, and of all."""
    return np.concatenate([[0], np.cumsum(values)])
