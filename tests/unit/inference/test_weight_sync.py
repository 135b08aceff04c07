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
from tests.unit.inference.conftest import ask

from hearth.errors import ClosedError, EngineError
from hearth.models.loading import base_tensors
from hearth.models.lora import LoraOptions
from hearth.sync import delta
from hearth.sync.chain import Published
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, Snapshot

pytestmark = pytest.mark.slow


@pytest.fixture
def matches(plain_logprobs):
    """Whether logprobs are those of a model."""

    def check(model, sampled, prompt=(1, 2, 3)) -> bool:
        expected = plain_logprobs(model, [*prompt, *sampled.token_ids])[len(prompt) - 1 :]
        return max(abs(a - b) for a, b in zip(sampled.logprobs, expected, strict=True)) <= 1e-5

    return check


@pytest.mark.parametrize(
    "lora",
    [
        None,
        LoraOptions(rank=4, alpha=8.0, seed=5),
        LoraOptions(rank=2, seed=1, train_unembed=True, train_mlp=False),
    ],
    ids=["full", "lora", "lora-with-head"],
)
def test_after_a_weight_sync_logprobs_are_the_trained_models(engine, trained, matches, lora):
    model, snapshot = trained(lora=lora)
    before = engine.submit(ask()).result()

    state = engine.load_snapshot(snapshot).result()
    after = engine.submit(ask()).result()

    assert (state.stage, state.current_identity, state.weight_version) == ("done", "step-1", 1)
    assert matches(model, after)
    assert not matches(model, before)
    assert (before.weight_version, before.snapshot_identity) == (0, None)
    assert (after.weight_version, after.snapshot_identity) == (1, "step-1")


def test_a_weight_sync_amid_generation_drops_nothing_and_mixes_nothing(
    engine, load, trained, matches
):
    model, snapshot = trained()

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
            assert matches(source, future.result(), [index])


def test_a_prompt_prefilled_before_a_weight_sync_is_not_used_after_it(engine, trained):
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


def test_versions_count_the_weight_syncs(engine, trained):
    states = [
        engine.load_snapshot(trained(f"step-{number}", number)[1]).result() for number in (1, 2, 3)
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
    engine, trained, changes, message
):
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


def test_adapters_come_change_rank_and_go(engine, load, trained, matches):
    adapters = (
        trained("small", lora=LoraOptions(rank=2, seed=3)),
        trained("large", 2, lora=LoraOptions(rank=8, train_attn=False)),
        trained("base", 3),
    )

    for model, snapshot in adapters:
        state = engine.load_snapshot(snapshot).result()
        assert (state.stage, state.is_adapter) == ("done", snapshot.kind == "lora")
        assert matches(model, engine.submit(ask()).result())


def test_an_adapter_that_does_not_fit_leaves_the_one_before(engine, trained, matches):
    good, snapshot = trained("good", lora=LoraOptions(rank=2))
    bad = trained("bad", lora=LoraOptions(rank=4))[1]
    bad.tensors.popitem()
    engine.load_snapshot(snapshot).result()

    state = engine.load_snapshot(bad).result()

    assert (state.stage, state.current_identity) == ("error", "good")
    assert matches(good, engine.submit(ask()).result())


