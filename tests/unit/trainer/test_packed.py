"""Packed rows against the padded rows that any model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.unit.trainer.decoders import (
    BODY,
    LIMITS,
    LORA,
    OBJECTIVE,
    OTHER,
    PLAIN,
    VOCAB_SIZE,
    PaddedScorer,
    Trained,
    Way,
    assert_same_gradient,
)

from hearth.kernels.ops import kernels
from hearth.models.loading import LoadedModel, load_model
from hearth.models.lora import LoraOptions, base_only
from hearth.models.packed import PackedDecoder
from hearth.trainer.datums import read_datums
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.options import TrainerOptions
from hearth.trainer.packing import PackedBatch, PaddedBatch, split_packed
from hearth.wire.tinker import DatumRecord

Data = Sequence[DatumRecord]
Ways = Callable[..., tuple["Way", "Way"]]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(kernels() is None, reason="needs a C compiler")]


def ways_of(loaded: LoadedModel, **options: Any) -> tuple[Way, Way]:
    """A model in packed rows, and in padded rows."""
    packed = TargetScorer(loaded, TrainerOptions(**options))
    padded = PaddedScorer(loaded, TrainerOptions(**options))
    return Way(loaded, packed), Way(loaded, padded)


@pytest.fixture
def ways(read: Any) -> Ways:
    """The same of a kind of model, with an adapter where options for one are given."""
    return lambda kind, *lora: ways_of(read(kind, *lora))


@pytest.fixture
def data(datum: Callable[..., DatumRecord]) -> list[DatumRecord]:
    """Ragged datums: prompts that begin alike, completions of them, copies, strangers."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB_SIZE, count).tolist()

    system = tokens(9)
    texts: list[list[int]] = []
    for length in (1, 20):
        prompt = [*system, *tokens(length)]
        texts += [[*prompt, *tokens(count)] for count in (2, 15, 40, 3)]
    texts += [texts[2], texts[2], texts[2][:-9], tokens(2), tokens(33), system]
    # Also with the padding token, as any other.
    texts.append([7, 7, *tokens(4), 7])
    order = rng.permutation(len(texts))
    return [datum(texts[place], weights=rng.normal(size=len(texts[place]) - 1)) for place in order]


def assert_same(found: Trained, expected: Trained, tolerance: float = 1e-5) -> None:
    """Logprobs, and the gradient of every parameter within a part of its own largest."""
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=tolerance)
    assert float(expected.logprobs.std()) > 0.3
    # Biases of keys move all scores of a query alike, and their gradient is noise about zero.
    noise = 1e-5 * max(float(gradient.abs().max()) for gradient in expected.gradient.values())
    assert found.gradient.keys() == expected.gradient.keys()
    for name, gradient in expected.gradient.items():
        allowed = max(noise, tolerance * float(gradient.abs().max()))
        assert float((found.gradient[name] - gradient).abs().max()) <= allowed, name


@pytest.mark.parametrize("kind", PLAIN)
def test_all_parameters_get_the_plain_gradient(ways: Ways, data: Data, kind: str) -> None:
    packed, padded = ways(kind)

    assert packed.kinds(data) == {PackedBatch}
    assert padded.kinds(data) == {PaddedBatch}
    assert_same(packed.train(data), padded.train(data))


@pytest.mark.parametrize("kind", ["qwen2", "qwen3, tied", "mistral"])
@pytest.mark.parametrize(
    "lora",
    [
        LORA,
        LoraOptions(rank=2, alpha=4.0, train_unembed=True),
        LoraOptions(rank=3, train_attn=False, train_mlp=False, train_unembed=True),
    ],
    ids=["layers", "layers and head", "head"],
)
def test_an_adapter_gets_the_plain_gradient(
    ways: Ways, data: Data, kind: str, lora: LoraOptions
) -> None:
    packed, padded = ways(kind, lora)

    assert_same(packed.train(data), padded.train(data))


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_a_temperature_divides_the_logits_and_the_gradient(
    ways: Ways, data: Data, temperature: float
) -> None:
    packed, padded = ways("qwen3")

    found = packed.train(data, temperature=temperature)

    assert_same(found, padded.train(data, temperature=temperature))
    assert np.abs(found.logprobs - packed.train(data).logprobs).max() > 0.1


