"""Whether a run has something to learn from: what is wrong with a step, in plain words.

``find_problems`` judges the metrics of one step. ``SignalWatch`` logs the findings now and then,
and ends a run whose rows have not taught anything for a long time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hearth.errors import HearthError
from training.samples.groups import ExampleAnswer, PromptGroup, RolloutStats, RowOutcome
from training.samples.reward_metrics import CORRECT

Metrics = Mapping[str, float]

TRUNCATED = 0.5
"""Share of cut answers from which on it is reported."""
USELESS_ROWS = 0.75
"""Share of rows that teach nothing, likewise."""
UNPARSED = 0.5
"""Share of answers in which the reward does not find what it looks for, likewise."""
FAILED_REWARDS = 0.25
"""Share of answers whose reward failed, likewise."""
EFFECTIVE = 0.25
"""Share of trained samples with an advantage at or below which it is reported."""
EXPLODING = 10.0
"""Times the running median of the gradient norm."""
FAR_KL = 1.0
"""KL to the reference in nats per token: the policy is then another model."""
COLLAPSED = 0.1
"""Share of the first steps' entropy."""
FIRST_STEPS = 5
"""Steps that there must be before one is compared with others."""
REMEMBERED_STEPS = 50
REPEAT_AFTER = 20
"""Steps until a finding of the same kind is logged again; twice as many each time after that."""
MOST_LINES = 2
"""Findings per step."""
MOST_CHARACTERS = 1000
"""Of a sample that is shown."""


class NoSignalError(HearthError, RuntimeError):
    """For ``no_signal_patience`` steps no row had anything to learn from."""


class Finding(NamedTuple):
    """Something that is wrong with a step; findings of one ``kind`` are not logged every time."""

    kind: str
    line: str


def signal_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """``signal/*`` of what a step trains: samples whose advantage is not 0."""
    samples = [sample for group in groups for sample in group.flat()]
    effective = sum(sample.is_effective for sample in samples)
    return {
        "signal/effective_samples": float(effective),
        "signal/effective_ratio": effective / max(1, len(samples)),
    }


def find_problems(metrics: Metrics, past: Sequence[Metrics] = ()) -> list[Finding]:
    """What is wrong with a step, the gravest first; ``past`` are earlier steps, oldest first.

    A metric that is not there is not judged.
    """
    return [*_gradient(metrics, past), *_rows(metrics), *_policy(metrics, past)]


def _gradient(metrics: Metrics, past: Sequence[Metrics]) -> Iterator[Finding]:
    norm = metrics.get("train/grad_norm")
    if norm is None:
        return
    effective = metrics.get("signal/effective_samples", 0.0)
    if not math.isfinite(norm):
        yield Finding("gradient", f"the gradient norm is {norm}: lower learning_rate, look at loss")
    elif norm == 0 and effective:
        yield Finding(
            "gradient",
            f"the gradient is exactly 0, though {effective:.0f} samples have an advantage: every "
            "token is clipped or masked",
        )
    elif metrics.get("train/skipped"):
        yield Finding(
            "skipped",
            "the gradient is exactly 0 and the optimizer step was skipped "
            '(zero_gradient_steps="take" takes it): no trained sample has an advantage',
        )
    usual = _median("train/grad_norm", past)
    if usual and EXPLODING * usual < norm < math.inf:
        yield Finding(
            "gradient",
            f"the gradient norm is {norm:.3g}, {norm / usual:.0f} times its running median: lower "
            "learning_rate or grad_clip_norm",
        )


