"""``igpo_loop`` on the embedded platform: turns get credit, by either scorer and for every loss."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tinker
from tests.integration.conftest import async_config
from tests.integration.rollouts import make_two_turns
from tests.integration.runs import Trial, read_metrics

from hearth.losses.catalog import POLICY_LOSSES
from training.data.rows import load_rows
from training.examples.rl.multihop_qa import rollout as multihop
from training.examples.rl.multihop_qa import train as multihop_train
from training.examples.rl.multihop_qa.corpus import question_rows
from training.examples.rl.multihop_qa.policy import ensure_model
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.platform.run_infra import RunInfra, load_tokenizer, provision
from training.quickstart import HELDOUT_ROWS
from training.recipes import async_rl_loop, igpo_loop
from training.samples.groups import PromptGroup, completion_sample
from training.samples.rollout import (
    Rollout,
    RolloutFn,
    RolloutFnFactory,
    RolloutResult,
    RolloutRun,
    RolloutSample,
    RolloutSetup,
)
from training.update.information_gain import AnswerFn, Scorer, deployment_scorer, trainer_scorer
from training.utils import DeployConfig


class Run:
    """A finished run of ``igpo_loop``: what it left behind, and the groups that it trained."""

    def __init__(
        self,
        folder: Path,
        make: RolloutFnFactory,
        *,
        answer_fn: AnswerFn | None = None,
        **changes: Any,
    ) -> None:
        self.groups: list[PromptGroup] = []
        fields = vars(async_config(folder, max_rows=4)) | changes
        summary = igpo_loop.main(
            igpo_loop.Config(**fields),
            rollout_fn_factory=make,
            dynamic_filter_fn=self._keep,
            answer_fn=answer_fn,
        )
        self.trial = Trial(folder, summary)

    def _keep(self, group: PromptGroup) -> bool:
        self.groups.append(group)
        return True

    def ordered(self) -> list[PromptGroup]:
        """The groups in the order of their rows; which is ready first is chance."""
        return sorted(self.groups, key=lambda group: group.row.index)

    def gains(self) -> list[list[float]]:
        """Of the groups in the order of their rows, one list per trajectory."""
        credits = [group.credit for group in self.ordered() if group.credit is not None]
        return [gain for credit in credits for gain in credit.gains]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Run:
    return Run(tmp_path_factory.mktemp("igpo"), make_two_turns())


# The loop.


def test_t165_steps_are_taken_with_an_advantage_for_every_turn(run):
    records = run.trial.records()

    assert [record["step"] for record in records] == [1, 2]
    assert all(record["train/grad_norm"] > 0 for record in records)
    assert len(run.groups) == 4
    for group in run.groups:
        assert group.credit is not None
        for samples, turns in zip(group.samples, group.credit.advantages, strict=True):
            (rows,) = [sample.advantage for sample in samples]
            assert isinstance(rows, list)
            first, second = turns
            prompt = len(rows) + 1 - 11
            assert rows == [0.0] * (prompt - 1) + [first] * 4 + [0.0] * 3 + [second] * 4


def test_a_step_says_how_many_turns_there_were_and_what_they_gained(run):
    for record in run.trial.records():
        assert record["igpo/avg_turns"] == 2.0
        assert record["igpo/baseline_logp"] < 0
        assert record["igpo/scoring_time"] > 0
        assert 0 < record["igpo/scoring_ratio"] < 1
    gains = [gain for gains in run.gains() for gain in gains]
    means = [record["igpo/mean_ig"] for record in run.trial.records()]
    assert sum(means) / 2 == pytest.approx(sum(gains) / len(gains))


def test_a_run_repeats_to_the_bit(run, tmp_path):
    again = Run(tmp_path / "again", make_two_turns())

    timed = ("igpo/scoring_time", "igpo/scoring_ratio")
    for record, other in zip(run.trial.records(), again.trial.records(), strict=True):
        assert {k: v for k, v in record.items() if k not in timed} == {
            k: v for k, v in other.items() if k not in timed
        }


@pytest.mark.parametrize("policy_loss", POLICY_LOSSES)
def test_t168_every_policy_loss_takes_advantages_per_token(tmp_path, policy_loss):
    done = Run(tmp_path, make_two_turns(), prompt_groups_per_step=4, policy_loss=policy_loss)

    (record,) = done.trial.records()
    assert record["train/grad_norm"] > 0
    assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))


def test_minibatches_and_staleness_take_them_too(tmp_path):
    done = Run(
        tmp_path,
        make_two_turns(),
        max_head_offpolicy_versions=1,
        ppo_n_minibatches=2,
        max_samples_per_fwd_bwd=4,
    )

    assert all(record["train/grad_norm"] > 0 for record in done.trial.records())


# Held-out evaluation.


def test_held_out_rows_are_evaluated_turn_by_turn_and_earn_no_credit(run, tmp_path):
    evaluated = Run(
        tmp_path,
        make_two_turns(),
        eval_dataset=str(HELDOUT_ROWS),
        eval_rows=3,
        eval_every=1,
        eval_samples_per_prompt=2,
    )

    records = evaluated.trial.records("eval")
    assert (records[0]["step"], records[-1]["step"]) == (0, 2)
    for record in records:
        assert (record["eval/samples"], record["eval/sample_fail_count"]) == (6, 0)
        assert 0 <= record["eval/pass@1"] == record["eval/accuracy"] <= record["eval/pass@2"] <= 1
        assert record["eval/response_len/mean"] == 8.0  # two turns of four tokens
        assert record["eval/truncated_ratio"] == 1.0  # which ignore the end
        assert not any(name.startswith("igpo/") for name in record)
    # The last one samples from the last weights, whatever the others met on their way.
    assert records[0]["eval/weight_version_min"] == 0
    assert records[-1]["eval/weight_version_min"] == records[-1]["eval/weight_version_max"] == 2
    # Held-out groups are neither filtered nor credited, and what is trained is the same to the bit.
    assert len(evaluated.groups) == 4
    assert evaluated.gains() == run.gains()
    assert evaluated.trial.has_weights_of(run.trial)


def test_an_evaluation_that_fails_is_said_with_its_row_and_the_turns_go_on(tmp_path, caplog):
    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        inner = make_two_turns()(setup)

        async def rollout_fn(row: dict[str, Any]) -> Any:
            if row in held_out:
                raise ValueError("no such tool")
            return await inner(row)

        return rollout_fn

    held_out = load_rows(str(HELDOUT_ROWS), 2)
    with caplog.at_level(logging.WARNING):
        done = Run(tmp_path, make_rollout_fn, eval_dataset=str(HELDOUT_ROWS), eval_rows=2)

    assert len(done.trial.records()) == 2
    assert done.trial.records("eval") == done.trial.summary.evaluations == []
    warning = "failed and has no record: ValueError: no such tool, in the rollout of held-out row"
    assert caplog.text.count(warning) == 2


TOOL = [40, 41, 9]


def any_shape() -> RolloutFnFactory:
    """A factory of rollouts of a turn, of several segments or of two agents; each turn is cut."""

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        sampler = build_deployment_sampler(setup)
        fields = setup.sample_kwargs | {"max_tokens": 4, "ignore_eos": True}

        async def segment(prompt: list[int], reward: float) -> RolloutSample:
            (completion,) = await sampler.sample_with_prompt_tokens(prompt, n=1, **fields)
            return completion_sample(completion, reward)

        async def rollout_fn(row: dict[str, Any], *, sample_index: int) -> RolloutResult:
            start = setup.tokenizer.apply_chat_template(
                row["messages"], tokenize=True, add_generation_prompt=True, return_dict=False
            )
            match sample_index:
                case 0:
                    return await segment(start, 0.0)
                case 1:
                    return RolloutRun(
                        [await segment([*start, *heard], 1.0) for heard in ([], TOOL)]
                    )
                case 2:
                    parts = ([], TOOL, [9, 9])
                    return RolloutRun([await segment([*start, *heard], 0.5) for heard in parts])
                case _:
                    runs = [RolloutRun([await segment(start, reward)]) for reward in (0.25, 0.75)]
                    return Rollout(runs)

        return rollout_fn

    return make_rollout_fn


@pytest.mark.parametrize("normalization", ["separate", "pooled"])
def test_trajectories_of_any_shape_are_credited_and_trained_together(tmp_path, normalization):
    done = Run(tmp_path, any_shape(), ig_normalization=normalization)

    assert [record["train/grad_norm"] > 0 for record in done.trial.records()] == [True, True]
    for group in done.groups:
        assert group.credit is not None
        turns = [len(advantage) for advantage in group.credit.advantages]
        assert turns == [1, 2, 3, 1, 1] == [len(samples) for samples in group.samples]
        assert group.truncated == [True] * 5
        for samples, advantages in zip(group.samples, group.credit.advantages, strict=True):
            for sample, advantage in zip(samples, advantages, strict=True):
                assert isinstance(sample.advantage, list)
                assert sample.advantage[-4:] == [advantage] * 4
                assert not any(sample.advantage[:-4])


# Against plain GRPO.


def test_t167_without_weight_it_trains_what_async_rl_loop_trains_to_the_bit(tmp_path):
    ours = Run(tmp_path / "igpo", make_two_turns(), ig_weight=0.0)

    config = async_config(tmp_path / "async", max_rows=4)
    theirs = Trial(
        tmp_path / "async", async_rl_loop.main(config, rollout_fn_factory=make_two_turns())
    )

    assert ours.trial.records() == theirs.records()
    assert ours.trial.has_weights_of(theirs)
    assert all(group.credit is None for group in ours.groups)


def test_groups_with_equal_outcomes_are_kept_and_teach(tmp_path):
    ours = Run(tmp_path / "igpo", make_two_turns(lambda _text, _row: 0.0))
    plain = Run(tmp_path / "plain", make_two_turns(lambda _text, _row: 0.0), ig_weight=0.0)

    assert [record["rollout/valid_prompt_groups"] for record in ours.trial.records()] == [2, 2]
    assert all(record["train/grad_norm"] > 0 for record in ours.trial.records())
    assert all(record["train/grad_norm"] == 0 for record in plain.trial.records())


# Scorers.


def test_deployment_and_trainer_see_the_same_gains(run, tmp_path):
    by_trainer = Run(tmp_path / "trainer", make_two_turns(), ig_scorer="trainer")

    count = 2 * 4  # of the first step, which both sample from the same weights
    for gain, other in zip(run.gains()[:count], by_trainer.gains()[:count], strict=True):
        assert gain == pytest.approx(other, abs=1e-4)


@pytest.mark.parametrize("scorer", ["deployment", "trainer"])
def test_beliefs_are_the_models_own_whatever_the_temperature(run, tmp_path, scorer):
    sharp = Run(tmp_path, make_two_turns(), ig_scorer=scorer, temperature=0.3)

    usual, sharper = (trial.records()[0] for trial in (run.trial, sharp.trial))
    assert sharper["igpo/baseline_logp"] == pytest.approx(usual["igpo/baseline_logp"])
    assert sharper["rollout/entropy"] < usual["rollout/entropy"]


def test_answers_of_a_function_of_ones_own_are_scored(run, tmp_path):
    other = Run(tmp_path, make_two_turns(), answer_fn=lambda _row: [7, 8])

    assert other.gains()[0] != run.gains()[0]
    assert other.ordered()[0].rewards == run.ordered()[0].rewards


@pytest.fixture(scope="module")
def infra(tmp_path_factory):
    folder = tmp_path_factory.mktemp("platform")
    own = async_config(folder)
    with provision(own, load_tokenizer(own.deployment)) as made:
        yield made


SEQUENCES = [[5, 17, 40, 41, 9, 12], [5, 17, 40], [7, 7, 30, 31, 32, 33, 34, 35]]


def run_scorer(score: Scorer) -> list[list[float]]:
    async def run() -> list[list[float]]:
        return [list(logprobs) for logprobs in await score(SEQUENCES, 2)]

    return asyncio.run(run())


def test_t170_both_scorers_take_token_ids_and_agree(infra: RunInfra):
    served, trained = (
        run_scorer(score)
        for score in (deployment_scorer(infra.sampler), trainer_scorer(infra.policy_client))
    )

    assert [len(logprobs) for logprobs in served] == [2, 2, 2]
    for logprobs, other in zip(served, trained, strict=True):
        assert logprobs == pytest.approx(other, abs=1e-4)


def test_t170_scoring_leaves_no_gradient(infra: RunInfra):
    run_scorer(trainer_scorer(infra.policy_client))
    run_scorer(deployment_scorer(infra.sampler))

    step = infra.policy_client.optim_step(tinker.AdamParams(learning_rate=1e-3)).result()
    assert (step.metrics or {})["grad_norm"] == 0.0


# The example.


def test_the_example_runs_as_a_program_and_shows_what_each_turn_was_worth(tmp_path, capsys):
    model = ensure_model(tmp_path / "model", steps=1)
    capsys.readouterr()

    code = multihop_train.command(
        [
            f"--base-model={model}",
            f"--deployment.tokenizer-model={model}",
            f"--log-path={tmp_path / 'run'}",
            "--prompt-groups-per-step=96",
            "--completions-per-prompt=2",
            "--max-completion-tokens=2",
        ]
    )

    assert code == 0
    shown = capsys.readouterr().out.splitlines()
    heads = [line for line in shown if line.startswith("row ")]
    assert [line.partition(",")[0] for line in heads] == ["row 1 of 192", "row 192 of 192"]
    for head in heads:
        question, names, turn = shown[shown.index(head) + 1 :][:3]
        assert question.startswith("where ")
        assert names == "    gain  advantage  turn"
        assert len(turn.split()) >= 2
    assert shown[-1].startswith("mean reward: 0.000 in the first quarter of 2 steps")


def test_scoring_takes_less_than_a_quarter_of_the_examples_step(tmp_path):
    """With a model that has learned nothing: what it answers has no part in the cost."""
    model = ensure_model(tmp_path / "model", steps=1)
    rows, _ = question_rows()
    config = replace(
        multihop_train.CONFIG,
        base_model=str(model),
        log_path=str(tmp_path / "run"),
        deployment=DeployConfig(tokenizer_model=str(model), max_batch_size=64),
    )

    igpo_loop.main(config, rollout_fn_factory=multihop.make_rollout_fn, rows=rows[:32])

    records = read_metrics(tmp_path / "run")
    assert min(record["igpo/scoring_ratio"] for record in records) < 0.25
