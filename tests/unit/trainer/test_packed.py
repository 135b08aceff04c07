"""Packed rows against the padded rows that any model takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
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
from hearth.trainer.passes import Pass, PassResult
from hearth.trainer.residents import find_trainable
from hearth.wire.tinker import DatumRecord

ReadModel = Callable[..., LoadedModel]

pytestmark = [pytest.mark.slow, pytest.mark.skipif(kernels() is None, reason="needs a C compiler")]


@pytest.fixture
def scorers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[TargetScorer, TargetScorer]]:
    """A model's scorer in packed rows, and the one in padded rows."""

    def make(loaded: LoadedModel, **options: Any) -> tuple[TargetScorer, TargetScorer]:
        packed = TargetScorer(loaded, TrainerOptions(**options))
        with monkeypatch.context() as patch:
            # HEARTH_KERNELS=0 turns the loops in C off for a whole process; both ways run here.
            patch.setattr(PackedDecoder, "from_model", lambda _: None)
            return packed, TargetScorer(loaded, TrainerOptions(**options))

    return make


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


@dataclass(frozen=True)
class Trained:
    """What one pass gave."""

    result: PassResult
    gradient: dict[str, torch.Tensor]

    @property
    def logprobs(self) -> np.ndarray:
        return np.concatenate([logprob.ravel() for logprob in self.result.logprobs])


def train(
    loaded: LoadedModel,
    scorer: TargetScorer,
    data: Sequence[DatumRecord],
    *,
    budget: int = 4096,
    temperature: float = 1.0,
) -> Trained:
    work = Pass(
        scorer, OBJECTIVE, read_datums(data, OBJECTIVE, LIMITS), LIMITS, budget, temperature
    )
    named = find_trainable(loaded)
    for parameter in named.values():
        parameter.grad = None
    result, _ = work.forward_backward()
    zeros = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    gradient = {
        name: zeros[name] if parameter.grad is None else parameter.grad
        for name, parameter in named.items()
    }
    return Trained(result, gradient)


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


def batches(scorer: TargetScorer, data: Sequence[DatumRecord], budget: int = 4096) -> Any:
    return scorer.batches(read_datums(data, OBJECTIVE, LIMITS), budget, LIMITS)


@pytest.mark.parametrize("kind", PLAIN)
def test_all_parameters_get_the_plain_gradient(
    read: ReadModel, scorers: Any, data: list[DatumRecord], kind: str
) -> None:
    loaded = read(kind)
    packed, padded = scorers(loaded)

    assert {type(batch) for batch in batches(packed, data)} == {PackedBatch}
    assert {type(batch) for batch in batches(padded, data)} == {PaddedBatch}
    assert_same(train(loaded, packed, data), train(loaded, padded, data))


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
    read: ReadModel, scorers: Any, data: list[DatumRecord], kind: str, lora: LoraOptions
) -> None:
    loaded = read(kind, lora)
    packed, padded = scorers(loaded)

    assert_same(train(loaded, packed, data), train(loaded, padded, data))


@pytest.mark.parametrize("temperature", [0.5, 1.7])
def test_a_temperature_divides_the_logits_and_the_gradient(
    read: ReadModel, scorers: Any, data: list[DatumRecord], temperature: float
) -> None:
    loaded = read("qwen3")
    packed, padded = scorers(loaded)

    found = train(loaded, packed, data, temperature=temperature)

    assert_same(found, train(loaded, padded, data, temperature=temperature))
    assert np.abs(found.logprobs - train(loaded, packed, data).logprobs).max() > 0.1


def test_logits_in_chunks_give_the_same(
    read: ReadModel, scorers: Any, data: list[DatumRecord]
) -> None:
    loaded = read("qwen3, tied")
    chunked, _ = scorers(loaded, logit_budget=1)
    whole, _ = scorers(loaded)

    found, expected = train(loaded, chunked, data), train(loaded, whole, data)

    assert np.array_equal(found.logprobs, expected.logprobs)
    assert_same(found, expected)


# 30 cuts every cluster, 64 and 100 some.
@pytest.mark.parametrize("budget", [1, 30, 64, 100, 200])
def test_results_do_not_depend_on_the_budget(
    read: ReadModel, scorers: Any, data: list[DatumRecord], budget: int
) -> None:
    loaded = read("qwen3")
    packed, _ = scorers(loaded)

    assert len(batches(packed, data, budget)) > 1
    assert_same(train(loaded, packed, data, budget=budget), train(loaded, packed, data))


def test_logprobs_do_not_depend_on_the_order_of_the_data_by_a_bit(
    read: ReadModel, scorers: Any, data: list[DatumRecord]
) -> None:
    loaded = read("qwen3")
    packed, _ = scorers(loaded)
    order = np.random.default_rng(1).permutation(len(data))

    expected = train(loaded, packed, data, budget=100)
    found = train(loaded, packed, [data[place] for place in order], budget=100)

    for place, source in enumerate(order):
        assert np.array_equal(found.result.logprobs[place], expected.result.logprobs[source])
    assert_same_gradient(found.gradient, expected.gradient)


