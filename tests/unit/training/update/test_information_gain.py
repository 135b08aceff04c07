"""Which tokens are scored for a group's turns, and what its samples get for them."""

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
import tinker
import torch
from tests.unit.training.trial_rollouts import (
    group_from,
    rollout_number,
    rollouts_of,
    row_of,
    run_row,
    sample_of,
)
from tests.unit.virtual_time import run_virtual

from hearth.errors import ConfigError, NumericsError, TransportError
from hearth.losses import POLICY_LOSSES
from training.config.objective import objective_options
from training.recipes import igpo_loop
from training.rollouts.runner import Submission
from training.samples.groups import PromptGroup, RowOutcome
from training.samples.rollout import RolloutSample
from training.update.information_gain import (
    InformationGain,
    credit_metrics,
    ground_truth_tokens,
    measure_cover,
    trainer_scorer,
    turn_prefixes,
)
from training.update.policy_losses import make_policy_loss_fn
from training.utils import DeployConfig

ANSWER = [90, 91]


def two_turns(reward: float, tool: int, last: int = 8) -> RolloutSample:
    """Prompt 5 6; the policy says 7; a tool says ``tool`` 20; the policy says ``last``."""
    tokens, mask = [5, 6, 7, tool, 20, last], [0, 0, 1, 0, 0, 1]
    return RolloutSample(tokens, [-0.5 * is_sampled for is_sampled in mask], mask, reward)


@dataclass
class Scored:
    """A scorer by hand: the mean logprob is minus a tenth of the prefix's largest later token."""

    calls: list[list[list[int]]] = field(default_factory=list)

    async def __call__(self, sequences: Sequence[Sequence[int]], last: int) -> list[list[float]]:
        self.calls.append([list(sequence) for sequence in sequences])
        return [self.rows(list(sequence))[-last:] for sequence in sequences]

    @staticmethod
    def rows(tokens: list[int]) -> list[float]:
        prefix = tokens[: tokens.index(ANSWER[0])]
        mean = -max(prefix[2:], default=prefix[-1]) / 10
        return [-9.0] * (len(tokens) - 3) + [mean - 1.0, mean + 1.0]


def two_by_two(*rewards: float) -> list[list[RolloutSample]]:
    """A pair of trajectories of two turns, whose tools say 30 and 40."""
    return [[two_turns(reward, tool)] for reward, tool in zip(rewards, (30, 40), strict=True)]


def gain_config(**changes: Any) -> igpo_loop.Config:
    return igpo_loop.Config(deployment=DeployConfig(tokenizer_model="x"), **changes)


def credit(
    trajectories: Sequence[Sequence[RolloutSample]],
    scorer: Any = None,
    *,
    opening: Sequence[int] = (),
    answer: Sequence[int] = ANSWER,
    **changes: Any,
) -> PromptGroup:
    group = group_from(row_of(3), trajectories)
    gain = InformationGain(gain_config(**changes), scorer or Scored(), lambda _row: answer, opening)
    return run_virtual(lambda: gain(group))


# What is scored.


def test_the_answer_follows_the_prompt_and_each_turn_with_what_the_tool_said():
    scorer = Scored()

    credit(two_by_two(1.0, 0.0), scorer)

    assert scorer.calls == [
        [[5, 6, *ANSWER], [5, 6, 7, 30, 20, *ANSWER], [5, 6, 7, 40, 20, *ANSWER]]
    ]


def test_equal_prefixes_are_scored_once_and_batches_hold_what_they_may():
    scorer = Scored()
    trajectories = [[two_turns(1.0, 30)], [two_turns(0.0, 30, last=9)], [two_turns(0.0, 40)]]

    credit(trajectories, scorer, scoring_batch=2)

    assert [len(call) for call in scorer.calls] == [2, 1]


def test_an_opening_stands_before_the_answer_and_is_not_scored():
    scorer = Scored()

    group = credit(two_by_two(1.0, 0.0), scorer, opening=[77])

    assert scorer.calls[0][0] == [5, 6, 77, *ANSWER]
    assert group.credit.baseline == pytest.approx(Scored.rows([5, 6, 77, *ANSWER])[-1] - 1.0)


def test_the_last_turns_end_is_scored_only_where_its_gain_counts():
    pooled = Scored()

    group = credit(two_by_two(1.0, 0.0), pooled, ig_normalization="pooled")

    assert [5, 6, 7, 30, 20, 8, *ANSWER] in pooled.calls[0]
    assert len(pooled.calls[0]) == 5
    assert [len(gain) for gain in group.credit.gains] == [2, 2]


