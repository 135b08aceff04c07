"""Runs in vLLM's environment: what vLLM makes of the exports of some models.

Reads a JSON object from its input: tokens, exports by model, and the file that the answer goes to.
One process scores them all, because the imports take longer than an engine.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from safetensors import safe_open
from vllm import LLM, SamplingParams
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest


def start(folder: str, **options: Any) -> Any:
    """An engine of a folder's model."""
    return LLM(
        folder,
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        max_num_seqs=2,
        enforce_eager=True,
        kv_cache_memory_bytes=2**24,
        **options,
    )


def score(engine: Any, tokens: list[int], request: Any = None) -> list[float]:
    """The logprobs of all tokens but the first."""
    parameters = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    (answer,) = engine.generate(
        [{"prompt_token_ids": tokens}], parameters, lora_request=request, use_tqdm=False
    )
    listed = zip(answer.prompt_logprobs[1:], tokens[1:], strict=True)
    return [logprobs[token].logprob for logprobs, token in listed]


def score_adapter(source: str, tokens: list[int], adapter: str) -> list[float]:
    """The logprobs of a model with an adapter."""
    engine = start(source, enable_lora=True, max_loras=1, max_lora_rank=8)
    return score(engine, tokens, LoRARequest("adapter", 1, adapter))


def read_adapter(folder: str) -> dict[str, Any]:
    """The layers of an adapter as vLLM reads it, with rank and scaling, and those of its file."""
    with safe_open(f"{folder}/adapter_model.safetensors", "pt") as file:
        names = {name.rpartition(".lora_")[0] for name in file.keys()}  # noqa: SIM118 - no mapping
    leaves = {name.rpartition(".")[2] for name in names}
    helper = PEFTHelper.from_local_dir(folder, None)
    model = LoRAModel.from_local_checkpoint(folder, leaves, helper, lora_model_id=1, device="cpu")
    return {
        "layers": sorted(model.loras),
        "written": sorted(name.removeprefix("base_model.model.") for name in names),
        "rank": helper.r,
        "scaling": helper.vllm_lora_scaling_factor,
    }


def main() -> None:
    """Score what was asked for, export by export; an error is its answer."""
    asked = json.load(sys.stdin)
    tokens, found = asked["tokens"], {}
    for kind, exports in asked["exports"].items():
        engine = start(exports["full"])
        found[kind] = {"full": score(engine, tokens)}
        del engine
        gc.collect()
        if asked["has_adapters"]:
            found[kind]["adapter"] = score_adapter(exports["source"], tokens, exports["adapter"])
        else:
            found[kind]["adapter"] = read_adapter(exports["adapter"])
        gc.collect()
    Path(asked["answer"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
