import copy
import re
import shutil
import threading
import time
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from functools import partial

import pytest
import torch

from hearth.errors import ClosedError, EngineError
from hearth.inference.backend import SampleRequest
from hearth.models.loading import base_tensors
from hearth.models.lora import LoraOptions, adapter_tensors, attach_lora
from hearth.sync import delta
from hearth.sync.chain import Published
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, Snapshot

pytestmark = pytest.mark.slow


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

    ours, theirs = (entry.submit(ask()).result() for entry in (engine, other))
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
    waiting = engine.watch_sync("step-1")

    with pytest.raises(FutureTimeoutError):
        waiting.result(timeout=0.05)
    engine.load_snapshot(trained()[1])

    assert waiting.result(timeout=20).current_identity == "step-1"


def test_closing_ends_the_wait_for_an_identity(start):
    engine = start()
    waiting = engine.watch_sync("step-1")

    engine.close()

    with pytest.raises(ClosedError):
        waiting.result(timeout=5)
    with pytest.raises(ClosedError):
        engine.hot_load("step-2", lambda: MemorySnapshotStore().get("step-2"))


class Policy:
    """A model that trains a little, and publishes into a store what it has become."""

    def __init__(self, load, store, dtype=torch.float32):
        self.model = load(dtype=dtype)
        self.store = store
        self.published = Published()

    def save(self, identity, kind="delta", base_model="qwen"):
        generator = torch.Generator().manual_seed(len(self.store.names()) + 1)
        tensors = base_tensors(self.model.module)
        with torch.no_grad():
            for name, tensor in tensors.items():
                if "layers.1" in name:
                    mask = torch.rand(tensor.shape, generator=generator) < 0.02
                    tensor += mask * torch.randn(tensor.shape, generator=generator)
        self.published.publish(
            self.store, identity, base_model, tensors, {}, as_delta=kind == "delta"
        )
        return copy.deepcopy(self.model)


def serve(engine, store, identity):
    return engine.hot_load(identity, lambda: store.get(identity)).result(timeout=30)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def folder(root):
    return FolderSnapshotStore(root)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_after_a_delta_logprobs_are_the_trained_models(start, load, plain_logprobs, folder, kind):
    policy = Policy(load, MemorySnapshotStore() if kind == "memory" else folder)
    engine = start()

    for version, identity in enumerate(("a", "b", "c"), 1):
        model = policy.save(identity)
        state = serve(engine, policy.store, identity)
        drawn = engine.submit(ask()).result()

        assert (state.stage, state.error, state.weight_version) == ("done", None, version)
        assert policy.store.get(identity).kind == ("base" if version == 1 else "delta")
        assert same_draw(plain_logprobs, model, drawn)
        assert (drawn.weight_version, drawn.snapshot_identity) == (version, identity)


def test_a_delta_touches_only_the_tensors_that_changed(start, load, folder):
    policy, served = Policy(load, folder), load()
    engine = start(served)
    policy.save("a")
    serve(engine, folder, "a")
    before = {name: tensor.data_ptr() for name, tensor in base_tensors(served.module).items()}

    policy.save("b")
    serve(engine, folder, "b")

    after = {name: tensor.data_ptr() for name, tensor in base_tensors(served.module).items()}
    moved = {name for name in before if before[name] != after[name]}
    assert moved == delta.changed_names(folder.get("b").tensors)
    assert 0 < len(moved) < len(before)
    weights = base_tensors(policy.model.module)
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in base_tensors(served.module).items()
    )


def test_a_delta_on_what_is_served_reads_nothing_else(start, load, folder, root):
    policy, engine = Policy(load, folder), start()
    policy.save("a")
    serve(engine, folder, "a")
    policy.save("b")
    shutil.rmtree(root / "a")

    state = serve(engine, folder, "b")

    assert (state.stage, state.current_identity) == ("done", "b")


