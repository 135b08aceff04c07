from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from hearth.errors import EngineError, NotFoundError, RequestError
from hearth.models.loading import load_model
from hearth.models.lora import LoraOptions, attach_lora, load_adapter_tensors, write_adapter
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine, TrainerOptions
from hearth.trainer.passes import PassResult
from hearth.wire.tinker import AdamParams

STEP = AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
LORA = LoraOptions(rank=4, alpha=8, seed=1)
MakeEngine = Callable[..., TrainerEngine]


def train(engine: TrainerEngine, model_id: str, data: Any, steps: int = 1) -> None:
    for _ in range(steps):
        engine.forward_backward(model_id, data)
        engine.optim_step(model_id, STEP, "num_loss_tokens")


def flat(result: PassResult) -> np.ndarray:
    return np.concatenate([one.ravel() for one in result.logprobs])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(
    make_engine: MakeEngine, random_data: Any, lora: LoraOptions | None, dtype: str
) -> None:
    data = random_data(count=6)
    first, second = make_engine(dtype=dtype), make_engine(dtype=dtype)
    one, other = first.create_model(lora), second.create_model(lora)
    train(first, one, data, steps=3)
    first.save_state(one, "step-3")
    train(first, one, data, steps=2)

    second.load_state(other, "step-3", with_optimizer=True)
    train(second, other, data, steps=2)

    assert np.array_equal(flat(first.forward(one, data)), flat(second.forward(other, data)))
    second.forward_backward(other, data)
    assert second.optim_step(other, STEP)["step"] == 6


def test_without_its_optimizer_a_checkpoint_starts_a_fresh_one(
    make_engine: MakeEngine, random_data: Any
) -> None:
    data = random_data(count=6)
    first, second = make_engine(), make_engine()
    one, other = first.create_model(), second.create_model()
    train(first, one, data, steps=3)
    first.save_state(one, "step-3")

    second.load_state(other, "step-3", with_optimizer=False)

    assert np.array_equal(flat(first.forward(one, data)), flat(second.forward(other, data)))
    train(first, one, data)
    train(second, other, data)
    assert not np.array_equal(flat(first.forward(one, data)), flat(second.forward(other, data)))


def test_loading_drops_the_accumulated_gradient(engine: TrainerEngine, random_data: Any) -> None:
    data = random_data(count=4)
    model_id = engine.create_model()
    engine.save_state(model_id, "start")
    engine.forward_backward(model_id, data)

    engine.load_state(model_id, "start", with_optimizer=True)

    assert engine.optim_step(model_id, STEP)["skipped"] == 1


def test_checkpoints_are_listed_in_the_order_of_saving(engine: TrainerEngine) -> None:
    model_id = engine.create_model()
    for name in ("step-2", "step-1", "last"):
        engine.save_state(model_id, name)

    assert engine.list_checkpoints() == ["step-2", "step-1", "last"]


def test_a_taken_name_is_refused_unless_it_is_to_be_overwritten(
    engine: TrainerEngine, random_data: Any
) -> None:
    data = random_data(count=4)
    model_id = engine.create_model()
    engine.save_state(model_id, "last")
    train(engine, model_id, data)
    trained = flat(engine.forward(model_id, data))

    with pytest.raises(RequestError, match="name must be new, got 'last'"):
        engine.save_state(model_id, "last")
    engine.save_state(model_id, "last", overwrite=True)
    train(engine, model_id, data)
    engine.load_state(model_id, "last", with_optimizer=True)

    assert np.array_equal(flat(engine.forward(model_id, data)), trained)


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".hidden", "Step-1"])
def test_a_checkpoints_name_cannot_leave_its_folder(engine: TrainerEngine, name: str) -> None:
    model_id = engine.create_model()

    with pytest.raises(RequestError, match="path must be 1 to 128 of a-z"):
        engine.save_state(model_id, name)
    with pytest.raises(RequestError, match="path must be 1 to 128 of a-z"):
        engine.load_state(model_id, name, with_optimizer=True)


def test_an_unknown_checkpoint_lists_the_known_ones(engine: TrainerEngine) -> None:
    model_id = engine.create_model()
    engine.save_state(model_id, "known")

    with pytest.raises(NotFoundError, match=r"one of \['known'\], got 'other'"):
        engine.load_state(model_id, "other", with_optimizer=True)


def test_a_sampler_snapshot_is_not_a_resumable_checkpoint(engine: TrainerEngine) -> None:
    model_id = engine.create_model()
    engine.save_for_sampler(model_id, "step-1-ab")

    message = "must name a resumable checkpoint, got the sampler snapshot 'step-1-ab'"
    with pytest.raises(RequestError, match=message):
        engine.load_state(model_id, "step-1-ab", with_optimizer=True)


def test_a_checkpoint_of_another_adapter_is_refused(make_engine: MakeEngine) -> None:
    first, second = make_engine(), make_engine()
    first.save_state(first.create_model(LORA), "lora")

    with pytest.raises(RequestError, match="checkpoint 'lora' must be of 'tiny'"):
        second.load_state(second.create_model(), "lora", with_optimizer=True)


def test_a_checkpoint_of_another_shape_is_refused(
    make_engine: MakeEngine, model_of: Any, random_data: Any
) -> None:
    first, second = make_engine(model_of("gpt2")), make_engine()
    first.save_state(first.create_model(), "gpt2")
    model_id = second.create_model()
    before = flat(second.forward(model_id, random_data()))

    with pytest.raises(RequestError, match="checkpoint 'gpt2' must fit model policy-1"):
        second.load_state(model_id, "gpt2", with_optimizer=True)
    assert np.array_equal(flat(second.forward(model_id, random_data())), before)


