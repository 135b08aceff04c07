"""A checkpoint's tensors through torch DCP (torch.distributed.checkpoint), without a pickle.

DCP's default storage pickles its ``.metadata`` and every value that is not a tensor, and unpickles
both on reading. Its Hugging Face storage, used here, keeps names, shapes and offsets in the headers
of safetensors files. It holds all tensors, also an optimizer's moments, masters and step counts
(which have no dimension). Other values belong into the checkpoint's manifest, as JSON.

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
from hearth.files import explain_refusals

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
        StorageError: the disk refused.
    """
    files = _HashedFiles()
    writer = dcp.HuggingFaceStorageWriter(
        str(folder), fqn_to_index_mapping=_assign_files(tensors), save_distributed=_is_shared()
    )
    writer.fs = files
    state: dict[str, Any] = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    rule = f"{_shorten_path(folder)} must be writable"
    with explain_refusals(folder), _explain_errors(rule, passes_refusals=True):
        dcp.save(state, storage_writer=writer, no_dist=not _is_shared())
    return files.entries


def load_tensors(folder: Path, entries: Mapping[str, FileEntry]) -> dict[str, Tensor]:
    """All tensors of a folder, on the CPU, its files checked against their entries.

    Raises:
        EngineError: a file is missing, unknown, truncated or changed; it is named.
    """
    verify_files(folder, entries)
    stored = describe_tensors(folder)
    tensors = {name: torch.empty_like(stored[name], device="cpu") for name in stored}
    load_into(folder, tensors)
    return tensors


def describe_tensors(folder: Path) -> dict[str, Tensor]:
    """A folder's tensors on the meta device, where they have a shape and a dtype only.

    Raises:
        EngineError: a file cannot be read.
    """
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _explain_errors(f"{_shorten_path(folder)} must be readable"):
        metadata = reader.read_metadata().state_dict_metadata
        return {
            name: torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for name, stored in metadata.items()
            if isinstance(stored, TensorStorageMetadata)
        }


def load_into(folder: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill ``tensors`` (whole ones, or DTensors: a rank's shards) from a verified folder.

    Raises:
        EngineError: the folder lacks a tensor, or has another shape of it.
    """
    state: dict[str, Any] = dict(tensors)
    reader = dcp.HuggingFaceStorageReader(str(folder))
    with _explain_errors(f"{_shorten_path(folder)} must hold the tensors to load"):
        dcp.load(state, storage_reader=reader, no_dist=not _is_shared())


def verify_files(folder: Path, entries: Mapping[str, FileEntry]) -> None:
    """Compare a folder's files with their entries; only safetensors files matter.

    Raises:
        EngineError: a file is missing, unknown, truncated or changed; it is named.
    """
    where = _shorten_path(folder)
    unknown = {path.name for path in folder.glob("*.safetensors")} - entries.keys()
    if unknown:
        raise EngineError(
            f"{where} must hold the files of its manifest, got {sorted(unknown)[:4]} beside them"
        )
    with ThreadPoolExecutor(min(_HASHING_THREADS, max(1, len(entries)))) as pool:
        actual = pool.map(lambda name: _read_entry(folder / name), entries)
        for name, entry in zip(entries, actual, strict=True):
            if entry != entries[name]:
                raise EngineError(
                    f"{where}/{name} must have {_format_entry(entries[name])}, got "
                    f"{_format_entry(entry)}: the file was cut or changed after it was written"
                )


class _HashedFiles(FileSystem):
    """Opens DCP's files, and hashes everything that is written to them."""

    def __init__(self) -> None:
        self.entries: dict[str, FileEntry] = {}

    @contextlib.contextmanager
    def create_stream(self, path: Any, mode: str) -> Generator[io.IOBase, None, None]:
        with super().create_stream(path, mode) as file:
            hashing = _HashingStream(cast("io.BufferedWriter", file))
            # Not an ``IOBase`` subclass, but it has all methods that DCP calls.
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
        return FileEntry(bytes=self._size, checksum=_format_checksum(self._hash))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _read_entry(path: Path) -> FileEntry | None:
    """A file's entry; None where there is no readable file."""
    hashing, size = _new_hash(), 0
    try:
        with path.open("rb", buffering=0) as file:
            while content := file.read(_READ_BYTES):
                hashing.update(content)
                size += len(content)
    except OSError:
        return None
    return FileEntry(bytes=size, checksum=_format_checksum(hashing))


def _new_hash() -> hashlib.blake2b:
    return hashlib.blake2b(digest_size=16)


def _format_checksum(hashing: hashlib.blake2b) -> str:
    return f"blake2b:{hashing.hexdigest()}"


def _format_entry(entry: FileEntry | None) -> str:
    return "no file" if entry is None else f"{entry['bytes']} bytes, {entry['checksum']}"


def _assign_files(tensors: Mapping[str, Tensor]) -> dict[str, int]:
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


def _shorten_path(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name}"


def _is_shared() -> bool:
    return dist.is_available() and dist.is_initialized()


@contextlib.contextmanager
def _explain_errors(rule: str, *, passes_refusals: bool = False) -> Generator[None, None, None]:
    """Raise DCP's failures as EngineError (its own is no ``Exception``), and silence a warning.

    ``passes_refusals`` raises an ``OSError`` as it came.
    DCP warns whenever only one process saves. Warning filters are process-wide, hence the lock.
    """
    try:
        with _filters, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except dcp.CheckpointException as error:
        cause = next(iter(error.failures.values()), (error, None))[0]
        if passes_refusals and isinstance(cause, OSError):
            raise cause from None
        raise EngineError(f"{rule}, got {type(cause).__name__}: {cause}") from None
    except (OSError, SafetensorError, KeyError, AssertionError, RuntimeError) as error:
        if passes_refusals and isinstance(error, OSError):
            raise
        raise EngineError(f"{rule}, got {type(error).__name__}: {error}") from None