def _rows(metrics: Metrics) -> Iterator[Finding]:
    truncated = metrics.get("rollout/truncated_ratio", 0.0)
    if truncated >= TRUNCATED:
        yield Finding(
            "truncated",
            f"{truncated:.0%} of the answers were cut at a length limit: raise "
            "max_completion_tokens, or ask for shorter answers",
        )
    unparsed = metrics.get("rollout/parse_fail_ratio", 0.0)
    if unparsed >= UNPARSED:
        yield Finding(
            "parser",
            f"no answer was found in {unparsed:.0%} of the completions: ask for the form that the "
            "reward function looks for, or change its parser",
        )
    num_completions = metrics.get("rollout/samples_completed", 0.0)
    failed = metrics.get("rollout/reward_fail_count", 0.0)
    if num_completions and failed / num_completions >= FAILED_REWARDS:
        yield Finding(
            "rewards",
            f"the reward of {failed / num_completions:.0%} of the answers failed: see the log",
        )
    useful = metrics.get("signal/useful_row_ratio")
    # Where answers are cut, that is why; and where most are right, there is less and less to learn.
    is_explained = truncated >= TRUNCATED or metrics.get("rollout/raw_reward", 0.0) > CORRECT
    if useful is not None and 1.0 - useful >= USELESS_ROWS and not is_explained:
        yield Finding(
            "rows",
            f"{1.0 - useful:.0%} of the rows taught nothing: mostly their answers all earn the "
            "same; take easier or harder rows, or more completions_per_prompt",
        )
    effective = metrics.get("signal/effective_ratio")
    if effective is not None and effective <= EFFECTIVE:
        yield Finding(
            "effective", f"{effective:.0%} of the trained samples have an advantage that is not 0"
        )


def _policy(metrics: Metrics, past: Sequence[Metrics]) -> Iterator[Finding]:
    kl = metrics.get("train/ref_kl", 0.0)
    if not kl <= FAR_KL:
        yield Finding(
            "kl",
            f"the KL to the reference is {kl:.3g} nats per token: raise kl_beta or lower "
            "learning_rate",
        )
    entropy = metrics.get("rollout/entropy")
    at_first = _median("rollout/entropy", past[:FIRST_STEPS])
    if entropy is not None and at_first and entropy < COLLAPSED * at_first:
        yield Finding(
            "entropy",
            f"the entropy has fallen from {at_first:.3g} to {entropy:.3g} nats per token: answers "
            "hardly differ any more",
        )


def _median(name: str, past: Sequence[Metrics]) -> float | None:
    """The median of a metric over earlier steps; None where these are too few to tell."""
    known = [metrics[name] for metrics in past if math.isfinite(metrics.get(name, math.nan))]
    return statistics.median(known) if len(known) >= FIRST_STEPS else None


@dataclass
class Stretch(RolloutStats):
    """Counts over rows that one after the other had nothing to learn from."""

    example: ExampleAnswer | None = None

    def add(self, outcome: RowOutcome) -> None:
        """Count one more row, and keep its example."""
        super().add(outcome)
        self.example = outcome.example or self.example

    @property
    def is_solved(self) -> bool:
        """Whether most answers were right, so that there is nothing left to learn."""
        return 2 * sum(reward > CORRECT for reward in self.rewards) > len(self.rewards)

    def likely_cause(self) -> str:
        """Why there was nothing to learn, as far as the counts tell."""
        if self.samples and self.truncated / self.samples >= TRUNCATED:
            share = self.truncated / self.samples
            return f"{share:.0%} of the answers were cut: raise max_completion_tokens"
        if self.parsed and self.parsed.count(False) / len(self.parsed) >= UNPARSED:
            share = self.parsed.count(False) / len(self.parsed)
            return (
                f"no answer was found in {share:.0%} of the completions: does the prompt ask for "
                "the form that the reward function looks for?"
            )
        for reason, why in (
            ("overlong_prompt", "the prompts leave no room below max_seq_len: raise it"),
            ("non_finite", "rewards are NaN or infinite: look at the reward function"),
            ("filtered", "dynamic_filter_fn refuses the groups: look at what it asks for"),
        ):
            if 2 * self.dropped[reason] >= self.rows:
                return why
        if not self.rewards:
            return "no answer has a reward: look at what the rollout or reward function drops"
        low, high = min(self.rewards), max(self.rewards)
        if low == high:
            return (
                f"every answer earned {low:g}: is the reward constant, does its parser find the "
                "answer, are the rows too hard?"
            )
        return (
            "the answers to one row all earn the same, though rows differ: raise temperature or "
            "completions_per_prompt, or leave out rows that are always or never solved"
        )


