"""What `hearth plan` prints for one GPU trains a small model, as printed."""

import bisect

import pytest
from tests.plans import Printed

from hearth.models.configs import read_config
from hearth.models.sizes import read_architecture
from hearth.planning.plan import PlanRequest, make_plan
from training.quickstart import MODEL

ONE_GPU = ("--gpus=1", "--context=128", "--concurrent=8")


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (("--no-reference",), {"dtype": "bfloat16", "trainer_mode": "POLICY_TRAINER"}),
        (("--dtype", "float32"), {"dtype": "float32"}),
        (("--no-reference", "--lora-rank", "4"), {"trainer_mode": "LORA_TRAINER"}),
        (("--lora-rank", "4", "--lora-targets", "attn"), {}),
    ],
    ids=["full", "reference", "adapter", "adapter and its base"],
)
def test_one_gpu_is_shared_by_all_of_a_run(tmp_path, flags, printed):
    plan = Printed.of(tmp_path, *ONE_GPU, "--gpu-memory-gib=1.5", *flags)
    shape, *others = plan.shapes
    assert shape.items() >= (printed | {"engine": "embedded", "replicas": 1}).items()
    assert [line.split()[0] for line in plan.lines] == ["export", "hearth"]

    records = plan.train()

    has_reference = "--no-reference" not in flags
    assert [other["trainer_mode"] for other in others] == ["FORWARD_ONLY"] * (
        has_reference and "--lora-rank" not in flags
    )
    assert len(records) == 2
    for record in records:
        assert record["train/grad_norm"] > 0
        assert ("perf/ref_tokens_per_s" in record) == has_reference


def test_a_gpu_without_room_for_snapshots_serves_processes(tmp_path):
    model = read_architecture(read_config(str(MODEL)))

    def fits(mib):
        memory = mib / 1024
        request = PlanRequest(model=model, gpus=1, context=128, gpu_memory_gib=memory, concurrent=8)
        return make_plan(request).fits

    # With more memory there is room for snapshots too.
    smallest = bisect.bisect_left(range(2048), True, lo=256, key=fits) / 1024
    plan = Printed.of(tmp_path, *ONE_GPU, "--no-reference", f"--gpu-memory-gib={smallest}")
    assert plan.lines[0] == "hearth serve --catalog shapes.toml --placement process"
    assert plan.shapes[0]["recompute_above"] < plan.shapes[0]["micro_batch_tokens"]

    records = plan.train()

    assert len(records) == 2
    assert all(record["train/grad_norm"] > 0 for record in records)
    assert plan.worker_logs("trainer").count("the trainer computes in bfloat16 on cpu") == 1
    assert plan.worker_logs("deployment").count("the deployment computes in bfloat16 on cpu") == 1
