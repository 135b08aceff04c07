from __future__ import annotations

import json
import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.unit.moe import write_moe
from tests.unit.tiny import checksum
from tests.unit.trainer.conftest import MakePolicy, Policy
from transformers import AutoModelForCausalLM

from hearth.errors import ConfigError, EngineError, NotFoundError, NumericsError, RequestError
from hearth.models.loading import load_model
from hearth.models.lora import LoraOptions, attach_lora, load_adapter_tensors, write_adapter
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, Snapshot, SnapshotStore
from hearth.trainer.checkpoint import MAX_METADATA_BYTES
from hearth.trainer.passes import PassResult
from hearth.wire.tinker import AdamParams

pytestmark = pytest.mark.slow

STEP = AdamParams(learning_rate=1e-2, weight_decay=0.01, grad_clip_norm=1.0)
LORA = LoraOptions(rank=4, alpha=8, seed=1)


def train(policy: Policy, data: Any, steps: int = 1) -> None:
    for _ in range(steps):
        policy.forward_backward(data)
        policy.optim_step(STEP, "num_loss_tokens")


def held(root: Path, name: str) -> dict[str, str]:
    """Checksums of a checkpoint's tensors, weights and optimizer: equal ones have the same bits."""
    files = (root / "checkpoints" / name / "data").glob("*.safetensors")
    return {key: checksum(tensor) for file in files for key, tensor in load_file(file).items()}


def flat(result: PassResult) -> np.ndarray:
    return np.concatenate([logprob.ravel() for logprob in result.logprobs])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_training_goes_on_bit_for_bit_from_a_checkpoint(
    make_policy: MakePolicy, random_data: Any, tmp_path: Path, lora: LoraOptions | None, dtype: str
) -> None:
    data = random_data(count=6)
    first, second = make_policy(lora, dtype=dtype), make_policy(lora, dtype=dtype)
    train(first, data, steps=3)
    first.save_state("step-3")
    train(first, data, steps=2)

    second.load_state("step-3", with_optimizer=True)
    train(second, data, steps=2)

    assert np.array_equal(flat(first.forward(data)), flat(second.forward(data)))
    first.save_state("unbroken")
    second.save_state("resumed")
    assert held(tmp_path, "resumed") == held(tmp_path, "unbroken")
    assert held(tmp_path, "resumed").keys() == held(tmp_path, "step-3").keys()
    assert len([key for key in held(tmp_path, "step-3") if key.startswith("weights/")]) >= 20
    second.forward_backward(data)
    assert second.optim_step(STEP)["step"] == 6


def test_without_its_optimizer_a_checkpoint_starts_a_fresh_one(
    make_policy: MakePolicy, random_data: Any
) -> None:
    data = random_data(count=6)
    first, second = make_policy(), make_policy()
    train(first, data, steps=3)
    first.save_state("step-3")

    second.load_state("step-3", with_optimizer=False)

    assert np.array_equal(flat(first.forward(data)), flat(second.forward(data)))
    train(first, data)
    train(second, data)
    assert not np.array_equal(flat(first.forward(data)), flat(second.forward(data)))


def test_loading_drops_the_accumulated_gradient(policy: Policy, random_data: Any) -> None:
    data = random_data(count=4)
    policy.save_state("start")
    policy.forward_backward(data)

    policy.load_state("start", with_optimizer=True)

    assert policy.optim_step(STEP)["skipped"] == 1


def test_checkpoints_are_listed_in_the_order_of_saving(policy: Policy) -> None:
    for name in ("step-2", "step-1", "last"):
        policy.save_state(name)

    assert policy.engine.list_checkpoints() == ["step-2", "step-1", "last"]


def test_a_taken_name_is_refused_unless_it_is_to_be_overwritten(
    policy: Policy, random_data: Any
) -> None:
    data = random_data(count=4)
    policy.save_state("last")
    train(policy, data)
    trained = flat(policy.forward(data))

    with pytest.raises(RequestError, match="name must be new, got 'last'"):
        policy.save_state("last")
    policy.save_state("last", overwrite=True)
    train(policy, data)
    policy.load_state("last", with_optimizer=True)

    assert np.array_equal(flat(policy.forward(data)), trained)


@pytest.mark.parametrize("name", ["../out", "a/b", "", ".hidden", "Step-1"])
def test_a_checkpoints_name_cannot_leave_its_folder(policy: Policy, name: str) -> None:
    with pytest.raises(RequestError, match="path must be 1 to 128 of a-z"):
        policy.save_state(name)
    with pytest.raises(RequestError, match="path must be 1 to 128 of a-z"):
        policy.load_state(name, with_optimizer=True)


