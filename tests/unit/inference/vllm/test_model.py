from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.unit.architectures import make_config

from hearth.errors import ConfigError, EngineError
from hearth.inference.vllm.model import read_facts
from hearth.inference.vllm.options import VllmOptions
from hearth.models.loading import base_tensors, load_model
from hearth.sync.store import Snapshot
from training.quickstart import MODEL


def test_a_model_is_known_without_its_weights_as_it_is_with_them() -> None:
    facts = read_facts(str(MODEL), name="tiny")
    loaded = load_model(MODEL, name="tiny")

    own = base_tensors(loaded.module)
    assert facts.shapes == {name: tuple(tensor.shape) for name, tensor in own.items()}
    assert facts.eos_token_ids == loaded.eos_token_ids
    assert facts.vocab_size == loaded.vocab_size
    assert facts.max_position == loaded.max_position
    facts.check(Snapshot("s", "base", "tiny", own))


def test_a_snapshot_of_another_model_is_refused() -> None:
    facts = read_facts(str(MODEL), name="tiny")
    with pytest.raises(EngineError, match="must be of 'tiny', which is served, got one of 'other'"):
        facts.check(Snapshot("s", "base", "other", {}))
    with pytest.raises(EngineError, match=r"embed_tokens.weight \(2,\) instead of \(386"):
        facts.check(Snapshot("s", "base", "tiny", {"model.embed_tokens.weight": torch.zeros(2)}))


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_adapters_of_experts_are_refused_before_a_server_starts(tmp_path: Path, kind: str) -> None:
    make_config(kind).save_pretrained(tmp_path)
    facts = read_facts(str(tmp_path), name="mixture")
    with pytest.raises(ConfigError, match="lora_targets must leave out 'mlp'"):
        facts.check_options(VllmOptions(lora_rank=4, train_mlp=True))
    facts.check_options(VllmOptions(lora_rank=4))
    facts.check_options(VllmOptions(lora_rank=4, train_mlp=False))
    read_facts(str(MODEL), name="dense").check_options(VllmOptions(lora_rank=4, train_mlp=True))


def test_what_is_no_model_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="base_model must be a causal LM's folder or hub id"):
        read_facts(str(tmp_path), name="tiny")
