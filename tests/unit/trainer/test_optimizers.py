"""Trainers whose optimizer is not plain AdamW: which parameters, which models, and resuming."""

import pytest
import torch
from tests.unit.moe import write_moe
from tests.unit.trainer.conftest import make_datum

from hearth.errors import ConfigError
from hearth.models.lora import LoraOptions
from hearth.planning.memory import OptimizerName
from hearth.sync.manifest import read_manifest
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.checkpoint import DATA
from hearth.trainer.dcp import load_tensors
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.wire.tinker import AdamParams

DATUMS = [make_datum([5, 9, 11, 2, 40, 7, 3], weights=[1.0] * 6)]
ADAM = AdamParams(learning_rate=1e-2)
LAYERS = 2


@pytest.fixture
def checkpoints(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def start(checkpoints):
    """A trainer of a folder."""
    made = []

    def make(folder, *, optimizer: OptimizerName = "muon", **options):
        made.append(
            TrainerEngine(
                folder,
                snapshots=MemorySnapshotStore(),
                checkpoint_dir=checkpoints,
                options=TrainerOptions(optimizer=optimizer, **options),
            )
        )
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def steps(engine, model_id, count):
    for _ in range(count):
        engine.forward_backward(model_id, DATUMS)
        engine.optim_step(model_id, ADAM)


def saved(engine, model_id, folder):
    """A checkpoint's tensors by name."""
    engine.save_state(model_id, folder.name, overwrite=True)
    return load_tensors(folder / DATA, read_manifest(folder)["files"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4, seed=1, train_unembed=True)])
def test_linear_layers_are_muons_and_the_rest_adamws(start, qwen_folder, checkpoints, dtype, lora):
    engine = start(qwen_folder, dtype=dtype)
    model_id = engine.create_model(lora)

    steps(engine, model_id, 1)

    kinds = {}
    for name in saved(engine, model_id, checkpoints / "one"):
        part, _, rest = name.partition("/")
        if part == "optimizer":
            kind, _, parameter = rest.partition("/")
            kinds.setdefault(kind, set()).add(parameter)
    muons, adamws = kinds["momentum_buffer"], kinds.get("exp_avg", set())
    assert len(muons) == LAYERS * 7 * (2 if lora else 1)
    assert all("layers." in name and "norm" not in name for name in muons)
    assert adamws
    assert not any("layers." in name and "norm" not in name for name in adamws)
    assert kinds["exp_avg_sq"] == kinds["step"] == adamws


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("optimizer", ["muon", "adamw_8bit"])
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=64, seed=1)], ids=["full", "adapter"])
def test_a_checkpoint_goes_on_to_the_bit(start, qwen_folder, checkpoints, optimizer, lora, dtype):
    if optimizer == "adamw_8bit":
        pytest.importorskip("bitsandbytes")
    whole, again = (start(qwen_folder, optimizer=optimizer, dtype=dtype) for _ in range(2))
    first, second = whole.create_model(lora), again.create_model(lora)

    steps(whole, first, 2)
    whole.save_state(first, "two", overwrite=True)
    again.load_state(second, "two", with_optimizer=True)
    steps(whole, first, 2)
    steps(again, second, 2)

    expected = saved(whole, first, checkpoints / "whole")
    found = saved(again, second, checkpoints / "again")
    assert expected.keys() == found.keys()
    assert any("momentum_buffer" in name or "absmax1" in name for name in expected)
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_experts_of_a_mixture_are_refused_and_an_adapter_of_attention_is_not(start, tmp_path):
    engine = start(write_moe(tmp_path / "moe"))

    for experts in (None, LoraOptions(rank=2)):
        with pytest.raises(
            ConfigError, match=r"optimizer must be 'adamw' for this model, got 'muo"
        ):
            engine.create_model(experts)

    steps(engine, engine.create_model(LoraOptions(rank=2, seed=1, train_mlp=False)), 1)
