"""Resumable checkpoints: everything a trainer goes on from, in one folder, written at once.

A folder holds ``manifest.json`` and ``data``, the tensors as torch DCP writes them
(``hearth.trainer.dcp``). What is no tensor is in the manifest. Neither is ever unpickled.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import json
import logging
from collections.abc import Generator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import hearth
from hearth.errors import ConfigError, EngineError, NotFoundError, RequestError
from hearth.models.lora import LoraOptions
from hearth.sync.folders import drafted, remove_folder, sweep
from hearth.sync.manifest import MANIFEST_FILE, check_name, folder_names, read_manifest
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
    """What a checkpoint's manifest says of it."""

    base_model: str
    lora: LoraOptions | None
    steps: int
    """Optimizer steps taken."""
    created_s: float
    """Unix time at which the save began."""
    seq_id: int | None = None
    """The model's operations up to this number are in it."""
    metadata: Mapping[str, Any] = field(default_factory=lambda: {})
    """The client's own: row cursor, weight version, config. With ``"pinned": true`` it stays."""


@dataclass(frozen=True, eq=False)
class TrainerState:
    """What a checkpoint holds."""

    facts: CheckpointFacts
    weights: Mapping[str, Tensor]
    optimizer: Mapping[str, Tensor]
    rng: Mapping[str, str]
    """As ``rng_state`` gives it."""

    def tensors(self) -> dict[str, Tensor]:
        """All tensors by the names that they have in the folder."""
        named = {f"{_WEIGHTS}{name}": one for name, one in self.weights.items()}
        return named | {f"{_OPTIMIZER}{name}": one for name, one in self.optimizer.items()}


def state_of(
    facts: CheckpointFacts, tensors: Mapping[str, Tensor], rng: Mapping[str, str]
) -> TrainerState:
    """The reverse of ``TrainerState.tensors``."""
    return TrainerState(
        facts=facts,
        weights=_below(_WEIGHTS, tensors),
        optimizer=_below(_OPTIMIZER, tensors),
        rng=rng,
    )


def write_manifest(draft: Path, state: TrainerState, files: Mapping[str, FileEntry]) -> None:
    """Write down what the files of a draft are."""
    manifest: dict[str, Any] = {
        "format": _FORMAT,
        "hearth": hearth.__version__,
        "torch": torch.__version__,
        **asdict(state.facts),
        "rng": dict(state.rng),
        "files": dict(files),
    }
    # As a reader will find it: JSON has lists for tuples and texts for keys.
    manifest = json.loads(json.dumps(manifest))
    text = json.dumps({**manifest, "checksum": _digest(manifest)}, indent=1)
    (draft / MANIFEST_FILE).write_text(text, encoding="utf-8")


