from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.tiny import shake
from transformers import AutoModelForCausalLM

from hearth.errors import ConfigError, EngineError
from hearth.models.loading import (
    base_tensors,
    choose_dtype,
    export_pretrained,
    load_base_tensors,
    load_model,
    load_tokenizer,
    own_weights,
)
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from training.quickstart import MODEL

IDS = torch.tensor([[5, 9, 11, 2, 40, 7]])


def test_a_loaded_model_states_what_others_need_to_know(qwen_folder: Path) -> None:
    loaded = load_model(qwen_folder, name="accounts/me/models/tiny")

    assert loaded.name == "accounts/me/models/tiny"
    assert loaded.source == str(qwen_folder)
    assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
    assert loaded.eos_token_ids == (3,)
    assert (loaded.vocab_size, loaded.max_position) == (64, 256)
    assert not loaded.module.training


def test_models_that_share_have_the_same_memory_until_one_owns_its_weights(
    qwen_folder: Path,
) -> None:
    first, second = (load_model(qwen_folder, share=True) for _ in range(2))
    alone = load_model(qwen_folder)
    addresses = [
        [tensor.data_ptr() for tensor in base_tensors(loaded.module).values()]
        for loaded in (first, second, alone)
    ]
    expected = first.module(IDS).logits

    assert addresses[0] == addresses[1]
    assert not set(addresses[0]) & set(addresses[2])

    own_weights(second)
    with torch.no_grad():
        for tensor in base_tensors(second.module).values():
            tensor.add_(1.0)

    assert torch.equal(first.module(IDS).logits, expected)
    assert not torch.equal(second.module(IDS).logits, expected)


def test_an_adapter_of_one_model_changes_no_other_that_shares_its_weights(
    qwen_folder: Path,
) -> None:
    first, second = (load_model(qwen_folder, share=True) for _ in range(2))
    expected = second.module(IDS).logits

    attach_lora(first, LoraOptions(rank=2))
    shake(adapter_tensors(first), 1)
    third = load_model(qwen_folder, share=True)

    assert not torch.equal(first.module(IDS).logits, expected)
    assert torch.equal(second.module(IDS).logits, expected)
    assert torch.equal(third.module(IDS).logits, expected)
    assert all(parameter.requires_grad for parameter in third.module.parameters())


def test_a_folder_that_was_written_again_is_read_again(qwen_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(qwen_folder, tmp_path / "model")
    before = load_model(folder, share=True)
    tensors = {name: tensor + 1 for name, tensor in base_tensors(before.module).items()}
    export_pretrained(before, tensors, folder)

    after = load_model(folder, share=True)

    for name, tensor in base_tensors(after.module).items():
        assert torch.equal(tensor, tensors[name])


def test_bfloat16_weights_are_the_rounded_float32_weights(qwen_folder: Path) -> None:
    exact = base_tensors(load_model(qwen_folder).module)
    rounded = base_tensors(load_model(qwen_folder, dtype="bfloat16").module)

    assert all(torch.equal(rounded[name], tensor.bfloat16()) for name, tensor in exact.items())


def test_a_tied_head_is_one_tensor_under_the_embeddings_name(qwen_folder: Path) -> None:
    names = base_tensors(load_model(qwen_folder).module).keys()

    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


@pytest.mark.slow
def test_exported_weights_give_the_same_logits_with_plain_transformers(
    model_folder: Path, tmp_path: Path
) -> None:
    loaded = load_model(model_folder)
    with torch.no_grad():
        for tensor in base_tensors(loaded.module).values():
            tensor.add_(torch.randn(tensor.shape, generator=torch.manual_seed(1)) * 0.01)
    export_pretrained(loaded, base_tensors(loaded.module), tmp_path)

    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(IDS).logits, loaded.module(IDS).logits)


