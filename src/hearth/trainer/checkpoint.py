"""Resumable checkpoints: a trainer's whole state in one folder, which appears complete or not.

A folder holds ``manifest.json`` and ``data``, the tensors as torch DCP writes them
(``hearth.trainer.dcp``). All other values are in the manifest. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import logging
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

import hearth
from hearth.errors import ConfigError, EngineError, NotFoundError, RequestError
from hearth.files import CHECKSUM, seal
from hearth.models.lora import LoraOptions
from hearth.sync.folders import remove_folder, sweep, write_draft
from hearth.sync.manifest import MANIFEST_FILE, check_name, folder_names, next_number, read_manifest
from hearth.trainer.dcp import FileEntry, load_tensors, save_tensors, verify_files

logger = logging.getLogger(__name__)

MAX_METADATA_BYTES = 2**20
"""Most bytes of a client's metadata, as JSON."""
CROSS_JOB = "cross_job://"

_FORMAT = "hearth-checkpoint-2"
DATA = "data"
"""The folder of the tensors in a checkpoint's."""
_WEIGHTS, _OPTIMIZER = "weights/", "optimizer/"


@dataclass(frozen=True)
class CheckpointFacts:
    """Facts of a checkpoint, from its manifest."""

    base_model: str
    lora: LoraOptions | None
    steps: int
    """Optimizer steps taken."""
    created_s: float
    """Unix time at which the save began."""
    seq_id: int | None = None
    """Number of the model's last operation that is in it."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: {})
    """The client's own: row cursor, weight version, config. With ``"pinned": true`` it stays."""


@dataclass(frozen=True, eq=False)
class TrainerState:
    """The content of a checkpoint."""

    facts: CheckpointFacts
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    rng: Mapping[str, str]
    """As ``read_rng`` returns it."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names that they have in the folder."""
        named = {f"{_WEIGHTS}{name}": tensor for name, tensor in self.weights.items()}
        return named | {f"{_OPTIMIZER}{name}": tensor for name, tensor in self.optimizer.items()}

    @classmethod
    def from_tensors(
        cls, facts: CheckpointFacts, tensors: Mapping[str, Tensor], rng: Mapping[str, str]
    ) -> Self:
        """The reverse of ``tensors``."""
        weights, optimizer = (_select_below(part, tensors) for part in (_WEIGHTS, _OPTIMIZER))
        return cls(facts, weights, optimizer, rng)


def write_manifest(draft: Path, state: TrainerState, files: Mapping[str, FileEntry]) -> None:
    """Write the manifest of a draft's files."""
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "number": next_number(draft.parent),
        "hearth": hearth.__version__,
        "torch": torch.__version__,
        **asdict(state.facts),
        "rng": dict(state.rng),
        "files": dict(files),
    }
    text = json.dumps(seal(manifest), indent=1)
    (draft / MANIFEST_FILE).write_text(text, encoding="utf-8")


