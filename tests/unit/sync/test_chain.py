"""A chain leads to the exact weights, or says which link is wrong, what it wanted and found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load
from tests.unit.tiny import checksum

from hearth.errors import EngineError, NotFoundError, RequestError
from hearth.files import CHECKSUM, seal
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
def any_trainer(store: SnapshotStore) -> Trainer:
    return Trainer(store)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(FolderSnapshotStore(tmp_path))


@pytest.fixture
def folder(tmp_path: Path) -> FolderSnapshotStore:
    return FolderSnapshotStore(tmp_path)


def kinds(store: SnapshotStore) -> list[str]:
    return [store.get(name).kind for name in store.names()]


def edit(path: Path, **changes: Any) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest[CHECKSUM]
    (path / "manifest.json").write_text(json.dumps(seal(manifest | changes)))


def test_every_link_of_a_chain_is_the_weights_of_its_moment(any_trainer: Trainer) -> None:
    any_trainer.run("a", "b", "c", "d")

    assert kinds(any_trainer.store) == ["base", "delta", "delta", "delta"]
    assert [any_trainer.store.get(name).parent for name in "abcd"] == [None, "a", "b", "c"]
    for name in "abcd":
        found = resolve(any_trainer.store, name)
        assert (found.identity, found.kind) == (name, "base")
        assert same(found.tensors, any_trainer.history[name])


def test_a_delta_leaves_out_what_did_not_change(any_trainer: Trainer) -> None:
    any_trainer.run("a", "b")

    delta = any_trainer.store.get("b")

    assert {key.split("/")[0] for key in delta.tensors} == {"embed", "layer"}
    base_bytes, delta_bytes = (
        sum(tensor.nbytes for tensor in any_trainer.store.get(name).tensors.values())
        for name in "ab"
    )
    assert delta_bytes * 10 < base_bytes


def test_weights_that_did_not_change_make_an_empty_delta(any_trainer: Trainer) -> None:
    any_trainer.save("a")
    any_trainer.save("b")

    assert any_trainer.store.get("b").tensors == {}
    assert same(resolve(any_trainer.store, "b").tensors, any_trainer.history["a"])


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


def test_a_delta_says_what_it_leads_to_and_from_where(trainer: Trainer) -> None:
    trainer.run("a", "b")

    delta, base = trainer.store.get("b"), trainer.store.get("a")

    assert delta.entries is not None
    assert base.entries is not None
    assert delta.entries == fingerprints(trainer.history["b"])
    assert delta.entries["norm"] == base.entries["norm"]
    assert delta.metadata == {"step": 1}


@pytest.mark.parametrize("as_delta", [True, False])
def test_without_a_previous_snapshot_there_is_a_base(any_trainer: Trainer, as_delta: bool) -> None:
    any_trainer.save("a", delta=as_delta)

    assert any_trainer.store.get("a").kind == "base"


def test_after_forgetting_the_next_one_is_a_base(any_trainer: Trainer) -> None:
    any_trainer.run("a", "b")

    any_trainer.published.forget()
    any_trainer.run("c", "d")

    assert kinds(any_trainer.store) == ["base", "delta", "base", "delta"]
    assert same(resolve(any_trainer.store, "d").tensors, any_trainer.history["d"])


def test_a_base_that_is_asked_for_begins_a_new_chain(any_trainer: Trainer) -> None:
    any_trainer.run("a", "b")
    any_trainer.save("c", delta=False)
    any_trainer.step()
    any_trainer.save("d")

    assert kinds(any_trainer.store) == ["base", "delta", "base", "delta"]
    assert any_trainer.store.get("d").parent == "c"


def test_a_save_that_fails_is_followed_by_a_base(trainer: Trainer) -> None:
    trainer.run("a", "b")

    with pytest.raises(RequestError, match="must be new, got 'a'"):
        trainer.save("a")
    trainer.run("c")

    assert trainer.store.get("c").kind == "base"
    assert same(resolve(trainer.store, "c").tensors, trainer.history["c"])


def test_a_parent_that_the_store_has_dropped_is_followed_by_a_base(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.run("a", "b")
    shutil.rmtree(tmp_path / "b")

    trainer.run("c")

    assert trainer.store.get("c").kind == "base"


def test_weights_of_another_shape_are_followed_by_a_base(any_trainer: Trainer) -> None:
    any_trainer.run("a")
    any_trainer.weights["norm"] = torch.ones(40).bfloat16()

    any_trainer.run("b")

    assert any_trainer.store.get("b").kind == "base"


def test_saving_twice_changes_nothing_and_the_chain_goes_on(any_trainer: Trainer) -> None:
    any_trainer.run("a")
    any_trainer.save("b")
    any_trainer.save("b")
    any_trainer.step()
    any_trainer.save("c")

    assert any_trainer.store.names() == ["a", "b", "c"]
    assert [any_trainer.store.get(name).parent for name in "bc"] == ["a", "b"]
    assert same(resolve(any_trainer.store, "c").tensors, any_trainer.history["c"])


@pytest.mark.slow
def test_a_chain_ends_before_it_is_long(trainer: Trainer) -> None:
    trainer.run(*(f"s{number}" for number in range(70)))

    kinds = [trainer.store.get(name).kind for name in trainer.history]
    assert kinds == ["base", *["delta"] * 64, "base", *["delta"] * 4]


def test_a_chain_of_large_deltas_ends_early(trainer: Trainer) -> None:
    for number in range(6):
        trainer.save(f"s{number}")
        trainer.weights = {name: tensor + 1 for name, tensor in trainer.weights.items()}

    kinds = [trainer.store.get(name).kind for name in trainer.history]
    # Two deltas of a base's size each.
    assert kinds == ["base", "delta", "delta", "base", "delta", "delta"]


def test_a_missing_base_is_named_with_what_is_there(trainer: Trainer, tmp_path: Path) -> None:
    trainer.run("a", "b", "c")
    shutil.rmtree(tmp_path / "a")

    with pytest.raises(
        EngineError, match=r"delta 'b' must follow its parent: expected 'a', found \['b', 'c'\]"
    ):
        resolve(trainer.store, "c")


def test_a_missing_top_is_not_found(store: SnapshotStore) -> None:
    with pytest.raises(NotFoundError, match="got 'gone'"):
        resolve(store, "gone")


def test_a_truncated_link_is_named_with_both_sizes(trainer: Trainer, tmp_path: Path) -> None:
    trainer.run("a", "b", "c")
    path = tmp_path / "b" / "weights.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])

    with pytest.raises(EngineError) as caught:
        resolve(trainer.store, "c")

    message = str(caught.value)
    expected = sum(tensor.nbytes for tensor in load(whole).values())
    assert "delta 'c' must follow its parent 'b': b/weights.safetensors" in message
    assert f"hold {expected} bytes of tensors, got {len(whole) - 3} bytes" in message


def test_a_parent_with_other_weights_is_named_with_both_digests(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.run("a", "b")
    shutil.rmtree(tmp_path / "a")
    other = Trainer(trainer.store)
    other.step()
    other.run("a")

    with pytest.raises(
        EngineError,
        match=r"'b' must go on top of the weights of 'a': expected "
        r"blake2b:\w+, found blake2b:\w+",
    ):
        resolve(trainer.store, "b")


def test_weights_that_differ_from_the_manifest_are_refused(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.run("a", "b")
    entries = dict(trainer.store.get("b").entries or {})
    wrong = entries["layer"] | {"checksum": "blake2b:00"}
    edit(tmp_path / "b", weights={**entries, "layer": wrong})

    with pytest.raises(
        EngineError,
        match=r"tensor 'layer' must be that of snapshot 'b' once 'a' "
        r".*expected .*blake2b:00.*found",
    ):
        resolve(trainer.store, "b")


@pytest.mark.parametrize(
    ("link", "changes", "message"),
    [
        (
            "b",
            {"parent": "c", "parent_digest": None},
            "must end in a base, got 'c' as the parent of 'b'",
        ),
        ("a", {"base_model": "huge"}, "weights of 'tiny', got 'a': base of 'huge'"),
    ],
    ids=["in a circle", "of another model"],
)
def test_links_that_do_not_lead_to_a_base_of_the_model_are_refused(
    trainer: Trainer, tmp_path: Path, link: str, changes: dict[str, Any], message: str
) -> None:
    trainer.run("a", "b", "c")
    edit(tmp_path / link, **changes)

    with pytest.raises(EngineError, match=message):
        resolve(trainer.store, "c")


@pytest.mark.parametrize("is_known", [True, False])
def test_a_delta_on_served_weights_makes_only_what_changed(
    trainer: Trainer, is_known: bool
) -> None:
    trainer.run("a", "b")
    base = trainer.store.get("a")

    fresh = apply_verified(trainer.store.get("b"), base.tensors, base.entries if is_known else None)

    assert fresh.keys() == {"embed", "layer"}
    assert same({**base.tensors, **fresh}, trainer.history["b"])
    assert same(base.tensors, trainer.history["a"])


@pytest.mark.parametrize("tensor", ["layer", "norm"])
def test_a_delta_on_other_weights_than_its_parents_is_refused(
    trainer: Trainer, tensor: str
) -> None:
    trainer.run("a", "b")
    served = {name: tensor.clone() for name, tensor in trainer.store.get("a").tensors.items()}
    served[tensor].view(-1)[-1] += 1

    with pytest.raises(EngineError, match=f"tensor '{tensor}' must be that of snapshot 'b'"):
        apply_verified(trainer.store.get("b"), served, None)


@pytest.mark.parametrize("target", ["memory", "folder"])
def test_a_chain_can_be_copied_parent_first(trainer: Trainer, tmp_path: Path, target: str) -> None:
    trainer.run("a", "b")
    is_memory = target == "memory"
    copy = MemorySnapshotStore() if is_memory else FolderSnapshotStore(tmp_path / "copy")

    message = r"delta 'b' must follow its parent: expected 'a', found \[\]"
    with pytest.raises(EngineError, match=message):
        copy.put(trainer.store.get("b"))
    copy.put(trainer.store.get("a"))
    copy.put(trainer.store.get("b"))

    assert same(resolve(copy, "b").tensors, trainer.history["b"])


def test_memory_that_drops_a_parent_still_has_the_delta(tmp_path: Path) -> None:
    trainer = Trainer(MemorySnapshotStore(keep=1))

    trainer.run("a", "b", "c")

    assert trainer.store.names() == ["c"]
    assert trainer.store.get("c").kind == "delta"
    assert same(resolve(trainer.store, "c").tensors, trainer.history["c"])


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
