"""Packed rows through the module against the padded rows that any model takes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.decoders import (
    LIMITS,
    LORA,
    OBJECTIVE,
    VOCAB_SIZE,
    LargestTensor,
    PaddedScorer,
    Trained,
    Way,
    assert_same_gradient,
)
from torch import Tensor

from hearth.errors import EngineError
from hearth.kernels.training import Tree
from hearth.models.loading import LoadedModel
from hearth.models.lora import LoraOptions, base_only
from hearth.models.packed import PackedDecoder
from hearth.trainer.datums import read_datums
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.packed_module import PackedModule
from hearth.trainer.packing import PackedBatch, PaddedBatch, split_packed
from hearth.trainer.segments import (
    Segments,
    attend,
    attend_in_turn,
    check_kernel,
    find_segments,
    make_mask,
)
from hearth.wire.tinker import DatumRecord

pytestmark = pytest.mark.slow

PLAIN = ["llama", "mistral", "qwen2, tied", "qwen3"]
OTHER = ["gemma", "a sliding window"]
CPU = torch.device("cpu")


def upper_left(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """As a kernel would be wrong that aligns segments at their first keys."""
    spans = zip(segments.key_starts.tolist(), segments.query_starts.diff().tolist(), strict=False)
    kept = torch.cat([torch.arange(first, first + count) for first, count in spans])
    own = replace(segments, key_starts=segments.query_starts, most_keys=segments.most_queries)
    return attend_in_turn(q, k[kept], v[kept], own, scale)


def without_gradient_of_v(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return attend_in_turn(q, k, v.detach() + 0 * v, *rest)


@pytest.fixture(autouse=True)
def through_the_module(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU and on ranks: no loops in C."""
    # HEARTH_KERNELS=0 turns the loops in C off for a whole process; here both ways run in one.
    monkeypatch.setattr(PackedDecoder, "from_model", lambda _: None)