class CheckpointFolder:
    """The checkpoints of one trainer, a folder each under ``root``.

    With ``keep`` a save removes the oldest beyond that many; pinned ones stay and do not count.

    Raises:
        ConfigError: ``keep`` is below 1.
    """

    def __init__(self, root: Path, *, keep: int | None = None) -> None:
        if keep is not None and keep < 1:
            raise ConfigError(
                f"keep_checkpoints must be >= 1 or None, got {keep}: the newest always stays"
            )
        self._root = root
        self._keep = keep

    def names(self) -> list[str]:
        """Names, oldest first."""
        sweep(self._root)
        return folder_names(self._root)

    def facts(self, name: str) -> CheckpointFacts:
        """The facts of a checkpoint; its tensors are not read.

        Raises:
            NotFoundError: there is none of that name; the message lists the names.
            RequestError: the name is invalid, or the folder has another format.
            EngineError: its manifest is damaged.
        """
        return parse_facts(self._read_manifest(name))

    def write(self, name: str, state: TrainerState, *, overwrite: bool) -> None:
        """Write a checkpoint; it appears complete or not at all, also in the place of an old one.

        Raises:
            RequestError: the name is no valid one, or is taken; the metadata are no JSON or too
                large.
            EngineError: the disk refused.
        """
        with self.draft(name, state.facts, overwrite=overwrite) as draft:
            write_manifest(draft, state, save_tensors(draft / DATA, state.tensors()))

    @contextlib.contextmanager
    def draft(
        self, name: str, facts: CheckpointFacts, *, overwrite: bool
    ) -> Generator[Path, None, None]:
        """A new folder that becomes the checkpoint if the ``with`` succeeds. Raises as ``write``.

        The caller writes the tensors into ``DATA``, and calls ``write_manifest`` last.
        """
        check_name(name, "path")
        check_metadata(facts.metadata)
        with write_draft(self._root / name, overwrite=overwrite) as draft:
            yield draft
        self._remove_oldest()

    def read(self, name: str, *, base_model: str, lora: LoraOptions | None) -> TrainerState:
        """A checkpoint of this model, verified, on the CPU.

        Raises:
            NotFoundError: there is none of that name; the message lists the names.
            RequestError: it is of another base model, adapter or format.
            EngineError: it is damaged; the file is named.
        """
        manifest = self._read_fitting(name, base_model, lora)
        try:
            tensors = load_tensors(self._root / name / DATA, manifest["files"])
        except EngineError:
            # Another process may have overwritten it between the manifest and the data.
            if self._read_manifest(name) == manifest:
                raise
            return self.read(name, base_model=base_model, lora=lora)
        return TrainerState.from_tensors(parse_facts(manifest), tensors, manifest["rng"])

    def verify(
        self, name: str, *, base_model: str, lora: LoraOptions | None
    ) -> tuple[Path, CheckpointFacts, Mapping[str, str]]:
        """The folder of a checkpoint's tensors, its facts and RNG states; raises as ``read``."""
        manifest = self._read_fitting(name, base_model, lora)
        folder = self._root / name / DATA
        verify_files(folder, manifest["files"])
        return folder, parse_facts(manifest), manifest["rng"]

    def _read_fitting(self, name: str, base_model: str, lora: LoraOptions | None) -> dict[str, Any]:
        """The manifest of a checkpoint, which must be of this model."""
        manifest = self._read_manifest(name)
        facts = parse_facts(manifest)
        if facts.base_model != base_model or _drop_free(facts.lora) != _drop_free(lora):
            raise RequestError(
                f"checkpoint {name!r} must be of {base_model!r} with adapter {_drop_free(lora)}, "
                f"got {facts.base_model!r} with {_drop_free(facts.lora)}"
            )
        return manifest

    def _read_manifest(self, name: str) -> dict[str, Any]:
        check_name(name, "path")
        known = self.names()
        if name not in known:
            raise NotFoundError(f"path must name one of {known}, got {name!r}")
        manifest = read_manifest(self._root / name)
        if manifest.get("format") != _FORMAT:
            raise RequestError(
                f"path must name a resumable checkpoint ({_FORMAT}), got {name!r}, which is "
                f"{manifest.get('format')!r}"
            )
        if manifest.pop(CHECKSUM, None) is None:
            raise EngineError(f"{name}/{MANIFEST_FILE} must have a checksum, got none")
        return manifest

    def _remove_oldest(self) -> None:
        """Remove the oldest beyond ``keep``. A failure is only logged: the new one is complete."""
        if self._keep is None:
            return
        try:
            counted = [name for name in folder_names(self._root) if not self._is_pinned(name)]
            for name in counted[: -self._keep]:
                remove_folder(self._root / name)
        except (EngineError, OSError) as error:
            logger.warning("old checkpoints under %s stay: %s", self._root, error)

    def _is_pinned(self, name: str) -> bool:
        try:
            return self.facts(name).metadata.get("pinned") is True
        except (EngineError, RequestError):
            return True  # a damaged checkpoint is kept for a person to look at


def parse_reference(path: str) -> tuple[str | None, str]:
    """``cross_job://<job>/<name>`` as job and name; a bare name has no job.

    Raises:
        RequestError: a part is no valid name of a folder.
    """
    if not path.startswith(CROSS_JOB):
        return None, check_name(path, "path")
    job, _, name = path.removeprefix(CROSS_JOB).partition("/")
    return check_name(job, "path's job"), check_name(name, "path's name")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse metadata that a manifest cannot hold.

    Raises:
        RequestError: it is no JSON, or too large.
    """
    try:
        size = len(json.dumps(dict(metadata), allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"metadata must be JSON values, got {error}") from None
    if size > MAX_METADATA_BYTES:
        raise RequestError(f"metadata must be at most {MAX_METADATA_BYTES} bytes, got {size}")


def read_rng(device: torch.device) -> dict[str, str]:
    """States of torch's generators of the CPU and of ``device``, in base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {
        name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()
    }


def restore_rng(states: Mapping[str, str], device: torch.device) -> None:
    """Set torch's generators to states of ``read_rng``; others stay as they are.

    Raises:
        EngineError: this torch cannot read a state.
    """
    for name, text in states.items():
        try:
            raw = bytearray(base64.b64decode(text, validate=True))
            state = torch.frombuffer(raw, dtype=torch.uint8)
            if name == "cpu":
                torch.set_rng_state(state)
            elif device.type == "cuda":
                torch.cuda.set_rng_state(state, device)
        except (RuntimeError, TypeError, ValueError, binascii.Error) as error:
            raise EngineError(
                f"rng.{name} must be a generator's state, got {len(text)} characters: {error}"
            ) from None


def parse_facts(manifest: Mapping[str, Any]) -> CheckpointFacts:
    """The facts that a manifest, or ``asdict`` of such facts, has."""
    values = {field.name: manifest[field.name] for field in fields(CheckpointFacts)}
    lora = LoraOptions.from_metadata(values) if values["lora"] else None
    return CheckpointFacts(**{**values, "lora": lora})


def _drop_free(lora: LoraOptions | None) -> dict[str, Any] | None:
    """What must be equal of an adapter's options: not its seed, nor whether experts are in it."""
    if lora is None:
        return None
    free = ("seed", "train_experts")
    return {key: value for key, value in asdict(lora).items() if key not in free}


def _select_below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): tensors[key] for key in tensors if key.startswith(prefix)}
