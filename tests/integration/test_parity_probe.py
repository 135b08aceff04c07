"""Probes of ``async_rl_loop`` on the embedded platform, where samples are stale; first steps."""

from __future__ import annotations

import pytest
from tests.integration.rollouts import spread
from tests.integration.test_router_replay import moe, moe_fields, read_blanks, requests, sent

from hearth.sdk import DeploymentConfig, DeploymentManager
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.quickstart import MODEL
from training.run.checkpoints import read_manifest
from training.samples.groups import completion_sample
from training.utils import DeployConfig, ResumeConfig

__all__ = ["moe", "requests", "sent"]

GROUPS = 2
STALE = {
    "max_head_offpolicy_versions": 2,
    "fifo_slack": 0,
    "output_model_id": None,
    "stall_timeout_s": 120.0,
}


def make_stale(setup):
    """Samples at once; a row comes back when the version that trains it has sampled for a while.

    So all but the first batch is stale, and the trainer has nothing to do while a probe is sampled.
    """
    sampler = build_deployment_sampler(setup)

    async def rollout_fn(row, cursor_index, sample_index):
        messages, fields = row["messages"], setup.sample_kwargs
        (completion,) = await sampler.sample_with_tokens(messages, n=1, **fields)
        served = cursor_index // GROUPS if sample_index else -1
        while served < cursor_index // GROUPS:
            (later,) = await sampler.sample_with_tokens(messages, n=1, **fields | {"max_tokens": 1})
            served = later.weight_version
        for _ in range(0 if sample_index else 4):
            await sampler.sample_with_tokens(messages, n=1, ignore_eos=True, **fields)
        return completion_sample(completion, spread(completion.text, row))

    return rollout_fn


def find_probed(run):
    """The records of the steps whose own samples were all stale, and probed."""
    first, *others = run.records()
    assert first["parity/tokens"] > 0
    assert all(other["version/sample_staleness_mean"] >= 1 for other in others)
    probed = [other for other in others if "parity/p95" in other]
    assert len(probed) + sum(other["parity/probes_skipped"] for other in others) >= len(others)
    assert len(probed) >= 0.7 * len(others)
    return probed


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 1.3, "lora_rank": 4}, {"ppo_n_minibatches": 2}], ids=str
)
def test_where_every_sample_is_stale_probes_agree(async_trial, changes):
    run = async_trial(make=make_stale, max_rows=12, learning_rate=1e-2, **STALE, **changes)

    for record in find_probed(run):
        assert 8 <= record["parity/tokens"] <= 64
        assert 0 <= record["parity/p50"] <= record["parity/p95"] <= record["parity/max"] < 1e-4
        assert record["parity/mean_exp"] == pytest.approx(1.0, abs=1e-4)
    assert max(record["train/inference_diff"] for record in run.records()) > 1e-2


def test_a_deployment_that_computes_otherwise_shows(async_trial, named_platform):
    names = {"deployment_id": "serving", "tokenizer_model": str(MODEL)}
    deployments = DeploymentManager()
    deployments.create_or_get(DeploymentConfig(base_model=str(MODEL), dtype="bfloat16", **names))
    deployments.wait_for_ready("serving")

    run = async_trial(make=make_stale, max_rows=12, deployment=DeployConfig(**names), **STALE)

    assert all(record["parity/p95"] > 1e-3 for record in find_probed(run))


def test_probes_replay_the_experts_that_sampled_them(async_trial, moe, sent, requests):
    run = async_trial(make=make_stale, **moe_fields(moe, **STALE, max_rows=8))

    trained = sum(record["train/num_sequences"] for record in run.records())
    policy = [datum for is_frozen, datum in sent if not is_frozen]
    assert len(policy) - 2 * trained == 8 * len(find_probed(run))
    assert all(any(read_blanks(datum)) and not all(read_blanks(datum)) for datum in policy)
    assert all(request["include_routing_matrix"] for request in requests)
    assert all(record.get("parity/max", 0.0) < 1e-4 for record in run.records())


# The first step of a run needs no probe: its own samples are its own weights'.


def is_whole(record) -> bool:
    """Whether all sampled tokens of a step were compared, and agree."""
    tokens = record["rollout/response_len/mean"] * 4 * record["rollout/valid_prompt_groups"]
    return record.get("parity/tokens") == pytest.approx(tokens) and record["parity/max"] < 1e-4


@pytest.mark.parametrize("options", [{}, {"weight_sync_before_training": True}], ids=str)
def test_the_first_step_off_policy_is_compared_whole(async_trial, options):
    (first,) = async_trial(max_rows=2, **STALE, **options).records()

    assert is_whole(first)


def test_so_is_the_first_one_after_a_resumption(async_trial):
    common = {"folder": "run", "max_rows": 8, "dcp_save_interval": 1, "learning_rate": 1e-2}
    whole = async_trial(**common, **STALE)
    point = read_manifest(whole.folder)[1]

    again = async_trial(**common, **STALE, resume=ResumeConfig(resume_from=point.name))

    assert [record["step"] for record in again.records()] == [1, 2, 3, 4]
    assert point.step == 2
    assert is_whole(again.records()[2])


@pytest.mark.parametrize(
    ("options", "compared"),
    [
        ({"weight_sync_interval": 2}, [True, True, False, True]),
        ({"weight_sync_interval": 0}, [True, False, False, False]),
        (
            {"weight_sync_interval": 0, "weight_sync_before_training": True},
            [True, True, False, False],
        ),
    ],
    ids=str,
)
def test_rl_loop_resumed_after_one_step_compares_what_is_served(trial, options, compared):
    common = {"folder": "run", "reward_fn": spread, "dcp_save_interval": 1, "learning_rate": 1e-2}
    first = trial(**common, **options)
    point = read_manifest(first.folder)[0]

    again = trial(**common, **options, resume=ResumeConfig(resume_from=point.name))

    assert point.step == 1
    assert ["parity/tokens" in record for record in again.records()] == compared
    assert [is_whole(record) for record in again.records()] == compared