def test_a_snapshot_from_a_folder_samples_what_one_from_memory_samples(start, trained, tmp_path):
    snapshot, store = trained()[1], FolderSnapshotStore(tmp_path)
    store.put(snapshot)
    engine, other = start(), start()

    engine.hot_load("step-1", lambda: store.get("step-1")).result()
    other.load_snapshot(snapshot).result()

    ours, theirs = (server.submit(ask()).result() for server in (engine, other))
    assert (ours.token_ids, ours.logprobs) == (theirs.token_ids, theirs.logprobs)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (
            torch.nan,
            "weights of snapshot 'broken' must be finite in the dtype that is served, got ",
        ),
        (3e38, "logits of snapshot 'broken' must be finite, got "),
    ],
    ids=["nan", "overflow"],
)
@pytest.mark.parametrize("folder", [None, "bucket"], ids=["memory", "folder"])
def test_weights_that_compute_no_numbers_are_refused_and_the_old_version_stays(
    engine, trained, matches, tmp_path, value, message, folder
):
    model, good = trained("good")
    broken = trained("broken", **{"model.norm.weight": torch.full((128,), value)})[1]
    if folder is not None:
        store = FolderSnapshotStore(tmp_path / folder)
        store.put(broken)
        broken = store.get("broken")
    engine.load_snapshot(good).result()

    state = engine.load_snapshot(broken).result()

    assert (state.stage, state.current_identity, state.weight_version) == ("error", "good", 1)
    assert message in state.error
    sampled = engine.submit(ask()).result()
    assert (sampled.snapshot_identity, sampled.weight_version) == ("good", 1)
    assert matches(model, sampled)


@pytest.mark.parametrize("value", [torch.inf, 1e38], ids=["inf", "overflow"])
@pytest.mark.parametrize("rank", [2, 3], ids=["same-rank", "other-rank"])
def test_an_adapter_that_computes_no_numbers_leaves_the_one_before(
    engine, trained, matches, rank, value
):
    model, good = trained("good", lora=LoraOptions(rank=2))
    _, broken = trained("broken", lora=LoraOptions(rank=rank))
    for name, tensor in broken.tensors.items():
        if "down_proj" in name:
            tensor.fill_(value)
    engine.load_snapshot(good).result()

    state = engine.load_snapshot(broken).result()

    assert (state.stage, state.current_identity) == ("error", "good")
    kind = "logits" if value == 1e38 else "weights"
    assert f"{kind} of snapshot 'broken' must be finite" in state.error
    assert matches(model, engine.submit(ask()).result())


def test_weights_that_fail_one_token_fail_its_requests_and_good_ones_mend_it(start, load, matches):
    engine, model = start("llama"), load("llama")
    tensors = dict(base_tensors(model.module))
    good = Snapshot.capture("good", "base", "llama", tensors)
    broken = Snapshot.capture("broken", "base", "llama", tensors)
    # Only the last hidden state of token 50, which is not probed, is long in the first direction.
    broken.tensors["model.embed_tokens.weight"][50] = 0
    broken.tensors["model.embed_tokens.weight"][50, 0] = 1e15
    broken.tensors["lm_head.weight"][:, 0] = 5e37
    assert engine.load_snapshot(broken).result().stage == "done"

    failing = [engine.submit(ask([index, 50], max_tokens=40)) for index in range(3)]

    for future in failing:
        with pytest.raises(EngineError, match="logits must be numbers, got NaN"):
            future.result()
    engine.load_snapshot(good).result()
    assert matches(model, engine.submit(ask()).result())


def test_waiting_for_an_identity_ends_when_it_is_served(engine, trained):
    waiting = engine.watch_sync("step-1")

    with pytest.raises(FutureTimeoutError):
        waiting.result(timeout=0.05)
    engine.load_snapshot(trained()[1])

    assert waiting.result(timeout=20).current_identity == "step-1"


def test_closing_ends_the_wait_for_an_identity(engine):
    waiting = engine.watch_sync("step-1")

    engine.close()

    with pytest.raises(ClosedError):
        waiting.result(timeout=5)
    with pytest.raises(ClosedError):
        engine.hot_load("step-2", lambda: MemorySnapshotStore().get("step-2"))


class Policy:
    """A model that trains a little, and publishes what it has become to an engine's store."""

    def __init__(self, model, store, engine):
        self.model, self.store, self.engine = model, store, engine
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

    def serve(self, identity):
        return self.engine.hot_load(identity, lambda: self.store.get(identity)).result(timeout=30)

    def sync(self, identity):
        model = self.save(identity)
        self.serve(identity)
        return model