def test_prompts_prefilled_before_a_delta_are_not_used_after_it(
    start, load, plain_logprobs, folder
):
    policy, engine = Policy(load, folder), start()
    policy.save("a")
    serve(engine, folder, "a")
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    for prompt in prompts:
        engine.submit(ask(prompt)).result()
        assert engine.submit(ask(prompt)).result().cached_prompt_tokens == len(prompt)

    model = policy.save("b")
    serve(engine, folder, "b")

    for prompt in prompts:
        after = engine.submit(ask(prompt, prompt_logprobs=True)).result()
        assert after.cached_prompt_tokens == 0
        assert same_draw(plain_logprobs, model, after, prompt)
        scores = plain_logprobs(model, prompt)
        assert after.prompt_logprobs[1:] == pytest.approx(scores, abs=1e-5)


def test_a_delta_amid_generation_mixes_nothing(start, load, plain_logprobs, folder):
    policy, engine = Policy(load, folder), start()
    models = {1: policy.save("a")}
    serve(engine, folder, "a")
    early = [engine.submit(ask([index], seed=index, max_tokens=80)) for index in range(20)]
    while engine.stats().steps < 5:
        time.sleep(0.001)

    models[2] = policy.save("b")
    serve(engine, folder, "b")
    late = [engine.submit(ask([index], seed=index, max_tokens=80)) for index in range(20)]

    for futures, version in ((early, 1), (late, 2)):
        for index, future in enumerate(futures):
            assert future.result().weight_version == version
            assert same_draw(plain_logprobs, models[version], future.result(), [index])


def test_a_delta_on_something_else_is_made_whole_from_its_store(
    start, load, plain_logprobs, folder
):
    policy, engine = Policy(load, folder), start()
    for identity in ("a", "b"):
        policy.save(identity)
    model = policy.save("c")

    first = serve(engine, folder, "c")
    drawn = engine.submit(ask()).result()

    assert (first.stage, first.error, first.weight_version) == ("done", None, 1)
    assert same_draw(plain_logprobs, model, drawn)


def test_a_delta_after_an_adapter_is_made_whole(start, load, trained, plain_logprobs, folder):
    policy, engine = Policy(load, folder), start()
    policy.save("a")
    serve(engine, folder, "a")
    engine.load_snapshot(trained("lora", lora=LoraOptions(rank=2))[1]).result()
    model = policy.save("b")

    state = serve(engine, folder, "b")

    assert (state.stage, state.is_adapter) == ("done", False)
    assert same_draw(plain_logprobs, model, engine.submit(ask()).result())


def test_deltas_of_another_dtype_than_the_served_one_are_made_whole(start, load, folder):
    policy, served = Policy(load, folder, torch.float32), load(dtype=torch.bfloat16)
    engine = start(served)

    for identity in ("a", "b"):
        model = policy.save(identity)
        assert serve(engine, folder, identity).error is None

    expected = base_tensors(model.module)
    assert all(
        torch.equal(tensor, expected[name].bfloat16())
        for name, tensor in base_tensors(served.module).items()
    )


def test_two_deltas_in_a_row_are_taken_in_their_order(start, load, plain_logprobs, folder, root):
    policy, engine = Policy(load, folder), start()
    policy.save("a")
    serve(engine, folder, "a")
    running = engine.submit(ask(max_tokens=200))
    policy.save("b")
    model = policy.save("c")
    shutil.rmtree(root / "a")

    futures = [engine.hot_load(name, partial(folder.get, name)) for name in ("b", "c")]

    assert [future.result(timeout=30).weight_version for future in futures] == [2, 3]
    assert running.result().weight_version == 1
    assert same_draw(plain_logprobs, model, engine.submit(ask()).result())