@pytest.mark.parametrize("lora", [(), (LORA,)], ids=["a trained head", "a frozen head"])
def test_logits_in_chunks_give_the_same(
    read: Any, data: Data, lora: tuple[LoraOptions, ...]
) -> None:
    loaded = read("qwen3, tied", *lora)
    chunked, _ = ways_of(loaded, logit_budget=1)
    whole, _ = ways_of(loaded)

    found, expected = (way.train(data, temperature=0.7) for way in (chunked, whole))

    assert np.array_equal(found.logprobs, expected.logprobs)
    assert_same(found, expected)


# 30 cuts every cluster, 64 and 100 some.
@pytest.mark.parametrize("budget", [1, 30, 64, 100, 200])
def test_results_do_not_depend_on_the_budget(ways: Ways, data: Data, budget: int) -> None:
    packed, _ = ways("qwen3")

    assert len(packed.batches(data, budget)) > 1
    assert_same(packed.train(data, budget=budget), packed.train(data))


def test_logprobs_do_not_depend_on_the_order_of_the_data_by_a_bit(ways: Ways, data: Data) -> None:
    packed, _ = ways("qwen3")
    order = np.random.default_rng(1).permutation(len(data))

    expected = packed.train(data, budget=100)
    found = packed.train([data[place] for place in order], budget=100)

    for place, source in enumerate(order):
        assert np.array_equal(found.result.logprobs[place], expected.result.logprobs[source])
    assert_same_gradient(found.gradient, expected.gradient)


def test_a_packed_text_scores_as_alone_by_a_bit(ways: Ways, data: Data) -> None:
    packed, _ = ways("llama")

    together = packed.train(data).result.logprobs

    for datum, expected in zip(data, together, strict=True):
        assert np.array_equal(packed.train([datum]).result.logprobs[0], expected)


def test_the_frozen_reference_is_the_base_without_its_adapter(ways: Ways, data: Data) -> None:
    packed, _ = ways("qwen2", LORA)
    work = packed.make_pass(data)

    with base_only(packed.loaded):
        reference = work.forward().logprobs
    policy = work.forward().logprobs

    expected = ways("qwen2")[1].train(data).result.logprobs
    for logprobs, other in zip(reference, expected, strict=True):
        np.testing.assert_allclose(logprobs, other, rtol=0, atol=1e-5)
    assert max(np.abs(left - two).max() for left, two in zip(policy, reference, strict=True)) > 0.1


def test_the_padding_tokens_embedding_gets_no_gradient(ways: Ways, data: Data) -> None:
    packed, padded = ways("llama")

    found, expected = packed.train(data), padded.train(data)

    name = "model.embed_tokens.weight"
    assert any(7 in (datum.model_input.chunks[0].tokens or ()) for datum in data)
    assert float(expected.gradient[name][7].abs().max()) == 0
    assert float(found.gradient[name][7].abs().max()) == 0
    assert_same(found, expected)


def test_several_targets_per_token_take_padded_rows(ways: Ways, datum: Any, data: Data) -> None:
    packed, padded = ways("qwen3")
    several = datum([5, 6, 7], [[6, 8], [7, 9]], weights=[[0.5, 0.5], [1.0, 0.0]])
    mixed = [several, *data]

    assert packed.kinds(mixed) == {PaddedBatch}
    assert_same(packed.train(mixed), padded.train(mixed))


@pytest.mark.parametrize("kind", OTHER)
def test_a_model_that_is_no_plain_decoder_takes_padded_rows(
    ways: Ways, data: Data, kind: str
) -> None:
    scorer, padded = ways(kind)

    assert scorer.kinds(data) == {PaddedBatch}
    assert_same(scorer.train(data), padded.train(data))


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without products in bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize(
    ("kind", "lora"),
    [("qwen2", LORA), ("qwen3, tied", LORA), ("qwen3", LoraOptions(rank=2, train_unembed=True))],
)
@pytest.mark.parametrize("logit_budget", [1, 2**26])
def test_bfloat16_weights_are_computed_with_in_float32(
    read: Any, data: Data, kind: str, lora: LoraOptions, logit_budget: int
) -> None:
    half = read(kind, lora, dtype="bfloat16")
    module = read(kind, lora, dtype="bfloat16").module.float()
    options = {"logit_budget": logit_budget}
    packed, _ = ways_of(half, **options)
    _, padded = ways_of(replace(half, module=module, dtype=torch.float32), **options)

    assert packed.kinds(data) == {PackedBatch}
    assert_same(packed.train(data), padded.train(data))


