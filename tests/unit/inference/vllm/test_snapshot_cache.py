"""What servers load: the shelf that snapshots are put on, and what is read from it."""

from __future__ import annotations

import gc
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.pieces import RankPublisher

from hearth.errors import EngineError
from hearth.inference.vllm.plugin.node_copy import NodeCopies
from hearth.inference.vllm.plugin.source import SnapshotSource, block_of, select_blocks
from hearth.inference.vllm.snapshot_cache import SnapshotCache
from hearth.models.lora import LoraOptions
from hearth.sync.chain import Published
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, Snapshot, SnapshotStore

NAMES = ("model.embed.weight", "model.layers.0.q.weight", "model.layers.1.q.weight")


class Trainer:
    """A trainer of one process, or of so many ranks, which write pieces."""

    def __init__(self, store: SnapshotStore, ranks: int = 1) -> None:
        self.store = store
        self.weights = {name: torch.arange(256.0) + place for place, name in enumerate(NAMES)}
        self._published = Published()
        self._ranks = None
        if isinstance(store, FolderSnapshotStore) and ranks > 1:
            self._ranks = RankPublisher(store, ranks)

    def save(self, identity: str, changed: str | None = None) -> Snapshot:
        if changed is not None:
            self.weights[changed][7] += 1
        as_delta = changed is not None
        if self._ranks is not None:
            self._ranks.publish(identity, self.weights, as_delta=as_delta)
        else:
            self._published.publish(self.store, identity, "m", self.weights, {}, as_delta=as_delta)
        return self.store.get(identity)


@pytest.fixture(params=["memory", "folder", "pieces"])
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Trainer:
    if request.param == "memory":
        return Trainer(MemorySnapshotStore(9))
    ranks = 3 if request.param == "pieces" else 1
    return Trainer(FolderSnapshotStore(tmp_path / "b"), ranks)


@pytest.fixture
def shelf(tmp_path: Path) -> SnapshotCache:
    return SnapshotCache(tmp_path / "shelf")


def remove_tensors(folder: Path) -> None:
    for file in folder.glob("*.safetensors"):
        file.unlink()


def prepare(source: SnapshotSource, root: Path, identity: str) -> None:
    while not source.prepare(root, identity):
        time.sleep(0.001)


def test_a_base_is_read_whole_and_a_delta_as_the_block_that_it_changes(trainer, shelf) -> None:
    source = SnapshotSource()
    shelf.add(trainer.save("base"))
    base = source.take(shelf.root, "base")
    source.note_loaded(base)
    assert set(base.tensors) == set(NAMES)

    for number, changed in enumerate(NAMES):
        shelf.add(trainer.save(f"delta-{number}", changed))
        update = source.take(shelf.root, f"delta-{number}")
        source.note_loaded(update)
        assert set(update.tensors) == {changed}
        assert all(
            torch.equal(tensor, trainer.weights[name])
            for name, tensor in update.copy.tensors.items()
        )
        assert torch.equal(update.tensors[changed], trainer.weights[changed])


def test_a_delta_is_made_whole_where_something_else_was_loaded(trainer, shelf) -> None:
    shelf.add(trainer.save("base"))
    shelf.add(trainer.save("delta", NAMES[1]))
    update = SnapshotSource().take(shelf.root, "delta")

    assert set(update.tensors) == set(NAMES)
    assert all(
        torch.equal(tensor, trainer.weights[name]) for name, tensor in update.tensors.items()
    )


def test_a_damaged_snapshot_is_refused_and_the_next_goes_on_as_before(trainer, shelf) -> None:
    source = SnapshotSource()
    for identity, changed in (("base", None), ("one", NAMES[0])):
        shelf.add(trainer.save(identity, changed))
        source.note_loaded(source.take(shelf.root, identity))
    shelf.add(trainer.save("two", NAMES[1]))
    file = max((shelf.root / "two").glob("*.safetensors"), key=lambda file: file.stat().st_size)
    intact = file.read_bytes()
    file.unlink()
    file.write_bytes(intact[:-1] + bytes([intact[-1] ^ 1]))

    with pytest.raises(EngineError, match="must match its manifest"):
        prepare(source, shelf.root, "two")
    with pytest.raises(EngineError, match="must match its manifest"):
        source.take(shelf.root, "two")

    file.write_bytes(intact)
    assert set(source.take(shelf.root, "two").tensors) == {NAMES[1]}


def test_a_snapshot_is_read_beside_other_work_and_then_only_taken(trainer, shelf) -> None:
    source = SnapshotSource()
    shelf.add(trainer.save("base"))
    prepare(source, shelf.root, "base")
    remove_tensors(shelf.root / "base")

    update = source.take(shelf.root, "base")

    assert all(
        torch.equal(tensor, trainer.weights[name]) for name, tensor in update.tensors.items()
    )
    assert set(update.tensors) == set(NAMES)


def test_one_worker_of_a_machine_reads_and_the_others_have_its_memory(trainer, shelf) -> None:
    first, second = SnapshotSource(), SnapshotSource()
    shelf.add(trainer.save("base"))
    taken = first.take(shelf.root, "base")
    remove_tensors(shelf.root / "base")

    shared = second.take(shelf.root, "base")

    taken.tensors[NAMES[0]][3] = -7.0
    assert shared.tensors[NAMES[0]][3] == -7.0
    first.note_loaded(taken)
    second.note_loaded(shared)
    shelf.add(trainer.save("delta", NAMES[1]))
    del taken, shared
    gc.collect()
    # Neither has kept the base, as no delta came before: its file is needed again.
    with pytest.raises(EngineError, match="no file"):
        first.take(shelf.root, "delta")


