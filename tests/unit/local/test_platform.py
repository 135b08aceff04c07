"""What an embedded platform refuses before it provisions anything."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.architectures import make_config

from hearth.errors import ConfigError
from hearth.local.platform import check_adapter_is_servable


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "deepseek_v3"])
def test_an_adapter_of_experts_is_refused_where_vllm_serves(tmp_path: Path, kind: str) -> None:
    make_config(kind).save_pretrained(tmp_path)

    with pytest.raises(ConfigError, match=re.escape("got ['attn', 'mlp']: choose ['attn']")):
        check_adapter_is_servable(str(tmp_path), ["attn", "mlp"], "vllm")

    check_adapter_is_servable(str(tmp_path), ["attn"], "vllm")
    check_adapter_is_servable(str(tmp_path), ["attn", "mlp"], "embedded")
    check_adapter_is_servable(str(tmp_path), ["attn", "mlp"], None)


def test_a_dense_model_may_have_any_adapter(tmp_path: Path) -> None:
    make_config("qwen3").save_pretrained(tmp_path)

    check_adapter_is_servable(str(tmp_path), ["attn", "mlp"], "vllm")
