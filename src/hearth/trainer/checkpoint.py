"""Resumable checkpoints: weights, optimizer and step count in one folder, written at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor

from hearth.errors import NotFoundError, RequestError
from hearth.models.lora import LoraOptions
from hearth.sync.manifest import (
    check_name,
    folder_names,
    read_manifest,
    read_tensors,
    write_folder,
)

_FORMAT = "hearth-checkpoint-1"


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint holds."""

    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    steps: int


class CheckpointFolder:
    """The checkpoints of one trainer, a folder each under ``root``."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def names(self) -> list[str]:
        """Names, oldest first."""
        return folder_names(self._root)

    def write(
        self, name: str, *, base_model: str, lora: LoraOptions | None, steps: int,
        weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], overwrite: bool,
    ) -> None:  # fmt: skip
        """Write a checkpoint; it appears complete or not at all.

        Raises:
            RequestError: the name is no valid one, or is taken.
        """
        check_name(name, "path")
        manifest = {
            "format": _FORMAT, "base_model": base_model, "steps": steps,
            "lora": asdict(lora) if lora is not None else None,
        }  # fmt: skip
        files = {"weights": weights, "optimizer": optimizer}
        write_folder(self._root / name, manifest, files, overwrite=overwrite)

    def read(self, name: str, *, base_model: str, lora: LoraOptions | None) -> TrainerState:
        """A checkpoint of this model, verified.

        Raises:
            NotFoundError: there is none of that name; the message lists the names.
            RequestError: it is of another base model or adapter.
            EngineError: it is damaged.
        """
        check_name(name, "path")
        if name not in self.names():
            raise NotFoundError(f"path must name one of {self.names()}, got {name!r}")
        folder = self._root / name
        manifest = read_manifest(folder)
        shape = asdict(lora) if lora is not None else None
        found = manifest.get("lora")
        differs = (found is None) != (shape is None)
        if found and shape:
            differs = any(found[key] != shape[key] for key in shape if key != "seed")
        if manifest.get("base_model") != base_model or differs:
            raise RequestError(
                f"checkpoint {name!r} must be of {base_model!r} with adapter {shape}, got "
                f"{manifest.get('base_model')!r} with {found}"
            )
        return TrainerState(
            weights=read_tensors(folder, manifest, "weights"),
            optimizer=read_tensors(folder, manifest, "optimizer"),
            steps=int(manifest["steps"]),
        )
