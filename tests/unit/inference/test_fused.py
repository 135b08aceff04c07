"""Packed prefill and decoding in fused loops against the module's own forward."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.inference.decoders import OTHER, PLAIN, WIDE, build, decode, make_prompts
from tests.unit.tiny import shake
from torch import Tensor

from hearth.inference.backend import SampleRequest
from hearth.inference.engine import sampler
from hearth.inference.engine.adapters import AdapterLayers
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.fused import FusedDecoder
from hearth.inference.engine.prompts import EVERY, Extras
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.sampler import SampledTokens, SamplingValues, sample
from hearth.kernels.ops import kernels
from hearth.models.loading import LoadedModel, base_tensors
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora, detach_lora
from hearth.sync.store import Snapshot

pytestmark = [pytest.mark.slow, pytest.mark.skipif(kernels() is None, reason="needs a C compiler")]


def change(loaded: LoadedModel, seed: int) -> None:
    """Train a little: the adapter where there is one, or all weights."""
    shake(adapter_tensors(loaded) if loaded.lora else base_tensors(loaded.module), seed)


@pytest.fixture
def runner() -> Callable[..., ModelRunner]:
    """A model's runner, decoding in one fused loop or through the module."""

    def make(loaded: LoadedModel, *, fused: bool, max_seq_len: int = 600) -> ModelRunner:
        decoder = None if fused else "module"
        made = ModelRunner(loaded, max_seq_len=max_seq_len, decoder=decoder)
        assert (made._fused is not None) == fused
        return made

    return make


@pytest.fixture
def without_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor without products in bfloat16."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", dict)


@pytest.fixture
def sample_in_torch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to have tokens sampled in torch from then on."""
    # HEARTH_KERNELS=0 turns the loops in C off for a whole process; here both ways run in one.
    return lambda: monkeypatch.setattr(sampler, "kernels", lambda: None)


@pytest.mark.parametrize("kind", PLAIN)
def test_logprobs_are_the_modules_own(runner: Any, kind: str) -> None:
    prompts = make_prompts(1, 2, 31, 64, 65, 200, 500)

    found = decode(runner(build(kind), fused=True), prompts)

    expected = decode(runner(build(kind), fused=False), prompts)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert float(expected.std()) > 0.3


def test_attention_takes_scores_that_no_exponential_holds(runner: Any) -> None:
    loaded = build("llama")
    with torch.no_grad():
        for layer in loaded.module.base_model.layers:
            layer.self_attn.q_proj.weight *= 1000.0

    found = decode(runner(loaded, fused=True), make_prompts(1, 31, 500))

    expected = decode(runner(loaded, fused=False), make_prompts(1, 31, 500))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", WIDE])
def test_a_rows_bits_do_not_depend_on_its_batch_or_on_threads(runner: Any, kind: str) -> None:
    fused = runner(build(kind), fused=True)
    prompts = make_prompts(5, 70, 200)
    alone = decode(fused, prompts)

    few = decode(fused, prompts, slots=len(prompts))
    crowd = decode(fused, [*prompts, *make_prompts(*range(1, 38), seed=2)], slots=64)
    torch.set_num_threads(2)
    threaded = decode(fused, prompts)
    shared = decode(fused, [*prompts, *make_prompts(*range(1, 38), seed=2)], slots=64)
    torch.set_num_threads(1)

    assert torch.equal(few, alone)
    assert torch.equal(crowd[:, :3], alone)
    assert torch.equal(threaded, alone)
    assert torch.equal(shared, crowd)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [16, 31, 48])
def test_threads_that_share_a_wide_layers_products_change_no_bit(
    runner: Any, rows: int, dtype: torch.dtype
) -> None:
    fused = runner(build(WIDE, dtype), fused=True)
    cache = SlotCache(fused.cache_shape, budget_bytes=2**30, max_slots=rows)
    cache.reserve(rows, 200, active=0)
    with torch.inference_mode():
        cache.keys.normal_()
        cache.values.normal_()
    tokens = np.arange(rows)
    positions = 3 * tokens + 1

    def decode_on(threads: int) -> Tensor:
        torch.set_num_threads(threads)
        return fused.decode(tokens, positions, cache).clone()

    alone, *shared = (decode_on(threads) for threads in (1, 2, 3))
    torch.set_num_threads(1)

    assert all(torch.equal(logits, alone) for logits in shared)


SHARED = (*range(7, 107), 3)
"""A beginning that some prompts share."""


def make_family() -> list[tuple[int, ...]]:
    """Prompts that share beginnings: of a text, of each other, one that is another's beginning."""
    return [
        (*SHARED, 1, 2, 3),
        SHARED,
        (*SHARED, 1, 2, 9, 9),
        (5,),
        *make_prompts(40, 2, 300),
        SHARED[:60],
    ]