class SignalWatch:
    """Says through ``note`` what is wrong with steps; stops a run that has nothing to learn.

    The patience is counted in rows, ``groups_per_step`` of them for each step, so that rows that
    make no step count too. Rows whose rollouts failed are others' to judge. ``decode`` turns tokens
    into text for a sample that has none. A stretch in which most answers are right is said, and
    does not stop the run.
    """

    def __init__(
        self,
        patience: int | None = None,
        groups_per_step: int = 1,
        note: Callable[[str], None] = lambda _line: None,
        decode: Callable[[Sequence[int]], str] = str,
    ) -> None:
        self._patience = patience
        self._groups_per_step = groups_per_step
        self._note = note
        self._decode = decode
        self._stretch = Stretch()
        self._first: list[Metrics] = []
        self._past: deque[Metrics] = deque(maxlen=REMEMBERED_STEPS)
        self._reported_at: dict[str, int] = {}
        self._pauses: dict[str, int] = {}
        self._steps = 0

    def see_row(self, outcome: RowOutcome) -> None:
        """Judge one row's outcome.

        Raises:
            NoSignalError: it is the last of so many without signal that patience is over.
        """
        if outcome.dropped in ("failed", "stale"):
            return
        if outcome.group is not None and outcome.group.effective_samples:
            self._stretch = Stretch()
            return
        self._stretch.add(outcome)
        patience = self._patience
        if patience is None or self._stretch.rows < patience * self._groups_per_step:
            return
        stretch, self._stretch = self._stretch, Stretch()
        if stretch.is_solved:
            self._note(
                f"the last {stretch.rows} rows taught nothing, and most of their answers are "
                "right: the policy has solved them"
            )
            return
        raise NoSignalError(
            f"rows must have something to learn from, got none in {stretch.rows} rows in a row "
            f"(no_signal_patience={patience}): {stretch.likely_cause()}"
            + self._format_example(stretch)
        )

    def see_step(self, step: int, metrics: Metrics) -> None:
        """Say what is wrong with a step, unless it was said not long ago."""
        self._steps += 1
        past = [*self._first, *self._past]
        new = [finding for finding in find_problems(metrics, past) if self._is_due(finding.kind)]
        for finding in new[:MOST_LINES]:
            self.report(step, finding)
        if len(self._first) < FIRST_STEPS:
            self._first.append(metrics)
        else:
            self._past.append(metrics)

    def report(self, step: int, finding: Finding) -> None:
        """Say what somebody else has found, unless it was said not long ago."""
        if self._is_due(finding.kind):
            self._reported_at[finding.kind] = self._steps
            self._pauses[finding.kind] = 2 * self._pauses.get(finding.kind, REPEAT_AFTER // 2)
            self._note(f"step {step:>4}  {finding.line}")

    def _is_due(self, kind: str) -> bool:
        pause = self._pauses.get(kind, 0)
        return self._steps - self._reported_at.get(kind, self._steps) >= pause

    def _format_example(self, stretch: Stretch) -> str:
        example = stretch.example
        if example is None:
            return ""
        text = (example.text or self._decode(example.tokens)).strip()
        if len(text) > MOST_CHARACTERS:
            text = text[:MOST_CHARACTERS] + " ..."
        facts = ["no reward" if example.reward is None else f"reward {example.reward:g}"]
        facts += ["no answer found"] if example.parsed is False else []
        facts += [f"finish reason {example.finish_reason!r}"]
        return f"\none of the last answers ({', '.join(facts)}):\n{text}"