@pytest.fixture
def root(tmp_path):
    return tmp_path / "snapshots"


@pytest.fixture
def folder(root):
    return FolderSnapshotStore(root)


@pytest.fixture
def policy(load, folder, engine):
    return Policy(load(), folder, engine)


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_after_a_delta_logprobs_are_the_trained_models(engine, load, matches, folder, kind):
    store = MemorySnapshotStore() if kind == "memory" else folder
    policy = Policy(load(), store, engine)

    for version, identity in enumerate(("a", "b", "c"), 1):
        model = policy.save(identity)
        state = policy.serve(identity)
        sampled = engine.submit(ask()).result()

        assert (state.stage, state.error, state.weight_version) == ("done", None, version)
        assert policy.store.get(identity).kind == ("base" if version == 1 else "delta")
        assert matches(model, sampled)
        assert (sampled.weight_version, sampled.snapshot_identity) == (version, identity)


def test_a_delta_touches_only_the_tensors_that_changed(start, load, folder):
    served = load()
    policy = Policy(load(), folder, start(served))
    policy.sync("a")
    before = {name: tensor.data_ptr() for name, tensor in base_tensors(served.module).items()}

    policy.sync("b")

    after = {name: tensor.data_ptr() for name, tensor in base_tensors(served.module).items()}
    moved = {name for name in before if before[name] != after[name]}
    assert moved == delta.list_changed(folder.get("b").tensors)
    assert 0 < len(moved) < len(before)
    weights = base_tensors(policy.model.module)
    assert all(
        torch.equal(tensor, weights[name]) for name, tensor in base_tensors(served.module).items()
    )


def test_a_delta_on_what_is_served_reads_nothing_else(policy, root):
    policy.sync("a")
    policy.save("b")
    shutil.rmtree(root / "a")

    state = policy.serve("b")

    assert (state.stage, state.current_identity) == ("done", "b")


def test_prompts_prefilled_before_a_delta_are_not_used_after_it(
    policy, engine, matches, plain_logprobs
):
    policy.sync("a")
    prompts = [[5, 6, 7, 8], [9, 10, 11]]
    for prompt in prompts:
        engine.submit(ask(prompt)).result()
        assert engine.submit(ask(prompt)).result().cached_prompt_tokens == len(prompt)

    model = policy.sync("b")

    for prompt in prompts:
        after = engine.submit(ask(prompt, prompt_logprobs=True)).result()
        assert after.cached_prompt_tokens == 0
        assert matches(model, after, prompt)
        scores = plain_logprobs(model, prompt)
        assert after.prompt_logprobs[1:] == pytest.approx(scores, abs=1e-5)


def test_a_delta_amid_generation_mixes_nothing(policy, engine, matches):
    models = {1: policy.sync("a")}
    early = [engine.submit(ask([index], seed=index, max_tokens=80)) for index in range(20)]
    while engine.stats().steps < 5:
        time.sleep(0.001)

    models[2] = policy.sync("b")
    late = [engine.submit(ask([index], seed=index, max_tokens=80)) for index in range(20)]

    for futures, version in ((early, 1), (late, 2)):
        for index, future in enumerate(futures):
            assert future.result().weight_version == version
            assert matches(models[version], future.result(), [index])


def test_a_delta_on_something_else_is_made_whole_from_its_store(policy, engine, matches):
    for identity in ("a", "b"):
        policy.save(identity)
    model = policy.save("c")

    first = policy.serve("c")
    sampled = engine.submit(ask()).result()

    assert (first.stage, first.error, first.weight_version) == ("done", None, 1)
    assert matches(model, sampled)


def test_a_delta_after_an_adapter_is_made_whole(policy, engine, trained, matches):
    policy.sync("a")
    engine.load_snapshot(trained("lora", lora=LoraOptions(rank=2))[1]).result()
    model = policy.save("b")

    state = policy.serve("b")

    assert (state.stage, state.is_adapter) == ("done", False)
    assert matches(model, engine.submit(ask()).result())