@pytest.mark.parametrize("scored", [0, 4, EVERY])
@pytest.mark.parametrize("kind", PLAIN)
def test_packed_prompts_have_the_modules_numbers(runner: Any, kind: str, scored: int) -> None:
    extras = Extras(scored=scored)
    packed, plain = runner(build(kind), fused=True), runner(build(kind), fused=False)

    together, computed = packed.prefill(make_family(), extras)

    lengths = [len(prompt) for prompt in make_family()]
    assert computed < sum(lengths) - len(SHARED)
    for found, prompt in zip(together, make_family(), strict=True):
        ((expected,), _) = plain.prefill([prompt], extras)
        assert found.tokens == expected.tokens == prompt
        for name in ("keys", "values", "logits"):
            torch.testing.assert_close(
                getattr(found, name), getattr(expected, name), rtol=1e-5, atol=1e-5
            )
        if not scored:
            assert found.logprobs is expected.logprobs is None
            continue
        assert len(found.logprobs) == min(scored, len(prompt) - 1)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_a_prompts_bits_do_not_depend_on_what_it_shares_a_forward_with(
    runner: Any, kind: str
) -> None:
    extras = Extras(scored=EVERY)
    fused = runner(build(kind), fused=True)
    together, _ = fused.prefill(make_family(), extras)
    torch.set_num_threads(2)
    threaded, _ = fused.prefill(make_family(), extras)
    torch.set_num_threads(1)

    for index, prompt in enumerate(make_family()):
        ((alone,), _) = fused.prefill([prompt], extras)
        for other in (together[index], threaded[index]):
            assert torch.equal(other.keys, alone.keys)
            assert torch.equal(other.values, alone.values)
            assert torch.equal(other.logits, alone.logits)
            assert other.logprobs == alone.logprobs


