from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.unit.tiny import write_qwen
from transformers import AutoModelForCausalLM, AutoTokenizer

from hearth.errors import EngineError, RequestError
from hearth.models.loading import LoadedModel, base_tensors, load_model
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.sync.store import Snapshot
from hearth.trainer.export import ExportOptions, export_snapshot

pytestmark = pytest.mark.slow

IDS = torch.tensor([[5, 9, 11, 2, 40, 7]])


def changed(loaded: LoadedModel, tensors: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in tensors.values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.05)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trained(model_folder: Path) -> LoadedModel:
    loaded = load_model(model_folder)
    changed(loaded, base_tensors(loaded.module))
    return loaded


@pytest.fixture
def adapted(model_folder: Path) -> LoadedModel:
    loaded = load_model(model_folder)
    attach_lora(loaded, LoraOptions(rank=4, alpha=8))
    changed(loaded, adapter_tensors(loaded))
    return loaded


def whole(loaded: LoadedModel) -> Snapshot:
    return Snapshot.capture("v1", "base", "tiny", base_tensors(loaded.module))


def adapter(loaded: LoadedModel) -> Snapshot:
    assert loaded.lora is not None
    tensors, facts = adapter_tensors(loaded), loaded.lora.as_metadata()
    return Snapshot.capture("a1", "lora", "tiny", tensors, facts)


def options_of(source: Path, folder: Path, **more: Any) -> ExportOptions:
    return ExportOptions(**{"base_model": "tiny", **more}, source=str(source), folder=str(folder))


def test_full_weights_give_a_model_of_the_same_logits_and_its_tokenizer(
    trained: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    export_snapshot(whole(trained), options_of(model_folder, tmp_path / "model"))

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
    torch.testing.assert_close(model(IDS).logits, trained.module(IDS).logits, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(tmp_path / "model")("w5 w9")["input_ids"] == [5, 9]


def test_weights_are_written_in_the_dtype_that_they_have(
    trained: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    trained.module.to(torch.bfloat16)
    export_snapshot(whole(trained), options_of(model_folder, tmp_path / "model"))

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert model.dtype == torch.bfloat16


# PEFT still asks under a name that transformers gives up in its version 6.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_an_adapter_gives_a_peft_folder_of_the_same_logits(
    adapted: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    export_snapshot(adapter(adapted), options_of(model_folder, tmp_path / "adapter"))

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = peft.PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    torch.testing.assert_close(model(IDS).logits, adapted.module(IDS).logits, atol=1e-5, rtol=0)
    names = sorted(path.name for path in (tmp_path / "adapter").iterdir())
    assert names == ["adapter_config.json", "adapter_model.safetensors"]


def test_a_merged_adapter_gives_a_model_of_the_same_logits(
    adapted: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    snapshot = adapter(adapted)
    options = options_of(model_folder, tmp_path / "merged", merge_adapter=True)
    export_snapshot(snapshot, options)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(model(IDS).logits, adapted.module(IDS).logits, atol=1e-5, rtol=0)


def test_what_does_not_fit_the_source_leaves_no_folder(
    trained: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    short = dict(list(whole(trained).tensors.items())[1:])
    snapshot = Snapshot("v1", "base", "tiny", short)

    with pytest.raises(EngineError, match="1 missing"):
        export_snapshot(snapshot, options_of(model_folder, tmp_path / "model"))
    options = options_of(model_folder, tmp_path / "model", base_model="other")
    with pytest.raises(EngineError, match="must be of 'other', got one of 'tiny'"):
        export_snapshot(whole(trained), options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_written_over(
    trained: LoadedModel, model_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()

    with pytest.raises(RequestError, match="exists already"):
        export_snapshot(whole(trained), options_of(model_folder, tmp_path / "mine"))
    assert list((tmp_path / "mine").iterdir()) == []
