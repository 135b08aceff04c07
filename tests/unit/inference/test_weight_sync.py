import re
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
import torch

from hearth.errors import ClosedError, EngineError
from hearth.inference.backend import SampleRequest
from hearth.models.loading import base_tensors
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, Snapshot


def ask(prompt=(1, 2, 3), **options) -> SampleRequest:
    return SampleRequest(
        prompt=list(prompt), **({"max_tokens": 12, "seed": 7, "ignore_eos": True} | options)
    )


@pytest.fixture
def trained(load):
    """A model with weights of its own, and the snapshot of it."""

    def make(identity="step-1", *, seed=1, lora=None, **changes):
        model = load()
        if lora is not None:
            attach_lora(model, lora)
        tensors = adapter_tensors(model) if lora else base_tensors(model.module)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for tensor in tensors.values():
                tensor += 0.05 * torch.randn(tensor.shape, generator=generator)
        metadata = lora.as_metadata() if lora else {}
        kind = "lora" if lora else "base"
        kept = {name: tensor for name, tensor in tensors.items() if name not in changes}
        return model, Snapshot.capture(identity, kind, "qwen", kept | changes, metadata)

    return make


def same_draw(plain_logprobs, model, drawn, prompt=(1, 2, 3)) -> bool:
    expected = plain_logprobs(model, [*prompt, *drawn.token_ids])[len(prompt) - 1 :]
    return max(abs(a - b) for a, b in zip(drawn.logprobs, expected, strict=True)) <= 1e-5


@pytest.mark.parametrize(
    "lora",
    [
        None,
        LoraOptions(rank=4, alpha=8.0, seed=5),
        LoraOptions(rank=2, seed=1, train_unembed=True, train_mlp=False),
    ],
    ids=["full", "lora", "lora-with-head"],
)
def test_after_a_weight_sync_logprobs_are_the_trained_models(start, trained, plain_logprobs, lora):
    model, snapshot = trained(lora=lora)
    engine = start()
    before = engine.submit(ask()).result()

    state = engine.load_snapshot(snapshot).result()
    after = engine.submit(ask()).result()

    assert (state.stage, state.current_identity, state.weight_version) == ("done", "step-1", 1)
    assert same_draw(plain_logprobs, model, after)
    assert not same_draw(plain_logprobs, model, before)
    assert (before.weight_version, before.snapshot_identity) == (0, None)
    assert (after.weight_version, after.snapshot_identity) == (1, "step-1")


def test_a_weight_sync_amid_generation_drops_nothing_and_mixes_nothing(
    start, load, trained, plain_logprobs
):
    model, snapshot = trained()
    engine = start()

    early = [engine.submit(ask([index], seed=index, max_tokens=80)) for index in range(20)]
    while engine.stats().steps < 5:
        time.sleep(0.001)
    swap = engine.load_snapshot(snapshot)
    late = [engine.submit(ask([index], seed=index, max_tokens=80)) for index in range(20)]

    assert swap.result().weight_version == 1
    for futures, version, source in ((early, 0, load()), (late, 1, model)):
        for index, future in enumerate(futures):
            assert len(future.result().token_ids) == 80
            assert future.result().weight_version == version
            assert same_draw(plain_logprobs, source, future.result(), [index])


def test_a_prompt_prefilled_before_a_weight_sync_is_not_used_after_it(start, trained):
    engine = start()
    engine.submit(ask()).result()

    engine.load_snapshot(trained()[1]).result()
    after = engine.submit(ask()).result()

    assert after.cached_prompt_tokens == 0
    assert engine.submit(ask()).result().cached_prompt_tokens == 3


def test_tensors_of_a_snapshot_are_taken_without_a_copy(start, load, trained):
    served, (_, snapshot) = load(), trained()

    start(served).load_snapshot(snapshot).result()

    addresses = {tensor.data_ptr() for tensor in snapshot.tensors.values()}
    assert {tensor.data_ptr() for tensor in base_tensors(served.module).values()} == addresses


def test_versions_count_the_weight_syncs(start, trained):
    engine = start()

    states = [
        engine.load_snapshot(trained(f"step-{number}", seed=number)[1]).result()
        for number in (1, 2, 3)
    ]

    assert [state.weight_version for state in states] == [1, 2, 3]
    assert engine.submit(ask()).result().snapshot_identity == "step-3"


def test_a_snapshot_that_is_served_is_not_loaded_again(start, trained):
    engine, snapshot = start(), trained()[1]

    first = engine.load_snapshot(snapshot).result()
    second = engine.load_snapshot(snapshot).result()

    assert first == second
    assert engine.state().weight_version == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.norm.weight": torch.zeros(5)}, r"model.norm.weight \[5\] instead of \[128\]"),
        ({"model.extra.weight": torch.zeros(5)}, "1 unknown .*model.extra.weight"),
    ],
    ids=["shape", "unknown"],
)
def test_a_snapshot_that_does_not_fit_is_refused_and_the_old_weights_stay(
    start, trained, changes, message
):
    engine = start()
    before = engine.submit(ask()).result()

    state = engine.load_snapshot(trained("odd", **changes)[1]).result()
    after = engine.submit(ask()).result()

    assert (state.stage, state.target_identity, state.current_identity) == ("error", "odd", None)
    assert re.search(message, state.error)
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert after.weight_version == 0


