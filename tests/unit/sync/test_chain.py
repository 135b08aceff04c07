"""A chain leads to the exact weights, or says which link is wrong, what it wanted and found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.unit.tiny import checksum

from hearth.errors import EngineError, NotFoundError, RequestError
from hearth.sync.chain import Published, apply_verified, resolve
from hearth.sync.manifest import fingerprints
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, Snapshot, SnapshotStore

Tensors = dict[str, torch.Tensor]


class Trainer:
    """Some weights, a step that moves a few of their bits, and what was published of them."""

    def __init__(self, store: SnapshotStore) -> None:
        self.store = store
        self.published = Published()
        generator = torch.Generator().manual_seed(0)
        self.weights: Tensors = {
            "embed": torch.randn(64, 32, generator=generator).bfloat16(),
            "layer": torch.randn(32, 32, generator=generator).bfloat16(),
            "norm": torch.ones(32).bfloat16(),
        }
        self.history: dict[str, Tensors] = {}

    def step(self) -> None:
        self.weights["embed"].view(-1)[:: 37 + len(self.history)] *= 1.0078125
        self.weights["layer"][1, len(self.history) % 32] += 1

    def save(self, identity: str, *, delta: bool = True) -> None:
        self.published.publish(
            self.store, identity, "tiny", self.weights, {"step": len(self.history)}, as_delta=delta
        )
        self.history[identity] = {name: tensor.clone() for name, tensor in self.weights.items()}

    def run(self, *identities: str) -> None:
        for identity in identities:
            self.save(identity)
            self.step()


def same(found: Any, expected: Tensors) -> bool:
    return found.keys() == expected.keys() and all(
        checksum(found[name]) == checksum(tensor) for name, tensor in expected.items()
    )


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> SnapshotStore:
    return MemorySnapshotStore(9) if request.param == "memory" else FolderSnapshotStore(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> FolderSnapshotStore:
    return FolderSnapshotStore(tmp_path)


def kinds(store: SnapshotStore) -> list[str]:
    return [store.get(name).kind for name in store.names()]


def edit(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps(manifest | changes))


def test_every_link_of_a_chain_is_the_weights_of_its_moment(store: SnapshotStore) -> None:
    trainer = Trainer(store)

    trainer.run("a", "b", "c", "d")

    assert kinds(store) == ["base", "delta", "delta", "delta"]
    assert [store.get(name).parent for name in "abcd"] == [None, "a", "b", "c"]
    for name in "abcd":
        found = resolve(store, name)
        assert (found.identity, found.kind) == (name, "base")
        assert same(found.tensors, trainer.history[name])


def test_a_delta_leaves_out_what_did_not_change(store: SnapshotStore) -> None:
    trainer = Trainer(store)
    trainer.run("a", "b")

    delta = store.get("b")

    assert {key.split("/")[0] for key in delta.tensors} == {"embed", "layer"}
    base_bytes, delta_bytes = (
        sum(tensor.nbytes for tensor in store.get(name).tensors.values()) for name in "ab"
    )
    assert delta_bytes * 10 < base_bytes


def test_weights_that_did_not_change_make_an_empty_delta(store: SnapshotStore) -> None:
    trainer = Trainer(store)
    trainer.save("a")
    trainer.save("b")

    assert store.get("b").tensors == {}
    assert same(resolve(store, "b").tensors, trainer.history["a"])


def test_in_memory_a_trainer_and_a_deployment_share_one_copy() -> None:
    trainer = Trainer(MemorySnapshotStore())
    trainer.run("a", "b")

    first, second = (trainer.store.get(name).weights for name in "ab")

    assert first is not None
    assert second is not None
    assert second["norm"] is first["norm"]
    assert second["embed"] is not first["embed"]
    assert resolve(trainer.store, "b").tensors["embed"] is second["embed"]
    assert second["embed"].data_ptr() != trainer.weights["embed"].data_ptr()


def test_a_delta_says_what_it_leads_to_and_from_where(folder: FolderSnapshotStore) -> None:
    trainer = Trainer(folder)
    trainer.run("a", "b")

    delta, base = folder.get("b"), folder.get("a")

    assert delta.entries is not None
    assert base.entries is not None
    assert delta.entries == fingerprints(trainer.history["b"])
    assert delta.entries["norm"] == base.entries["norm"]
    assert delta.metadata == {"step": 1}


@pytest.mark.parametrize("as_delta", [True, False])
def test_without_a_previous_snapshot_there_is_a_base(store: SnapshotStore, as_delta: bool) -> None:
    trainer = Trainer(store)

    trainer.save("a", delta=as_delta)

    assert store.get("a").kind == "base"


def test_after_forgetting_the_next_one_is_a_base(store: SnapshotStore) -> None:
    trainer = Trainer(store)
    trainer.run("a", "b")

    trainer.published.forget()
    trainer.run("c", "d")

    assert kinds(store) == ["base", "delta", "base", "delta"]
    assert same(resolve(store, "d").tensors, trainer.history["d"])


def test_a_base_that_is_asked_for_begins_a_new_chain(store: SnapshotStore) -> None:
    trainer = Trainer(store)
    trainer.run("a", "b")
    trainer.save("c", delta=False)
    trainer.step()
    trainer.save("d")

    assert kinds(store) == ["base", "delta", "base", "delta"]
    assert store.get("d").parent == "c"


def test_a_save_that_fails_is_followed_by_a_base(folder: FolderSnapshotStore) -> None:
    trainer = Trainer(folder)
    trainer.run("a", "b")

    with pytest.raises(RequestError, match="must be new, got 'a'"):
        trainer.save("a")
    trainer.run("c")

    assert folder.get("c").kind == "base"
    assert same(resolve(folder, "c").tensors, trainer.history["c"])


def test_a_parent_that_the_store_has_dropped_is_followed_by_a_base(
    folder: FolderSnapshotStore, tmp_path: Path
) -> None:
    trainer = Trainer(folder)
    trainer.run("a", "b")
    shutil.rmtree(tmp_path / "b")

    trainer.run("c")

    assert folder.get("c").kind == "base"


def test_weights_of_another_shape_are_followed_by_a_base(store: SnapshotStore) -> None:
    trainer = Trainer(store)
    trainer.run("a")
    trainer.weights["norm"] = torch.ones(40).bfloat16()

    trainer.run("b")

    assert store.get("b").kind == "base"


def test_saving_twice_changes_nothing_and_the_chain_goes_on(store: SnapshotStore) -> None:
    trainer = Trainer(store)
    trainer.run("a")
    trainer.save("b")
    trainer.save("b")
    trainer.step()
    trainer.save("c")

    assert store.names() == ["a", "b", "c"]
    assert [store.get(name).parent for name in "bc"] == ["a", "b"]
    assert same(resolve(store, "c").tensors, trainer.history["c"])


def test_a_chain_ends_before_it_is_long(folder: FolderSnapshotStore) -> None:
    trainer = Trainer(folder)

    trainer.run(*(f"s{number}" for number in range(70)))

    kinds = [folder.get(name).kind for name in trainer.history]
    assert kinds == ["base", *["delta"] * 64, "base", *["delta"] * 4]


def test_a_chain_of_large_deltas_ends_early(folder: FolderSnapshotStore) -> None:
    trainer = Trainer(folder)
    for number in range(6):
        trainer.save(f"s{number}")
        trainer.weights = {name: tensor + 1 for name, tensor in trainer.weights.items()}

    kinds = [folder.get(name).kind for name in trainer.history]
    # Two deltas of a base's size each.
    assert kinds == ["base", "delta", "delta", "base", "delta", "delta"]


def test_a_missing_base_is_named_with_what_is_there(
    folder: FolderSnapshotStore, tmp_path: Path
) -> None:
    Trainer(folder).run("a", "b", "c")
    shutil.rmtree(tmp_path / "a")

    with pytest.raises(
        EngineError, match=r"delta 'b' must follow its parent: expected 'a', found \['b', 'c'\]"
    ):
        resolve(folder, "c")


def test_a_missing_top_is_not_found(store: SnapshotStore) -> None:
    with pytest.raises(NotFoundError, match="got 'gone'"):
        resolve(store, "gone")


def test_a_truncated_link_is_named_with_both_sizes(
    folder: FolderSnapshotStore, tmp_path: Path
) -> None:
    Trainer(folder).run("a", "b", "c")
    path = tmp_path / "b" / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])

    with pytest.raises(EngineError) as caught:
        resolve(folder, "c")

    message = str(caught.value)
    expected = sum(tensor.nbytes for tensor in resolved_parts(tmp_path, whole).values())
    assert "delta 'c' must follow its parent 'b': b/weights.safetensors" in message
    assert f"hold {expected} bytes of tensors, got {len(whole) - 3} bytes" in message


def resolved_parts(tmp_path: Path, whole: bytes) -> Tensors:
    from safetensors.torch import load

    return load(whole)


def test_a_parent_with_other_weights_is_named_with_both_digests(
    folder: FolderSnapshotStore, tmp_path: Path
) -> None:
    Trainer(folder).run("a", "b")
    shutil.rmtree(tmp_path / "a")
    other = Trainer(folder)
    other.step()
    other.run("a")

    with pytest.raises(
        EngineError,
        match=r"'b' must go on top of the weights of 'a': expected "
        r"blake2b:\w+, found blake2b:\w+",
    ):
        resolve(folder, "b")


def test_weights_that_differ_from_the_manifest_are_refused(
    folder: FolderSnapshotStore, tmp_path: Path
) -> None:
    Trainer(folder).run("a", "b")
    entries = dict(folder.get("b").entries or {})
    wrong = entries["layer"] | {"checksum": "blake2b:00"}
    edit(tmp_path / "b", weights={**entries, "layer": wrong})

    with pytest.raises(
        EngineError,
        match=r"tensor 'layer' must be that of snapshot 'b' once 'a' "
        r".*expected .*blake2b:00.*found",
    ):
        resolve(folder, "b")


def test_links_that_go_in_a_circle_are_refused(folder: FolderSnapshotStore, tmp_path: Path) -> None:
    Trainer(folder).run("a", "b", "c")
    edit(tmp_path / "b", parent="c", parent_digest=None)

    with pytest.raises(EngineError, match="must end in a base, got 'c' as the parent of 'b'"):
        resolve(folder, "c")


def test_a_parent_of_another_model_is_refused_with_both_names(
    folder: FolderSnapshotStore, tmp_path: Path
) -> None:
    Trainer(folder).run("a", "b")
    edit(tmp_path / "a", base_model="huge")

    with pytest.raises(EngineError, match="weights of 'tiny', got 'a': base of 'huge'"):
        resolve(folder, "b")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_delta_on_served_weights_makes_only_what_changed(
    folder: FolderSnapshotStore, is_known: bool
) -> None:
    trainer = Trainer(folder)
    trainer.run("a", "b")
    base = folder.get("a")

    fresh = apply_verified(folder.get("b"), base.tensors, base.entries if is_known else None)

    assert fresh.keys() == {"embed", "layer"}
    assert same({**base.tensors, **fresh}, trainer.history["b"])
    assert same(base.tensors, trainer.history["a"])


@pytest.mark.parametrize("tensor", ["layer", "norm"])
def test_a_delta_on_other_weights_than_its_parents_is_refused(
    folder: FolderSnapshotStore, tensor: str
) -> None:
    Trainer(folder).run("a", "b")
    served = {name: tensor.clone() for name, tensor in folder.get("a").tensors.items()}
    served[tensor].view(-1)[-1] += 1

    with pytest.raises(EngineError, match=f"tensor '{tensor}' must be that of snapshot 'b'"):
        apply_verified(folder.get("b"), served, None)


def test_a_delta_without_its_whole_weights_needs_its_parent_in_memory(
    folder: FolderSnapshotStore,
) -> None:
    trainer = Trainer(folder)
    trainer.run("a", "b")
    memory = MemorySnapshotStore()

    with pytest.raises(EngineError, match=r"expected 'a', found \[\]"):
        memory.put(folder.get("b"))
    memory.put(folder.get("a"))
    memory.put(folder.get("b"))

    assert same(resolve(memory, "b").tensors, trainer.history["b"])


def test_memory_that_drops_a_parent_still_has_the_delta(tmp_path: Path) -> None:
    trainer = Trainer(MemorySnapshotStore(keep=1))

    trainer.run("a", "b", "c")

    assert trainer.store.names() == ["c"]
    assert trainer.store.get("c").kind == "delta"
    assert same(resolve(trainer.store, "c").tensors, trainer.history["c"])


def test_a_chain_can_be_copied_from_folder_to_folder(
    folder: FolderSnapshotStore, tmp_path: Path
) -> None:
    trainer = Trainer(folder)
    trainer.run("a", "b")
    copy = FolderSnapshotStore(tmp_path / "copy")

    with pytest.raises(EngineError, match=r"delta 'b' must follow its parent: expected 'a'"):
        copy.put(folder.get("b"))
    copy.put(folder.get("a"))
    copy.put(folder.get("b"))

    assert same(resolve(copy, "b").tensors, trainer.history["b"])


def test_keeping_two_keeps_the_chains_of_two(tmp_path: Path) -> None:
    trainer = Trainer(FolderSnapshotStore(tmp_path, keep=2))

    trainer.run("a", "b", "c")
    assert trainer.store.names() == ["a", "b", "c"]
    trainer.save("d", delta=False)
    assert trainer.store.names() == ["a", "b", "c", "d"]
    trainer.save("e", delta=False)

    assert trainer.store.names() == ["d", "e"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d", "e"]
    assert same(resolve(trainer.store, "e").tensors, trainer.history["e"])


def test_an_adapter_is_no_part_of_a_chain(folder: FolderSnapshotStore, tmp_path: Path) -> None:
    folder.put(Snapshot.capture("a", "lora", "tiny", {"x": torch.ones(2)}, {"lora": {"rank": 2}}))

    found = resolve(folder, "a")

    assert (found.kind, found.metadata["lora"]) == ("lora", {"rank": 2})