def truncate(path):
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def flip(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"b/weights.safetensors must be readable and hold \d+ bytes .* got \d+ bytes"),
        (flip, r"b/weights.safetensors: tensor '.*' must match its manifest"),
        (lambda path: path.unlink(), "got no file"),
    ],
    ids=["truncated", "flipped", "gone"],
)
def test_a_damaged_delta_is_refused_and_the_old_version_stays(
    start, load, plain_logprobs, folder, root, damage, message
):
    policy, engine = Policy(load, folder), start()
    model = policy.save("a")
    serve(engine, folder, "a")
    before = engine.submit(ask()).result()
    policy.save("b")
    damage(root / "b" / "weights.safetensors")

    state = serve(engine, folder, "b")

    assert (state.stage, state.current_identity, state.weight_version) == ("error", "a", 1)
    assert re.search(message, state.error)
    after = engine.submit(ask()).result()
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert same_draw(plain_logprobs, model, after)

    mended = policy.save("c", "base")
    assert serve(engine, folder, "c").weight_version == 2
    assert same_draw(plain_logprobs, mended, engine.submit(ask()).result())


def test_a_broken_chain_is_refused_with_what_was_expected_and_found(
    start, load, plain_logprobs, folder, root
):
    policy, engine = Policy(load, folder), start()
    model = policy.save("a")
    serve(engine, folder, "a")
    policy.save("b")
    policy.save("c")
    shutil.rmtree(root / "b")

    state = serve(engine, folder, "c")

    assert (state.stage, state.current_identity) == ("error", "a")
    assert "expected parent 'b', found 'a'" in state.error
    assert "expected 'b', found ['a', 'c']" in state.error
    assert same_draw(plain_logprobs, model, engine.submit(ask()).result())


def test_a_delta_at_hand_without_a_store_needs_its_parent_served(start, load, folder):
    policy, engine = Policy(load, folder), start()
    policy.save("a")
    policy.save("b")
    alone = replace(folder.get("b"), source=None)

    refused = engine.load_snapshot(alone).result()
    serve(engine, folder, "a")
    taken = engine.load_snapshot(alone).result()

    assert refused.error == (
        "delta 'b' must go on top of what is served: expected parent 'a', found None"
    )
    assert (taken.stage, taken.current_identity) == ("done", "b")


def test_a_parent_served_under_its_name_with_other_weights_is_refused(start, load, folder):
    policy, engine = Policy(load, folder), start()
    engine.load_snapshot(replace(trained_snapshot(load), identity="a")).result()
    policy.save("a")
    policy.save("b")

    state = serve(engine, folder, "b")

    assert (state.stage, state.current_identity) == ("error", "a")
    assert re.search("must be that of snapshot 'b' once 'a' has the delta applied", state.error)


def trained_snapshot(load):
    tensors = {name: tensor + 1 for name, tensor in base_tensors(load().module).items()}
    return Snapshot.capture("other", "base", "qwen", tensors)


@pytest.mark.parametrize("kind", ["base", "delta", "lora"])
def test_a_snapshot_of_another_base_model_is_refused_with_both_names(
    start, load, trained, folder, kind
):
    policy, engine = Policy(load, folder), start()
    if kind == "lora":
        adapter = trained("x", lora=LoraOptions(rank=2))[1]
        state = engine.load_snapshot(replace(adapter, base_model="huge")).result()
    else:
        for identity in ("w", "x") if kind == "delta" else ("x",):
            policy.save(identity, base_model="huge")
        state = serve(engine, folder, "x")

    assert (state.stage, state.current_identity, state.weight_version) == ("error", None, 0)
    assert "must be of 'qwen', which is served, got one of 'huge'" in state.error


def test_a_base_that_fails_halfway_changes_nothing(start, load, trained):
    served, snapshot = load(), trained()[1]
    *_, last = snapshot.tensors
    engine = start(served)
    before = {name: tensor.data_ptr() for name, tensor in base_tensors(served.module).items()}
    # As large as it says, and not there to be read: converting it fails.
    snapshot.tensors[last] = snapshot.tensors[last].to("meta")

    state = engine.load_snapshot(snapshot).result()

    assert state.stage == "error"
    after = {name: tensor.data_ptr() for name, tensor in base_tensors(served.module).items()}
    assert after == before
