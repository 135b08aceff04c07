"""The arithmetic of memory against what trainers and caches really hold."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.unit.planning.families import PUBLISHED, tiny
from tests.unit.trainer.conftest import make_datum
from tests.unit.trainer.decoders import PaddedScorer

from hearth.inference.engine.cache import CacheShape
from hearth.losses import builtin_objective
from hearth.models.loading import LoadedModel, load_model
from hearth.models.lora import LoraOptions, attach_lora
from hearth.models.sizes import read_architecture
from hearth.planning.architecture import Architecture
from hearth.planning.memory import (
    GIB,
    LOGIT_BUDGET,
    Machine,
    ReplicaSetting,
    TrainerSetting,
    activation_bytes_per_token,
    choose_copies,
    delta_bytes,
    host_bytes,
    logit_bytes,
    rank_state_bytes,
    replica_bytes,
    state_bytes,
    trainer_bytes,
)
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.datums import read_datums
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.options import DEFAULT_LOGIT_BUDGET, TrainerOptions
from hearth.trainer.packing import Limits
from hearth.wire.tinker import AdamParams, DatumRecord

pytestmark = pytest.mark.slow

TOKENS = 128
"""A multiple of 32, so that no row is padding."""
LIMITS = Limits(96, 256, 256)
BOTH = ("attn", "mlp")
QWEN_8B = read_architecture(PUBLISHED["qwen3-8b"]())


def saved(folder: Path, kind: str) -> Architecture:
    """A tiny model's sizes; the model is in the folder."""
    torch.manual_seed(0)
    config = tiny(kind)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return read_architecture(config)


def datum() -> DatumRecord:
    tokens = [place % 90 + 3 for place in range(TOKENS + 1)]
    return make_datum(tokens, weights=[1.0] * TOKENS)


