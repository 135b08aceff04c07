from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tests.unit.architectures import GPT_OSS, make_config
from tests.unit.moe import write_moe
from tests.unit.tiny import make_decoder, shake
from transformers import AutoModelForCausalLM

from hearth.errors import ConfigError, EngineError
from hearth.models.loading import LoadedModel, base_tensors, export_pretrained, load_model
from hearth.models.lora import (
    LoraOptions,
    adapter_tensors,
    attach_lora,
    base_only,
    detach_lora,
    from_peft,
    load_adapter_tensors,
    merge_tensors,
    read_adapter,
    target_experts,
    target_modules,
    write_adapter,
)

IDS = torch.tensor([[5, 9, 11, 2, 40, 7]])
# PEFT and transformers talk about tied heads and progress; neither is ours.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*tie_word_embeddings.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*save_embedding_layers.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


def logits(loaded: LoadedModel) -> torch.Tensor:
    with torch.no_grad():
        return loaded.module(IDS).logits


def adapted(folder: Path, **options: object) -> LoadedModel:
    """A model whose adapter does something."""
    loaded = load_model(folder)
    attach_lora(loaded, LoraOptions(rank=4, alpha=8.0, **options))  # pyright: ignore[reportArgumentType]
    shake(adapter_tensors(loaded), 2)
    return loaded


def test_a_fresh_adapter_changes_nothing(model_folder: Path) -> None:
    loaded = load_model(model_folder)
    before = logits(loaded)

    attach_lora(loaded, LoraOptions(rank=4, train_unembed=True))

    assert torch.equal(logits(loaded), before)


def test_the_seed_alone_decides_the_initial_values(qwen_folder: Path) -> None:
    def start(seed: int) -> torch.Tensor:
        torch.manual_seed(seed + 100)
        loaded = load_model(qwen_folder)
        attach_lora(loaded, LoraOptions(rank=4, seed=seed))
        return torch.cat([tensor.flatten() for tensor in adapter_tensors(loaded).values()])

    assert torch.equal(start(1), start(1))
    assert not torch.equal(start(1), start(2))


def test_only_the_adapter_requires_gradients_and_it_is_float32(qwen_folder: Path) -> None:
    loaded = load_model(qwen_folder, dtype="bfloat16")
    attach_lora(loaded, LoraOptions(rank=4))

    trained = {name for name, weight in loaded.module.named_parameters() if weight.requires_grad}
    assert all(".lora_" in name for name in trained)
    assert {tensor.dtype for tensor in adapter_tensors(loaded).values()} == {torch.float32}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"train_mlp": False}, {"q_proj", "k_proj", "v_proj", "o_proj"}),
        ({"train_attn": False}, {"gate_proj", "up_proj", "down_proj"}),
        ({"train_attn": False, "train_mlp": False, "train_unembed": True}, {"lm_head"}),
    ],
    ids=["attn", "mlp", "unembed"],
)
def test_options_choose_the_layers(
    qwen_folder: Path, options: dict[str, bool], expected: set[str]
) -> None:
    targets = target_modules(load_model(qwen_folder).module, LoraOptions(rank=1, **options))

    assert {name.split(".")[-1] for name in targets} == expected


def test_gpt2s_transposed_layers_are_found(gpt2_folder: Path) -> None:
    targets = target_modules(load_model(gpt2_folder).module, LoraOptions(rank=1, train_mlp=False))

    assert targets == [
        f"transformer.h.{layer}.attn.{name}" for layer in (0, 1) for name in ("c_attn", "c_proj")
    ]


@pytest.mark.parametrize("train_unembed", [False, True])
def test_peft_loads_what_was_written_and_gives_the_same_logits(
    model_folder: Path, tmp_path: Path, train_unembed: bool
) -> None:
    loaded = adapted(model_folder, train_unembed=train_unembed)
    write_adapter(loaded, tmp_path)

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    again = PeftModel.from_pretrained(base, tmp_path).eval()

    torch.testing.assert_close(again(IDS).logits, logits(loaded), rtol=0, atol=1e-6)


