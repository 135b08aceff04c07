"""Information gain of a group's turns: which tokens are scored, by whom, and what samples get.

The right answer is scored as token ids after each prefix of a trajectory, without gradient: after
the prompt, and after each turn with all that came before the next one, a tool's answer included.
All prefixes of a group are one batch, and equal ones are scored once. Scores are the model's own,
those of temperature 1, whatever temperature a run samples at.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any

from hearth.errors import ConfigError, NumericsError
from hearth.sdk import DeploymentSampler, FiretitanTrainingClient
from training.config.turn_credit import TurnCreditConfig
from training.data.rows import Row
from training.samples.datums import datum_from_tokens_weights
from training.samples.groups import PromptGroup, TrainSample
from training.samples.rollout import RolloutSample
from training.samples.turn_advantages import (
    TurnCredit,
    belief,
    information_gains,
    target_rows,
    turn_advantages,
    turn_spans,
)

Scorer = Callable[[Sequence[Sequence[int]], int], Awaitable[Sequence[Sequence[float]]]]
"""``(sequences of token ids, last)`` to the model's own logprobs of each one's ``last`` tokens."""
AnswerFn = Callable[[Row], Sequence[int]]
"""A row's right answer as token ids (``answer_fn``)."""


def deployment_scorer(sampler: DeploymentSampler) -> Scorer:
    """Scores by what the deployment serves: a request that echoes answers and samples nothing."""

    async def score(sequences: Sequence[Sequence[int]], last: int) -> Sequence[Sequence[float]]:
        return await sampler.score_token_ids(sequences, last=last)

    return score


def trainer_scorer(client: FiretitanTrainingClient) -> Scorer:
    """Scores by the weights in training: the trainer's forward, in its turn among other work."""

    async def score(sequences: Sequence[Sequence[int]], last: int) -> Sequence[Sequence[float]]:
        data = [
            datum_from_tokens_weights(sequence, [1.0] * len(sequence)) for sequence in sequences
        ]
        scored = await client.forward(data, "cross_entropy")
        return [output["logprobs"].data[-last:] for output in scored.loss_fn_outputs]

    return score


def ground_truth_tokens(tokenizer: Any) -> AnswerFn:
    """The tokens of a row's ``ground_truth``, by themselves."""
    return lambda row: tokenizer.encode(str(row["ground_truth"]), add_special_tokens=False)


class InformationGain:
    """Gives a group's turns their credit; to be called with the group, on any event loop.

    ``opening`` are tokens that lead to an answer wherever one may begin, as ``<answer>`` does.
    They stand between prefix and answer, and are not scored themselves.
    """

    def __init__(
        self,
        config: TurnCreditConfig,
        score: Scorer,
        answer_of: AnswerFn,
        opening: Sequence[int] = (),
    ) -> None:
        self._config = config
        self._score = score
        self._answer_of = answer_of
        self._opening = list(opening)

    async def __call__(self, group: PromptGroup) -> PromptGroup:
        """The same group, its samples with an advantage per token.

        Raises:
            ConfigError: the row's right answer has no token.
            NumericsError: a logprob of the right answer is not finite.
        """
        started = time.perf_counter()
        answer = list(self._answer_of(group.row.row))
        if not answer:
            raise ConfigError(
                f"answer_fn must give at least 1 token id, got [] for row {group.row.index}: "
                "without a right answer nothing can be gained"
            )
        # The cookbook's normalization compares the last turn's gain too.
        ends_too = self._config.ig_normalization == "pooled"
        prefixes = [
            turn_prefixes([sample.rollout for sample in samples], with_whole=ends_too)
            for samples in group.samples
        ]
        logprobs = await self._mean_logprobs(
            {prefix for turns in prefixes for prefix in turns}, answer
        )
        beliefs = [[self._belief(logprobs.get(prefix)) for prefix in turns] for turns in prefixes]
        gains = [information_gains(many) for many in beliefs]
        advantages = turn_advantages(
            gains if ends_too else [[*turns, 0.0] for turns in gains],
            group.rewards,
            ig_weight=self._config.ig_weight,
            gamma=self._config.ig_gamma,
            normalization=self._config.ig_normalization,
        )
        credit = TurnCredit(
            gains,
            advantages,
            logprobs.get(prefixes[0][0]),
            unscored=sum(many[1:].count(None) for many in beliefs),
            scored_from_s=started,
            scored_until_s=time.perf_counter(),
        )
        samples = [credit_turns(*pair) for pair in zip(group.samples, advantages, strict=True)]
        return replace(group, samples=samples, credit=credit)

    def _belief(self, mean_logprob: float | None) -> float | None:
        return None if mean_logprob is None else belief(mean_logprob, self._config.ig_form)

    async def _mean_logprobs(
        self, prefixes: set[tuple[int, ...]], answer: list[int]
    ) -> dict[tuple[int, ...], float]:
        """The mean logprob of the answer's tokens after each prefix that leaves room for it."""
        asked = [*self._opening, *answer]
        room = self._config.max_seq_len - len(asked)
        # In an order of their own, so that a batch is the same in every run.
        fitting = sorted(prefix for prefix in prefixes if len(prefix) <= room)
        found: dict[tuple[int, ...], float] = {}
        size = self._config.scoring_batch
        for batch in (fitting[start : start + size] for start in range(0, len(fitting), size)):
            scored = await self._score([[*prefix, *asked] for prefix in batch], len(answer))
            for prefix, rows in zip(batch, scored, strict=True):
                found[prefix] = mean_logprob(rows, num_before=len(prefix))
        return found