def live() -> dict[str, int]:
    """Bytes of the tensors that this process holds: parameters, their gradients, all."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    parameters = [tensor for tensor in tensors if isinstance(tensor, torch.nn.Parameter)]
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    groups = {"parameters": parameters, "gradients": gradients, "all": [*tensors, *gradients]}
    return {
        name: sum({tensor.untyped_storage().data_ptr(): tensor.nbytes for tensor in group}.values())
        for name, group in groups.items()
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("rank", "targets"), [(None, BOTH), (4, BOTH), (4, ("attn",)), (4, ("mlp", "unembed"))]
)
@pytest.mark.parametrize(
    ("kind", "optimizer"), [("qwen3", "adamw"), ("qwen3", "muon"), ("qwen3_moe", "adamw")]
)
def test_a_trainer_holds_exactly_the_bytes_that_are_planned(
    tmp_path: Path, kind: str, rank: int | None, targets: Any, dtype: Any, optimizer: Any
) -> None:
    model = saved(tmp_path, kind)
    setting = TrainerSetting(dtype=dtype, lora_rank=rank, lora_targets=targets, optimizer=optimizer)
    planned = state_bytes(model, setting)
    before = live()
    engine = TrainerEngine(
        tmp_path,
        snapshots=MemorySnapshotStore(),
        checkpoint_dir=tmp_path / "checkpoints",
        options=TrainerOptions(dtype=dtype, optimizer=optimizer),
    )
    model_id = engine.create_model(None if rank is None else make_lora(rank, targets))

    engine.forward_backward(model_id, [datum()])
    trained = live()
    engine.optim_step(model_id, AdamParams(learning_rate=1e-3))
    stepped = live()

    held = {name: trained[name] - before[name] for name in trained}
    assert held["parameters"] == planned["weights"] + planned["masters"]
    assert held["gradients"] == planned["gradients"]
    # AdamW's moments have a step count of four bytes beside them, and gradients are gone.
    moments = stepped["all"] - trained["all"] + planned["gradients"]
    assert planned["moments"] <= moments < planned["moments"] + 4 * 200
    engine.close()


def make_lora(rank: int, targets: tuple[str, ...]) -> LoraOptions:
    """An adapter on these parts."""
    parts: Any = {f"train_{part}": part in targets for part in ("attn", "mlp", "unembed")}
    return LoraOptions(rank=rank, **parts)


def kept_bytes(scorer: TargetScorer, loaded: LoadedModel) -> int:
    """Bytes that a forward pass keeps for its backward pass, the weights left out."""
    examples = read_datums([datum()], builtin_objective("cross_entropy"), LIMITS)
    (batch,) = scorer.batches(examples, 4096, LIMITS)
    weights = {parameter.untyped_storage().data_ptr() for parameter in loaded.module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        states = scorer.states(batch)
    del states
    return sum(kept.values())


@pytest.mark.parametrize(
    ("kind", "dtype", "way"),
    [
        ("llama", "float32", "loops in C"),
        ("qwen3", "float32", "loops in C"),
        ("llama", "float32", "module"),
        ("qwen3", "float32", "module"),
        ("qwen3", "bfloat16", "module"),
        ("qwen3_moe", "float32", "module"),
        ("qwen3_moe", "bfloat16", "module"),
    ],
)
@pytest.mark.parametrize("recompute_above", [None, 1])
@pytest.mark.parametrize("rank", [None, 4])
def test_activations_are_those_that_autograd_keeps_within_a_tenth(
    tmp_path: Path, kind: str, dtype: Any, way: str, recompute_above: int | None, rank: int | None
) -> None:
    model = saved(tmp_path, kind)
    loaded = load_model(tmp_path, dtype=dtype)
    if rank is not None:
        attach_lora(loaded, LoraOptions(rank=rank))
    setting = TrainerSetting(
        dtype=dtype,
        lora_rank=rank,
        micro_batch_tokens=TOKENS,
        recompute_above=recompute_above,
        is_fused=way == "loops in C",
    )

    make_scorer = PaddedScorer if way == "module" else TargetScorer
    scorer = make_scorer(loaded, TrainerOptions(recompute_above=recompute_above))
    kept = kept_bytes(scorer, loaded)

    planned = TOKENS * activation_bytes_per_token(model, setting)
    assert 0.9 < planned / kept < 1.1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_adapter_of_attention_alone_keeps_no_inputs_of_the_mlp(
    tmp_path: Path, dtype: Any
) -> None:
    model = saved(tmp_path, "qwen3")
    loaded = load_model(tmp_path, dtype=dtype)
    attach_lora(loaded, make_lora(4, ("attn",)))
    both = TrainerSetting(dtype=dtype, lora_rank=4, micro_batch_tokens=TOKENS)
    setting = replace(both, lora_targets=("attn",))

    kept = kept_bytes(PaddedScorer(loaded), loaded)

    planned = activation_bytes_per_token(model, setting)
    assert 0.9 < TOKENS * planned / kept < 1.1
    assert planned < activation_bytes_per_token(model, both)


def test_the_kv_cache_of_a_token_is_that_of_the_engine() -> None:
    shape = CacheShape(36, 8, 128, 128, torch.bfloat16, torch.device("cpu"))

    assert QWEN_8B.kv_bytes_per_token(2) == shape.bytes_per_token


def test_the_logit_budget_is_the_trainers() -> None:
    setting = TrainerSetting(dtype="float32", is_fused=True)

    assert LOGIT_BUDGET == DEFAULT_LOGIT_BUDGET
    rows = DEFAULT_LOGIT_BUDGET // QWEN_8B.vocab
    assert logit_bytes(QWEN_8B, setting) == 4 * rows * QWEN_8B.vocab


def test_ranks_divide_what_is_trained_and_copy_an_adapter() -> None:
    full = TrainerSetting(ranks=4)
    adapter = TrainerSetting(ranks=4, lora_rank=8)
    size = QWEN_8B.lora_parameters(8)

    parts = rank_state_bytes(QWEN_8B, full)
    shared = rank_state_bytes(QWEN_8B, adapter)

    assert sum(parts.values()) == 16 * QWEN_8B.parameters // 4
    assert shared["weights"] == 2 * QWEN_8B.parameters // 4 + 4 * size
    assert (shared["gradients"], shared["moments"]) == (4 * size, 8 * size)
    own = replace(full, sums_whole=False)
    whole, in_parts = (sum(trainer_bytes(QWEN_8B, each).values()) for each in (full, own))
    assert whole - in_parts == 4 * QWEN_8B.parameters
    assert "gradients on their way" not in trainer_bytes(QWEN_8B, adapter)


def test_moments_are_the_optimizers() -> None:
    matrices = 36 * (4096 * (4096 + 2 * 1024 + 4096) + 3 * 4096 * 12288)
    assert QWEN_8B.matrix_parameters == matrices
    size = QWEN_8B.lora_parameters(8)
    muon, blocks = TrainerSetting(optimizer="muon"), TrainerSetting(optimizer="adamw_8bit")

    def moments(setting: TrainerSetting) -> int:
        return rank_state_bytes(QWEN_8B, setting)["moments"]

    assert moments(muon) == 8 * QWEN_8B.parameters - 4 * matrices
    assert moments(replace(muon, ranks=4)) == moments(muon) // 4
    assert moments(replace(muon, ranks=4, lora_rank=8)) == 4 * size
    # Two bytes a number, and two scales a block of 256.
    assert moments(blocks) == pytest.approx((2 + 8 / 256) * QWEN_8B.parameters, rel=1e-6)
    assert moments(replace(blocks, lora_rank=8)) == pytest.approx((2 + 8 / 256) * size, rel=1e-6)


def test_what_is_offloaded_is_the_hosts() -> None:
    near = TrainerSetting(ranks=4)
    away = replace(near, offload_optimizer=True)

    freed = sum(trainer_bytes(QWEN_8B, near).values()) - sum(trainer_bytes(QWEN_8B, away).values())

    assert freed == sum(rank_state_bytes(QWEN_8B, near).values())
    kept, published = (
        host_bytes(QWEN_8B, each, ReplicaSetting(), Machine(4, 0), learning_rate=1e-5)["sync"]
        for each in (away, near)
    )
    assert kept - published == 4 * freed


def test_machines_hold_a_copy_each_where_half_of_their_ranks_memory_has_room() -> None:
    memory = 80 * GIB

    def choose(parameters: int, setting: TrainerSetting) -> tuple[int, int]:
        model = replace(QWEN_8B, parameters=parameters)
        chosen = choose_copies(model, setting, memory, ranks_of_machine=8)
        return chosen.copies, chosen.reference_copies

    full, adapter = TrainerSetting(ranks=16), TrainerSetting(ranks=16, lora_rank=16)
    # Half of eight GPUs: 320 GiB, of 16 bytes if trained and 2 if frozen.
    assert choose(20 * GIB, full) == (2, 2)
    assert choose(20 * GIB + 8, full) == (1, 2)
    assert choose(160 * GIB, adapter) == (2, 2)
    assert choose(160 * GIB + 8, adapter) == (1, 1)
    for apart in (
        TrainerSetting(ranks=8),
        TrainerSetting(ranks=12),
        replace(full, offload_optimizer=True),
    ):
        assert choose(GIB, apart) == (1, 1)


def test_a_copy_is_divided_over_the_ranks_of_one_machine() -> None:
    setting = TrainerSetting(ranks=16, copies=2, has_reference=True, sums_whole=False)
    alone = replace(setting, ranks=8, copies=1)

    assert rank_state_bytes(QWEN_8B, setting) == rank_state_bytes(QWEN_8B, alone)
    # The reference is not copied, and the sums of a request wait for those of the other machine.
    more = sum(trainer_bytes(QWEN_8B, setting).values())
    more -= sum(trainer_bytes(QWEN_8B, alone).values())
    assert more == pytest.approx((4 - 1) * QWEN_8B.parameters / 8, abs=16)
    held, expected = (
        host_bytes(QWEN_8B, each, ReplicaSetting(), Machine(8, 0), learning_rate=1e-5)["sync"]
        for each in (setting, alone)
    )
    assert held == expected


def test_at_the_start_the_ranks_of_a_machine_read_the_model_once_and_the_reference_once() -> None:
    def start(setting: TrainerSetting, ranks: int) -> int:
        machine = Machine(ranks, 0)
        return host_bytes(QWEN_8B, setting, ReplicaSetting(), machine, learning_rate=1e-5)["start"]

    alone, four = TrainerSetting(), TrainerSetting(ranks=4)
    adapter = TrainerSetting(ranks=4, lora_rank=16, has_reference=True)
    whole = 2 * QWEN_8B.parameters
    assert start(alone, 1) == whole
    # Rounded up, on each rank.
    assert start(four, 4) == start(adapter, 4) == pytest.approx(whole, abs=4)
    assert start(replace(four, has_reference=True), 4) == 2 * start(four, 4)
    assert start(four, 2) == start(four, 4) // 2


def test_a_sync_holds_weights_twice_over_all_ranks_and_twice_for_all_replicas_there() -> None:
    setting, rate = TrainerSetting(ranks=4), 1e-6
    whole, delta = 2 * QWEN_8B.parameters, delta_bytes(QWEN_8B, setting, rate)

    def sync(ranks: int, replicas: int, gpus: int) -> int:
        replica = ReplicaSetting(gpus=gpus)
        machine = Machine(ranks, replicas)
        return host_bytes(QWEN_8B, setting, replica, machine, learning_rate=rate)["sync"]

    assert sync(0, 3, 1) == sync(0, 2, 4) == 2 * whole + delta
    assert sync(4, 0, 1) == 2 * whole + delta + 8 * QWEN_8B.largest_tensor
    assert sync(1, 0, 1) == pytest.approx(sync(4, 0, 1) / 4)
    assert sync(4, 3, 1) == sync(4, 0, 1) + sync(0, 3, 1)


def test_a_reference_is_another_trainer_of_as_many_ranks() -> None:
    setting = TrainerSetting(ranks=4)

    with_it = trainer_bytes(QWEN_8B, replace(setting, has_reference=True))
    adapter = trainer_bytes(QWEN_8B, replace(setting, has_reference=True, lora_rank=8))

    whole = 2 * (QWEN_8B.outer_parameters + 2 * QWEN_8B.layer_parameters)
    assert with_it["reference"] > 2 * QWEN_8B.parameters // 4 + whole
    assert with_it == trainer_bytes(QWEN_8B, setting) | {"reference": with_it["reference"]}
    assert "reference" not in adapter


def test_a_replica_divides_weights_and_cache_as_far_as_it_has_heads() -> None:
    single = replica_bytes(QWEN_8B, ReplicaSetting(context=1024, sequences=32))
    two = replica_bytes(QWEN_8B, ReplicaSetting(context=1024, sequences=32, gpus=2))

    assert single["weights"] == 2 * two["weights"] == 2 * QWEN_8B.parameters
    assert single["KV cache"] == 2 * two["KV cache"] == 32 * 1024 * 147_456