def test_the_turns_of_several_segments_follow_each_other():
    first, second = two_turns(1.0, 30), sample_of(1.0, tokens=[5, 9, 70, 71])

    assert turn_prefixes([first, second]) == [(5, 6), (5, 6, 7, 30, 20), (5, 9)]
    assert turn_prefixes([first, second], with_whole=True)[-1] == (5, 9, 70, 71)


def test_a_branch_is_credited_against_what_it_goes_on_from():
    """The second segment begins where the first one did, before its only turn."""
    first, second = two_turns(1.0, 30), two_turns(1.0, 50)
    group = credit([[first, second], [two_turns(0.0, 40)]], ig_gamma=0.0)

    # -0.6, then -3.0 after the tool; back to -0.6; -5.0; and the last turn has the outcome.
    assert group.credit.gains[0] == pytest.approx([-2.4, 2.4, -4.4])
    assert math.fsum(group.credit.gains[0]) == pytest.approx(-5.0 - -0.6)
    assert [len(advantage) for advantage in group.credit.advantages] == [4, 2]
    assert group.credit.advantages[0][-1] == pytest.approx(1.0)


def test_trajectories_that_were_cut_or_have_one_turn_stand_beside_longer_ones():
    cut = replace(two_turns(0.0, 30), finish_reason="length")
    group = credit([[cut], [two_turns(1.0, 40)], [sample_of(0.5)]])

    assert [len(gain) for gain in group.credit.gains] == [1, 1, 0]
    last = [turns[-1] for turns in group.credit.advantages]
    assert last == pytest.approx([-math.sqrt(1.5), math.sqrt(1.5), 0.0])
    assert group.truncated == [True, False, False]


def test_a_prefix_without_room_for_the_answer_is_not_scored_and_its_turn_gains_nothing():
    scorer = Scored()

    group = credit(two_by_two(1.0, 0.0), scorer, max_seq_len=6)

    assert scorer.calls == [[[5, 6, *ANSWER]]]
    assert group.credit.gains == [[0.0], [0.0]]
    assert group.credit.baseline == pytest.approx(-0.6)
    assert credit_metrics([group], 1.0)["igpo/unscored_ratio"] == 1.0


def test_without_room_for_any_prefix_outcomes_alone_count():
    scorer = Scored()

    group = credit(two_by_two(1.0, 0.0), scorer, max_seq_len=3, ig_gamma=1.0)

    assert scorer.calls == []
    assert group.credit.baseline is None
    assert group.credit.advantages == [pytest.approx([1.0, 1.0]), pytest.approx([-1.0, -1.0])]
    assert "igpo/baseline_logp" not in credit_metrics([group], 1.0)


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_an_answer_without_a_finite_logprob_ends_the_run_and_says_what_to_do(value):
    async def broken(sequences: Sequence[Sequence[int]], last: int) -> list[list[float]]:
        return [[-1.0] * (last - 1) + [value] for _ in sequences]

    message = r"must be finite, got \[-1.0, .*\] after 2 tokens.*start"
    with pytest.raises(NumericsError, match=message):
        run_with(broken)


def test_a_longer_answer_weighs_no_more_than_a_short_one():
    async def even(sequences: Sequence[Sequence[int]], last: int) -> list[list[float]]:
        # Every token is half as likely after the tool has spoken as before.
        return [[-1.0 - math.log(2) * (30 in sequence)] * last for sequence in sequences]

    for length in (1, 7):
        group = credit(two_by_two(1.0, 0.0), even, answer=[90] * length)
        assert group.credit.gains == [[pytest.approx(-math.log(2))], [0.0]]


def test_a_row_without_an_answer_is_named():
    with pytest.raises(ConfigError, match=r"answer_fn must give at least 1 token id.*row 3"):
        credit(two_by_two(1.0, 0.0), answer=[])


def test_the_trainers_scores_are_the_logprobs_of_the_last_tokens():
    asked = []

    class Trainer:
        async def forward(self, data: list[tinker.Datum], loss: str) -> Any:
            asked.extend([loss, *(datum.model_input.to_ints() for datum in data)])
            targets = [list(datum.loss_fn_inputs["target_tokens"].data) for datum in data]
            outputs = [
                {"logprobs": tinker.TensorData(data=[-token / 8 for token in row], dtype="float32")}
                for row in targets
            ]
            return tinker.ForwardBackwardOutput("cross_entropy", outputs, {})

    scored = asyncio.run(trainer_scorer(cast("Any", Trainer()))([[5, 6, 90, 91], [7, 90, 91]], 2))

    assert asked == ["cross_entropy", [5, 6, 90], [7, 90]]
    assert [list(rows) for rows in scored] == [[-90 / 8, -91 / 8]] * 2


