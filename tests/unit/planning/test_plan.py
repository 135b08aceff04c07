"""Who gets which GPUs, what is said where nothing fits, and that a catalog takes the shape."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.unit.architectures import make_config
from tests.unit.planning.families import OTHERS, PUBLISHED

from hearth.control.catalog import read_catalog
from hearth.errors import ConfigError
from hearth.models.sizes import read_architecture
from hearth.planning.gradients import fits_whole_gradient
from hearth.planning.memory import GIB, rank_state_bytes, replica_bytes, trainer_bytes
from hearth.planning.plan import (
    PlanRequest,
    catalog_entry,
    commands,
    find_best_layout,
    list_layouts,
    make_plan,
    shape_name,
)
from hearth.planning.rates import Gpu, sampling_tokens_per_s, training_tokens_per_s


def make_request(name: str, gpus: int, context: int, **more: Any) -> PlanRequest:
    model = read_architecture((PUBLISHED | OTHERS)[name]())
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
    assert layout.trainer.ranks >= 2
    assert sum(layout.trainer_bytes[name] for name in state) == pytest.approx(
        16 * 8_190_735_360 / layout.trainer.ranks, rel=1e-6
    )
    assert layout.replica.engine == "vllm"


def test_ranks_share_a_trainer_until_it_fits() -> None:
    model = make_request("qwen3-8b", 8, 8192)

    layouts = [find_best_layout(replace(model, gpus=gpus)) for gpus in (2, 4, 8)]

    # 131 GB of state fit no GPU, and three beside one that samples.
    assert [layout is not None for layout in layouts] == [False, True, True]


def test_activations_are_kept_as_far_as_there_is_room() -> None:
    request = make_request("qwen3-8b", 8, 8192)
    layout = make_plan(request).layout
    setting = layout.trainer

    assert setting.recompute_above is not None
    fewer = replace(setting, micro_batch_tokens=setting.recompute_above, recompute_above=None)
    assert sum(trainer_bytes(request.model, fewer).values()) <= request.room
    more = replace(fewer, micro_batch_tokens=setting.recompute_above + 1)
    assert sum(trainer_bytes(request.model, more).values()) > request.room


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
    assert plan.advice[1].endswith("--gpus 4")
    assert find_best_layout(replace(request, gpus=4)) is not None


@pytest.mark.slow
def test_eight_billion_on_one_gpu_are_offered_an_adapter_with_fewer_completions() -> None:
    request = make_request("qwen3-8b", 1, 8192, concurrent=64)

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
    request = make_request("qwen3-14b", 4, 8192)

    plan = make_plan(request)
    away = make_plan(replace(request, offload_optimizer=True))

    assert not plan.fits
    assert any("--offload-optimizer" in advice for advice in plan.advice)
    assert away.fits
    assert away.host_bytes["sync"] >= 16 * request.model.parameters
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

    assert full.trainer_bytes["reference"] > 2 * request.model.parameters // full.trainer.ranks
    assert "reference" not in adapter.trainer_bytes


def test_an_optimizer_that_keeps_less_needs_fewer_gpus() -> None:
    request = make_request("qwen3-0p6b", 1, 2048, gpu_memory_gib=18)

    held = {
        name: sum(make_plan(replace(request, optimizer=name)).layout.trainer_bytes.values())
        for name in ("adamw", "muon", "adamw_8bit")
    }

    assert held["adamw"] > held["muon"] > held["adamw_8bit"]
    assert not make_plan(request).fits
    smaller = replace(request, optimizer="adamw_8bit")
    layout = make_plan(smaller).layout
    assert not layout.excess(smaller.room)
    (train,) = [line for line in commands("m", "m", smaller, layout) if "hearth train" in line]
    assert "--optimizer adamw_8bit" in train


def test_moments_of_eight_bits_are_not_divided_among_ranks() -> None:
    request = make_request("qwen3-0p6b", 8, 2048, optimizer="adamw_8bit")

    assert {layout.trainer.ranks for layout in list_layouts(request)} == {1}
    adapter = replace(request, lora_rank=8)
    assert {layout.trainer.ranks for layout in list_layouts(adapter)} > {1, 4}


def test_a_sync_of_an_adapter_is_small_and_one_in_float32_is_whole() -> None:
    request = make_request("qwen3-0p6b", 2, 1024)

    full = make_plan(request)
    adapter = make_plan(replace(request, lora_rank=8))
    wide = make_plan(replace(request, dtype="float32"))

    assert full.base_bytes == 2 * request.model.parameters
    assert full.delta_bytes < full.base_bytes
    assert adapter.base_bytes == adapter.delta_bytes == 4 * request.model.lora_parameters(8)
    assert wide.base_bytes == wide.delta_bytes == 4 * request.model.parameters


def test_vllm_is_sent_the_whole_model_where_an_adapter_changes_experts() -> None:
    request = make_request("qwen3-30b-a3b", 8, 1024, lora_rank=8)

    experts = make_plan(request)
    attention = make_plan(replace(request, lora_targets=("attn",)))

    assert experts.base_bytes == experts.delta_bytes == 2 * request.model.parameters
    assert experts.layout.replica.lora_rank is None
    assert attention.base_bytes == 4 * request.model.lora_parameters(8, ("attn",))
    flag = "--first-checkpoint-type merged_base"
    assert flag in commands("model", "model", request, experts.layout)[-1]
    assert flag not in commands("model", "model", request, attention.layout)[-1]


@pytest.mark.parametrize(
    ("learning_rate", "each"),
    [
        # A fifth of the elements: two bytes each, and a bit of every element.
        (1e-5, 0.2 * 2 + 1 / 8),
        # Three in a hundred: two bytes, and one that says how far away the next one is.
        (1e-6, 0.03 * 3),
        # All of them.
        (1e-2, 2),
    ],
)
def test_a_delta_has_what_a_step_of_that_rate_changes(learning_rate: float, each: float) -> None:
    request = make_request("qwen3-0p6b", 2, 1024, learning_rate=learning_rate)

    plan = make_plan(request)

    assert plan.delta_bytes == pytest.approx(each * request.model.parameters, rel=1e-6)


def test_rates_between_the_measured_ones_change_shares_between_them() -> None:
    request = make_request("qwen3-0p6b", 2, 1024)

    deltas = [
        make_plan(replace(request, learning_rate=rate)).delta_bytes
        for rate in (1e-7, 1e-6, 3e-6, 1e-5, 1e-4)
    ]

    assert deltas == sorted(deltas)
    assert len(set(deltas)) == 5


@pytest.mark.parametrize("name", ["qwen3-8b", "qwen3-30b-a3b", "qwen3-32b"])
def test_replicas_take_as_many_completions_as_they_have_room_for(name: str) -> None:
    request = make_request(name, 16, 8192)

    layout = make_plan(request).layout

    assert 8 <= layout.replica.sequences <= 64
    more = replace(layout.replica, sequences=layout.replica.sequences + 1)
    is_full = sum(replica_bytes(request.model, more).values()) > request.room
    assert is_full or layout.replica.sequences == 64


def test_more_gpus_than_key_heads_have_copies_of_one_each() -> None:
    # A replica of 235B needs eight GPUs, and the model has four key heads.
    request = make_request("qwen3-235b-a22b", 64, 8192, offload_optimizer=True)

    plan = make_plan(request)

    replica = plan.layout.replica
    assert plan.fits
    assert replica.gpus == 8
    of_a_head = 2 * 94 * 128 * 2
    assert plan.layout.replica_bytes["KV cache"] == replica.sequences * 8192 * of_a_head
    copied = 94 * 4096 * 2 * 4 * 128
    weights = 2 * ((235_093_634_560 - copied) / 8 + copied / 4)
    assert plan.layout.replica_bytes["weights"] == pytest.approx(weights, abs=2)


def test_heads_that_do_not_divide_are_not_split() -> None:
    model = read_architecture(
        make_config("llama", num_attention_heads=6, num_key_value_heads=6, hidden_size=48)
    )
    request = PlanRequest(model=model, gpus=16, context=64, gpu_memory_gib=1e-3)

    splits = {layout.replica.gpus for layout in list_layouts(request)}

    assert splits == {1, 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "gpus", "layout"),
    [("qwen3-8b", 8, (3, 5, 1)), ("qwen3-32b", 16, (12, 2, 2)), ("qwen3-30b-a3b", 16, (10, 6, 1))],
)
def test_published_models_with_their_reference(
    name: str, gpus: int, layout: tuple[int, int, int]
) -> None:
    request = make_request(name, gpus, 8192, has_reference=True)
    plan = make_plan(request)

    found = plan.layout
    assert plan.fits
    assert (found.trainer.ranks, found.replicas, found.replica.gpus) == layout
    # 16 bytes a parameter over the ranks, as they reduce gradients in every micro-batch.
    assert not found.trainer.sums_whole
    state = sum(found.trainer_bytes[part] for part in ("weights", "gradients", "moments"))
    assert state == pytest.approx(16 * request.model.parameters / layout[0], rel=1e-6)


@pytest.mark.slow
def test_235_billion_fit_64_gpus_with_the_hosts_memory_alone() -> None:
    request = make_request("qwen3-235b-a22b", 64, 8192, has_reference=True)

    plan = make_plan(request)

    # 62 GiB of weights, gradients and moments on each of 56 ranks leave 9 for a layer of 5 GiB,
    # the next one, their gradients, and what is in no layer.
    assert not plan.fits
    assert plan.layout.trainer.ranks == 56
    assert any(advice.endswith("fit: --offload-optimizer") for advice in plan.advice)
    assert make_plan(replace(request, offload_optimizer=True)).fits


def test_the_hosts_memory_is_compared_where_it_is_known() -> None:
    request = make_request("qwen3-8b", 8, 8192, has_reference=True)

    unknown = make_plan(request)
    enough = make_plan(replace(request, host_memory_gib=1024))
    short = make_plan(replace(request, host_memory_gib=16))

    assert unknown.host_shortage == enough.host_shortage == {}
    assert unknown.host_bytes == short.host_bytes
    assert short.host_shortage == {when: size - 16 * GIB for when, size in short.host_bytes.items()}


@pytest.mark.parametrize(("gib", "is_whole"), [(80, False), (400, True)])
def test_ranks_add_gradients_up_as_the_trainer_chooses(gib: float, is_whole: bool) -> None:
    request = make_request("qwen3-8b", 8, 8192, gpu_memory_gib=gib)

    layout = make_plan(request).layout

    held = sum(rank_state_bytes(request.model, layout.trainer).values())
    memory = int(gib * GIB)
    assert layout.trainer.sums_whole == is_whole
    assert fits_whole_gradient(request.model.parameters, held=held, memory=memory) == is_whole


@pytest.mark.slow
def test_the_page_on_scale_has_the_sums_of_its_examples() -> None:
    page = (Path(__file__).parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
    full = {"has_reference": True}
    small = {"gpu_memory_gib": 24, "concurrent": 16}
    examples = {
        "| sum | ": [
            make_request("qwen3-0p6b", 1, 2048, **full, **small),
            make_request("qwen3-8b", 8, 8192, **full),
            make_request("qwen3-30b-a3b", 8, 8192, lora_rank=32, lora_targets=("attn",)),
        ],
        "| Qwen3-32B | 16 | ": [make_request("qwen3-32b", 16, 8192, **full)],
        "| Qwen3-30B-A3B | 16 | ": [make_request("qwen3-30b-a3b", 16, 8192, **full)],
        "| Qwen3-235B-A22B | 64 | ": [make_request("qwen3-235b-a22b", 64, 8192, **full)],
    }

    for row, requests in examples.items():
        written = " ".join(line for line in page.splitlines() if line.startswith(row))
        for request in requests:
            layout = make_plan(request).layout
            for parts in (layout.trainer_bytes, layout.replica_bytes):
                assert f" {sum(parts.values()) / GIB:.2f}" in written


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


def test_muon_is_for_adapters_of_a_mixture_that_leave_experts_alone() -> None:
    options: Any = {"optimizer": "muon", "lora_rank": 8, "lora_targets": ("attn",)}
    adapter = make_request("qwen3-30b-a3b", 8, 64, **options)

    assert make_plan(adapter).fits
    for other in ({"lora_rank": None}, {"lora_targets": ("attn", "mlp")}):
        with pytest.raises(ConfigError, match="optimizer must be 'adamw' or 'adamw_8bit' for the"):
            replace(adapter, **other)
