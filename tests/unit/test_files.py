"""Files under disks that are full or read-only, and files that are cut or have a flipped bit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import resource
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.disks import fill, mounted, set_read_only

from hearth.errors import ConfigError, EngineError, StorageError
from hearth.files import is_intact, seal, write_file
from hearth.launch.gpus import GpuBoard
from hearth.launch.heartbeat import read_beat
from hearth.launch.records import (
    PhaseFile,
    ProcessFacts,
    ProcessId,
    WorkerFolder,
    read_json,
    write_json,
)
from hearth.sync.chain import Published, resolve
from hearth.sync.store import FolderSnapshotStore, Snapshot
from hearth.trainer.checkpoint import CheckpointFacts, CheckpointFolder, TrainerState
from training.examples.rl.trend import reward_trend
from training.run.checkpoints import Checkpoint, read_manifest, write_manifest
from training.run.continuation import TrainedOn, read_trained_on, write_trained_on
from training.run.log_path import prepare_log_path
from training.run.metrics import MetricsLog, read_records

BASE = "tiny"
FACTS = CheckpointFacts(base_model=BASE, lora=None, steps=3, created_s=1.5)


def make_weights(value: float, size: int = 64) -> dict[str, torch.Tensor]:
    return {"layer": torch.full((size,), value), "head": torch.arange(8.0)}


def as_lists(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in sorted(tensors.items())}


def write_checkpoint(root: Path, value: float) -> None:
    state = TrainerState(FACTS, make_weights(value), make_weights(value + 1), {})
    CheckpointFolder(root).write("step", state, overwrite=True)


def read_checkpoint(root: Path) -> Any:
    state = CheckpointFolder(root).read("step", base_model=BASE, lora=None)
    return state.facts, as_lists(state.tensors())


def write_snapshot(root: Path, value: float) -> None:
    snapshot = Snapshot(f"s{value:g}", "base", BASE, make_weights(value), {})
    FolderSnapshotStore(root).put(snapshot)


def read_snapshot(root: Path) -> Any:
    snapshot = FolderSnapshotStore(root).get("s1")
    return snapshot.kind, snapshot.base_model, snapshot.metadata, as_lists(snapshot.tensors)


def write_adapter_snapshot(root: Path, value: float) -> None:
    metadata = {"lora": {"rank": 4, "alpha": 8.0 * value}}
    FolderSnapshotStore(root).put(Snapshot("s1", "lora", BASE, make_weights(value), metadata))


def write_delta(root: Path, value: float) -> None:
    store, published = FolderSnapshotStore(root), Published()
    published.publish(store, "s0", BASE, make_weights(0.0), {}, as_delta=True)
    published.publish(store, "s1", BASE, make_weights(value) | {"x": torch.ones(1)}, {}, as_delta=0)
    changed = make_weights(value) | {"x": torch.ones(1)}
    changed["layer"][3] = 7.0
    published.publish(store, "s2", BASE, changed, {}, as_delta=True)
    assert store.get("s2").kind == "delta"


def read_delta(root: Path) -> Any:
    return as_lists(resolve(FolderSnapshotStore(root), "s2").tensors)


def write_run(root: Path, value: float) -> None:
    write_manifest(root, [Checkpoint("step-00001", 1, int(value), [5], 0, 1, "job")])


def write_start(root: Path, value: float) -> None:
    write_trained_on(root, TrainedOn({"lr": value}, 4, "ab"))


def write_process(root: Path, value: float) -> None:
    identity = ProcessId(int(value), 7)
    WorkerFolder(root).write_process(ProcessFacts(identity, "socket", identity))


def write_end(root: Path, value: float) -> None:
    content = {"code": None, "signal": "SIGKILL", "peak_rss_mb": value}
    write_json(WorkerFolder(root).exit, content)
    write_json(WorkerFolder(root).failure, {"reason": "gone", "message": "m", "code": "internal"})


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of file that we write. ``write(root, 1)`` and ``read(root)`` are of one content."""

    write: Callable[[Path, float], None]
    read: Callable[[Path], Any]
    error: type[Exception] = EngineError
    is_sealed: bool = True
    """Whether every flipped bit is found, and not only what makes no sense."""


KINDS = {
    "checkpoint": Kind(write_checkpoint, read_checkpoint),
    "snapshot": Kind(write_snapshot, read_snapshot),
    "adapter": Kind(write_adapter_snapshot, read_snapshot),
    "delta": Kind(write_delta, read_delta),
    "run.json": Kind(write_run, read_manifest, ConfigError),
    "trained_on.json": Kind(write_start, read_trained_on, ConfigError),
    "process.json": Kind(
        write_process, lambda root: WorkerFolder(root).read_process(), is_sealed=0
    ),
    "exit.json": Kind(
        write_end, lambda root: WorkerFolder(root).report("x").describe(), is_sealed=False
    ),
}


