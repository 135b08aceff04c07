"""Recorded decoding steps. A GPU's recordings are outside of us: a record here is a call again."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hearth.inference.backend import SampleRequest
from hearth.inference.engine.cache import SlotCache
from hearth.inference.engine.engine import EngineOptions, InferenceEngine
from hearth.inference.engine.graphs import CudaRecorder, DecodeGraphs, row_bucket, span_bucket
from hearth.inference.engine.runner import ModelRunner
from hearth.inference.engine.weights import ServedWeights
from hearth.models.loading import LoadedModel, base_tensors
from hearth.models.lora import LoraOptions, attach_lora
from hearth.sync.store import Snapshot

pytestmark = pytest.mark.slow

Load = Callable[..., LoadedModel]
Recorded = tuple["Tape", ModelRunner, SlotCache]


class Tape(CudaRecorder):
    """A recorder that calls the recorded function again, and counts."""

    def __init__(self) -> None:
        self.recorded = self.replayed = self.forgotten = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return replay

    def forget(self) -> None:
        self.forgotten += 1


class Refusing(Tape):
    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")


class Garbling(Tape):
    """Replays something else than was recorded."""

    logits: Tensor

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            run()
            self.logits.add_(1.0)

        return replay


def make_runner(
    loaded: LoadedModel, recorder: CudaRecorder | None = None, max_seq_len: int = 512
) -> ModelRunner:
    """As on a GPU, without loops in C; with a recorder it decodes in plain steps."""
    decoder = "module" if recorder is None else "plain"
    return ModelRunner(loaded, max_seq_len=max_seq_len, recorder=recorder, decoder=decoder)


@pytest.fixture
def cache_of() -> Callable[..., SlotCache]:
    def make(runner: ModelRunner, rows: int = 16, tokens: int = 200) -> SlotCache:
        cache = SlotCache(runner.cache_shape, budget_bytes=2**30, max_slots=256)
        cache.reserve(rows, tokens, active=0)
        return cache

    return make


@pytest.fixture
def recorded(load: Load, cache_of: Any) -> Recorded:
    """A recorder, and a runner and its cache that are recorded."""
    tape = Tape()
    runner = make_runner(load(), tape)
    return tape, runner, cache_of(runner)


def decoded(runner: ModelRunner, cache: SlotCache, *, start: int, steps: int, rows: int = 16):
    """Logits [steps, rows, V] of the same random tokens, at positions from ``start`` on."""
    rng = np.random.default_rng(start)
    found = []
    for step in range(steps):
        tokens = rng.integers(0, 250, rows)
        positions = np.full(rows, start + step)
        # A row of its own length, as every batch has them.
        positions[3] = step
        found.append(runner.decode(tokens, positions, cache).clone())
    return torch.stack(found)


@pytest.mark.parametrize(
    ("rows", "bucket"), [(1, 16), (16, 16), (17, 24), (25, 32), (33, 48), (64, 64), (65, 96)]
)
def test_rows_come_in_powers_of_two_and_half_of_the_way_to_the_next(rows: int, bucket: int) -> None:
    assert row_bucket(rows) == bucket


@pytest.mark.parametrize(
    ("tokens", "span"),
    [(1, 64), (64, 64), (65, 128), (129, 192), (513, 640), (1025, 1280), (2048, 2048)],
)
def test_spans_are_a_quarter_too_long_at_most(tokens: int, span: int) -> None:
    assert span_bucket(tokens) == span


def test_the_second_step_of_a_bucket_is_recorded_and_later_ones_are_replays(
    recorded: Recorded,
) -> None:
    tape, runner, cache = recorded
    counts = []

    for step in range(4):
        decoded(runner, cache, start=step, steps=1)
        counts.append((tape.recorded, tape.replayed))

    # The step that is recorded is checked by one replay.
    assert counts == [(0, 0), (1, 1), (1, 2), (1, 3)]


@pytest.mark.parametrize("model", ["qwen", "llama"])
@pytest.mark.parametrize("rows", [5, 16, 20])
def test_replayed_steps_give_the_modules_logits(
    load: Load, cache_of: Any, model: str, rows: int
) -> None:
    tape = Tape()
    recorded = make_runner(load(model), tape)
    plain = make_runner(load(model))

    found = decoded(recorded, cache_of(recorded, 24), start=60, steps=9, rows=rows)
    expected = decoded(plain, cache_of(plain, 24), start=60, steps=9, rows=rows)

    # Positions 60 to 63 look at 64 keys, 64 to 68 at 128.
    assert tape.recorded == 2
    assert tape.replayed == 7
    assert found.shape == expected.shape
    assert float((found - expected).abs().max()) <= 1e-4
    assert float(expected.std()) > 0.3


def test_a_bucket_is_never_larger_than_the_cache(load: Load) -> None:
    tape = Tape()
    runner = make_runner(load(), tape, 1024)
    cache = SlotCache(runner.cache_shape, budget_bytes=2**30, max_slots=17)
    cache.reserve(17, 513, active=0)
    assert cache.keys.shape[1:4:2] == (17, 1024)

    logits = decoded(runner, cache, start=1000, steps=2, rows=17)

    assert tape.recorded == 1
    assert logits.shape[1] == 17


def test_recordings_are_dropped_when_the_cache_is_elsewhere(recorded: Recorded) -> None:
    tape, runner, cache = recorded
    decoded(runner, cache, start=0, steps=3)

    # What it holds moves to new memory.
    cache.reserve(40, 200, active=16)
    decoded(runner, cache, start=3, steps=3)

    assert tape.recorded == 2


def test_recordings_are_dropped_when_weights_are_elsewhere(recorded: Recorded) -> None:
    tape, runner, cache = recorded
    decoded(runner, cache, start=0, steps=3)

    weight = base_tensors(runner.loaded.module)["model.norm.weight"]
    weight.data = weight.data.clone()
    runner.weights_changed()
    decoded(runner, cache, start=3, steps=1)
    assert tape.recorded == 1
    decoded(runner, cache, start=4, steps=1)

    assert tape.recorded == 2


def test_recordings_are_dropped_when_an_adapter_comes(recorded: Recorded) -> None:
    tape, runner, cache = recorded
    decoded(runner, cache, start=0, steps=3)

    attach_lora(runner.loaded, LoraOptions(rank=2, alpha=4.0))
    runner.weights_changed()
    decoded(runner, cache, start=3, steps=2)
    assert tape.recorded == 2

    # Another one may be made where the first stood; its scale is part of what was recorded.
    runner.loaded.lora = LoraOptions(rank=2, alpha=8.0)
    runner.weights_changed()
    decoded(runner, cache, start=5, steps=2)
    assert tape.recorded == 3


def test_weights_that_are_taken_in_place_keep_recordings_and_show_at_once(
    load: Load, cache_of: Any
) -> None:
    tape, loaded, other = Tape(), load(), load()
    runner = make_runner(loaded, tape)
    cache = cache_of(runner)
    before = decoded(runner, cache, start=0, steps=3)
    with torch.no_grad():
        for tensor in base_tensors(other.module).values():
            tensor += 0.05
    snapshot = Snapshot.capture("step-1", "base", "qwen", base_tensors(other.module), {})
    served = ServedWeights(loaded, in_place=True)

    served.swap_in(served.prepare(snapshot))
    runner.weights_changed()
    found = decoded(runner, cache, start=0, steps=3)

    plain = make_runner(other)
    assert tape.recorded == 1
    assert float((found - decoded(plain, cache_of(plain), start=0, steps=3)).abs().max()) <= 1e-4
    assert float((found - before).abs().max()) > 0.1
    # The snapshot is the trainer's, and stays as it is when the next one is taken.
    kept = {name: tensor.clone() for name, tensor in snapshot.tensors.items()}
    served.swap_in(served.prepare(replace(snapshot, tensors={n: o + 1 for n, o in kept.items()})))
    assert all(torch.equal(tensor, kept[name]) for name, tensor in snapshot.tensors.items())


def test_the_least_recently_used_recording_goes_first(load: Load, cache_of: Any) -> None:
    tape = Tape()
    runner = make_runner(load())
    cache = cache_of(runner)
    graphs = DecodeGraphs(runner.loaded, runner._step, tape, most=2)

    def step(position: int) -> None:
        for _ in range(2):
            graphs.decode(np.zeros(16, np.int64), np.full(16, position), cache)

    for position in (1, 65, 1, 129):
        step(position)
    assert (tape.recorded, len(graphs)) == (3, 2)
    step(1)
    assert tape.recorded == 3
    step(65)
    assert tape.recorded == 4


@pytest.mark.parametrize("model", ["qwen", "llama"])
def test_a_step_that_cannot_be_recorded_stays_eager_with_one_warning(
    load: Load, cache_of: Any, caplog: pytest.LogCaptureFixture, model: str
) -> None:
    runner = make_runner(load(model), Refusing())
    plain = make_runner(load(model))

    with caplog.at_level(logging.WARNING, "hearth.inference.engine.graphs"):
        found = decoded(runner, cache_of(runner), start=60, steps=9)

    (record,) = caplog.records
    assert "16 rows and 64 keys" in record.getMessage()
    assert "not permitted when stream is capturing" in record.getMessage()
    assert float((found - decoded(plain, cache_of(plain), start=60, steps=9)).abs().max()) <= 1e-4


def test_a_replay_that_differs_is_not_used(
    load: Load, cache_of: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tape = Garbling()
    runner, plain = (make_runner(load()) for _ in range(2))
    cache = cache_of(runner)
    graphs = DecodeGraphs(runner.loaded, runner._step, tape)
    tokens, positions = np.arange(16), np.full(16, 3)
    tape.logits = graphs.decode(tokens, positions, cache)

    with caplog.at_level(logging.WARNING, "hearth.inference.engine.graphs"):
        found = [graphs.decode(tokens, positions + step, cache).clone() for step in range(3)]

    (record,) = caplog.records
    assert "replayed step must give the logits" in record.getMessage()
    expected_cache = cache_of(plain)
    for step, item in enumerate(found):
        expected = plain.decode(tokens, positions + step, expected_cache)
        assert float((item - expected).abs().max()) <= 1e-4
    assert not graphs.is_recording


def test_broken_weights_are_no_failed_recording(load: Load, cache_of: Any) -> None:
    tape, loaded = Tape(), load()
    runner = make_runner(loaded, tape)
    base_tensors(loaded.module)["model.norm.weight"].data.fill_(float("nan"))

    logits = decoded(runner, cache_of(runner), start=0, steps=3)

    assert bool(logits.isnan().all())
    assert tape.replayed == 2


def test_an_engine_samples_the_same_with_recorded_steps(load: Load, start: Any) -> None:
    tape, rng = Tape(), random.Random(0)
    engine = InferenceEngine(
        load(), options=EngineOptions(max_seq_len=512, decoder="plain"), recorder=tape
    )
    plain = start(decoder="module")
    requests = [
        SampleRequest(
            prompt=[rng.randrange(256) for _ in range(rng.randint(1, 80))],
            ignore_eos=True,
            max_tokens=rng.randint(3, 40),
            seed=number,
            temperature=rng.choice([0.0, 0.7, 1.0]),
        )
        for number in range(30)
    ]
    trained = load()
    with torch.no_grad():
        for tensor in base_tensors(trained.module).values():
            tensor += 0.02 * torch.ones_like(tensor)
    snapshot = Snapshot.capture("step-1", "base", "qwen", base_tensors(trained.module), {})

    for version in range(2):
        found, expected = (
            [future.result() for future in [which.submit(request) for request in requests]]
            for which in (engine, plain)
        )
        assert {item.weight_version for item in found} == {version}
        for item, other in zip(found, expected, strict=True):
            assert item.token_ids == other.token_ids
            assert max(abs(np.subtract(item.logprobs, other.logprobs))) <= 1e-4
        assert tape.replayed > 20 * (version + 1)
        for which in (engine, plain):
            which.load_snapshot(snapshot).result()
    engine.close()