def test_a_snapshot_without_a_tensor_is_refused(start, trained):
    snapshot = trained("odd")[1]
    del snapshot.tensors["model.norm.weight"]

    state = start().load_snapshot(snapshot).result()

    assert "1 missing ['model.norm.weight']" in state.error


def test_a_failed_load_can_be_tried_again(start, trained):
    engine, snapshot = start(), trained()[1]

    failed = engine.hot_load("step-1", lambda: MemorySnapshotStore().get("step-1")).result()
    loaded = engine.load_snapshot(snapshot).result()

    assert failed.stage == "error"
    assert (loaded.stage, loaded.error, loaded.weight_version) == ("done", None, 1)


def test_a_snapshot_that_cannot_be_read_is_an_error_and_generation_goes_on(start):
    engine, store = start(), MemorySnapshotStore()

    state = engine.hot_load("gone", lambda: store.get("gone")).result()

    assert state.stage == "error"
    assert "it was never saved here" in state.error
    assert len(engine.submit(ask()).result().token_ids) == 12


def test_generation_goes_on_while_a_snapshot_is_being_read(start, trained):
    engine, snapshot, gate = start(), trained()[1], threading.Event()

    def slow():
        gate.wait(20)
        return snapshot

    loading = engine.hot_load("step-1", slow)
    during = engine.submit(ask()).result(timeout=20)
    stage = engine.state().stage
    gate.set()

    assert (during.weight_version, stage) == (0, "loading")
    assert loading.result().weight_version == 1


def test_adapters_come_change_rank_and_go(start, load, trained, plain_logprobs):
    small, small_snapshot = trained("small", lora=LoraOptions(rank=2, seed=3))
    large, large_snapshot = trained("large", seed=2, lora=LoraOptions(rank=8, train_attn=False))
    base, base_snapshot = trained("base", seed=3)
    engine = start()

    for model, snapshot in (
        (small, small_snapshot),
        (large, large_snapshot),
        (base, base_snapshot),
    ):
        state = engine.load_snapshot(snapshot).result()
        assert (state.stage, state.is_adapter) == ("done", snapshot.kind == "lora")
        assert same_draw(plain_logprobs, model, engine.submit(ask()).result())


def test_an_adapter_that_does_not_fit_leaves_the_one_before(start, trained, plain_logprobs):
    good, snapshot = trained("good", lora=LoraOptions(rank=2))
    bad = trained("bad", lora=LoraOptions(rank=4))[1]
    bad.tensors.popitem()
    engine = start()
    engine.load_snapshot(snapshot).result()

    state = engine.load_snapshot(bad).result()

    assert (state.stage, state.current_identity) == ("error", "good")
    assert same_draw(plain_logprobs, good, engine.submit(ask()).result())


def test_a_snapshot_from_a_folder_draws_what_one_from_memory_draws(start, trained, tmp_path):
    snapshot, store = trained()[1], FolderSnapshotStore(tmp_path)
    store.put(snapshot)
    engine, other = start(), start()

    engine.hot_load("step-1", lambda: store.get("step-1")).result()
    other.load_snapshot(snapshot).result()

    ours, theirs = (one.submit(ask()).result() for one in (engine, other))
    assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


def test_broken_weights_fail_their_requests_and_good_ones_mend_it(start, trained, plain_logprobs):
    broken = trained("broken", **{"model.norm.weight": torch.full((128,), torch.nan)})[1]
    model, snapshot = trained("good")
    engine = start()
    engine.load_snapshot(broken).result()

    failing = [engine.submit(ask([index], max_tokens=40)) for index in range(3)]

    for future in failing:
        with pytest.raises(EngineError, match="logits must be numbers, got NaN"):
            future.result()
    engine.load_snapshot(snapshot).result()
    assert same_draw(plain_logprobs, model, engine.submit(ask()).result())


def test_waiting_for_an_identity_ends_when_it_is_served(start, trained):
    engine = start()
    waiting = engine.settled("step-1")

    with pytest.raises(FutureTimeoutError):
        waiting.result(timeout=0.05)
    engine.load_snapshot(trained()[1])

    assert waiting.result(timeout=20).current_identity == "step-1"


def test_closing_ends_the_wait_for_an_identity(start):
    engine = start()
    waiting = engine.settled("step-1")

    engine.close()

    with pytest.raises(ClosedError):
        waiting.result(timeout=5)
    with pytest.raises(ClosedError):
        engine.hot_load("step-2", lambda: MemorySnapshotStore().get("step-2"))