def test_scores_of_a_large_vocabulary_come_in_chunks(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = Extras(scored=EVERY)
    ((whole,), _) = runner(build("llama"), fused=True).prefill([SHARED], extras)
    # A chunk holds 2**26 logits: without this only a large vocabulary would be cut.
    monkeypatch.setattr("hearth.inference.engine.prefill._MAX_LOGITS", 264 * 40)

    ((cut,), _) = runner(build("llama"), fused=True).prefill([SHARED], extras)

    assert cut.logprobs == whole.logprobs


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", WIDE])
def test_changed_weights_are_taken_whatever_carries_them(runner: Any, kind: str) -> None:
    model, other = build(kind), build(kind)
    fused, plain = runner(model, fused=True), runner(other, fused=False)
    prompts = make_prompts(3, 40)
    seen = [decode(fused, prompts)]

    def retrain(seed: int) -> Callable[[LoadedModel], None]:
        return lambda loaded: change(loaded, seed)

    def adapt(options: LoraOptions, seed: int) -> Callable[[LoadedModel], None]:
        def attach(loaded: LoadedModel) -> None:
            if loaded.lora is not None:
                detach_lora(loaded)
            attach_lora(loaded, options)
            change(loaded, seed)

        return attach

    for apply in (
        retrain(1),
        adapt(LoraOptions(rank=4, alpha=8.0), 2),
        retrain(3),
        adapt(LoraOptions(rank=2, alpha=4.0, train_unembed=True, train_attn=False), 4),
        detach_lora,
        retrain(5),
    ):
        apply(model)
        apply(other)
        fused.weights_changed()
        found = decode(fused, prompts)
        torch.testing.assert_close(found, decode(plain, prompts), rtol=1e-5, atol=2e-5)
        assert float((found - seen[-1]).abs().max()) > 0.01
        seen.append(found)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_after_a_weight_sync_the_engine_samples_from_the_new_weights(
    start: Any, plain_logprobs: Any, kind: str
) -> None:
    served, trained = build(kind), build(kind)
    engine = start(served, max_seq_len=600)
    request = SampleRequest(prompt=list(range(200)), max_tokens=20, seed=1, ignore_eos=True)

    for number in range(3):
        change(trained, number)
        tensors = base_tensors(trained.module)
        snapshot = Snapshot.capture(f"step-{number}", "base", kind, tensors, {})
        assert engine.load_snapshot(snapshot).result().stage == "done"
        sampled = engine.submit(request).result()
        expected = plain_logprobs(trained, [*request.prompt, *sampled.token_ids])[199:]
        np.testing.assert_allclose(sampled.logprobs, expected, rtol=0, atol=1e-5)


def test_both_ways_sample_the_same_completions(
    start: Any, sample_in_torch: Callable[[], None]
) -> None:
    requests = [
        SampleRequest(prompt=list(prompt), max_tokens=30, seed=seed, ignore_eos=True)
        for seed, prompt in enumerate(make_prompts(1, 5, 80, 300))
    ]
    fused = [start(build("qwen2"), max_seq_len=400).submit(request) for request in requests]
    sample_in_torch()
    module = {"max_seq_len": 400, "decoder": "module"}
    plain = [start(build("qwen2"), **module).submit(request) for request in requests]

    for future, other in zip(fused, plain, strict=True):
        assert future.result().token_ids == other.result().token_ids
        np.testing.assert_allclose(future.result().logprobs, other.result().logprobs, atol=1e-5)


@pytest.mark.parametrize("kind", OTHER)
def test_a_model_that_is_no_plain_decoder_decodes_through_its_module(
    runner: Any, kind: str
) -> None:
    loaded = build(kind)

    assert FusedDecoder.for_model(loaded, positions=64) is None
    runner(loaded, fused=False, max_seq_len=64)


@pytest.mark.usefixtures("without_products")
@pytest.mark.parametrize("kind", ["llama with one key head, tied", "qwen3", WIDE])
@pytest.mark.parametrize("adapted", [False, True])
def test_bfloat16_weights_are_computed_with_in_float32(
    runner: Any, kind: str, adapted: bool
) -> None:
    half = build(kind, torch.bfloat16)
    widened = replace(half, module=build(kind, torch.bfloat16).module.float(), dtype=torch.float32)
    for loaded in (half, widened):
        if adapted:
            attach_lora(loaded, LoraOptions(rank=4, alpha=8.0, train_unembed=True))
            change(loaded, 2)
    prompts = make_prompts(1, 31, 200)

    found = decode(runner(half, fused=True), prompts)

    expected = decode(runner(widened, fused=False), prompts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("without_products")
def test_bfloat16_with_an_adapter_for_each_request_decodes_through_its_module() -> None:
    loaded = build("qwen3", torch.bfloat16)
    layers = AdapterLayers(loaded)

    made = ModelRunner(loaded, max_seq_len=64, adapters=layers)

    assert made._fused is None
    assert not made.packs


@pytest.mark.parametrize("name", ["avx512_bf16", "amx_bf16", "bf16"])
def test_a_processor_with_products_in_bfloat16_takes_them(
    runner: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx2": True, name: True})

    assert not runner(build("qwen3", torch.bfloat16), fused=False).packs
    runner(build("qwen3"), fused=True)


@pytest.mark.parametrize("max_seq_len", [1, 3])
def test_the_shortest_sequences_leave_room_to_try_the_decoder(
    runner: Any, max_seq_len: int
) -> None:
    made = runner(build("llama"), fused=True, max_seq_len=max_seq_len)

    # Which is done at the fifth token.
    assert made._fused._rotations[0].shape[0] >= 5


def values(count: int, **given: Any) -> SamplingValues:
    """Full distributions at temperature 1, but for what is given."""
    plain: dict[str, Any] = {
        "temperature": np.ones(count),
        "top_p": np.ones(count),
        "top_k": np.zeros(count, np.int64),
    }
    return SamplingValues(**plain | given)


def sample_rows(logits: Tensor, given: SamplingValues) -> SampledTokens:
    rows = len(logits)
    return sample(logits, given, np.arange(rows, dtype=np.uint64), np.arange(rows))


def mixed(rows: int) -> SamplingValues:
    """Rows in turn: plain, tempered, greedy, top_k, top_p."""
    turn = np.arange(rows) % 5
    return values(
        rows,
        temperature=np.select([turn == 1, turn == 2], [0.7, 0.0], 1.0),
        top_k=np.where(turn == 3, 5, 0),
        top_p=np.where(turn == 4, 0.8, 1.0),
    )


def test_samples_in_loops_are_those_in_torch(sample_in_torch: Callable[[], None]) -> None:
    logits = torch.randn(200, 264, generator=torch.Generator().manual_seed(0)) * 3

    found = sample_rows(logits, mixed(200))
    sample_in_torch()
    expected = sample_rows(logits, mixed(200))

    assert np.array_equal(found.tokens, expected.tokens)
    np.testing.assert_allclose(found.logprobs, expected.logprobs, rtol=0, atol=1e-5)
    np.testing.assert_allclose(
        found.sampling_logprobs, expected.sampling_logprobs, rtol=0, atol=1e-5
    )


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-6])
def test_the_smallest_temperatures_take_the_most_probable_token(
    sample_in_torch: Callable[[], None], is_fused: bool, temperature: float
) -> None:
    logits = torch.randn(20, 264, generator=torch.Generator().manual_seed(0)) * 3
    if not is_fused:
        sample_in_torch()

    sampled = sample_rows(logits, values(20, temperature=np.full(20, temperature)))

    assert np.array_equal(sampled.tokens, logits.argmax(1).numpy())
    assert np.abs(sampled.sampling_logprobs).max() == 0
    expected = logits.double().log_softmax(-1).amax(1)
    np.testing.assert_allclose(sampled.logprobs, expected.numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("is_fused", [True, False])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_have_nan_for_logprobs(
    sample_in_torch: Callable[[], None], is_fused: bool, bad: float
) -> None:
    logits = torch.randn(10, 264, generator=torch.Generator().manual_seed(0))
    logits[:5, 100] = bad
    if not is_fused:
        sample_in_torch()

    sampled = sample_rows(logits, mixed(10))

    # Greedy rows aside, which are sampled from one token.
    rows = [0, 1, 3, 4]
    assert np.isnan(sampled.logprobs[rows]).all()
    assert np.isfinite(sampled.logprobs[5:]).all()