def test_a_packed_text_scores_as_alone_by_a_bit(
    read: ReadModel, scorers: Any, data: list[DatumRecord]
) -> None:
    loaded = read("llama")
    packed, _ = scorers(loaded)

    together = train(loaded, packed, data).result.logprobs

    for datum, expected in zip(data, together, strict=True):
        assert np.array_equal(train(loaded, packed, [datum]).result.logprobs[0], expected)


def test_the_frozen_reference_is_the_base_without_its_adapter(
    read: ReadModel, scorers: Any, data: list[DatumRecord]
) -> None:
    base, adapted = read("qwen2"), read("qwen2", LORA)
    packed, _ = scorers(adapted)
    work = Pass(packed, OBJECTIVE, read_datums(data, OBJECTIVE, LIMITS), LIMITS, 4096)

    with base_only(adapted):
        reference = work.forward().logprobs
    policy = work.forward().logprobs

    expected = train(base, scorers(base)[1], data).result.logprobs
    for logprobs, other in zip(reference, expected, strict=True):
        np.testing.assert_allclose(logprobs, other, rtol=0, atol=1e-5)
    assert max(np.abs(left - two).max() for left, two in zip(policy, reference, strict=True)) > 0.1


def test_the_padding_tokens_embedding_gets_no_gradient(
    read: ReadModel, scorers: Any, data: list[DatumRecord]
) -> None:
    loaded = read("llama")
    packed, padded = scorers(loaded)

    found, expected = train(loaded, packed, data), train(loaded, padded, data)

    name = "model.embed_tokens.weight"
    assert any(7 in (datum.model_input.chunks[0].tokens or ()) for datum in data)
    assert float(expected.gradient[name][7].abs().max()) == 0
    assert float(found.gradient[name][7].abs().max()) == 0
    assert_same(found, expected)


def test_several_targets_per_token_take_padded_rows(
    read: ReadModel, scorers: Any, datum: Any, data: list[DatumRecord]
) -> None:
    loaded = read("qwen3")
    packed, padded = scorers(loaded)
    several = datum([5, 6, 7], [[6, 8], [7, 9]], weights=[[0.5, 0.5], [1.0, 0.0]])
    mixed = [several, *data]

    assert {type(batch) for batch in batches(packed, mixed)} == {PaddedBatch}
    assert_same(train(loaded, packed, mixed), train(loaded, padded, mixed))


@pytest.mark.parametrize("kind", OTHER)
def test_a_model_that_is_no_plain_decoder_takes_padded_rows(
    read: ReadModel, scorers: Any, data: list[DatumRecord], kind: str
) -> None:
    loaded = read(kind)
    scorer, padded = scorers(loaded)

    assert {type(batch) for batch in batches(scorer, data)} == {PaddedBatch}
    assert_same(train(loaded, scorer, data), train(loaded, padded, data))


def test_bfloat16_takes_padded_rows(
    folder_of: Callable[[str], Path], data: list[DatumRecord]
) -> None:
    scorer = TargetScorer(load_model(folder_of("qwen3"), dtype="bfloat16"))

    assert {type(batch) for batch in batches(scorer, data)} == {PaddedBatch}


def test_a_model_of_few_positions_fills_rows_up_all_the_same(
    tmp_path: Path, scorers: Any, datum: Any
) -> None:
    body: dict[str, Any] = BODY | {"max_position_embeddings": 12}
    config = transformers.LlamaConfig(**body)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    packed, padded = scorers(loaded)
    short = [datum([1, 2, 3, 4], weights=[1.0, 2.0, 3.0]), datum([1, 5], weights=[1.0])]

    decoder = PackedDecoder.from_model(loaded)

    assert decoder is not None
    (batch,) = batches(packed, short)
    assert batch.num_tokens == 32
    # Every row that is computed has a rotation.
    assert decoder._rotations[0].shape[0] > int(batch.positions.max())
    found, expected = train(loaded, packed, short), train(loaded, padded, short)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


def test_rows_beyond_the_first_rotations_are_computed_too(
    read: ReadModel, scorers: Any, datum: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of 4096 positions none is beyond the first in a model of the tests.
    monkeypatch.setattr("hearth.models.packed._FIRST_POSITIONS", 32)
    loaded = read("qwen3")
    packed, padded = scorers(loaded)
    tokens = np.random.default_rng(0).integers(0, VOCAB_SIZE, 257).tolist()
    long = [datum(tokens[: length + 1], weights=[1.0] * length) for length in (20, 100, 256)]

    assert_same(train(loaded, packed, long), train(loaded, padded, long))


def test_a_shared_prefix_is_computed_once(data: list[DatumRecord], datum: Any) -> None:
    prompt = list(range(1, 41))
    group = [datum([*prompt, 50 + number, *range(60, 80)]) for number in range(8)]

    (batch,) = split_packed(read_datums(group, OBJECTIVE, LIMITS), 4096)

    # 40 rows of the prompt and 20 of each completion, filled up to a multiple of 32.
    assert batch.num_tokens == 224
    assert batch.token_places.numel() == 8 * 60
    assert batch.token_places.unique().numel() == 40 + 8 * 20


@pytest.mark.parametrize("budget", [1, 32, 33, 50, 64, 100, 129, 4096])
def test_packed_rows_are_the_texts_within_the_budget(data: list[DatumRecord], budget: int) -> None:
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