def test_an_unknown_checkpoint_lists_the_known_ones(policy: Policy) -> None:
    policy.save_state("known")

    with pytest.raises(NotFoundError, match=r"one of \['known'\], got 'other'"):
        policy.load_state("other", with_optimizer=True)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotStore:
    if request.param == "memory":
        return MemorySnapshotStore()
    return FolderSnapshotStore(tmp_path / "snap")


@pytest.mark.parametrize("path", ["step-1-ab", "cross_job://me/step-1-ab"])
def test_a_sampler_snapshot_is_not_a_resumable_checkpoint(
    make_policy: MakePolicy, store: SnapshotStore, path: str
) -> None:
    policy = make_policy(snapshots=store, folder="jobs/me")
    policy.save_for_sampler("step-1-ab")
    policy.save_state("step-1")

    message = (
        r"must name a resumable checkpoint, got the sampler snapshot 'step-1-ab'.*\['step-1'\]"
    )
    with pytest.raises(RequestError, match=message):
        policy.load_state(path, with_optimizer=True)


def test_a_checkpoint_of_another_adapter_is_refused(
    policy: Policy, make_policy: MakePolicy
) -> None:
    make_policy(LORA).save_state("lora")

    with pytest.raises(RequestError, match="checkpoint 'lora' must be of 'tiny'"):
        policy.load_state("lora", with_optimizer=True)


def test_a_checkpoint_of_another_shape_is_refused(
    policy: Policy, make_policy: MakePolicy, model_of: Any, data: Any
) -> None:
    make_policy(source=model_of("gpt2")).save_state("gpt2")
    before = flat(policy.forward(data))

    with pytest.raises(RequestError, match="checkpoint 'gpt2' must fit model policy-1"):
        policy.load_state("gpt2", with_optimizer=True)
    assert np.array_equal(flat(policy.forward(data)), before)


def damage(path: Path, how: str) -> None:
    content = bytearray(path.read_bytes())
    if how == "changed":
        content[-1] ^= 1
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[:-1])
    else:
        path.unlink()


@pytest.mark.parametrize(
    ("how", "found"),
    [
        ("changed", "got {size} bytes, blake2b:"),
        ("truncated", "got {less} bytes"),
        ("gone", "got no file"),
    ],
)
def test_a_damaged_file_is_found_and_named_and_the_model_stays(
    policy: Policy, tmp_path: Path, random_data: Any, how: str, found: str
) -> None:
    data = random_data(count=3)
    policy.save_state("s")
    train(policy, data)
    before = flat(policy.forward(data))
    folder = tmp_path / "checkpoints" / "s"
    manifest = json.loads((folder / "manifest.json").read_text())
    described = manifest["files"]["model-00001-of-00001.safetensors"]
    damage(folder / "data" / "model-00001-of-00001.safetensors", how)

    size, checksum = described["bytes"], described["checksum"]
    expected = f"data/model-00001-of-00001.safetensors must have {size} bytes, {checksum}"
    found = found.format(size=size, less=size - 1)
    with pytest.raises(EngineError, match=f"{expected}, {found}"):
        policy.load_state("s", with_optimizer=True)
    assert np.array_equal(flat(policy.forward(data)), before)


def test_a_file_that_no_manifest_names_is_not_read(policy: Policy, tmp_path: Path) -> None:
    policy.save_state("s")
    data = tmp_path / "checkpoints" / "s" / "data"
    (data / "more.safetensors").write_bytes(next(data.glob("*.safetensors")).read_bytes())

    with pytest.raises(EngineError, match=r"files of its manifest, got \['more.safetensors'\]"):
        policy.load_state("s", with_optimizer=True)


def test_a_changed_manifest_is_found(policy: Policy, tmp_path: Path) -> None:
    policy.save_state("s")
    path = tmp_path / "checkpoints" / "s" / "manifest.json"
    path.write_text(path.read_text().replace('"steps": 0', '"steps": 7'))

    with pytest.raises(EngineError, match=r"s/manifest\.json must match its own checksum"):
        policy.load_state("s", with_optimizer=True)
    path.write_text("{")
    with pytest.raises(EngineError, match="'s' must have a readable manifest"):
        policy.load_state("s", with_optimizer=True)


