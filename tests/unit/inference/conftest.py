import asyncio
import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.threads import one_thread as one_thread
from tests.unit.tiny import shake
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from hearth.inference.backend import SampleRequest
from hearth.inference.engine.engine import EngineOptions, InferenceEngine
from hearth.models.loading import LoadedModel, base_tensors, load_model, load_tokenizer
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.sync.store import Snapshot

VOCABULARY = 264
EOS = 257
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 1024,
    # Wide enough that some tokens are much more probable than others.
    "initializer_range": 0.1,
    "eos_token_id": EOS,
    "bos_token_id": None,
    "pad_token_id": 256,
}


CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | map(attribute='function.name') | join(',') }}|{% endif %}"
    "{% for m in messages %}{% if m.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}"
    "<tag>{{ m.role }}:{{ m.content }}"
    "{% for call in m.tool_calls %}{{ call.function.arguments.a }}{% endfor %}{% endfor %}"
    "{% if style %}[{{ style }}]{% endif %}{% if add_generation_prompt %}<tag>{% endif %}"
)


def byte_tokenizer(chat_template: str | None = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    """One token per byte (ids are not the bytes' values), two special and one plain added one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: index for index, symbol in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|pad|>"), AddedToken("<|end|>")])
    tokenizer.add_tokens([AddedToken("<tag>", normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|end|>",
        pad_token="<|pad|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders: Qwen3 with two key heads for four, and Llama with one for each."""
    torch.manual_seed(0)
    qwen = Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=32, tie_word_embeddings=True)
    llama = LlamaConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=False)
    made: dict[str, Path] = {}
    for name, model in (("qwen", Qwen3ForCausalLM(qwen)), ("llama", LlamaForCausalLM(llama))):
        made[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(made[name])
        byte_tokenizer().save_pretrained(made[name])
    return made


@pytest.fixture(scope="session")
def originals(folders: dict[str, Path]) -> dict[str, LoadedModel]:
    return {name: load_model(folder, name=name) for name, folder in folders.items()}


@pytest.fixture
def load(originals: dict[str, LoadedModel]) -> Callable[..., LoadedModel]:
    """A fresh model by name; nobody else holds its module."""

    def fresh(name: str = "qwen", *, dtype: torch.dtype = torch.float32) -> LoadedModel:
        module = copy.deepcopy(originals[name].module).to(dtype)
        return replace(originals[name], module=module, dtype=dtype)

    return fresh


@pytest.fixture(scope="session")
def tokenizer(folders: dict[str, Path]) -> Any:
    return load_tokenizer(folders["qwen"])


@pytest.fixture
def start(
    load: Callable[..., LoadedModel], tokenizer: Any
) -> Iterator[Callable[..., InferenceEngine]]:
    """Start engines that end with the test."""
    engines: list[InferenceEngine] = []

    def engine(
        model: str | LoadedModel = "qwen", *, with_tokenizer: bool = True, **options: Any
    ) -> InferenceEngine:
        loaded = load(model) if isinstance(model, str) else model
        options = {"max_seq_len": 512} | options
        engines.append(
            InferenceEngine(
                loaded,
                tokenizer=tokenizer if with_tokenizer else None,
                options=EngineOptions(**options),
            )
        )
        return engines[-1]

    yield engine
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(start: Callable[..., InferenceEngine]) -> InferenceEngine:
    return start()


def ask(prompt: Sequence[int] = (1, 2, 3), **options: Any) -> SampleRequest:
    """A request for 12 tokens, of which none ends it."""
    usual: dict[str, Any] = {"max_tokens": 12, "seed": 7, "ignore_eos": True}
    return SampleRequest(prompt=list(prompt), **usual | options)


@pytest.fixture
def trained(load: Callable[..., LoadedModel]) -> Callable[..., tuple[LoadedModel, Snapshot]]:
    """A model with weights of its own, and the snapshot of it."""

    def make(
        identity: str = "step-1", seed: int = 1, lora: LoraOptions | None = None, **changes: Tensor
    ) -> tuple[LoadedModel, Snapshot]:
        model = load()
        if lora is not None:
            attach_lora(model, lora)
        tensors = adapter_tensors(model) if lora else base_tensors(model.module)
        shake(tensors, seed)
        kind, metadata = ("lora", lora.as_metadata()) if lora else ("base", {})
        return model, Snapshot.capture(identity, kind, "qwen", {**tensors, **changes}, metadata)

    return make


class AppClient:
    """Calls an app in this process."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://d") as client:
            return await client.request(method, path, timeout=30, **options)


async def until(is_so: Callable[[], bool]) -> None:
    """Wait as ``wait_until`` does, while the event loop runs on."""
    async with asyncio.timeout(20):
        while not is_so():
            await asyncio.sleep(0.002)


@pytest.fixture
def plain_logprobs() -> Callable[[LoadedModel, list[int]], list[float]]:
    """The model's logprobs of tokens after the first, from one ordinary forward."""

    def score(loaded: LoadedModel, tokens: list[int]) -> list[float]:
        padded = tokens + [0] * (-len(tokens) % 32)
        with torch.no_grad():
            logits = loaded.module(input_ids=torch.tensor([padded])).logits[0].float()
        rows = torch.log_softmax(logits, -1)[: len(tokens) - 1]
        return rows.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    return score