def mean_logprob(logprobs: Sequence[float], *, num_before: int) -> float:
    """The mean logprob of an answer's tokens, which stand after ``num_before`` others.

    A mean and not a sum, so that gains of long and short answers are of one size.

    Raises:
        NumericsError: one is not finite.
    """
    if not all(map(math.isfinite, logprobs)):
        raise NumericsError(
            f"logprobs of the right answer must be finite, got {list(logprobs)} after {num_before} "
            "tokens: the weights that score hold NaN or infinity, or can never sample such a "
            "token; start again from an earlier checkpoint with a lower learning_rate"
        )
    return math.fsum(logprobs) / len(logprobs)


def turn_prefixes(
    segments: Sequence[RolloutSample], *, with_whole: bool = False
) -> list[tuple[int, ...]]:
    """What stands before each turn of a trajectory: the prompt, then all up to the next turn.

    ``with_whole`` adds the last segment as a whole, which is what stands after the last turn.
    """
    prefixes = [
        tuple(segment.tokens[:start])
        for segment in segments
        for start, _ in turn_spans(segment.loss_mask)
    ]
    return [*prefixes, tuple(segments[-1].tokens)] if with_whole else prefixes


def credit_turns(samples: Sequence[TrainSample], per_turn: Sequence[float]) -> list[TrainSample]:
    """The samples of one trajectory with the advantage of each turn on its tokens."""
    left = list(per_turn)
    found: list[TrainSample] = []
    for sample in samples:
        count = len(turn_spans(sample.rollout.loss_mask))
        rows = target_rows(sample.rollout.loss_mask, left[:count])
        found.append(replace(sample, advantage=rows))
        left = left[count:]
    return found


def credit_metrics(groups: Sequence[PromptGroup], step_s: float) -> dict[str, float]:
    """``igpo/*`` of one step of ``step_s`` seconds; {} where no group has turn-level credit.

    ``igpo/mean_ig`` leaves outcomes out. ``igpo/unscored_ratio`` is the share of gains that count
    as 0 because ``max_seq_len`` left no room for the right answer. ``igpo/scoring_time`` is the
    seconds in which the right answer of some group was being scored, whatever else went on
    meanwhile, and ``igpo/scoring_ratio`` its share of the step.
    """
    credits = [group.credit for group in groups if group.credit is not None]
    if not credits:
        return {}
    turns = [len(advantage) for credit in credits for advantage in credit.advantages]
    gains = [gain for credit in credits for turns in credit.gains for gain in turns]
    baselines = [credit.baseline for credit in credits if credit.baseline is not None]
    seconds = measure_cover([(credit.scored_from_s, credit.scored_until_s) for credit in credits])
    metrics = {
        "igpo/avg_turns": sum(turns) / len(turns),
        "igpo/mean_ig": math.fsum(gains) / len(gains) if gains else 0.0,
        "igpo/unscored_ratio": sum(credit.unscored for credit in credits) / max(1, len(gains)),
        "igpo/scoring_time": seconds,
        "igpo/scoring_ratio": seconds / step_s,
    }
    if baselines:
        metrics["igpo/baseline_logp"] = math.fsum(baselines) / len(baselines)
    return metrics


def measure_cover(spans: Sequence[tuple[float, float]]) -> float:
    """The length of what the spans cover together."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
