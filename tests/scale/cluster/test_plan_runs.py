"""What `hearth plan` prints for several GPUs trains a small model on processes of this machine.

The plans are of large models; the shipped one is in their place when the printed lines run.
"""

from __future__ import annotations

import pytest
from tests.plans import Printed
from tests.scale.cluster.greedy import needs_vllm
from tests.unit.planning.families import PUBLISHED

pytestmark = needs_vllm


def plan(folder, model, *flags):
    return Printed.of(folder, "--context=4096", *flags, config=PUBLISHED[model]())


def check_steps(records):
    assert len(records) == 2
    assert all(record["train/grad_norm"] > 0 for record in records)


def test_ranks_and_replicas_are_those_of_the_shape(tmp_path):
    printed = plan(tmp_path, "qwen3-4b", "--gpus=8", "--no-reference")
    assert printed.lines[0] == "hearth serve --catalog shapes.toml --placement process"
    (shape,) = printed.shapes
    assert shape["engine"] == "vllm"
    assert shape["ranks"] + shape["replicas"] == 8
    printed.shrink(ranks=2, replicas=2)

    check_steps(printed.train())

    assert printed.worker_logs("trainer").count("the trainer computes in bfloat16 on cpu") == 1
    assert printed.sidecars("trainer") == {"rank-1"}
    assert printed.sidecars("deployment") == {"replica-0", "replica-1"}


def test_ranks_keep_their_parts_in_the_hosts_memory_and_so_do_those_of_the_reference(tmp_path):
    printed = plan(tmp_path, "qwen3-8b", "--gpus=8", "--offload-optimizer")
    policy, reference = printed.shapes
    assert policy["ranks"] == reference["ranks"] > 1
    assert policy["offload_optimizer"] is reference["offload_optimizer"] is True
    assert policy["recompute_above"] < policy["micro_batch_tokens"]
    printed.shrink(ranks=2, replicas=1)
    printed.compute_in_float32()

    records = printed.train()

    check_steps(records)
    assert all(record["perf/ref_tokens_per_s"] > 0 for record in records)
    for role in ("policy", "reference"):
        assert printed.sidecars(f"trainer-rl-{role}") == {"rank-1"}


def test_two_gpus_share_a_replica_that_is_sent_the_merged_adapter_of_experts(tmp_path):
    flags = ("--gpus=8", "--gpu-memory-gib=40", "--lora-rank=8", "--concurrent=64")
    printed = plan(tmp_path, "qwen3-30b-a3b", *flags)
    assert "--first-checkpoint-type merged_base" in printed.lines[-1]
    (shape,) = printed.shapes
    assert shape["trainer_mode"] == "LORA_TRAINER"
    assert shape["engine_options"] == {"tensor_parallel_size": 2}
    printed.shrink(ranks=2, replicas=1)
    printed.compute_in_float32()

    check_steps(printed.train())


@pytest.mark.parametrize(
    ("flag", "replicas"), [("--no-reference", 2), ("--lora-rank=32", 1)], ids=["full", "adapter"]
)
def test_a_cluster_of_ray_has_ranks_and_replicas_on_its_nodes(tmp_path, two_nodes, flag, replicas):
    printed = plan(tmp_path, "qwen3-8b", "--gpus=16", flag)
    assert printed.lines[0] == "hearth serve --catalog shapes.toml --placement ray"
    printed.shrink(ranks=2, replicas=replicas)

    check_steps(printed.train())
