"""Adapters come and go on a running server."""

from __future__ import annotations

import pytest
from tests.vllm.stack import TOLERANCE, Deployment, Trainer


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    made = Deployment(tmp_path_factory.mktemp("adapted"), lora_rank=4)
    yield made
    made.close()


@pytest.fixture
def policy(adapted, tmp_path):
    made = Trainer(adapted, tmp_path, lora_rank=4)
    yield made
    made.close()


def test_adapters_are_served_and_a_base_takes_them_away(adapted, policy, tmp_path):
    for version in (1, 2):
        policy.step(learning_rate=1e-2)
        state = adapted.hot_load(policy.save(f"adapter-{version}"))
        assert state["current_snapshot_identity"] == f"adapter-{version}", state
        assert [loaded_adapter["identity"] for loaded_adapter in state["loaded_adapters"]] == [
            f"adapter-{version}"
        ]
        for choice in adapted.complete(n=4):
            assert choice["raw_output"]["versions"] == [[version, 12]]
            assert policy.gap(choice) < TOLERANCE

    full = Trainer(adapted, tmp_path / "full")
    full.step()
    state = adapted.hot_load(full.save("whole"))
    assert state["loaded_adapters"] == []
    for choice in adapted.complete(n=4):
        assert full.gap(choice) < TOLERANCE
    full.close()

    state = adapted.hot_load(policy.save("adapter-3"))
    assert state["current_snapshot_identity"] == "adapter-3", state
