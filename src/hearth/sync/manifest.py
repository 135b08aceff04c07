"""Tensor folders: safetensors data beside a JSON manifest, written whole or not at all.

Snapshots and checkpoints are such folders. A manifest has each tensor's dtype, shape and checksum,
and every read checks them.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any, TypedDict, cast

import numpy as np
import safetensors.torch as safetensors_torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from hearth.errors import EngineError, RequestError
from hearth.files import is_intact, seal

MANIFEST_FILE = "manifest.json"
THREADS = min(8, os.cpu_count() or 1)
"""Threads that hash, compare and copy tensors, all without holding the GIL."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
LEAF = 2**24
"""Bytes of a tensor that are hashed as one."""
_MIN_FOR_THREADS = 2**22


class TensorEntry(TypedDict):
    """One tensor as the manifest has it.

    Example: ``{"dtype": "float32", "shape": [2, 3], "checksum": "blake2b:9f..."}``
    """

    dtype: str
    shape: list[int]
    checksum: str


def check_name(name: str, field: str) -> str:
    """``name``, if it is a valid name of a folder.

    Raises:
        RequestError: it has other characters than ``a-z 0-9 . _ -``, does not begin with a letter
            or digit, is empty, or has more than 128 characters.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{field} must be 1 to 128 of a-z, 0-9, '.', '_', '-' and begin with a letter or "
            f"digit, got {name[:160]!r}"
        )
    return name


def describe(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Manifest entries of ``tensors``, as they are in a file.

    Up to 16 MiB a checksum is the blake2b of the tensor's bytes in row-major order; beyond, that of
    the hashes of 16 MiB pieces, so that several threads can hash one large tensor.
    """
    return _make_entries(tensors, _checksums(tensors, "blake2b", _blake2b))