def test_a_damaged_checkpoint_is_found(engine: TrainerEngine, tmp_path: Path) -> None:
    model_id = engine.create_model()
    engine.save_state(model_id, "s")
    path = tmp_path / "checkpoints" / "s" / "weights.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)

    with pytest.raises(EngineError, match="must match its manifest"):
        engine.load_state(model_id, "s", with_optimizer=True)


def test_a_checkpoint_holds_no_pickle(engine: TrainerEngine, tmp_path: Path) -> None:
    engine.save_state(engine.create_model(), "s")

    files = sorted(path.name for path in (tmp_path / "checkpoints" / "s").iterdir())
    assert files == ["manifest.json", "optimizer.safetensors", "weights.safetensors"]


def make_with(store: Any, folder: Path, root: Path) -> TrainerEngine:
    return TrainerEngine(
        folder, name="tiny", snapshots=store, checkpoint_dir=root, options=TrainerOptions()
    )


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_a_snapshot_keeps_the_weights_of_its_moment(
    kind: str, qwen_folder: Path, tmp_path: Path, random_data: Any
) -> None:
    store = MemorySnapshotStore() if kind == "memory" else FolderSnapshotStore(tmp_path / "snap")
    engine = make_with(store, qwen_folder, tmp_path)
    data = random_data(count=4)
    model_id = engine.create_model()
    train(engine, model_id, data)
    module = load_model(qwen_folder).module
    assert engine.save_for_sampler(model_id, "step-1", metadata={"reward": 0.5}) == "step-1"
    taken = {name: one.clone() for name, one in store.get("step-1").tensors.items()}
    train(engine, model_id, data)

    found = store.get("step-1")
    assert (found.kind, found.base_model) == ("base", "tiny")
    assert found.metadata == {"step": 1, "user": {"reward": 0.5}}
    assert all(torch.equal(found.tensors[name], one) for name, one in taken.items())
    assert not torch.equal(found.tensors["model.norm.weight"], module.model.norm.weight)
    engine.close()


def test_a_lora_snapshot_rebuilds_the_policy(
    qwen_folder: Path, tmp_path: Path, random_data: Any
) -> None:
    store = MemorySnapshotStore()
    engine = make_with(store, qwen_folder, tmp_path)
    data = random_data(count=4)
    model_id = engine.create_model(LORA)
    train(engine, model_id, data)
    engine.save_for_sampler(model_id, "step-1")

    snapshot = store.get("step-1")
    loaded = load_model(qwen_folder)
    attach_lora(loaded, LoraOptions.from_metadata(snapshot.metadata))
    load_adapter_tensors(loaded, snapshot.tensors)

    assert snapshot.kind == "lora"
    assert all(name.startswith("base_model.model.") for name in snapshot.tensors)
    ids = torch.tensor([[5, 6, 7, 8] * 8])
    engine.export(model_id, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids).logits, merged(ids).logits, rtol=0, atol=1e-4)
    engine.close()


def test_a_merged_snapshot_is_a_whole_model(
    qwen_folder: Path, tmp_path: Path, random_data: Any
) -> None:
    store = MemorySnapshotStore()
    engine = make_with(store, qwen_folder, tmp_path)
    model_id = engine.create_model(LORA)
    train(engine, model_id, random_data(count=4))
    engine.save_for_sampler(model_id, "whole", "merged_base")
    engine.export(model_id, tmp_path / "merged")

    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    snapshot = store.get("whole")
    assert snapshot.kind == "base"
    assert all(torch.equal(merged[name], one) for name, one in snapshot.tensors.items())
    engine.close()


def test_a_tied_head_with_an_adapter_cannot_be_merged_into_a_snapshot(
    engine: TrainerEngine,
) -> None:
    model_id = engine.create_model(LoraOptions(rank=2, train_unembed=True))

    with pytest.raises(RequestError, match="merging would untie it"):
        engine.save_for_sampler(model_id, "whole", "merged_base")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_peft_adapter_is_taken_up(
    make_engine: MakeEngine, qwen_folder: Path, tmp_path: Path, random_data: Any
) -> None:
    data = random_data(count=4)
    loaded = load_model(qwen_folder)
    attach_lora(loaded, LORA)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02)
    write_adapter(loaded, tmp_path / "adapter")
    engine = make_engine()
    model_id = engine.create_model(LoraOptions(rank=4, alpha=8, seed=77))

    engine.load_adapter(model_id, str(tmp_path / "adapter"))

    engine.export(model_id, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(qwen_folder)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
    train(engine, model_id, data)


def test_an_adapter_that_does_not_fit_is_refused(
    make_engine: MakeEngine, qwen_folder: Path, tmp_path: Path
) -> None:
    loaded = load_model(qwen_folder)
    attach_lora(loaded, LORA)
    write_adapter(loaded, tmp_path / "adapter")
    for options, message in (
        (LoraOptions(rank=2, alpha=8), "must fit model"),
        (LoraOptions(rank=4, alpha=16), "must have the model's lora_alpha, 16, got 8"),
        (None, "must run on a LoRA model"),
    ):
        engine = make_engine()
        model_id = engine.create_model(options)
        with pytest.raises(RequestError, match=message):
            engine.load_adapter(model_id, str(tmp_path / "adapter"))
