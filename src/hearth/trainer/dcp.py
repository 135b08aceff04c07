"""A checkpoint's tensors through torch DCP (torch.distributed.checkpoint), without a pickle.

DCP's default storage describes its files in a pickled ``.metadata`` and stores whatever is no
tensor with ``torch.save``, and unpickles both on reading. Its Hugging Face storage, used here,
keeps names, shapes and offsets in the headers of safetensors files. It holds every tensor there
is, also an optimizer's: moments, masters, step counts of no dimension. What is no tensor belongs
into the checkpoint's manifest, as JSON.

Where ranks share a model, each calls ``save_tensors`` with its shards (DTensors) and the same
folder, and each loads into its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import threading
import warnings
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypedDict, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hearth.errors import EngineError

_FILE_BYTES = 2**29
"""About the most bytes of a file: twice as much is in memory while it is written."""
_READ_BYTES = 2**22
_HASHING_THREADS = 4
_filters = threading.Lock()


class FileEntry(TypedDict):
    """One file as the manifest has it: ``{"bytes": 96, "checksum": "blake2b:9f..."}``."""

    bytes: int
    checksum: str


def save_tensors(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, FileEntry]:
    """Write tensors into a new folder; returns the files that this process wrote, by name.

    Raises:
        EngineError: the disk refused.
    """
    files = _HashedFiles()
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_file_of_each(tensors), save_distributed=_is_shared()
    )
    writer.fs = files
    state: dict[str, Any] = {name: one.detach().contiguous() for name, one in tensors.items()}
    with _explained(f"{_where(folder)} must be writable"):
        dcp.save(state, storage_writer=writer, no_dist=not _is_shared())
    return files.entries


def load_tensors(folder: Path, entries: Mapping[str, FileEntry]) -> dict[str, Tensor]:
    """All tensors of a folder, on the CPU, its files checked against their entries.

    Raises:
        EngineError: a file is missing, unknown, truncated or changed; it is named.
    """
    verify_files(folder, entries)
    tensors = {name: torch.empty_like(one, device="cpu") for name, one in described(folder).items()}
    load_into(folder, tensors)
    return tensors


def described(folder: Path) -> dict[str, Tensor]:
    """What a folder holds, as tensors on the meta device, which have a shape and a dtype only.

    Raises:
        EngineError: a file cannot be read.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _explained(f"{_where(folder)} must be readable"):
        found = reader.read_metadata().state_dict_metadata
        return {
            name: torch.empty(one.size, dtype=one.properties.dtype, device="meta")
            for name, one in found.items()
            if isinstance(one, TensorStorageMetadata)
        }


def load_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` (whole ones, or DTensors: a rank's shards) from a verified folder.

    Raises:
        EngineError: the folder has none of a name, or another shape.
    """
    state: dict[str, Any] = dict(tensors)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _explained(f"{_where(folder)} must hold the tensors asked for"):
        dcp.load(state, storage_reader=reader, no_dist=not _is_shared())


def verify_files(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Compare a folder's files with their entries; files that no reader opens do not matter.

    Raises:
        EngineError: a file is missing, unknown, truncated or changed; it is named.
    """
    where = _where(folder)
    unknown = {path.name for path in folder.glob("*.safetensors")} - entries.keys()
    if unknown:
        raise EngineError(
            f"{where} must hold the files of its manifest, got {sorted(unknown)[:4]} beside them"
        )
    with ThreadPoolExecutor(min(_HASHING_THREADS, max(1, len(entries)))) as pool:
        found = pool.map(lambda name: _entry_of(folder / name), entries)
        for name, one in zip(entries, found, strict=True):
            if one != entries[name]:
                raise EngineError(
                    f"{where}/{name} must have {_text(entries[name])}, got {_text(one)}: the file "
                    "was cut or changed after it was written"
                )


class _HashedFiles(FileSystem):
    """Where DCP opens its files: hashes what goes by on the way to the disk."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as file:
            hashing = _HashingStream(cast("io.BufferedWriter", file))
            # Not a stream by its class, and everything that DCP does with one.
            yield cast("io.IOBase", hashing)
        self.entries[Path(path).name] = hashing.entry()


class _HashingStream:
    def __init__(self, file: io.BufferedWriter) -> None:
        self._file = file
        self._hash = _new_hash()
        self._size = 0

    def write(self, content: Any) -> int:
        raw = content.encode() if isinstance(content, str) else content
        self._hash.update(raw)
        self._size += memoryview(raw).nbytes
        return cast("Any", self._file).write(content)

    def entry(self) -> FileEntry:
        return FileEntry(bytes=self._size, checksum=_checksum(self._hash))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _entry_of(path: Path) -> FileEntry | None:
    """A file's entry; None where there is no readable file."""
    hashing, size = _new_hash(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while content := file.read(_READ_BYTES):
                hashing.update(content)
                size += len(content)
    except OSError:
        return None
    return FileEntry(bytes=size, checksum=_checksum(hashing))


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _checksum(hashing: hashlib.blake2b) -> str:
    return f"blake2b:{hashing.hexdigest()}"


def _text(entry: FileEntry | None) -> str:
    return "no file" if entry is None else f"{entry['bytes']} bytes, {entry['checksum']}"


def _file_of_each(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Which file each tensor goes into, numbered from 1."""
    files: dict[str, int] = {}
    number, filled = 1, 0
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > _FILE_BYTES:
            number, filled = number + 1, 0
        files[name] = number
        filled += size
    return files


def _where(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _is_shared() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _explained(rule: str) -> Generator[None, None, None]:
    """DCP's failures as ours (its own is no ``Exception``), and no warning of its single process.

    Warning filters belong to the whole process, hence the lock.
    """
    try:
        with _filters, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()), (error, None))[0]
        raise EngineError(f"{rule}, got {type(cause).__name__}: {cause}") from None
    except (OSError, SafetensorError, KeyError, AssertionError, RuntimeError) as error:
        raise EngineError(f"{rule}, got {type(error).__name__}: {error}") from None