def test_a_checkpoint_holds_no_pickle(policy: Policy, tmp_path: Path) -> None:
    policy.save_state("s")

    folder = tmp_path / "checkpoints" / "s"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    assert files == [
        "data/model-00001-of-00001.safetensors",
        "data/model.safetensors.index.json",
        "manifest.json",
    ]


class Bomb:
    """Fails whoever unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("a pickle was read",)


OPENED: list[str] | None = None


def _note_opened(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and OPENED is not None:
        OPENED.append(str(arguments[0]))


sys.addaudithook(_note_opened)  # for good: hooks cannot be taken back


def test_no_pickle_is_read_and_a_planted_one_is_never_opened(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        pytest.fail("a pickle was read")

    policy.save_state("s")
    folder = tmp_path / "checkpoints" / "s"
    for planted in (folder / ".metadata", folder / "data" / ".metadata"):
        planted.write_bytes(pickle.dumps(Bomb()))
    for module, name in (
        (pickle, "load"),
        (pickle, "loads"),
        (pickle, "Unpickler"),
        (pickle, "_Unpickler"),
        (torch, "load"),
    ):
        monkeypatch.setattr(module, name, refuse)
    opened: list[str] = []
    # This file's own list, which an audit hook fills: a hook cannot be removed again.
    monkeypatch.setattr(sys.modules[__name__], "OPENED", opened)

    policy.load_state("s", with_optimizer=True)

    assert str(folder / "manifest.json") in opened
    assert not [path for path in opened if path.endswith(".metadata")]


def test_the_rng_is_restored_with_the_optimizer_and_only_then(policy: Policy) -> None:
    torch.manual_seed(7)
    policy.save_state("s")
    expected = torch.rand(4)

    torch.manual_seed(8)
    policy.load_state("s", with_optimizer=False)
    assert not torch.equal(torch.rand(4), expected)
    policy.load_state("s", with_optimizer=True)
    assert torch.equal(torch.rand(4), expected)


def test_a_checkpoints_facts_are_read_without_its_tensors(
    make_policy: MakePolicy, tmp_path: Path, random_data: Any
) -> None:
    policy = make_policy(LORA)
    train(policy, random_data(count=3), steps=2)
    metadata = {"cursor": 9, "version": 4, "config": {"lr": 1e-5, "names": ("a", "b")}, 1: None}
    before = time.time()
    policy.save_state("s", metadata=metadata, seq_id=5)
    for path in (tmp_path / "checkpoints" / "s" / "data").iterdir():
        path.unlink()

    facts = policy.engine.read_checkpoint_facts("s")

    assert (facts.base_model, facts.lora, facts.steps, facts.seq_id) == ("tiny", LORA, 2, 5)
    assert before <= facts.created_s <= time.time()
    assert facts.metadata == {
        "cursor": 9,
        "version": 4,
        "config": {"lr": 1e-5, "names": ["a", "b"]},
        "1": None,
    }


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"big": "x" * MAX_METADATA_BYTES}, "metadata must be at most 1048576 bytes, got 104858"),
        ({"odd": object()}, "metadata must be JSON values, got Object of type object"),
        ({"odd": float("nan")}, "metadata must be JSON values, got Out of range float"),
    ],
)
def test_metadata_that_a_manifest_cannot_hold_are_refused(
    policy: Policy, metadata: dict[str, Any], message: str
) -> None:
    policy.save_state("s", metadata={"kept": True})

    with pytest.raises(RequestError, match=message):
        policy.save_state("s", overwrite=True, metadata=metadata)
    assert policy.engine.read_checkpoint_facts("s").metadata == {"kept": True}


def test_only_the_newest_stay_and_the_pinned(make_policy: MakePolicy, tmp_path: Path) -> None:
    policy = make_policy(keep_checkpoints=2)
    for name in ("a", "b", "c", "d"):
        policy.save_state(name, metadata={"pinned": name == "a"})

    assert policy.engine.list_checkpoints() == ["a", "c", "d"]
    policy.save_state("c", overwrite=True)
    policy.save_state("e")
    assert policy.engine.list_checkpoints() == ["a", "c", "e"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["a", "c", "e"]


def test_a_clock_set_back_removes_no_newer_checkpoint(
    make_policy: MakePolicy, tmp_path: Path
) -> None:
    policy = make_policy(keep_checkpoints=2)
    for age, name in enumerate(("a", "b", "c", "d")):
        policy.save_state(name)
        moment = 2_000_000_000 - age * 3600
        os.utime(tmp_path / "checkpoints" / name / "manifest.json", (moment, moment))

    assert policy.engine.list_checkpoints() == ["c", "d"]
    policy.save_state("c", overwrite=True)
    assert policy.engine.list_checkpoints() == ["d", "c"]


def test_a_trainer_keeps_one_checkpoint_at_least(make_engine: Any) -> None:
    with pytest.raises(ConfigError, match="keep_checkpoints must be >= 1 or None, got 0"):
        make_engine(keep_checkpoints=0)


def test_another_jobs_checkpoint_goes_by_its_job(make_policy: MakePolicy, random_data: Any) -> None:
    data = random_data(count=3)
    first, second = make_policy(folder="first"), make_policy(folder="second")
    train(first, data, steps=2)
    first.save_state("step-2")

    path = "cross_job://first/step-2"
    assert second.load_state(path, with_optimizer=True) == path
    assert np.array_equal(flat(second.forward(data)), flat(first.forward(data)))
    with pytest.raises(NotFoundError, match=r"one of \['step-2'\], got 'step-9'"):
        second.load_state("cross_job://first/step-9", with_optimizer=True)
    with pytest.raises(NotFoundError, match=r"one of \[\], got 'step-2'"):
        second.load_state("cross_job://absent/step-2", with_optimizer=True)


@pytest.mark.parametrize(
    "path",
    [
        "cross_job://../first/step-2",
        "cross_job://first/../step-2",
        "cross_job://first",
        "cross_job:///step-2",
        "cross_job://first/",
        "cross_job://.././step-2",
        "cross_job://first/a/b",
        "cross_job://%2e%2e/step-2",
        "tinker://first/step-2",
        "/tmp/step-2",
        "cross_job://first\\..\\x/step-2",
    ],
)
def test_no_reference_can_leave_the_folder_of_jobs(policy: Policy, path: str) -> None:
    policy.save_state("step-2")

    with pytest.raises(RequestError, match=r"path('s job|'s name)? must be 1 to 128 of a-z"):
        policy.load_state(path, with_optimizer=True)


def test_a_folder_of_another_format_is_no_checkpoint(policy: Policy, tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "old").mkdir(parents=True)
    manifest = {"format": "hearth-checkpoint-1", "files": {}}
    (tmp_path / "checkpoints" / "old" / "manifest.json").write_text(json.dumps(manifest))

    with pytest.raises(RequestError, match="got 'old', which is 'hearth-checkpoint-1'"):
        policy.load_state("old", with_optimizer=True)


def test_model_ids_differ_between_processes(make_policy: MakePolicy) -> None:
    before, after = make_policy(), make_policy()  # each counts for itself, as a new process does

    assert before.model_id != after.model_id
    with pytest.raises(NotFoundError, match="the trainer may have been restarted"):
        after.engine.save_state(before.model_id, "s")


def test_a_snapshot_keeps_the_weights_of_its_moment(
    make_policy: MakePolicy, store: SnapshotStore, qwen_folder: Path, random_data: Any
) -> None:
    policy, data = make_policy(snapshots=store), random_data(count=4)
    train(policy, data)
    module = load_model(qwen_folder).module
    assert policy.save_for_sampler("step-1", metadata={"reward": 0.5}) == "step-1"
    taken = {name: tensor.clone() for name, tensor in store.get("step-1").tensors.items()}
    train(policy, data)

    found = store.get("step-1")
    assert (found.kind, found.base_model) == ("base", "tiny")
    assert found.metadata == {"step": 1, "user": {"reward": 0.5}}
    assert all(torch.equal(found.tensors[name], tensor) for name, tensor in taken.items())
    assert not torch.equal(found.tensors["model.norm.weight"], module.model.norm.weight)


def export_merged(
    make_policy: MakePolicy, data: Any, folder: Path, kind: str = "base"
) -> tuple[Snapshot, Any]:
    """A trained adapter's snapshot of a kind, and the model with the adapter merged into it."""
    store = MemorySnapshotStore()
    policy = make_policy(LORA, snapshots=store)
    train(policy, data)
    policy.save_for_sampler("step-1", kind)
    policy.export(folder / "merged")
    return store.get("step-1"), AutoModelForCausalLM.from_pretrained(folder / "merged").eval()