def test_the_ground_truth_is_tokenized_by_itself():
    class Letters:
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [ord(part) for part in text]

    assert ground_truth_tokens(Letters())({"ground_truth": 42}) == [52, 50]


# What samples get.


def test_each_token_has_the_advantage_of_its_turn():
    group = credit(two_by_two(1.0, 0.0), ig_gamma=0.5)

    assert group.credit.gains == [[pytest.approx(-2.4)], [pytest.approx(-3.4)]]
    assert group.credit.advantages == [pytest.approx([1.5, 1.0]), pytest.approx([-1.5, -1.0])]
    rows = [sample.advantage for sample in group.flat()]
    assert rows == [pytest.approx([0, 1.5, 0, 0, 1.0]), pytest.approx([0, -1.5, 0, 0, -1.0])]
    assert group.rewards == [1.0, 0.0]


def test_the_segments_of_a_run_have_the_advantages_of_their_own_turns():
    long = [two_turns(1.0, 30), sample_of(1.0, tokens=[5, 9, 70, 71])]
    group = credit([long, [two_turns(0.0, 40)]], ig_gamma=0.0)

    ((first, second, third), _) = group.credit.advantages
    assert [sample.advantage for sample in group.samples[0]] == [
        [0.0, first, 0.0, 0.0, second],
        [0.0, third, third],
    ]


def test_a_group_with_equal_outcomes_is_kept_and_told_apart_by_its_gains():
    group = credit(two_by_two(0.0, 0.0))

    assert group.advantages == [0.0, 0.0]
    assert group.credit.advantages == [pytest.approx([1.0, 0.0]), pytest.approx([-1.0, 0.0])]


def test_the_probability_form_compares_probabilities():
    group = credit(two_by_two(0.0, 0.0), ig_form="probability")

    assert group.credit.gains[0] == [pytest.approx(0.0497871 - 0.5488116, abs=1e-6)]
    assert group.credit.baseline == pytest.approx(-0.6)


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_t168_every_policy_loss_moves_each_token_by_its_own_advantage(policy_loss):
    group = credit(two_by_two(0.0, 0.0))
    samples = group.flat()
    policy = [torch.full((5,), -0.5, dtype=torch.float64, requires_grad=True) for _ in samples]

    loss_fn = make_policy_loss_fn(
        policy_loss,
        advantages=[sample.advantage for sample in samples],
        behavior_logprobs=[sample.behavior_logprobs for sample in samples],
        config=objective_options(gain_config(policy_loss=policy_loss, kl_beta=0.0)),
    )
    loss, _ = loss_fn([sample.datum for sample in samples], policy)
    loss.backward()

    # At a ratio of 1 the gradient is minus the advantage; the last turns have an outcome of 0.
    first, second = (tensor.grad for tensor in policy)
    torch.testing.assert_close(first, torch.tensor([0, -1, 0, 0, 0], dtype=torch.float64))
    torch.testing.assert_close(second, torch.tensor([0, 1, 0, 0, 0], dtype=torch.float64))


# Among the rollouts.


def run_with(score: Any, **options: Any) -> RowOutcome:
    """The outcome of a row whose group is credited by what ``score`` says."""

    async def rollout_fn(_row: dict[str, Any]) -> RolloutSample:
        return two_turns(0.0, 30 + 10 * rollout_number())

    gain = InformationGain(gain_config(), score, lambda _row: ANSWER)
    rollouts = rollouts_of(rollout_fn, credit=gain, **options)
    return run_virtual(lambda: rollouts.run_row(Submission(row_of(3), 0, 0)))


def test_a_sampled_group_has_its_credit_and_the_filter_sees_it():
    seen: list[PromptGroup] = []

    def accepts(group: PromptGroup) -> bool:
        seen.append(group)
        return True

    done = run_with(Scored(), accepts=accepts)

    assert [done.group] == seen
    assert seen[0].credit is not None


