"""Probes of ``async_rl_loop`` on the embedded platform, where samples are stale; first steps."""

from __future__ import annotations

import pytest
from tests.integration.rollouts import spread
from tests.integration.test_router_replay import blanks_of, draws, moe, on_moe, sent

from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentConfig, DeploymentManager
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.quickstart import MODEL
from training.run.checkpoints import read_manifest
from training.samples.groups import completion_sample
from training.utils import DeployConfig, ResumeConfig

__all__ = ["draws", "moe", "sent"]

GROUPS = 2
STALE = {
    "max_head_offpolicy_versions": 2,
    "fifo_slack": 0,
    "output_model_id": None,
    "stall_timeout_s": 120.0,
}


@pytest.fixture(autouse=True)
def no_platform(monkeypatch):
    for name in ("FIREWORKS_BASE_URL", "FIREWORKS_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def stale(setup):
    """Draws at once; a row comes back when the version that it is trained at has drawn for a while.

    So all but the first batch is stale, and the trainer has nothing to do while a probe is sampled.
    """
    sampler = build_deployment_sampler(setup)

    async def rollout_fn(row, cursor_index, sample_index):
        (drawn,) = await sampler.sample_with_tokens(row["messages"], n=1, **setup.sample_kwargs)
        served = cursor_index // GROUPS if sample_index else -1
        while served < cursor_index // GROUPS:
            (later,) = await sampler.sample_with_tokens(
                row["messages"], n=1, **setup.sample_kwargs | {"max_tokens": 1}
            )
            served = later.weight_version
        for _ in range(0 if sample_index else 4):
            await sampler.sample_with_tokens(
                row["messages"], n=1, ignore_eos=True, **setup.sample_kwargs
            )
        return completion_sample(drawn, spread(drawn.text, row))

    return rollout_fn


def probed(run):
    """The records of the steps whose own samples were all stale, and probed."""
    first, *others = run.records()
    assert first["parity/tokens"] > 0
    assert all(other["version/sample_staleness_mean"] >= 1 for other in others)
    found = [other for other in others if "parity/p95" in other]
    assert len(found) + sum(other["parity/probes_skipped"] for other in others) >= len(others)
    assert len(found) >= 0.7 * len(others)
    return found


@pytest.mark.parametrize(
    "changes", [{}, {"temperature": 1.3, "lora_rank": 4}, {"ppo_n_minibatches": 2}], ids=str
)
def test_where_every_sample_is_stale_probes_agree(async_trial, changes):
    run = async_trial(make=stale, max_rows=12, learning_rate=1e-2, **STALE, **changes)

    for entry in probed(run):
        assert 8 <= entry["parity/tokens"] <= 64
        assert 0 <= entry["parity/p50"] <= entry["parity/p95"] <= entry["parity/max"] < 1e-4
        assert entry["parity/mean_exp"] == pytest.approx(1.0, abs=1e-4)
    assert max(record["train/inference_diff"] for record in run.records()) > 1e-2


def test_a_deployment_that_computes_otherwise_shows(async_trial, tmp_path, monkeypatch):
    with EmbeddedPlatform(work_dir=tmp_path / "platform") as platform:
        monkeypatch.setenv("FIREWORKS_BASE_URL", platform.base_url)
        monkeypatch.setenv("FIREWORKS_API_KEY", "x")
        deployments = DeploymentManager()
        deployments.create_or_get(
            DeploymentConfig(
                deployment_id="serving",
                base_model=str(MODEL),
                tokenizer_model=str(MODEL),
                dtype="bfloat16",
            )
        )
        deployments.wait_for_ready("serving")
        run = async_trial(
            make=stale,
            max_rows=12,
            deployment=DeployConfig(deployment_id="serving", tokenizer_model=str(MODEL)),
            **STALE,
        )

    assert all(entry["parity/p95"] > 1e-3 for entry in probed(run))


def test_probes_replay_the_experts_that_drew_them(async_trial, moe, sent, draws):
    run = async_trial(make=stale, **on_moe(moe, **STALE, max_rows=8))

    trained = sum(record["train/num_sequences"] for record in run.records())
    policy = [datum for is_frozen, datum in sent if not is_frozen]
    assert len(policy) - 2 * trained == 8 * len(probed(run))
    assert all(any(blanks_of(tensor)) and not all(blanks_of(tensor)) for tensor in policy)
    assert all(draw["include_routing_matrix"] for draw in draws)
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
