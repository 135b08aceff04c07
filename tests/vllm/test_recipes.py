"""The recipes on vLLM: the same files, another engine."""

from __future__ import annotations

from tests.integration.conftest import (
    async_config,
    async_trial,
    config,
    logging_as_before,
    rows,
    trial,
)
from tests.integration.rollouts import spread
from tests.vllm.stack import OPTIONS

from training.quickstart import MODEL
from training.utils import DeployConfig

__all__ = ["async_config", "async_trial", "config", "logging_as_before", "rows", "trial"]

ON_VLLM = DeployConfig(
    tokenizer_model=str(MODEL), engine="vllm", max_batch_size=32, engine_options=OPTIONS
)
GAP = 1e-3
"""Nats between sampler and trainer on the tokens of one version."""


def test_rl_loop_takes_three_steps(trial):
    run = trial(deployment=ON_VLLM, reward_fn=spread, max_rows=6)

    records = run.records()
    assert run.summary.steps == len(records) == 3
    assert run.summary.version == 3
    assert all(record["parity/max"] < GAP for record in records)
    assert all(record["train/grad_norm"] > 0 for record in records)


def test_async_rl_loop_takes_three_steps_with_an_adapter(async_trial):
    run = async_trial(
        deployment=ON_VLLM,
        max_rows=6,
        lora_rank=4,
        merge_adapter=True,
        max_head_offpolicy_versions=1,
    )

    records = run.records()
    assert run.summary.steps == len(records) == 3
    assert run.summary.version == 3
    assert all(record.get("parity/max", 0.0) < GAP for record in records)