def test_a_delta_is_applied_to_the_memory_that_another_worker_has(trainer, shelf) -> None:
    first, second = SnapshotSource(), SnapshotSource()
    shelf.add(trainer.save("base"))
    shelf.add(trainer.save("one", NAMES[0]))
    first.note_loaded(first.take(shelf.root, "one"))
    shelf.add(trainer.save("two", NAMES[1]))
    remove_tensors(shelf.root / "base")

    found = second.take(shelf.root, "two").tensors

    assert all(torch.equal(found[name], trainer.weights[name]) for name in NAMES)


def test_the_memory_of_workers_that_are_gone_is_gone(trainer, shelf) -> None:
    shelf.add(trainer.save("base"))
    entries = FolderSnapshotStore(shelf.root).open("base").entries
    taken = SnapshotSource().take(shelf.root, "base")
    assert NodeCopies(shelf.root).find(entries) is not None

    del taken
    gc.collect()

    assert NodeCopies(shelf.root).find(entries) is None


def test_a_worker_that_is_killed_amid_a_copy_leaves_nothing_that_another_takes(
    trainer, shelf
) -> None:
    shelf.add(trainer.save("base"))
    entries = FolderSnapshotStore(shelf.root).open("base").entries
    child = os.fork()
    if child == 0:
        NodeCopies(shelf.root).find_or_make(
            entries, lambda targets: os.kill(os.getpid(), signal.SIGKILL)
        )
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL

    found = SnapshotSource().take(shelf.root, "base").tensors

    assert all(torch.equal(found[name], trainer.weights[name]) for name in NAMES)


def test_a_name_that_has_other_weights_by_now_is_read_again(tmp_path, shelf) -> None:
    stores = [FolderSnapshotStore(tmp_path / name) for name in "ab"]
    taken = []
    for number, store in enumerate(stores):
        trainer = Trainer(store)
        trainer.weights[NAMES[0]][0] = number
        shelf.add(trainer.save("same"))
        taken.append(SnapshotSource().take(shelf.root, "same"))
        shelf.keep(())

    assert [update.tensors[NAMES[0]][0].item() for update in taken] == [0, 1]


def test_a_bucket_that_drops_what_is_served_does_not_matter(
    tmp_path: Path, shelf: SnapshotCache
) -> None:
    trainer = Trainer(FolderSnapshotStore(tmp_path / "b", keep=1))
    shelf.add(trainer.save("base"))
    trainer.save("other")

    assert trainer.store.names() == ["other"]
    assert set(SnapshotSource().take(shelf.root, "base").tensors) == set(NAMES)


def test_the_files_of_a_bucket_are_linked_not_copied(tmp_path: Path, shelf: SnapshotCache) -> None:
    trainer = Trainer(FolderSnapshotStore(tmp_path / "b"))
    shelf.add(trainer.save("base"))

    paths = [root / "base" / "weights.safetensors" for root in (tmp_path / "b", shelf.root)]
    assert paths[0].stat().st_ino == paths[1].stat().st_ino


def test_a_delta_from_memory_on_what_was_never_here_is_shelved_whole(shelf: SnapshotCache) -> None:
    trainer = Trainer(MemorySnapshotStore(9))
    trainer.save("base")
    shelf.add(trainer.save("delta", NAMES[0]))

    found = SnapshotSource().take(shelf.root, "delta").tensors
    assert all(torch.equal(found[name], trainer.weights[name]) for name in NAMES)


def test_only_what_is_needed_stays(trainer, shelf) -> None:
    shelf.add(trainer.save("old"))
    shelf.add(trainer.save("base"))
    shelf.add(trainer.save("delta", NAMES[0]))
    shelf.keep({"delta"})

    assert sorted(path.name for path in shelf.root.iterdir()) == ["base", "delta"]


def test_an_adapter_stands_as_peft_has_it(shelf: SnapshotCache) -> None:
    tensors = {
        f"base_model.model.model.layers.0.self_attn.{name}.lora_{part}.weight": torch.ones(2, 2)
        for name in ("q_proj", "v_proj")
        for part in "AB"
    }
    options = LoraOptions(rank=2, alpha=4.0)
    found = shelf.add(Snapshot("a", "lora", "m", tensors, options.as_metadata()))

    assert found.adapter is not None
    config = json.loads((found.adapter / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    assert config["target_modules"] == ["q_proj", "v_proj"]
    assert load_file(found.adapter / "adapter_model.safetensors").keys() == tensors.keys()
    shelf.keep(())
    assert not found.adapter.exists()


def test_blocks_hold_what_vllm_packs_together() -> None:
    names = [
        "model.layers.3.self_attn.q_proj.weight",
        "model.layers.3.mlp.experts.7.up.weight",
        "model.layers.30.mlp.up.weight",
        "model.norm.weight",
        "lm_head.weight",
    ]
    assert [block_of(name) for name in names] == [
        "model.layers.3",
        "model.layers.3",
        "model.layers.30",
        "model.norm",
        "lm_head",
    ]
    whole = dict.fromkeys(names, torch.zeros(1))
    assert list(select_blocks(whole, [names[1]])) == names[:2]