def test_scoring_that_fails_for_a_while_is_tried_again():
    failures = 2

    async def unsteady(sequences: Sequence[Sequence[int]], last: int) -> list[list[float]]:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise TransportError("the deployment restarts")
        return await Scored()(sequences, last)

    done = run_with(unsteady)

    assert done.group.credit is not None
    assert (done.dropped, done.failed_samples) == (None, 0)


def test_a_group_that_cannot_be_scored_is_dropped_as_failed():
    async def broken(_sequences: Sequence[Sequence[int]], _last: int) -> list[list[float]]:
        raise TransportError("no deployment")

    done = run_with(broken, rollout_retries=1)

    assert (done.group, done.dropped, done.completions) == (None, "failed", 2)
    assert isinstance(done.error, TransportError)


def test_scoring_that_no_second_try_mends_ends_the_run_and_names_the_row():
    async def wrong(_sequences: Sequence[Sequence[int]], _last: int) -> list[list[float]]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        run_with(wrong)

    assert caught.value.__notes__ == ["in the rollout of row 3, credit"]


def test_scoring_that_hangs_is_given_up():
    async def hanging(_sequences: Sequence[Sequence[int]], _last: int) -> list[list[float]]:
        await asyncio.sleep(1e5)
        raise AssertionError

    assert run_with(hanging, rollout_retries=0, rollout_timeout_s=60.0).dropped == "failed"


def test_without_credit_a_group_is_that_of_its_rewards():
    async def rollout_fn(_row: dict[str, Any]) -> RolloutSample:
        return two_turns(float(rollout_number()), 30)

    done = run_row(rollout_fn, row_of(3))

    assert done.group.credit is None
    assert [sample.advantage for sample in done.group.flat()] == done.group.advantages


# Metrics.


def test_metrics_count_turns_and_mean_gains_without_outcomes():
    short = sample_of(1.0, tokens=[5, 6, 7, 8])
    groups = [credit([*two_by_two(1.0, 0.0), [short]]), group_from(row_of(1), [[short], [short]])]

    metrics = credit_metrics(groups, step_s=2.0)

    assert metrics["igpo/avg_turns"] == pytest.approx(5 / 3)
    assert metrics["igpo/mean_ig"] == pytest.approx((-2.4 - 3.4) / 2)
    assert metrics["igpo/baseline_logp"] == pytest.approx(-0.6)
    assert metrics["igpo/unscored_ratio"] == 0.0
    assert metrics["igpo/scoring_ratio"] == metrics["igpo/scoring_time"] / 2.0


def test_without_credit_there_are_no_metrics_of_it():
    assert credit_metrics([group_from(row_of(1), [[sample_of()], [sample_of()]])], 1.0) == {}


@pytest.mark.parametrize(
    ("spans", "length"),
    [([], 0.0), ([(1, 3)], 2.0), ([(5, 6), (1, 3)], 3.0), ([(1, 5), (2, 3), (4, 7)], 6.0)],
)
def test_time_that_spans_share_counts_once(spans, length):
    assert measure_cover(spans) == length


# The recipe's settings.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ig_weight": -1.0}, "ig_weight must be >= 0, got -1.0"),
        ({"ig_gamma": 1.5}, r"ig_gamma must lie in \[0, 1\], got 1.5"),
        ({"scoring_batch": 0}, r"scoring_batch must lie in \[1, 1024\], got 0"),
        ({"ig_form": "bits"}, "ig_form must be one of"),
        ({"ig_normalization": "joint"}, "ig_normalization must be one of"),
        ({"ig_scorer": "reference"}, "ig_scorer must be one of"),
        ({"completions_per_prompt": 1}, "completions_per_prompt must be >= 2"),
        ({"rollout_retries": -1}, "rollout_retries must be >= 0"),
    ],
)
def test_each_setting_has_its_rule(changes, message):
    with pytest.raises(ConfigError, match=message):
        gain_config(**changes).validate()


@pytest.mark.parametrize("row", [{"question": "?"}, {"ground_truth": ""}, {"ground_truth": ["a"]}])
def test_a_row_without_ground_truth_is_refused_before_anything_is_started(tmp_path, row):
    config = gain_config(log_path=str(tmp_path / "run"))

    message = r"rows\[1\] must have a ground_truth, a text or a number, got "
    with pytest.raises(ConfigError, match=message):
        igpo_loop.main(
            config,
            rollout_fn_factory=lambda _: pytest.fail("started"),
            rows=[{"ground_truth": 0}, row],
        )

    assert not (tmp_path / "run").exists()