def fingerprints(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Manifest entries of ``tensors``, as they are in memory.

    Their checksum is a CRC-32 (of each 16 MiB, as above): it finds accidental damage too, in a
    fifth of the time, and every weight sync computes it for a whole model.
    """
    return _make_entries(tensors, _checksums(tensors, "crc32", _crc32))


def _make_entries(tensors: Mapping[str, Tensor], sums: Mapping[str, str]) -> dict[str, TensorEntry]:
    return {
        name: TensorEntry(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            checksum=sums[name],
        )
        for name, tensor in tensors.items()
    }


def digest(entries: Mapping[str, TensorEntry]) -> str:
    """One checksum of weights by their entries: equal names, dtypes, shapes and bytes."""
    text = json.dumps(entries, sort_keys=True, separators=(",", ":"))
    return f"blake2b:{_blake2b(text.encode()).hex()}"


def verify(entries: Mapping[str, TensorEntry], tensors: Mapping[str, Tensor], where: str) -> None:
    """Compare tensors with their manifest entries.

    Raises:
        EngineError: a tensor is missing, unknown or differs; it is named.
    """
    if entries.keys() != tensors.keys():
        odd = sorted(entries.keys() ^ tensors.keys())
        raise EngineError(f"{where} must hold the tensors of its manifest, got {odd[:4]} differing")
    for name, found in describe(tensors).items():
        if found != entries[name]:
            raise EngineError(
                f"{where}: tensor {name!r} must match its manifest, got {found} instead of "
                f"{entries[name]}: the file is damaged or was changed"
            )


def write_tensors(draft: Path, name: str, tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Write ``<name>.safetensors`` into a draft; its tensors' entries.

    Raises:
        OSError: the disk refused.
    """
    arrays = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
    save_file(arrays, draft / f"{name}.safetensors")
    return describe(tensors)


def render_manifest(
    manifest: Mapping[str, Any], number: int, files: Mapping[str, Mapping[str, TensorEntry]]
) -> bytes:
    """The content of ``manifest.json``, with a checksum of its own.

    ``number`` is the folder's place (``next_number``); ``files`` has the entries of each file's
    tensors.
    """
    text = json.dumps(seal({**manifest, "number": number, "files": dict(files)}), indent=1)
    return text.encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder.

    Raises:
        EngineError: there is none, it is no JSON object, or it was changed.
    """
    try:
        return parse_manifest(folder.name, (folder / MANIFEST_FILE).read_bytes())
    except OSError as error:
        raise EngineError(f"{folder.name!r} must have a readable manifest, got {error}") from None


def parse_manifest(name: str, text: bytes) -> dict[str, Any]:
    """The manifest of the folder ``name``; errors are those of ``read_manifest``."""
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise EngineError(f"{name!r} must have a readable manifest, got {error}") from None
    if not isinstance(manifest, dict) or "files" not in manifest:
        raise EngineError(f"{name!r} must have a manifest with files, got {manifest!r:.80}")
    content = cast("dict[str, Any]", manifest)
    if not is_intact(content):
        raise EngineError(
            f"{name}/{MANIFEST_FILE} must match its own checksum, got another one: the file "
            "was changed after it was written"
        )
    return content


def read_tensors(
    folder: Path, manifest: Mapping[str, Any], name: str, into: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The verified tensors of one file of a folder, on the CPU.

    With ``into`` they are read into its tensors of the same layout, and are these.

    Raises:
        EngineError: the file is missing or does not match the manifest.
    """
    path = folder / f"{name}.safetensors"
    entries: dict[str, TensorEntry] = manifest["files"].get(name, {})
    where = f"{folder.name}/{path.name}"
    try:
        mapped = _load_file(str(path))
    except (OSError, SafetensorError) as error:
        expected = sum(_size(entry) for entry in entries.values())
        found = f"{path.stat().st_size} bytes" if path.exists() else "no file"
        raise EngineError(
            f"{where} must be readable and hold {expected} bytes of tensors, got {found}: {error}"
        ) from None
    # The file is mapped: without a copy, truncating it would break the tensors in use.
    if into is None:
        tensors = {key: tensor.clone() for key, tensor in mapped.items()}
    else:
        tensors = {key: _copy(mapped[key], into[key]) for key in into.keys() & mapped.keys()}
    verify(entries, tensors, where)
    return tensors


def _copy(source: Tensor, target: Tensor) -> Tensor:
    if source.dtype != target.dtype or source.shape != target.shape:
        return target.copy_(source)  # its entry will not be that of the file
    # Without torch's threads: for each tensor they would wait for cores on which others compute.
    np.copyto(_as_array(target), _as_array(source))
    return target


def _as_array(tensor: Tensor) -> np.ndarray[Any, Any]:
    return tensor.view(-1).view(torch.uint8).numpy()


def folder_names(root: Path) -> list[str]:
    """Names of the complete folders under ``root``, oldest first.

    They are ordered by the number in their manifests, never by the clock. Folders without one were
    written before there were numbers: they come first, by their steps and then by their time.

    Raises:
        EngineError: a manifest cannot be read now, so that its place is unknown.
    """
    return [name for *_, name in sorted(_find_places(root))]


def next_number(root: Path) -> int:
    """The number of the next folder under ``root``: above that of every folder that is there.

    Raises:
        EngineError: as ``folder_names``.
    """
    return 1 + max((number for number, *_ in _find_places(root)), default=0)


def _find_places(root: Path) -> Iterator[tuple[int, int, int, str]]:
    for path in root.glob(f"*/{MANIFEST_FILE}"):
        if not _NAME.match(path.parent.name):
            continue
        try:
            facts = path.stat()
            number, steps = _read_place(path, facts.st_ino, facts.st_mtime_ns)
        except (FileNotFoundError, NotADirectoryError):
            continue  # another process removed it after the listing
        except OSError as error:
            raise EngineError(
                f"{path} must be readable, got {error.strerror or error}: look at its disk"
            ) from error
        yield number, steps, facts.st_mtime_ns, path.parent.name


@lru_cache(maxsize=2**14)
def _read_place(manifest: Path, _inode: int, _mtime_ns: int) -> tuple[int, int]:
    """A manifest's number and optimizer steps, 0 where it has none; read once per file.

    Raises:
        OSError: it cannot be read; nothing is remembered.
    """
    text = manifest.read_bytes()
    try:
        content = parse_manifest(manifest.parent.name, text)
    except EngineError:
        return 0, 0
    number, steps = (content.get(name) for name in ("number", "steps"))
    return number if isinstance(number, int) else 0, steps if isinstance(steps, int) else 0


def _checksums(
    tensors: Mapping[str, Tensor], name_of_hash: str, hash_of: Callable[[memoryview], bytes]
) -> dict[str, str]:
    leaves: list[memoryview] = []
    ends: list[int] = []
    for tensor in tensors.values():
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        leaves.extend(flat[start : start + LEAF] for start in range(0, max(1, len(flat)), LEAF))
        ends.append(len(leaves))
    if sum(map(len, leaves)) < _MIN_FOR_THREADS:
        hashes = [hash_of(leaf) for leaf in leaves]
    else:
        with ThreadPoolExecutor(THREADS) as pool:
            hashes = list(pool.map(hash_of, leaves))
    sums: dict[str, str] = {}
    for name, start, end in zip(tensors, [0, *ends], ends, strict=False):
        sums[name] = f"{name_of_hash}:{combine_leaves(hashes[start:end]).hex()}"
    return sums


def combine_leaves(hashes: Sequence[bytes]) -> bytes:
    """The hash of a tensor from those of its leaves."""
    return hashes[0] if len(hashes) == 1 else _blake2b(b"".join(hashes))


def _crc32(data: memoryview) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


def _blake2b(data: bytes | memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _size(entry: TensorEntry) -> int:
    return math.prod(entry["shape"]) * getattr(torch, entry["dtype"]).itemsize


def save_file(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file.

    Raises:
        OSError: the disk refused, which the library says with an error of its own.
    """
    try:
        # A strict type checker knows safetensors' own annotations only in part.
        safetensors_torch.save_file(tensors, str(path), {"format": "pt"})  # pyright: ignore[reportUnknownMemberType]
    except SafetensorError as error:
        raise _as_os_error(error) from None


def _as_os_error(error: SafetensorError) -> OSError:
    """Example: its text ends with ``No space left on device (os error 28)``."""
    number = re.search(r"os error (\d+)", str(error))
    if number is None:
        return OSError(str(error))
    return OSError(int(number[1]), os.strerror(int(number[1])))


def _load_file(path: str) -> dict[str, Tensor]:
    return safetensors_torch.load_file(path)  # pyright: ignore[reportUnknownMemberType]