@pytest.mark.usefixtures("without_products")
def test_bfloat16_weights_get_the_gradient_of_float32_ones(read: Any, data: Data) -> None:
    half, module = read("qwen3", dtype="bfloat16"), read("qwen3", dtype="bfloat16").module.float()
    packed, _ = ways_of(half)
    _, padded = ways_of(replace(half, module=module, dtype=torch.float32))

    found, expected = packed.train(data), padded.train(data)

    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    # Gradients of rows that several tokens take add up in bfloat16.
    assert_same_gradient(found.gradient, expected.gradient, 2**-6)


@pytest.mark.usefixtures("without_products")
def test_several_targets_per_token_of_bfloat16_take_padded_rows(read: Any, datum: Any) -> None:
    packed, _ = ways_of(read("qwen3", LORA, dtype="bfloat16"))
    _, padded = ways_of(read("qwen3", LORA))
    several = [datum([5, 6, 7], [[6, 8], [7, 9]], weights=[[0.5, 0.5], [1.0, 0.0]])]

    assert packed.kinds(several) == {PaddedBatch}
    assert_same(packed.train(several), padded.train(several), tolerance=0.1)


def test_a_processor_with_products_in_bfloat16_takes_them(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"amx_bf16": True})

    assert PackedDecoder.from_model(read("qwen3", dtype="bfloat16")) is None
    assert PackedDecoder.from_model(read("qwen3")) is not None


def test_a_model_of_few_positions_fills_rows_up_all_the_same(tmp_path: Path, datum: Any) -> None:
    body: dict[str, Any] = BODY | {"max_position_embeddings": 12}
    config = transformers.LlamaConfig(**body)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    packed, padded = ways_of(loaded)
    short = [datum([1, 2, 3, 4], weights=[1.0, 2.0, 3.0]), datum([1, 5], weights=[1.0])]

    decoder = PackedDecoder.from_model(loaded)

    assert decoder is not None
    (batch,) = packed.batches(short)
    assert batch.num_tokens == 32
    # Every row that is computed has a rotation.
    assert decoder._rotations[0].shape[0] > int(batch.positions.max())
    found, expected = packed.train(short), padded.train(short)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_rows_beyond_the_first_rotations_are_computed_too(
    ways: Ways, datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 4096 positions none is beyond the first in a model of the tests.
    monkeypatch.setattr("hearth.models.packed._FIRST_POSITIONS", 32)
    packed, padded = ways("qwen3")
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 257).tolist()
    long = [datum(tokens[: length + 1], weights=[1.0] * length) for length in (20, 100, 256)]

    assert_same(packed.train(long), padded.train(long))


def test_a_shared_prefix_is_computed_once(data: Data, datum: Any) -> None:
    prompt = list(range(1, 41))
    group = [datum([*prompt, 50 + number, *range(60, 80)]) for number in range(8)]

    (batch,) = split_packed(read_datums(group, OBJECTIVE, LIMITS), 4096)

    # 40 rows of the prompt and 20 of each completion, filled up to a multiple of 32.
    assert batch.num_tokens == 224
    assert batch.token_places.numel() == 8 * 60
    assert batch.token_places.unique().numel() == 40 + 8 * 20


@pytest.mark.parametrize("budget", [1, 32, 33, 50, 64, 100, 129, 4096])
def test_packed_rows_are_the_texts_within_the_budget(data: Data, budget: int) -> None:
    examples = read_datums(data, OBJECTIVE, LIMITS)

    found = split_packed(examples, budget)

    assert sorted(example.index for batch in found for example in batch.examples) == list(
        range(len(data))
    )
    for batch in found:
        longest = max(example.length for example in batch.examples)
        assert batch.num_tokens % 32 == 0
        assert batch.num_tokens <= max(budget, -(-longest // 32) * 32)
        lengths = [example.length for example in batch.examples]
        for example, rows in zip(batch.examples, batch.token_places.split(lengths), strict=True):
            assert torch.equal(batch.tokens[rows], example.tokens)
            assert torch.equal(batch.positions[rows], torch.arange(example.length))
        assert torch.equal(
            batch.targets, torch.cat([example.targets for example in batch.examples])
        )
