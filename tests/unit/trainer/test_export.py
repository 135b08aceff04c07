from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.unit.tiny import shake, write_qwen
from transformers import AutoModelForCausalLM, AutoTokenizer

from hearth.errors import EngineError, RequestError
from hearth.models.loading import LoadedModel, base_tensors, load_model
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.sync.store import Snapshot
from hearth.trainer.export import ExportOptions, export_snapshot

pytestmark = pytest.mark.slow

IDS = torch.tensor([[5, 9, 11, 2, 40, 7]])


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture
def trained(model_folder: Path) -> LoadedModel:
    loaded = load_model(model_folder)
    shake(base_tensors(loaded.module), 1)
    return loaded


@pytest.fixture
def adapted(model_folder: Path) -> LoadedModel:
    loaded = load_model(model_folder)
    attach_lora(loaded, LoraOptions(rank=4, alpha=8))
    shake(adapter_tensors(loaded), 1)
    return loaded


def whole(loaded: LoadedModel) -> Snapshot:
    return Snapshot.capture("v1", "base", "tiny", base_tensors(loaded.module))


def adapter(loaded: LoadedModel) -> Snapshot:
    assert loaded.lora is not None
    tensors, facts = adapter_tensors(loaded), loaded.lora.as_metadata()
    return Snapshot.capture("a1", "lora", "tiny", tensors, facts)


Export = Callable[..., Path]


@pytest.fixture
def export(model_folder: Path, tmp_path: Path) -> Export:
    """Write a snapshot's model into a folder of the test, which comes back."""

    def run(snapshot: Snapshot, name: str = "model", **options: Any) -> Path:
        folders = {"source": str(model_folder), "folder": str(tmp_path / name)}
        export_snapshot(snapshot, ExportOptions(**{"base_model": "tiny"} | options | folders))
        return tmp_path / name

    return run


def test_full_weights_give_a_model_of_the_same_logits_and_its_tokenizer(
    trained: LoadedModel, export: Export
) -> None:
    folder = export(whole(trained))

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(model(IDS).logits, trained.module(IDS).logits, atol=1e-5, rtol=0)
    assert AutoTokenizer.from_pretrained(folder)("w5 w9")["input_ids"] == [5, 9]


def test_weights_are_written_in_the_dtype_that_they_have(
    trained: LoadedModel, export: Export
) -> None:
    trained.module.to(torch.bfloat16)

    folder = export(whole(trained))

    assert AutoModelForCausalLM.from_pretrained(folder).dtype == torch.bfloat16


# PEFT still asks under a name that transformers gives up in its version 6.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_an_adapter_gives_a_peft_folder_of_the_same_logits(
    adapted: LoadedModel, model_folder: Path, export: Export
) -> None:
    folder = export(adapter(adapted))

    base = AutoModelForCausalLM.from_pretrained(model_folder)
    model = peft.PeftModel.from_pretrained(base, str(folder)).eval()
    torch.testing.assert_close(model(IDS).logits, adapted.module(IDS).logits, atol=1e-5, rtol=0)
    names = sorted(path.name for path in folder.iterdir())
    assert names[:2] == ["adapter_config.json", "adapter_model.safetensors"]
    assert AutoTokenizer.from_pretrained(folder)("w5 w9")["input_ids"] == [5, 9]


def test_every_file_may_be_read_by_who_may_enter_the_folder_and_the_card_is_one_of_them(
    trained: LoadedModel, export: Export
) -> None:
    folder = export(whole(trained), card="# mine\n")

    assert (folder / "README.md").read_text() == "# mine\n"
    modes = {path.stat().st_mode & 0o666 for path in folder.iterdir()}
    assert modes == {folder.stat().st_mode & 0o666}


def test_a_merged_adapter_gives_a_model_of_the_same_logits(
    adapted: LoadedModel, export: Export
) -> None:
    folder = export(adapter(adapted), merge_adapter=True)

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.testing.assert_close(model(IDS).logits, adapted.module(IDS).logits, atol=1e-5, rtol=0)


def test_what_does_not_fit_the_source_leaves_no_folder(
    trained: LoadedModel, export: Export, tmp_path: Path
) -> None:
    short = dict(list(whole(trained).tensors.items())[1:])

    with pytest.raises(EngineError, match="1 missing"):
        export(Snapshot("v1", "base", "tiny", short))
    with pytest.raises(EngineError, match="must be of 'other', got one of 'tiny'"):
        export(whole(trained), base_model="other")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_exists_is_not_written_over(
    trained: LoadedModel, export: Export, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()

    with pytest.raises(RequestError, match="exists already"):
        export(whole(trained), "mine")
    assert list((tmp_path / "mine").iterdir()) == []