def test_deltas_of_another_dtype_than_the_served_one_are_made_whole(start, load, folder):
    served = load(dtype=torch.bfloat16)
    policy = Policy(load(), folder, start(served))

    for identity in ("a", "b"):
        model = policy.save(identity)
        assert policy.serve(identity).error is None

    expected = base_tensors(model.module)
    assert all(
        torch.equal(tensor, expected[name].bfloat16())
        for name, tensor in base_tensors(served.module).items()
    )


def test_two_deltas_in_a_row_are_taken_in_their_order(policy, engine, root, matches, folder):
    policy.sync("a")
    running = engine.submit(ask(max_tokens=200))
    policy.save("b")
    model = policy.save("c")
    shutil.rmtree(root / "a")

    futures = [engine.hot_load(name, partial(folder.get, name)) for name in ("b", "c")]

    assert [future.result(timeout=30).weight_version for future in futures] == [2, 3]
    assert running.result().weight_version == 1
    assert matches(model, engine.submit(ask()).result())


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
    policy, engine, root, damage, message, matches
):
    model = policy.sync("a")
    before = engine.submit(ask()).result()
    policy.save("b")
    damage(root / "b" / "weights.safetensors")

    state = policy.serve("b")

    assert (state.stage, state.current_identity, state.weight_version) == ("error", "a", 1)
    assert re.search(message, state.error)
    after = engine.submit(ask()).result()
    assert (after.token_ids, after.logprobs) == (before.token_ids, before.logprobs)
    assert matches(model, after)

    mended = policy.save("c", "base")
    assert policy.serve("c").weight_version == 2
    assert matches(mended, engine.submit(ask()).result())


def test_a_broken_chain_is_refused_with_what_was_expected_and_found(policy, engine, root, matches):
    model = policy.sync("a")
    policy.save("b")
    policy.save("c")
    shutil.rmtree(root / "b")

    state = policy.serve("c")

    assert (state.stage, state.current_identity) == ("error", "a")
    assert "expected parent 'b', found 'a'" in state.error
    assert "expected 'b', found ['a', 'c']" in state.error
    assert matches(model, engine.submit(ask()).result())


def test_a_delta_at_hand_without_a_store_needs_its_parent_served(policy, engine, folder):
    policy.save("a")
    policy.save("b")
    alone = replace(folder.get("b"), source=None)

    refused = engine.load_snapshot(alone).result()
    policy.serve("a")
    taken = engine.load_snapshot(alone).result()

    assert refused.error == (
        "delta 'b' must go on top of what is served: expected parent 'a', found None"
    )
    assert (taken.stage, taken.current_identity) == ("done", "b")


def test_a_parent_served_under_its_name_with_other_weights_is_refused(policy, engine, load):
    engine.load_snapshot(replace(trained_snapshot(load), identity="a")).result()
    policy.save("a")
    policy.save("b")

    state = policy.serve("b")

    assert (state.stage, state.current_identity) == ("error", "a")
    assert re.search("must be that of snapshot 'b' once 'a' has the delta applied", state.error)


def trained_snapshot(load):
    tensors = {name: tensor + 1 for name, tensor in base_tensors(load().module).items()}
    return Snapshot.capture("other", "base", "qwen", tensors)


@pytest.mark.parametrize("kind", ["base", "delta", "lora"])
def test_a_snapshot_of_another_base_model_is_refused_with_both_names(policy, engine, trained, kind):
    if kind == "lora":
        adapter = trained("x", lora=LoraOptions(rank=2))[1]
        state = engine.load_snapshot(replace(adapter, base_model="huge")).result()
    else:
        for identity in ("w", "x") if kind == "delta" else ("x",):
            policy.save(identity, base_model="huge")
        state = policy.serve("x")

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