@pytest.mark.parametrize("lora", [None, LoraOptions(rank=2)], ids=["full", "lora"])
def test_weights_that_are_not_finite_are_never_published(
    make_policy: MakePolicy, store: SnapshotStore, random_data: Any, lora: LoraOptions | None
) -> None:
    policy, data = make_policy(snapshots=store, lora=lora), random_data(count=4)
    policy.save_state("good")
    policy.save_for_sampler("good")
    policy.forward_backward(data, "cross_entropy")
    policy.optim_step(AdamParams(learning_rate=1e38, weight_decay=10.0))

    with pytest.raises(
        NumericsError, match=r"weights of snapshot 'bad' must be finite, got \d+ of \d+ values of '"
    ):
        policy.save_for_sampler("bad")

    assert store.names() == ["good"]
    policy.load_state("good", with_optimizer=True)
    assert policy.save_for_sampler("bad") == "bad"


def test_a_lora_snapshot_rebuilds_the_policy(
    make_policy: MakePolicy, qwen_folder: Path, tmp_path: Path, data: Any
) -> None:
    snapshot, merged = export_merged(make_policy, data, tmp_path)
    loaded = load_model(qwen_folder)
    attach_lora(loaded, LoraOptions.from_metadata(snapshot.metadata))
    load_adapter_tensors(loaded, snapshot.tensors)

    assert snapshot.kind == "lora"
    assert all(name.startswith("base_model.model.") for name in snapshot.tensors)
    ids = torch.tensor([[5, 6, 7, 8] * 8])
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(ids).logits, merged(ids).logits, rtol=0, atol=1e-4)


