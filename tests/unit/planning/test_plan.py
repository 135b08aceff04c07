"""Who gets which GPUs, what is said where nothing fits, and that a catalog takes the shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.planning.families import PUBLISHED

from hearth.control.catalog import read_catalog
from hearth.errors import ConfigError
from hearth.planning.architecture import read_architecture
from hearth.planning.memory import GIB, trainer_bytes
from hearth.planning.plan import PlanRequest, catalog_entry, find_best_layout, make_plan, shape_name
from hearth.planning.rates import Gpu, sampling_tokens_per_s, training_tokens_per_s


def make_request(name: str, gpus: int, context: int, **more: Any) -> PlanRequest:
    model = read_architecture(PUBLISHED[name]().to_dict())
    return PlanRequest(model=model, gpus=gpus, context=context, **more)


def test_a_small_model_is_trained_and_served_on_one_gpu() -> None:
    plan = make_plan(make_request("qwen3-0p6b", 1, 2048, gpu_memory_gib=24, concurrent=16))

    assert plan.fits
    assert plan.layout.is_shared
    assert (plan.layout.trainer.ranks, plan.layout.replicas) == (1, 1)
    assert plan.layout.replica.engine == "embedded"
    held = [*plan.layout.trainer_bytes.values(), *plan.layout.replica_bytes.values()]
    assert sum(held) <= 0.9 * 24 * GIB


def test_one_process_of_its_own_each_where_snapshots_in_memory_do_not_fit() -> None:
    request = make_request("qwen3-0p6b", 1, 2048, gpu_memory_gib=24, concurrent=16)
    roomy = make_plan(replace(request, gpu_memory_gib=48)).layout

    tight = [
        make_plan(replace(request, gpu_memory_gib=memory)).layout.placement
        for memory in range(12, 48)
    ]

    assert roomy.placement == "inline"
    assert roomy.trainer_bytes["snapshots"] == 4 * 2 * request.model.parameters
    assert "process" in tight
    # Once the whole platform fits into one process it goes on fitting.
    assert "process" not in tight[tight.index("inline") + 1 :] or tight[0] == "inline"


def test_eight_gpus_are_divided_among_ranks_and_replicas() -> None:
    plan = make_plan(make_request("qwen3-8b", 8, 8192))

    layout = plan.layout
    assert plan.fits
    assert layout.placement == "process"
    assert layout.trainer.ranks + layout.replicas * layout.replica.gpus <= 8
    # 16 bytes a parameter: float32 weights, gradients, moments.
    state = ("weights", "gradients", "moments")
    assert layout.trainer.ranks >= 4
    assert sum(layout.trainer_bytes[name] for name in state) == pytest.approx(
        16 * 8_190_735_360 / layout.trainer.ranks, rel=1e-6
    )
    assert layout.replica.engine == "vllm"


def test_ranks_share_a_trainer_until_it_fits() -> None:
    model = make_request("qwen3-8b", 8, 8192)

    layouts = [find_best_layout(replace(model, gpus=gpus)) for gpus in (2, 4, 8)]

    # 131 GB of state fit no GPU, and no three beside 33 GB of gradients that wait for their sum.
    assert [layout is not None for layout in layouts] == [False, False, True]


def test_activations_are_kept_as_far_as_there_is_room() -> None:
    request = make_request("qwen3-8b", 8, 8192)
    layout = make_plan(request).layout
    setting = layout.trainer

    assert setting.recompute_above is not None
    fewer = replace(setting, micro_batch_tokens=setting.recompute_above, recompute_above=None)
    assert sum(trainer_bytes(request.model, fewer).values()) <= request.room


@pytest.mark.slow
def test_more_than_a_machine_is_placed_by_ray() -> None:
    layout = make_plan(make_request("qwen3-30b-a3b", 16, 8192)).layout

    assert layout.placement == "ray"
    assert layout.gpus <= 16


def test_what_does_not_fit_says_what_is_short_and_what_would() -> None:
    request = make_request("qwen3-8b", 1, 4096, concurrent=16)
    plan = make_plan(request)

    assert not plan.fits
    ((who, missing),) = plan.shortage.items()
    held = [*plan.layout.trainer_bytes.values(), *plan.layout.replica_bytes.values()]
    assert who == "trainer and deployment"
    assert missing == sum(held) - request.room
    assert plan.advice[0] == "an adapter fits: --lora-rank 32"
    assert find_best_layout(replace(request, lora_rank=32)) is not None
    assert plan.advice[1].endswith("--gpus 8")
    assert find_best_layout(replace(request, gpus=8)) is not None


@pytest.mark.slow
def test_eight_billion_on_one_gpu_are_offered_an_adapter_with_fewer_completions() -> None:
    request = make_request("qwen3-8b", 1, 8192)

    plan = make_plan(request)

    assert plan.advice[0] == (
        "an adapter with fewer completions at a time fits: --lora-rank 32 --concurrent 16"
    )
    assert make_plan(replace(request, lora_rank=32, concurrent=16)).fits
    assert not make_plan(replace(request, lora_rank=32, concurrent=32)).fits
    wide = make_plan(replace(request, dtype="float32")).advice
    assert any("--lora-rank 32 --dtype bfloat16 --concurrent 16" in advice for advice in wide)


def test_advice_is_of_what_fits_alone() -> None:
    plan = make_plan(make_request("qwen3-32b", 1, 4096, gpu_memory_gib=8))

    assert all("--lora-rank" not in advice and "--context" not in advice for advice in plan.advice)


def test_a_long_context_is_shortened_or_asked_for_less_often() -> None:
    request = make_request("qwen3-0p6b", 1, 40960, gpu_memory_gib=24)
    plan = make_plan(request)

    assert not plan.fits
    less = {
        advice.rsplit("--", 1)[-1].split()[0]: int(advice.split()[-1]) for advice in plan.advice
    }
    assert find_best_layout(replace(request, context=less["context"])) is not None
    assert find_best_layout(replace(request, context=2 * less["context"])) is None


def test_the_hosts_memory_takes_what_ranks_have_no_room_for() -> None:
    request = make_request("qwen3-8b", 4, 8192)

    plan = make_plan(request)
    away = make_plan(replace(request, offload_optimizer=True))

    assert not plan.fits
    assert any("--offload-optimizer" in advice for advice in plan.advice)
    assert away.fits
    assert away.host_bytes >= 16 * request.model.parameters
    assert "offload_optimizer = true" in catalog_entry("m", request, away.layout)


def test_more_gpus_than_a_deployment_has_replicas_go_several_to_a_replica() -> None:
    layout = make_plan(make_request("qwen3-8b", 512, 4096, concurrent=8192)).layout

    assert layout.replicas <= 64
    assert layout.replica.gpus > 1
    assert layout.gpus > 400
    assert layout.trainer.ranks % 8 == 0


def test_a_reference_takes_memory_but_beside_an_adapter() -> None:
    request = make_request("qwen3-8b", 8, 8192)

    full = make_plan(replace(request, has_reference=True)).layout
    adapter = make_plan(replace(request, has_reference=True, lora_rank=16)).layout

    assert full.trainer_bytes["reference"] == -(-2 * request.model.parameters // full.trainer.ranks)
    assert "reference" not in adapter.trainer_bytes


def test_a_sync_of_an_adapter_is_small_and_one_in_float32_is_whole() -> None:
    request = make_request("qwen3-0p6b", 2, 1024)

    full = make_plan(request)
    adapter = make_plan(replace(request, lora_rank=8))
    wide = make_plan(replace(request, dtype="float32"))

    assert full.base_bytes == 2 * request.model.parameters
    assert full.delta_bytes == round(0.03 * full.base_bytes)
    assert adapter.base_bytes == adapter.delta_bytes == 4 * request.model.lora_parameters(8)
    assert wide.base_bytes == wide.delta_bytes == 4 * request.model.parameters


def test_rates_are_those_of_the_datasheet_by_hand() -> None:
    request = make_request("qwen3-8b", 8, 4096)
    layout = make_plan(request).layout
    setting = replace(layout.trainer, recompute_above=None, lora_rank=None)
    replica = replace(layout.replica, sequences=16, context=4096, gpus=1)

    active = 8_190_735_360 - 151936 * 4096
    per_token = 3 * (2 * active + 2 * 36 * 4096 * 4096)
    assert training_tokens_per_s(request.model, setting, 4096, Gpu()) == pytest.approx(
        0.35 * 989e12 / per_token
    )
    read = 2 * active + 16 * 2048 * 147_456
    assert sampling_tokens_per_s(request.model, replica, Gpu()) == pytest.approx(
        16 * 0.5 * 3.35e12 / read
    )


@pytest.mark.parametrize("rank", [None, 16])
def test_a_catalog_takes_the_shape(tmp_path: Path, rank: int | None) -> None:
    request = make_request("qwen3-8b", 8, 8192, lora_rank=rank, concurrent=16)
    name = "accounts/fireworks/models/qwen3-8b"
    layout = make_plan(request).layout
    file = tmp_path / "catalog.toml"

    file.write_text(catalog_entry(name, request, layout))

    shape = read_catalog(file).find_shape(shape_name(name, request))
    assert shape.name == "accounts/mine/trainingShapes/qwen3-8b-8x80g"
    assert shape.base_model == name
    assert shape.trainer_mode == ("POLICY_TRAINER" if rank is None else "LORA_TRAINER")
    assert (shape.context_length, shape.dtype) == (8192, "bfloat16")
    assert (shape.ranks, shape.engine) == (layout.trainer.ranks, "vllm")
    assert shape.micro_batch_tokens == layout.trainer.micro_batch_tokens
    assert shape.recompute_above == layout.trainer.recompute_above


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"gpus": 0}, "gpus must be >= 1, got 0"),
        ({"context": 0}, "context must be >= 1, got 0"),
        ({"context": 50000}, "context must be at most 40960, the positions of the model"),
        ({"concurrent": 0}, "concurrent must be >= 1"),
        ({"lora_rank": 0}, "lora_rank must be >= 1"),
        ({"gpu_memory_gib": 0.0}, "gpu_memory_gib must be > 0"),
    ],
)
def test_a_question_that_breaks_a_rule_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(make_request("qwen3-0p6b", 1, 64), **values)