def test_an_adapter_that_peft_wrote_is_read_back(qwen_folder: Path, tmp_path: Path) -> None:
    loaded = adapted(qwen_folder)
    write_adapter(loaded, tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(qwen_folder)
    PeftModel.from_pretrained(base, tmp_path / "ours").save_pretrained(tmp_path / "theirs")

    config, tensors = read_adapter(tmp_path / "theirs")
    fresh = load_model(qwen_folder)
    attach_lora(fresh, LoraOptions(rank=config["r"], alpha=config["lora_alpha"], seed=9))
    load_adapter_tensors(fresh, tensors)

    assert torch.equal(logits(fresh), logits(loaded))


def test_base_only_switches_the_adapter_off_and_on_again(qwen_folder: Path) -> None:
    plain, loaded = logits(load_model(qwen_folder)), adapted(qwen_folder)
    with_adapter = logits(loaded)

    with base_only(loaded):
        assert torch.equal(logits(loaded), plain)

    assert not torch.allclose(with_adapter, plain, atol=1e-4)
    assert torch.equal(logits(loaded), with_adapter)
    assert all(tensor.requires_grad for tensor in adapter_tensors(loaded).values())


def test_detaching_leaves_the_plain_model(qwen_folder: Path) -> None:
    plain = load_model(qwen_folder)
    loaded = adapted(qwen_folder, train_unembed=True)

    detach_lora(loaded)

    assert torch.equal(logits(loaded), logits(plain))
    assert loaded.module.state_dict().keys() == plain.module.state_dict().keys()
    attach_lora(loaded, LoraOptions(rank=2))


@pytest.mark.parametrize("train_unembed", [False, True])
def test_a_merged_export_computes_what_the_adapter_does(
    model_folder: Path, tmp_path: Path, train_unembed: bool
) -> None:
    loaded = adapted(model_folder, train_unembed=train_unembed)
    export_pretrained(loaded, merge_tensors(loaded), tmp_path)

    merged = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(merged(IDS).logits, logits(loaded), rtol=0, atol=2e-6)


def test_merging_leaves_the_base_weights_alone(qwen_folder: Path) -> None:
    loaded, plain = adapted(qwen_folder), load_model(qwen_folder)

    merged = merge_tensors(loaded)

    own, expected = base_tensors(loaded.module), base_tensors(plain.module)
    assert all(torch.equal(own[name], tensor) for name, tensor in expected.items())
    assert not torch.equal(
        merged["model.layers.0.mlp.up_proj.weight"], expected["model.layers.0.mlp.up_proj.weight"]
    )


def test_a_rank_that_no_weight_can_have_is_refused_before_it_is_made(qwen_folder: Path) -> None:
    loaded = load_model(qwen_folder)
    largest = max(min(weight.shape) for weight in base_tensors(loaded.module).values())

    with pytest.raises(ConfigError, match=r"lora rank must be <= \d+, .*, got 1000000: train all"):
        attach_lora(loaded, LoraOptions(rank=10**6))

    assert loaded.lora is None
    attach_lora(loaded, LoraOptions(rank=largest))


def test_an_adapter_of_another_rank_is_refused(qwen_folder: Path) -> None:
    loaded, other = adapted(qwen_folder), load_model(qwen_folder)
    attach_lora(other, LoraOptions(rank=2))

    with pytest.raises(EngineError, match=r"\[4, 32\] instead of \[2, 32\]"):
        load_adapter_tensors(other, adapter_tensors(loaded))


def test_a_second_adapter_is_refused(qwen_folder: Path) -> None:
    loaded = adapted(qwen_folder)

    with pytest.raises(ConfigError, match="one adapter at most"):
        attach_lora(loaded, LoraOptions(rank=4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, "rank must be >= 1, got 0"),
        ({"rank": 1, "alpha": float("nan")}, "alpha must be finite"),
        ({"rank": 1, "train_attn": False, "train_mlp": False}, "at least one of"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraOptions(**options)  # pyright: ignore[reportArgumentType]


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapter_path must be a PEFT adapter's folder"):
        read_adapter(tmp_path)


def test_options_survive_a_snapshots_metadata() -> None:
    options = LoraOptions(rank=4, alpha=16.0, seed=3, train_unembed=True)

    assert LoraOptions.from_metadata(json.loads(json.dumps(options.as_metadata()))) == options


def test_of_a_mixture_mlps_are_experts_and_what_is_beside_them_and_no_router() -> None:
    modules = {kind: make_decoder(make_config(kind)) for kind in ("qwen3_moe", "qwen2_moe")}
    mlps = LoraOptions(rank=1, train_attn=False)

    linears = {kind: target_modules(module, mlps) for kind, module in modules.items()}
    experts = {kind: list(target_experts(module, mlps)) for kind, module in modules.items()}

    # The first of the one has a dense layer, the other shared experts with a gate.
    dense, shared = "model.layers.0.mlp", "model.layers.{}.mlp.shared_expert"
    names = ("gate_proj", "up_proj", "down_proj")
    assert linears["qwen3_moe"] == [f"{dense}.{name}" for name in names]
    assert linears["qwen2_moe"] == [f"{shared.format(n)}.{name}" for n in (0, 1) for name in names]
    assert experts["qwen3_moe"] == ["model.layers.1.mlp.experts"]
    assert experts["qwen2_moe"] == [f"model.layers.{n}.mlp.experts" for n in (0, 1)]


def test_an_adapter_of_an_earlier_version_leaves_a_mixtures_mlps_alone() -> None:
    module = make_decoder(make_config("qwen3_moe"))
    options = LoraOptions.from_metadata({"lora": {"rank": 1, "train_mlp": True}})

    found = target_modules(module, options)

    assert {name.rpartition(".")[2] for name in found} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert target_experts(module, options) == {}


@pytest.fixture
def moe_folder(tmp_path: Path) -> Path:
    return write_moe(tmp_path / "moe")


@pytest.fixture
def oss_folder(tmp_path: Path) -> Path:
    make_decoder(GPT_OSS).save_pretrained(tmp_path / "oss")
    return tmp_path / "oss"


@pytest.mark.parametrize("folder", ["moe_folder", "oss_folder"])
def test_experts_of_an_adapter_are_switched_off_detached_and_merged(
    request: pytest.FixtureRequest, tmp_path: Path, folder: str
) -> None:
    source = request.getfixturevalue(folder)
    loaded, plain = adapted(source), load_model(source)
    with_adapter = logits(loaded)
    export_pretrained(loaded, merge_tensors(loaded), tmp_path / "merged")

    with base_only(loaded):
        assert torch.equal(logits(loaded), logits(plain))
    assert torch.equal(logits(loaded), with_adapter)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(IDS).logits, with_adapter, rtol=0, atol=1e-5)
    assert float((with_adapter - logits(plain)).abs().max()) > 1e-3

    detach_lora(loaded)
    assert torch.equal(logits(loaded), logits(plain))
    assert loaded.module.state_dict().keys() == plain.module.state_dict().keys()


@pytest.mark.parametrize("folder", ["moe_folder", "oss_folder"])
def test_peft_reads_and_writes_experts(
    request: pytest.FixtureRequest, tmp_path: Path, folder: str
) -> None:
    source = request.getfixturevalue(folder)
    loaded = adapted(source)
    write_adapter(loaded, tmp_path / "ours")
    base = AutoModelForCausalLM.from_pretrained(source)
    theirs = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    torch.testing.assert_close(theirs(IDS).logits, logits(loaded), rtol=0, atol=1e-5)
    theirs.save_pretrained(str(tmp_path / "theirs"))

    _, tensors = read_adapter(tmp_path / "theirs")
    fresh = load_model(source)
    attach_lora(fresh, LoraOptions(rank=4, alpha=8.0, seed=9))
    load_adapter_tensors(fresh, from_peft(tensors, fresh))

    own = adapter_tensors(loaded)
    assert all(torch.equal(own[name], value) for name, value in adapter_tensors(fresh).items())


def test_experts_that_a_folder_leaves_alone_begin_at_0(moe_folder: Path, tmp_path: Path) -> None:
    without = adapted(moe_folder, train_mlp=False)
    write_adapter(without, tmp_path / "attention")
    fresh = adapted(moe_folder)

    load_adapter_tensors(fresh, from_peft(read_adapter(tmp_path / "attention")[1], fresh))

    assert torch.equal(logits(fresh), logits(without))


def test_the_experts_of_another_rank_are_refused(moe_folder: Path, tmp_path: Path) -> None:
    loaded = adapted(moe_folder, train_attn=False)
    write_adapter(loaded, tmp_path / "adapter")
    other = load_model(moe_folder)
    attach_lora(other, LoraOptions(rank=2, train_attn=False))

    with pytest.raises(EngineError, match=r"8 missing .* and 8 unknown"):
        load_adapter_tensors(other, from_peft(read_adapter(tmp_path / "adapter")[1], other))