def test_a_merged_snapshot_is_a_whole_model(
    make_policy: MakePolicy, tmp_path: Path, data: Any
) -> None:
    snapshot, module = export_merged(make_policy, data, tmp_path, "merged_base")

    merged = module.state_dict()
    assert snapshot.kind == "base"
    assert all(torch.equal(merged[name], tensor) for name, tensor in snapshot.tensors.items())


def test_a_tied_head_with_an_adapter_cannot_be_merged_into_a_snapshot(
    make_policy: MakePolicy,
) -> None:
    policy = make_policy(LoraOptions(rank=2, train_unembed=True))

    with pytest.raises(RequestError, match="merging would untie it"):
        policy.save_for_sampler("whole", "merged_base")


@pytest.mark.parametrize("has_experts", [False, True])
def test_a_mixtures_adapter_goes_on_with_experts_as_its_checkpoint_has_them_or_not(
    make_policy: MakePolicy, random_data: Any, tmp_path: Path, has_experts: bool
) -> None:
    folder, data = write_moe(tmp_path / "moe", vocab_size=96), random_data(count=4)
    first = make_policy(replace(LORA, train_experts=has_experts), source=folder)
    second = make_policy(replace(LORA, train_experts=not has_experts), source=folder)
    train(first, data, steps=2)
    train(second, data)
    first.save_state("two")

    second.load_state("two", with_optimizer=True)

    for name, policy in (("first", first), ("second", second)):
        train(policy, data)
        policy.save_state(name)
    found = held(tmp_path, "second")
    assert found == held(tmp_path, "first")
    assert any("experts" in name for name in found) == has_experts


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_a_peft_adapter_is_taken_up(
    make_policy: MakePolicy, qwen_folder: Path, tmp_path: Path, random_data: Any
) -> None:
    data = random_data(count=4)
    loaded = load_model(qwen_folder)
    attach_lora(loaded, LORA)
    with torch.no_grad():
        for parameter in loaded.module.parameters():
            if parameter.requires_grad:
                parameter.add_(0.02)
    write_adapter(loaded, tmp_path / "adapter")
    policy = make_policy(LoraOptions(rank=4, alpha=8, seed=77))

    policy.load_adapter(str(tmp_path / "adapter"))

    policy.export(tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    base = AutoModelForCausalLM.from_pretrained(qwen_folder)
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, rtol=0, atol=1e-4)
    train(policy, data)


def test_an_adapter_that_does_not_fit_is_refused(
    make_policy: MakePolicy, qwen_folder: Path, tmp_path: Path
) -> None:
    loaded = load_model(qwen_folder)
    attach_lora(loaded, LORA)
    write_adapter(loaded, tmp_path / "adapter")
    for options, message in (
        (LoraOptions(rank=2, alpha=8), "must fit model"),
        (LoraOptions(rank=4, alpha=16), "must have the model's lora_alpha, 16, got 8"),
        (None, "must run on a LoRA model"),
    ):
        policy = make_policy(options)
        with pytest.raises(RequestError, match=message):
            policy.load_adapter(str(tmp_path / "adapter"))
