"""Sampler and trainer of the embedded platform agree; a rollout that samples otherwise shows."""

from __future__ import annotations

import pytest
from tests.integration.rollouts import spread

from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.samples.groups import completion_sample
from training.update.parity import ParityError


def compared(run) -> list[bool]:
    return ["parity/p95" in record for record in run.records()]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"temperature": 1.3, "lora_rank": 4, "merge_adapter": True},
        {"loss_path": "builtin"},
        {"ppo_n_minibatches": 2},
    ],
    ids=str,
)
def test_on_policy_every_token_of_every_step_is_compared_and_agrees(trial, changes):
    records = trial(reward_fn=spread, **changes).records()

    assert len(records) == 4
    for record in records:
        tokens = record["rollout/response_len/mean"] * 4 * record["rollout/valid_prompt_groups"]
        assert record["parity/tokens"] == pytest.approx(tokens)
        assert 0 <= record["parity/p50"] <= record["parity/p95"] <= record["parity/max"] < 1e-4
        assert record["parity/mean_exp"] == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize(
    ("interval", "steps"), [(2, [True, False, True, False]), (0, [True, False, False, False])]
)
def test_only_steps_whose_weights_are_served_are_compared(trial, interval, steps):
    run = trial(reward_fn=spread, weight_sync_interval=interval, learning_rate=1e-2)

    # At this learning rate a row may turn uniform; the next one makes up for it.
    taken = compared(run)
    assert len(taken) >= 3
    assert taken == steps[: len(taken)]
    assert all(record.get("parity/max", 0.0) < 1e-4 for record in run.records())


def test_off_policy_staleness_is_no_difference(async_trial):
    run = async_trial(max_head_offpolicy_versions=2, learning_rate=1e-2, max_rows=12)

    records = run.records()
    assert compared(run)[0]
    assert any(record["async/version_offset_max"] > 0 for record in records)
    assert max(record["train/inference_diff"] for record in records) > 1e-4
    assert all(record.get("parity/max", 0.0) < 1e-4 for record in records)


def sample_otherwise(**options):
    """A factory of rollouts that ask the deployment past the sampler that would refuse."""

    def make_rollout_fn(setup):
        sampler = build_deployment_sampler(setup).deployment

        async def rollout_fn(row, *, cursor_index, sample_index):
            fields = setup.sample_kwargs | options | {"seed": 4 * cursor_index + sample_index}
            (completion,) = await sampler.sample_with_tokens(row["messages"], n=1, **fields)
            return completion_sample(completion, spread(completion.text, row))

        return rollout_fn

    return make_rollout_fn


@pytest.mark.parametrize("options", [{"temperature": 2.0}, {"top_k": 2}], ids=str)
def test_a_rollout_that_samples_otherwise_is_said_or_ends_the_run(async_trial, capsys, options):
    run = async_trial(make=sample_otherwise(**options))

    assert run.records()[0]["parity/p95"] > 0.2
    assert capsys.readouterr().out.count("sampler and trainer must agree within") == 1

    with pytest.raises(ParityError, match=r"step 1: .* another temperature, top_p or top_k"):
        async_trial(make=sample_otherwise(**options), parity_stops=True)
