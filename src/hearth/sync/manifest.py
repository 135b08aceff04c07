"""Tensor folders: safetensors data beside a JSON manifest, written whole or not at all.

Snapshots and checkpoints are both such folders. A manifest states each tensor's dtype, shape and
checksum; whoever reads checks them.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

import safetensors.torch as safetensors_torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from hearth.errors import EngineError, RequestError

MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")


class TensorEntry(TypedDict):
    """One tensor as the manifest has it.

    Example: ``{"dtype": "float32", "shape": [2, 3], "checksum": "blake2b:9f..."}``
    """

    dtype: str
    shape: list[int]
    checksum: str


def check_name(name: str, field: str) -> str:
    """``name``, when it can be a folder's name and nothing else.

    Raises:
        RequestError: it has other characters than ``a-z 0-9 . _ -``, begins with a mark, is empty
            or longer than 128.
    """
    if not _NAME.fullmatch(name):
        raise RequestError(
            f"{field} must be 1 to 128 of a-z, 0-9, '.', '_', '-' and begin with a letter or "
            f"digit, got {name[:160]!r}"
        )
    return name


def checksum(tensor: Tensor) -> str:
    """Of the tensor's bytes in row-major order; dtype and shape are not part of it."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"blake2b:{hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()}"


def describe(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Manifest entries of ``tensors``."""
    return {
        name: TensorEntry(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=list(tensor.shape),
            checksum=checksum(tensor),
        )
        for name, tensor in tensors.items()
    }


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


def write_folder(
    folder: Path,
    manifest: Mapping[str, Any],
    files: Mapping[str, Mapping[str, Tensor]],
    *,
    overwrite: bool = False,
) -> None:
    """Write ``<file>.safetensors`` for each of ``files`` and the manifest, atomically.

    The folder appears complete or not at all; ``manifest["files"]`` gets the entries. An
    overwritten folder is away for the moment between two renames.

    Raises:
        RequestError: the folder exists and ``overwrite`` is False.
    """
    if folder.exists() and not overwrite:
        raise RequestError(f"name must be new, got {folder.name!r}: it exists already")
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = folder.parent / f".draft-{folder.name}-{secrets.token_hex(4)}"
    draft.mkdir()
    try:
        entries = {name: describe(tensors) for name, tensors in files.items()}
        for name, tensors in files.items():
            arrays = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
            _save_file(arrays, str(draft / f"{name}.safetensors"))
        text = json.dumps({**manifest, "files": entries}, indent=1)
        (draft / MANIFEST_FILE).write_text(text, encoding="utf-8")
        for path in draft.iterdir():
            _fsync(path)
        _fsync(draft)
        _replace(draft, folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    _fsync(folder.parent)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a folder that ``write_folder`` wrote.

    Raises:
        EngineError: there is none, or it is no JSON object.
    """
    try:
        manifest = json.loads((folder / MANIFEST_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EngineError(f"{folder.name!r} must have a readable manifest, got {error}") from None
    if not isinstance(manifest, dict) or "files" not in manifest:
        raise EngineError(f"{folder.name!r} must have a manifest with files, got {manifest!r:.80}")
    return cast("dict[str, Any]", manifest)


def read_tensors(folder: Path, manifest: Mapping[str, Any], name: str) -> dict[str, Tensor]:
    """The verified tensors of one file of a folder, on the CPU.

    Raises:
        EngineError: the file is missing or does not match the manifest.
    """
    path = folder / f"{name}.safetensors"
    try:
        tensors = _load_file(str(path))
    except (OSError, SafetensorError) as error:
        raise EngineError(f"{folder.name}/{path.name} must be readable, got {error}") from None
    verify(manifest["files"].get(name, {}), tensors, f"{folder.name}/{path.name}")
    return tensors


def folder_names(root: Path) -> list[str]:
    """Names of the complete folders under ``root``, oldest first."""
    if not root.is_dir():
        return []
    complete = [path for path in root.glob(f"*/{MANIFEST_FILE}") if _NAME.match(path.parent.name)]
    complete.sort(key=lambda path: (path.stat().st_mtime_ns, path.parent.name))
    return [path.parent.name for path in complete]


# safetensors' own annotations are partly unknown to a strict type checker.
def _save_file(tensors: dict[str, Tensor], path: str) -> None:
    safetensors_torch.save_file(tensors, path, {"format": "pt"})  # pyright: ignore[reportUnknownMemberType]


def _load_file(path: str) -> dict[str, Tensor]:
    return safetensors_torch.load_file(path)  # pyright: ignore[reportUnknownMemberType]


def _replace(draft: Path, folder: Path) -> None:
    if not folder.exists():
        draft.rename(folder)
        return
    # A rename cannot replace a folder that has files, so the old one steps aside first.
    aside = folder.parent / f".old-{folder.name}-{secrets.token_hex(4)}"
    folder.rename(aside)
    draft.rename(folder)
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