def test_an_export_takes_the_tokenizer_along(qwen_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(qwen_folder)
    export_pretrained(loaded, base_tensors(loaded.module), tmp_path)

    assert load_tokenizer(tmp_path)("w5 w9")["input_ids"] == [5, 9]
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == 3


def test_an_export_refuses_tensors_of_another_model(qwen_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(qwen_folder)

    with pytest.raises(EngineError, match=r"missing \['model.embed_tokens"):
        export_pretrained(loaded, {}, tmp_path)


def test_misshapen_weights_change_nothing(qwen_folder: Path) -> None:
    module = load_model(qwen_folder).module
    given = {name: torch.zeros_like(tensor) for name, tensor in base_tensors(module).items()}
    given["model.norm.weight"] = torch.zeros(7)

    with pytest.raises(EngineError, match=r"model.norm.weight \[7\] instead of \[32\]"):
        load_base_tensors(module, given)
    assert bool((base_tensors(module)["model.embed_tokens.weight"] != 0).any())


@pytest.mark.parametrize("source", ["./absent", Path("absent"), "/no/such/folder", ""])
def test_a_missing_folder_is_named(source: str | Path) -> None:
    with pytest.raises(ConfigError, match="base_model must be an existing folder or a hub id"):
        load_model(source)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"got '{tmp_path}'"):
        load_model(tmp_path)
    with pytest.raises(ConfigError, match="tokenizer must be a tokenizer's folder or hub id"):
        load_tokenizer(tmp_path)


def test_an_unknown_architecture_is_refused(qwen_folder: Path, tmp_path: Path) -> None:
    config = json.loads((qwen_folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "abacus"}))

    with pytest.raises(ConfigError, match="abacus"):
        load_model(tmp_path)


def test_a_model_with_missing_weights_is_refused(qwen_folder: Path, tmp_path: Path) -> None:
    shutil.copytree(qwen_folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ConfigError, match=r"every weight .* without \['model.norm.weight'\]"):
        load_model(tmp_path)


def test_an_unknown_dtype_or_device_is_refused(qwen_folder: Path) -> None:
    with pytest.raises(ConfigError, match="dtype must be one of float32, bfloat16, got 'int4'"):
        load_model(qwen_folder, dtype="int4")
    with pytest.raises(ConfigError, match="device must be"):
        load_model(qwen_folder, device="abacus")


def test_an_unreachable_hub_is_said_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def unreachable(*args: object, **kwargs: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", unreachable)
    with pytest.raises(ConfigError, match=r"hub cannot be reached \(no route\)"):
        load_model("nobody/nothing")


class Planted:
    """Runs as soon as it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self._mark,))


def test_a_models_pickle_is_never_run(qwen_folder: Path, tmp_path: Path) -> None:
    folder, mark = tmp_path / "model", tmp_path / "it-ran"
    shutil.copytree(qwen_folder, folder)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Planted(mark)}, folder / "pytorch_model.bin")

    with pytest.raises(ConfigError, match="must hold weights and nothing else"):
        load_model(folder)

    assert not mark.exists()


def test_a_models_own_code_runs_only_where_it_is_trusted(
    qwen_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, mark = tmp_path / "model", tmp_path / "it-ran"
    shutil.copytree(qwen_folder, folder)
    code = f"""
from pathlib import Path
from transformers import Qwen3Config, Qwen3ForCausalLM
Path({str(mark)!r}).touch()
class OwnConfig(Qwen3Config): model_type = "own"
class OwnModel(Qwen3ForCausalLM): config_class = OwnConfig
"""
    (folder / "own.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    config |= {"model_type": "own", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(ConfigError, match="trust_remote_code"):
        load_model(folder)
    assert not mark.exists()

    assert type(load_model(folder, trust_remote_code=True).module).__name__ == "OwnModel"
    assert mark.exists()


def test_a_tokenizers_own_code_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = str(tmp_path / "modules")
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    folder, mark = tmp_path / "own", tmp_path / "it-ran"
    folder.mkdir()
    shutil.copy(MODEL / "tokenizer.json", folder)
    code = f"""
from pathlib import Path
from transformers import PreTrainedTokenizerFast
Path({str(mark)!r}).touch()
class OwnTokenizer(PreTrainedTokenizerFast): pass
"""
    (folder / "own.py").write_text(code)
    names = {"AutoTokenizer": [None, "own.OwnTokenizer"]}
    settings = {"tokenizer_class": "OwnTokenizer", "auto_map": names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))

    with pytest.raises(ConfigError, match="custom code"):
        load_tokenizer(folder)
    assert not mark.exists()

    assert type(load_tokenizer(folder, trust_remote_code=True)).__name__ == "OwnTokenizer"
    assert mark.exists()


@pytest.mark.parametrize(
    ("dtype", "device", "expected"),
    [
        (None, "cuda", "bfloat16"),
        (None, "cuda:1", "bfloat16"),
        (None, "cpu", "float32"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_weights_are_bfloat16_on_a_gpu_where_nobody_says(dtype, device, expected):
    assert choose_dtype(dtype, device) == expected