def list_files(root: Path) -> list[Path]:
    return sorted(path for path in root.rglob("*") if path.is_file())


def cut_places(size: int) -> list[int]:
    """Where a file may be cut: its ends, pages, and some places in between."""
    chosen = random.Random(0).sample(range(size), min(size, 12))
    return sorted({0, 1, size // 2, size - 2, size - 1, *range(0, size, 512), *chosen} - {-1})


@pytest.mark.parametrize("damage", ["cut", pytest.param("flipped", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", KINDS)
def test_a_damaged_file_is_a_clear_error_and_never_other_numbers(tmp_path, name, damage):
    kind, generator = KINDS[name], random.Random(1)
    kind.write(tmp_path, 1.0)
    right, found = kind.read(tmp_path), 0
    for file in list_files(tmp_path):
        content = file.read_bytes()
        if damage == "cut":
            versions = [content[:place] for place in cut_places(len(content))]
        else:
            places = generator.sample(range(len(content)), min(len(content), 60))
            versions = [flip_bit(content, place, generator.randrange(8)) for place in places]
        for version in versions:
            file.write_bytes(version)
            read, refusal = read_or_refuse(kind, tmp_path)
            found += refusal is not None
            assert refusal is None or " must " in refusal, "it names what is wrong"
            assert refusal is not None or not kind.is_sealed or read == right, (file, version)
        file.write_bytes(content)
    assert found or not kind.is_sealed
    assert kind.read(tmp_path) == right


def read_or_refuse(kind: Kind, root: Path) -> tuple[Any, str | None]:
    """What is read, and the error instead."""
    try:
        return kind.read(root), None
    except kind.error as error:
        return None, str(error)


def flip_bit(content: bytes, place: int, bit: int) -> bytes:
    changed = bytearray(content)
    changed[place] ^= 1 << bit
    return bytes(changed)


def write_or_refuse(kind: Kind, root: Path, value: float) -> str | None:
    """The error where it cannot be written."""
    try:
        kind.write(root, value)
    except EngineError as error:
        return str(error)
    return None


@pytest.mark.parametrize("name", KINDS)
def test_on_a_disk_that_is_full_at_any_write_what_was_there_stays(tmp_path, name):
    disk, kind = tmp_path / "disk", KINDS[name]
    with mounted(disk, 2**20):
        if name not in ("snapshot", "adapter", "delta"):
            kind.write(disk, 1.0)
        before = kind.read(disk) if list_files(disk) else None
        refused = 0
        # From no free page to as many as it takes: each time it ends at a later write.
        for free in range(40):
            fill(disk, free)
            refusal = write_or_refuse(kind, disk, 2.0 if before is not None else 1.0)
            if refusal is not None:
                refused += 1
                assert "No space left" in refusal
                assert before is None or kind.read(disk) == before
                drafts = [path.name for path in disk.rglob(".*") if path.is_file()]
                assert drafts == [], "half a file is not left behind"
                if name == "delta":
                    for path in disk.glob("s*"):
                        shutil.rmtree(path)
            else:
                break
        assert refused
        assert before is None or kind.read(disk) != before


def test_a_read_only_disk_is_an_error_that_says_so(tmp_path):
    disk = tmp_path / "disk"
    with mounted(disk, 2**20):
        for name, kind in KINDS.items():
            (disk / name).mkdir()
            if name not in ("snapshot", "adapter", "delta"):
                kind.write(disk / name, 1.0)
        set_read_only(disk)
        for name, kind in KINDS.items():
            rule = f"^{disk / name}.* must be writable, got Read-only file system: its disk is read"
            with pytest.raises(StorageError, match=rule):
                kind.write(disk / name, 2.0)
        rule = rf"^{disk}/metrics\.jsonl must be writable, got Read-only file system: its disk is"
        with pytest.raises(StorageError, match=rule), MetricsLog.open(disk) as log:
            log.write("train", 1, {"rollout/reward": 0.5})
        with pytest.raises(ConfigError, match="log_path must be writable"):
            prepare_log_path(str(disk))


@contextlib.contextmanager
def limited_files(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("size", [0, 16, 40])
def test_a_limit_on_the_size_of_files_refuses_and_keeps_what_was_there(tmp_path, name, size):
    kind = KINDS[name]
    if name not in ("snapshot", "adapter", "delta"):
        kind.write(tmp_path, 1.0)
    before = {path: path.read_bytes() for path in list_files(tmp_path)}

    with limited_files(size), pytest.raises(EngineError, match="File too large"):
        kind.write(tmp_path, 2.0)

    assert {path: path.read_bytes() for path in list_files(tmp_path)} == before


def test_a_record_is_in_the_metrics_whole_or_not_at_all(tmp_path):
    with MetricsLog.open(tmp_path) as log:
        log.write("train", 1, {"rollout/reward": 0.5})
        path = tmp_path / "metrics.jsonl"
        whole = path.read_bytes()
        for room in range(0, 60, 7):
            with (
                limited_files(len(whole) + room),
                pytest.raises(StorageError, match=r"metrics\.jsonl must be writable, got File too"),
            ):
                log.write("train", 2, {"rollout/reward": 0.75, "text": "x" * 60})
            assert path.read_bytes() == whole
        log.write("train", 2, {"rollout/reward": 1.0})

    assert [record["step"] for record in read_records(path)] == [1, 2]


FOREIGN = [b"[1]", b"7", b"null", b'"text"', b"{}", b'{"step": "2"}', b"\xff\xfe", b'{"step": 1']


@pytest.mark.parametrize("line", FOREIGN)
def test_a_foreign_line_in_the_metrics_is_left_out_and_named(tmp_path, caplog, line):
    record = b'{"type":"train","step":1,"rollout/reward":0.5}\n'
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(record + line + b"\n" + record)

    assert "0.500 in the first quarter of 2 steps" in reward_trend(tmp_path)
    assert "lines [2] are no records" in caplog.text
    with MetricsLog.open(tmp_path, resumed_step=1):
        pass
    assert path.read_bytes() == record * 2
    assert line in (tmp_path / "metrics.1.jsonl").read_bytes(), "nothing is lost"


def test_a_record_that_was_cut_before_its_newline_does_not_swallow_the_next(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"type":"train","step":1}\n{"type":"train","step":2}')

    with MetricsLog.open(tmp_path, resumed_step=2) as log:
        log.write("train", 3, {})

    assert [record["step"] for record in read_records(path)] == [1, 2, 3]


@pytest.mark.parametrize("text", [b"", b"7", b"[1]", b"[[1]]", b'[["0", "x", {}]]', b"\xff\x00"])
def test_an_odd_board_of_gpus_is_an_empty_one(tmp_path, text):
    path = tmp_path / "gpus.json"
    path.write_bytes(text)

    assert GpuBoard(path, ["0", "1"]).take(1) == ["0"]


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"at_s": 1}', b"\xff"])
def test_odd_records_of_a_process_are_no_error(tmp_path, text):
    folder = WorkerFolder(tmp_path)
    for path in (folder.heartbeat, folder.process, folder.exit, folder.failure, folder.phase):
        path.write_bytes(text)

    assert read_beat(folder.heartbeat) is None
    assert folder.read_process() is None
    assert folder.report("it is gone").describe().startswith("it is gone")


def test_what_is_of_another_type_in_the_record_of_an_end_is_unknown(tmp_path):
    folder = WorkerFolder(tmp_path)
    write_json(folder.exit, {"code": "1", "signal": 9, "peak_rss_mb": "x", "reason": 3})
    write_json(folder.failure, {"reason": 7})

    assert folder.report("it is gone").describe() == "it is gone"


def test_a_sealed_object_is_known_by_every_value():
    sealed = seal({"a": (1, 2), 3: {"b": 1e-3}})

    assert json.loads(json.dumps(sealed)) == sealed
    assert is_intact(sealed)
    assert not is_intact(sealed | {"a": [1, 3]})
    assert is_intact({"a": 1}), "written before there were checksums"


def test_a_disk_that_refuses_the_phase_ends_no_worker(tmp_path):
    phase = PhaseFile(tmp_path / "phase")

    with limited_files(0):
        phase("forward")

    assert (tmp_path / "phase").read_bytes() == b""
    phase.close()


def test_a_write_that_is_refused_leaves_the_old_file_and_no_draft(tmp_path):
    file = tmp_path / "file"
    write_file(file, b"old")

    with limited_files(2), pytest.raises(StorageError, match="ulimit -f"):
        write_file(file, b"new and long")

    assert [path.read_bytes() for path in list_files(tmp_path)] == [b"old"]
    assert read_json(file) is None