@pytest.fixture
def data(datum: Callable[..., DatumRecord]) -> list[DatumRecord]:
    """Prompts that begin alike, completions of them, a copy, a part, strangers."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        return rng.integers(0, VOCAB_SIZE, count).tolist()

    texts: list[list[int]] = []
    for length in (10, 30):
        prompt = tokens(length)
        texts += [[*prompt, *tokens(count)] for count in (2, 15, 40)]
    texts += [texts[2], texts[2][:-9], tokens(2), tokens(33)]
    return [datum(text, weights=rng.normal(size=len(text) - 1)) for text in texts]


def assert_same(found: Trained, expected: Trained, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=tolerance)
    assert_same_gradient(found.gradient, expected.gradient, tolerance)


def pack(loaded: LoadedModel) -> Way:
    return Way(loaded, TargetScorer(loaded))


def pad(loaded: LoadedModel) -> Way:
    return Way(loaded, PaddedScorer(loaded))


def test_segments_are_prefixes_and_what_stands_behind_them() -> None:
    # Two rows that two sequences share, three rows alone, three rows that nobody shares.
    tree = Tree(
        torch.tensor([[0, 2, 0, 2], [6, 3, 2, 2], [9, 0, 2, 3]]),
        torch.tensor([[2, 1], [3, 3], [9, 3]]),
        5,
    )

    found = find_segments(tree, CPU)

    assert found.query_starts.tolist() == [0, 2, 3, 6, 9, 12]
    assert found.key_starts.tolist() == [0, 2, 5, 10, 13, 16]
    assert (found.most_queries, found.most_keys) == (3, 5)
    assert found.keys is not None
    assert found.keys.tolist() == [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert found.query_starts.dtype == found.key_starts.dtype == torch.int32


def test_nothing_is_gathered_where_nothing_is_shared() -> None:
    tree = Tree(torch.tensor([[0, 4, 0, 0], [4, 0, 0, 1]]), torch.tensor([[4, 2]]), 4)

    found = find_segments(tree, CPU)

    assert found.keys is None
    assert found.key_starts.tolist() == found.query_starts.tolist() == [0, 4, 6]


@pytest.mark.parametrize("budget", [33, 100, 4096])
def test_attention_within_segments_is_that_under_the_dense_mask(
    data: list[DatumRecord], budget: int
) -> None:
    for batch in split_packed(read_datums(data, OBJECTIVE, LIMITS), budget):
        rows = batch.num_tokens
        made = [torch.randn(rows, count, 8, dtype=torch.float64) for count in (4, 2, 2)]
        q, k, v = (tensor.requires_grad_() for tensor in made)
        weights = torch.randn(rows, 4, 8, dtype=torch.float64)

        mixed = attend(q, k, v, find_segments(batch.tree, CPU), 0.3, attend_in_turn)
        dense = torch.nn.functional.scaled_dot_product_attention(
            *(tensor.transpose(0, 1) for tensor in (q, k, v)),
            attn_mask=make_mask(batch.tree),
            scale=0.3,
            enable_gqa=True,
        ).transpose(0, 1)

        assert mixed.shape == dense.shape
        assert float((mixed - dense).detach().abs().max()) <= 1e-12
        # Gradients of gathered rows add up in float32.
        for actual, other in zip(
            torch.autograd.grad((mixed * weights).sum(), (q, k, v)),
            torch.autograd.grad((dense * weights).sum(), (q, k, v)),
            strict=True,
        ):
            assert float((actual - other).abs().max()) <= 1e-6 * float(other.abs().max())


def test_visible_is_what_each_text_sees_of_itself(data: list[DatumRecord]) -> None:
    examples = read_datums(data, OBJECTIVE, LIMITS)

    for batch in split_packed(examples, 100):
        seen = make_mask(batch.tree)
        lengths = [example.length for example in batch.examples]
        for rows in batch.token_places.split(lengths):
            count = len(rows)
            assert torch.equal(seen[rows][:, rows], torch.ones(count, count).tril().bool())
            assert seen[rows[-1]].sum() == count


def test_gathered_keys_are_not_kept_for_the_backward_pass(datum: Any) -> None:
    prompt = list(range(1, 41))
    group = [datum([*prompt, 50 + number, *range(60, 80)]) for number in range(8)]
    (batch,) = split_packed(read_datums(group, OBJECTIVE, LIMITS), 4096)
    segments = find_segments(batch.tree, CPU)
    q, k, v = (torch.randn(batch.num_tokens, 2, 8, requires_grad=True) for _ in range(3))
    saved: list[int] = []

    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: (saved.append(len(tensor)), tensor)[1], lambda tensor: tensor
    ):
        attend(q, k, v, segments, 0.3, attend_in_turn)

    # 40 of the prompt and eight times 60, and the padding.
    assert segments.keys is not None
    assert len(segments.keys) == 40 + 8 * 60 + batch.num_tokens - 200
    assert max(saved, default=0) <= batch.num_tokens


def test_a_sound_kernel_passes_the_check() -> None:
    for kv_heads in (1, 2, 4):
        sizes = {"heads": 4, "kv_heads": kv_heads, "dim": 16}
        with torch.no_grad():
            check_kernel(attend_in_turn, **sizes, dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize(
    ("unsound", "part"), [(upper_left, "output"), (without_gradient_of_v, "gradient of v")]
)
def test_an_unsound_kernel_is_found_out(unsound: Any, part: str) -> None:
    with pytest.raises(EngineError, match=f"in its {part}"):
        check_kernel(unsound, heads=4, kv_heads=2, dim=16, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("kind", PLAIN)
@pytest.mark.parametrize("lora", [None, LORA], ids=["all parameters", "adapter"])
def test_packed_rows_give_the_padded_gradient(
    read: Any, data: list[DatumRecord], kind: str, lora: LoraOptions | None
) -> None:
    packed, padded = pack(read(kind, lora)), pad(read(kind, lora))

    assert packed.kinds(data) == {PackedBatch}
    assert padded.kinds(data) == {PaddedBatch}
    expected = padded.train(data)
    assert float(expected.logprobs.std()) > 0.3
    assert_same(packed.train(data), expected)
    assert_same(packed.train(data, budget=64), expected)


def test_bfloat16_is_trained_on_in_packed_rows(read: Any, data: list[DatumRecord]) -> None:
    found = pack(read("qwen3", dtype="bfloat16")).train(data)

    assert_same(found, pad(read("qwen3")).train(data), tolerance=0.1)


def test_several_scorers_of_one_module_all_pack(read: Any, data: list[DatumRecord]) -> None:
    loaded = read("qwen3", LORA)
    first, second = pack(loaded), pack(loaded)

    assert first.kinds(data) == second.kinds(data) == {PackedBatch}
    with base_only(loaded):
        found = second.make_pass(data).forward().logprobs
    expected = pad(read("qwen3")).train(data).result.logprobs
    for logprobs, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(logprobs, other, rtol=0, atol=1e-5)


def test_several_targets_per_token_take_padded_rows(
    read: Any, datum: Any, data: list[DatumRecord]
) -> None:
    packed = pack(read("llama"))
    mixed = [datum([5, 6, 7], [[6, 8], [7, 9]], weights=[[0.5, 0.5], [1.0, 0.0]]), *data]

    assert packed.kinds(mixed) == {PaddedBatch}
    assert_same(packed.train(mixed), pad(read("llama")).train(mixed))


@pytest.mark.parametrize("kind", OTHER)
def test_a_model_that_is_no_plain_decoder_takes_padded_rows(
    read: Any, data: list[DatumRecord], kind: str
) -> None:
    assert pack(read(kind)).kinds(data) == {PaddedBatch}


def test_an_unsound_kernel_means_padded_rows_and_one_warning(
    read: Any, data: list[DatumRecord], caplog: pytest.LogCaptureFixture
) -> None:
    loaded = read("qwen3")
    with caplog.at_level(logging.WARNING, "hearth.trainer.packed_module"):
        scorer = TargetScorer(loaded, kernel=upper_left)

    (record,) = caplog.records
    assert "pads its texts" in record.getMessage()
    assert Way(loaded, scorer).kinds(data) == {PaddedBatch}


def test_no_mask_of_rows_by_rows_is_made(read: Any) -> None:
    loaded = read("qwen3")
    packed = PackedModule.from_model(loaded)
    assert packed is not None
    count, length = 48, 32
    heads = torch.tensor([[number * length, length, 0, 0] for number in range(count)])
    tree = Tree(heads, torch.tensor([[0, 0]]), length)
    positions = torch.arange(length).repeat(count)

    with LargestTensor() as made, torch.no_grad():
        states = packed.states(torch.zeros(count * length, dtype=torch.int64), positions, tree)

    assert states.shape == (count * length, 64)
    # The MLP's rows are the largest.
    assert made.elements == count * length * 128
    assert made.elements < (count * length) ** 2