class CheckpointFolder:
    """The checkpoints of one trainer, a folder each under ``root``.

    With ``keep`` the oldest beyond that many go after a save; pinned ones stay and do not count.

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
        """What a checkpoint is; its tensors are not read.

        Raises:
            NotFoundError: there is none of that name; the message lists the names.
            RequestError: it is no name, or the folder is of another format.
            EngineError: its manifest is damaged.
        """
        return _facts_of(self._manifest(name))

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
        """An empty folder that is the checkpoint once the ``with`` ends well; raises as ``write``.

        Its tensors go into ``DATA``, and ``write_manifest`` comes last.
        """
        check_name(name, "path")
        check_metadata(facts.metadata)
        with drafted(self._root / name, overwrite=overwrite) as draft:
            yield draft
        self._retire()

    def read(self, name: str, *, base_model: str, lora: LoraOptions | None) -> TrainerState:
        """A checkpoint of this model, verified, on the CPU.

        Raises:
            NotFoundError: there is none of that name; the message lists the names.
            RequestError: it is of another base model, adapter or format.
            EngineError: it is damaged; the file is named.
        """
        manifest = self._fitting(name, base_model, lora)
        try:
            tensors = load_tensors(self._root / name / DATA, manifest["files"])
        except EngineError:
            # Another process may have overwritten it between the manifest and the data.
            if self._manifest(name) == manifest:
                raise
            return self.read(name, base_model=base_model, lora=lora)
        return state_of(_facts_of(manifest), tensors, manifest["rng"])

    def verified(
        self, name: str, *, base_model: str, lora: LoraOptions | None
    ) -> tuple[Path, CheckpointFacts, Mapping[str, str]]:
        """Where a checkpoint's tensors are, its facts and its RNG states; raises as ``read``."""
        manifest = self._fitting(name, base_model, lora)
        folder = self._root / name / DATA
        verify_files(folder, manifest["files"])
        return folder, _facts_of(manifest), manifest["rng"]

    def _fitting(self, name: str, base_model: str, lora: LoraOptions | None) -> dict[str, Any]:
        """The manifest of a checkpoint of this model."""
        manifest = self._manifest(name)
        facts = _facts_of(manifest)
        if facts.base_model != base_model or _shape(facts.lora) != _shape(lora):
            raise RequestError(
                f"checkpoint {name!r} must be of {base_model!r} with adapter {_shape(lora)}, got "
                f"{facts.base_model!r} with {_shape(facts.lora)}"
            )
        return manifest

    def _manifest(self, name: str) -> dict[str, Any]:
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
        if manifest.pop("checksum", None) != _digest(manifest):
            raise EngineError(
                f"{name}/{MANIFEST_FILE} must match its own checksum, got another one: the file "
                "was changed after it was written"
            )
        return manifest

    def _retire(self) -> None:
        """Let the oldest beyond ``keep`` go. The new checkpoint stands whatever happens here."""
        if self._keep is None:
            return
        try:
            counted = [name for name in folder_names(self._root) if not self._is_pinned(name)]
            for name in counted[: -self._keep]:
                remove_folder(self._root / name)
        except OSError as error:
            logger.warning("old checkpoints under %s stay: %s", self._root, error)

    def _is_pinned(self, name: str) -> bool:
        try:
            return self.facts(name).metadata.get("pinned") is True
        except (EngineError, RequestError):
            return True  # who looks into the damage decides


def parse_reference(path: str) -> tuple[str | None, str]:
    """``cross_job://<job>/<name>`` as job and name; a bare name has no job.

    Raises:
        RequestError: a part can be no folder's name.
    """
    if not path.startswith(CROSS_JOB):
        return None, check_name(path, "path")
    job, _, name = path.removeprefix(CROSS_JOB).partition("/")
    return check_name(job, "path's job"), check_name(name, "path's name")


def check_metadata(metadata: Mapping[str, Any]) -> None:
    """Refuse what a manifest cannot hold.

    Raises:
        RequestError: it is no JSON, or too large.
    """
    try:
        size = len(json.dumps(dict(metadata), allow_nan=False).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"metadata must be JSON values, got {error}") from None
    if size > MAX_METADATA_BYTES:
        raise RequestError(f"metadata must be at most {MAX_METADATA_BYTES} bytes, got {size}")


def rng_state(device: torch.device) -> dict[str, str]:
    """States of torch's generators of the CPU and of ``device``, in base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {
        name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()
    }


def restore_rng(states: Mapping[str, str], device: torch.device) -> None:
    """Set torch's generators to what ``rng_state`` gave; one that was not saved stays.

    Raises:
        EngineError: a state is none of a generator of this torch.
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


def _facts_of(manifest: Mapping[str, Any]) -> CheckpointFacts:
    lora = manifest["lora"]
    return CheckpointFacts(
        base_model=manifest["base_model"],
        lora=LoraOptions(**lora) if lora else None,
        steps=manifest["steps"],
        created_s=manifest["created_s"],
        seq_id=manifest["seq_id"],
        metadata=manifest["metadata"],
    )


def _shape(lora: LoraOptions | None) -> dict[str, Any] | None:
    """An adapter without its seed: where it started says nothing of whether a checkpoint fits."""
    if lora is None:
        return None
    return {key: value for key, value in asdict(lora).items() if key != "seed"}


def _below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): one for key, one in tensors.items() if key.startswith(prefix)}


def _digest(manifest: Mapping[str, Any]) -> str:
    text = json.dumps(manifest, sort_keys=True)
    return f"blake2b:{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"
