"""What is exported of each architecture is loaded by transformers and PEFT, with equal numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.unit.architectures import ARCHITECTURES, compute_logprobs, write_exports
from transformers import AutoModelForCausalLM

# Who reads a folder gets PEFT's and transformers' own warnings; none is about our files.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning"),
]


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_every_export_is_loaded_and_computes_the_same(kind: str, tmp_path: Path) -> None:
    exports = write_exports(kind, tmp_path)

    loaded: dict[str, Any] = {
        name: AutoModelForCausalLM.from_pretrained(exports.folders[name])
        for name in ("full", "merged")
    }
    base = AutoModelForCausalLM.from_pretrained(exports.source)
    plain = compute_logprobs(base)
    loaded["adapter"] = peft.PeftModel.from_pretrained(base, exports.folders["adapter"])

    for name, module in loaded.items():
        expected = exports.logprobs[name]
        torch.testing.assert_close(compute_logprobs(module), expected, rtol=0, atol=1e-5)
        # Training has changed something that the numbers show.
        assert float((expected - plain).abs().max()) > 1e-2
