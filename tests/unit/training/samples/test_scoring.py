"""What becomes of a row's completions once they have rewards."""

import asyncio
from typing import Any

import pytest
from tests.unit.training.trial_rollouts import row_of

from hearth.sdk import SampledCompletion
from training.recipes.rl_loop import Config
from training.rewards import Score, Unscored
from training.samples.groups import ExampleAnswer, RowOutcome, TrainSample
from training.samples.scoring import SampledRow, ScoredRow, score_row


def completion_of(text: str, finish_reason: str = "stop") -> SampledCompletion:
    tokens = [5, 6, *(ord(letter) for letter in text)]
    logprobs = [-0.5] * len(text)
    return SampledCompletion(text, tokens, 2, finish_reason, inference_logprobs=logprobs)


def score(*texts: str, cut: str = "", **changes: Any) -> ScoredRow:
    """A row whose completions earn a quarter per letter; "?" holds no answer."""

    async def reward(text: str, row: Any) -> Score:
        assert row == row_of(3).row
        return Score(len(text) / 4, disagreement=0.25, parsed="?" not in text)

    completions = [completion_of(text, "length" if text in cut else "stop") for text in texts]
    return asyncio.run(score_row(Config(**changes), SampledRow(row_of(3), completions), reward))


def test_every_completion_that_was_not_cut_is_a_sample_with_what_it_earned():
    done = score("ab", "?", "wxyz", cut="wxyz", truncated_completions="drop")

    assert done.rewards == [0.5, 0.25]
    assert done.trajectories == [[sample] for sample in done.samples]
    assert [(sample.text, sample.tokens, sample.parsed) for sample in done.samples] == [
        ("ab", [5, 6, 97, 98], True),
        ("?", [5, 6, 63], False),
    ]
    assert len(done.scores) == 2
    assert done.dropped is None
    assert score("ab", "wxyz", cut="wxyz", truncated_completions="score").rewards == [0.5, 1.0]


def test_a_rows_outcome_counts_what_was_sampled_and_what_it_earned():
    done = score("ab", "?", "wxyz", cut="wxyz", truncated_completions="drop")
    samples = [[TrainSample.from_rollout(sample, 1.0)] for sample in done.samples]

    kept, dropped = done.keep([1.0, -1.0], samples), done.drop("uniform")

    assert kept.group is not None
    assert (kept.group.row, kept.group.rewards, kept.group.samples) == (
        done.sampled.row,
        [0.5, 0.25],
        samples,
    )
    assert kept.group.advantages == [1.0, -1.0]
    usual: dict[str, Any] = {
        "completions": 3,
        "truncated": 1,
        "rewards": [0.5, 0.25],
        "disagreements": [0.25, 0.25],
        "parsed": [True, False],
        "example": ExampleAnswer("?", [63], 0.25, "stop", False),
    }
    assert kept == RowOutcome(done.sampled.row, group=kept.group, **usual)
    assert dropped == RowOutcome(done.sampled.row, dropped="uniform", **usual)


@pytest.mark.parametrize(
    ("num_failed", "rewards", "reason"),
    [(0, [1.0, 1.0], None), (0, [1.0], "too_few"), (2, [1.0], "failed"), (1, [1.0, 0.0], None)],
)
def test_too_few_rewards_are_a_failure_where_some_failed(num_failed, rewards, reason):
    errors = [ValueError(str(number)) for number in range(num_failed)]
    completions = [completion_of("a" * round(4 * reward)) for reward in rewards]
    full = asyncio.run(
        score_row(Config(), SampledRow(row_of(3), completions), lambda text, row: len(text) / 4)
    )
    done = ScoredRow(full.sampled, full.samples, [*full.scores, *map(Unscored, errors)])

    assert done.dropped == reason
    outcome = done.drop("failed")
    assert outcome.failed_rewards == num_failed
    assert outcome.error is (errors[-1] if errors else None)
    assert done.drop("uniform").error is None


def test_what_was_not_sampled_is_dropped_for_that_and_earns_nothing():
    error = TimeoutError()
    nothing = SampledRow(row_of(3), dropped="prompt_too_long", error=error)

    done = asyncio.run(score_row(Config(), nothing, lambda text, row: 1.0))

    assert done == ScoredRow(nothing)
    assert done.dropped == "prompt_too_long"
    assert done.drop("prompt_too_long") == RowOutcome(
        nothing.row, dropped="prompt_too_long", rewards=[], parsed=[], disagreements=[], error=error
    )


def test_without_a_reward_the_first_completion_is_the_example():
    sampled = SampledRow(row_of(3), [completion_of("ab", "length"), completion_of("c")])

    assert ScoredRow(sampled).drop("too_few").example == ExampleAnswer(
        "ab", [97, 98], None, "length"
    )
