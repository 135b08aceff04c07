"""Ranks on other models and in another precision; each is a trainer of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.scale.ranks.trainers import (
    RankTrainer,
    RefusedError,
    assert_close,
    checkpoint_tensors,
    gradient,
    random_data,
)
from tests.unit.moe import LAYERS, TOP_K, write_moe
from torch import Tensor

from hearth.models.lora import LoraOptions
from hearth.wire.routing import encode_routing
from hearth.wire.tinker import AdamParams, DatumRecord, ModelInputRecord

LENGTHS = (33, 12, 50, 7, 21)


def routed(data: list[DatumRecord]) -> list[DatumRecord]:
    """The datums with random experts for each token but the first ones, as prompts have none."""
    rng = np.random.default_rng(7)
    found: list[DatumRecord] = []
    for datum in data:
        count = len(datum.model_input.chunks[0].tokens or ())
        picked = rng.permuted(np.tile(np.arange(8, dtype=np.uint8), (count, LAYERS, 1)), axis=-1)
        rows = encode_routing(np.ascontiguousarray(picked[count // 3 :, :, :TOP_K]))
        given = ModelInputRecord(
            chunks=datum.model_input.chunks, routing_matrices=[""] * (count // 3) + rows
        )
        found.append(datum.model_copy(update={"model_input": given}))
    return found


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def ranks_of_mixture(start: Callable[..., RankTrainer], mixture: Path) -> Iterator[RankTrainer]:
    trainer = start(2, source=str(mixture))
    yield trainer
    trainer.close()


def test_experts_are_replayed_on_every_rank(ranks_of_mixture, mixture, make_single, checkpoints):
    trainer, single = ranks_of_mixture, make_single(mixture)
    data = routed(random_data(LENGTHS, vocabulary=64))
    theirs, own = trainer.create_model(), single.create_model()

    found, expected = trainer.forward_backward(theirs, data), single.forward_backward(own, data)
    free, _ = single.forward(own, random_data(LENGTHS, vocabulary=64))

    for row, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5, rtol=0)
    assert np.abs(np.concatenate(found[0]) - np.concatenate(free)).max() > 0.1
    assert_close(gradient(trainer, theirs, checkpoints), gradient(single, own, checkpoints))
    trainer.unload(theirs)


def test_an_adapter_of_experts_is_that_of_one_process(
    ranks_of_mixture, mixture, make_single, checkpoints
):
    trainer, single = ranks_of_mixture, make_single(mixture)
    data, adam = random_data(LENGTHS, vocabulary=64), AdamParams(learning_rate=1e-2, eps=1e-6)
    theirs = trainer.create_model(lora={"rank": 4, "seed": 1})
    own = single.create_model(LoraOptions(rank=4, seed=1))

    for run, model in ((trainer, theirs), (single, own)):
        run.forward_backward(model, data)
        run.optim_step(model, adam, "num_loss_tokens")
        run.forward_backward(model, data)
    found, expected = gradient(trainer, theirs, checkpoints), gradient(single, own, checkpoints)

    assert sum("experts" in name for name in found) == LAYERS * 2 * 2
    assert all(bool(tensor.any()) for tensor in found.values())
    assert_close(found, expected)
    trainer.save_state(theirs, "theirs")
    single.load_state(own, "theirs")
    single.save_state(own, "read")
    saved = checkpoint_tensors(checkpoints, "theirs")
    read = checkpoint_tensors(checkpoints, "read")
    assert all(torch.equal(tensor, read[key]) for key, tensor in saved.items())
    published = trainer.published(theirs, "adapter")
    assert all(torch.equal(tensor, saved[f"weights/{key}"]) for key, tensor in published.items())
    trainer.unload(theirs)


@pytest.mark.parametrize("lora", [None, {"rank": 4, "seed": 1}], ids=["full", "adapter"])
def test_muon_on_ranks_is_muon_of_one_process_which_goes_on_from_its_checkpoint(
    start, make_single, checkpoints, lora
):
    """Parts in the host's memory change no number."""
    trainer = start(2, optimizer="muon", offload_optimizer=lora is None)
    single = make_single(optimizer="muon")
    data = random_data(LENGTHS)
    adam = AdamParams(learning_rate=1e-2, weight_decay=0.1)
    theirs = trainer.create_model(lora=lora)
    own = single.create_model(LoraOptions(**lora) if lora else None)

    pairs = ((trainer, theirs), (single, own))

    def take(steps: int, name: str) -> list[dict[str, Tensor]]:
        """The checkpoints of both after some more steps."""
        taken: list[dict[str, Tensor]] = []
        for run, model in pairs:
            for _ in range(steps):
                run.forward_backward(model, data)
                run.optim_step(model, adam, "num_loss_tokens")
            run.save_state(model, name)
            taken.append(checkpoint_tensors(checkpoints, name))
        return taken

    found, expected = take(2, "two")
    # Its iterations compute in bfloat16.
    assert_close(found, expected, tolerance=2e-3)
    moments = [name for name in found if name.startswith("optimizer/momentum_buffer/")]
    assert len(moments) == 2 * 7 * (2 if lora else 1)

    trainer.save_state(theirs, "two")
    single.load_state(own, "two")
    single.save_state(own, "read")
    read = checkpoint_tensors(checkpoints, "read")
    assert all(torch.equal(tensor, read[key]) for key, tensor in found.items())
    trainer.load_state(theirs, "two")
    found, expected = take(1, "three")
    assert_close(found, expected, tolerance=2e-3)
    trainer.close()


def test_moments_of_eight_bits_are_for_adapters_on_ranks(start):
    pytest.importorskip("bitsandbytes")
    trainer = start(2, optimizer="adamw_8bit")

    with pytest.raises(RefusedError, match="its moments are scaled in blocks"):
        trainer.create_model()
    model = trainer.create_model(lora={"rank": 4, "seed": 1})
    trainer.forward_backward(model, random_data(LENGTHS))
    assert trainer.optim_step(model, AdamParams(learning_rate=1e-3), "none")["grad_norm"] > 0
    trainer.close()


def test_bfloat16_has_float32_masters_and_one_process_goes_on_from_them(
    start, make_single, checkpoints
):
    """Parts in the host's memory, layers recomputed: neither changes a number."""
    trainer = start(2, dtype="bfloat16", offload_optimizer=True, recompute_above=16)
    single = make_single(dtype="bfloat16")
    data = random_data(LENGTHS)
    adam = AdamParams(learning_rate=1e-3, eps=1e-6)
    theirs, own = trainer.create_model(), single.create_model()

    for run, model in ((trainer, theirs), (single, own)):
        _, metrics = run.forward_backward(model, data)
        assert metrics["loss:sum"] == pytest.approx(
            single.forward(own, data)[1]["loss:sum"], rel=0.05
        )
        run.optim_step(model, adam, "num_loss_tokens")
    trainer.save_state(theirs, "rounded")
    saved = checkpoint_tensors(checkpoints, "rounded")
    published = trainer.published(theirs, "rounded")
    single.load_state(own, "rounded")
    single.save_state(own, "read")
    trainer.close()

    name = "model.layers.0.mlp.up_proj.weight"
    assert saved[f"weights/{name}"].dtype == published[name].dtype == torch.bfloat16
    master = saved[f"optimizer/master/{name}"]
    assert torch.equal(master.bfloat16(), saved[f"weights/{name}"])
    assert not torch.equal(master, saved[f"weights/{name}"].float())
    read = checkpoint_tensors(checkpoints, "read")
    assert read.keys() == saved.keys()
    assert all(torch.equal(tensor, read[key]) for key, tensor in saved.items())
