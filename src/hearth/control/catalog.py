"""Which models and training shapes there are, and what stands behind their names.

Three sources: the documented ids that ship with Hearth, a TOML file of the user's, and models that
were promoted here. What is none of these but names a folder or a hub id is a model too, and every
model has an own shape for each mode, so that a shape is always found.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hearth.errors import ConfigError, NotFoundError
from hearth.settings import CATALOG_VARIABLE
from hearth.wire.fireworks import ShapeSnapshot, TrainerMode, TrainingShapeVersion

_BUILT_IN = Path(__file__).with_name("catalog.toml")
MODES: Mapping[str, TrainerMode] = {
    "": "POLICY_TRAINER",
    "-lora": "LORA_TRAINER",
    "-forward": "FORWARD_ONLY",
}


@dataclass(frozen=True)
class ModelEntry:
    """One model."""

    name: str
    source: str
    """A folder, or a hub id."""
    moe: bool = False
    parameters: int | None = None
    context_length: int | None = None
    """Most tokens; None where nobody says before the model is loaded."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ShapeEntry:
    """One training shape."""

    name: str
    base_model: str
    trainer_mode: TrainerMode = "POLICY_TRAINER"
    context_length: int | None = None
    dtype: str | None = None
    device: str | None = None
    micro_batch_tokens: int | None = None
    threads: int | None = None

    @property
    def deployment_shape(self) -> str:
        """The shape of a deployment that goes with it."""
        return f"{self.name.replace('/trainingShapes/', '/deploymentShapes/')}/versions/1"

    def version(self) -> TrainingShapeVersion:
        """Its one version, as a record."""
        return TrainingShapeVersion(
            name=f"{self.name}/versions/1",
            snapshot=ShapeSnapshot(
                base_model=self.base_model,
                trainer_mode=self.trainer_mode,
                max_supported_context_length=self.context_length or 4096,
                deployment_shape_version=self.deployment_shape,
            ),
        )


@dataclass(frozen=True)
class Catalog:
    """Models and shapes by name."""

    models: Mapping[str, ModelEntry] = field(default_factory=lambda: {})
    shapes: Mapping[str, ShapeEntry] = field(default_factory=lambda: {})

    def model(self, name: str, promoted: Mapping[str, ModelEntry] | None = None) -> ModelEntry:
        """What a name stands for; a folder or a hub id stands for itself.

        Raises:
            ConfigError: the name looks registered (``accounts/...``) and is not, or looks like a
                path and is no folder.
        """
        known = {**self.models, **(promoted or {})}
        if name in known:
            return _with_config(known[name])
        if name.startswith("accounts/"):
            raise ConfigError(
                f"base_model must be a registered name, a folder or a hub id, got {name!r}: "
                f"registered are {sorted(known)}; a catalog file ({CATALOG_VARIABLE}) adds more"
            )
        looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        if looks_like_a_path and not Path(name).expanduser().is_dir():
            raise ConfigError(f"base_model must be an existing folder, got {name!r}")
        return _with_config(ModelEntry(name=name, source=name))

    def shape(self, name: str) -> ShapeEntry:
        """The shape of a name, with or without its version.

        Raises:
            NotFoundError: there is none; the message lists the known ones.
        """
        bare = name.split("/versions/")[0]
        if bare in self.shapes:
            return self.shapes[bare]
        for model in self.models.values():
            for shape in _own_shapes(model):
                if shape.name == bare:
                    return shape
        raise NotFoundError(
            f"training_shape_id must be a known shape, got {name!r}: known are "
            f"{sorted(self.shapes)}; leave it unset to have one chosen"
        )

    def all_shapes(self) -> list[ShapeEntry]:
        """Every shape: the registered ones, then each model's own."""
        own = [shape for model in self.models.values() for shape in _own_shapes(model)]
        return [*self.shapes.values(), *own]


def read_catalog(path: Path | None = None) -> Catalog:
    """The documented entries, with those of ``path`` (or of ``HEARTH_CATALOG``) over them.

    Raises:
        ConfigError: the file cannot be read, or an entry breaks its rule.
    """
    catalog = _read(_BUILT_IN)
    variable = os.environ.get(CATALOG_VARIABLE)
    chosen = path or (Path(variable) if variable else None)
    if chosen is None:
        return catalog
    added = _read(chosen.expanduser())
    return Catalog({**catalog.models, **added.models}, {**catalog.shapes, **added.shapes})


def _read(path: Path) -> Catalog:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"catalog must be a TOML file, got {str(path)!r}: {error}") from None
    models = {
        name: _entry(ModelEntry, "models", name, values)
        for name, values in content.get("models", {}).items()
    }
    shapes = {
        name: _entry(ShapeEntry, "shapes", name, values)
        for name, values in content.get("shapes", {}).items()
    }
    return Catalog(models, shapes)


def _entry(kind: type[Any], table: str, name: str, values: Any) -> Any:
    parts = name.split("/")
    if len(parts) != 4 or parts[0] != "accounts" or not all(parts):
        middle = "trainingShapes" if table == "shapes" else "models"
        raise ConfigError(
            f"catalog {table} must be named accounts/ACCOUNT/{middle}/NAME, got {name!r}"
        )
    try:
        return kind(name=name, **values)
    except TypeError as error:
        raise ConfigError(f"catalog entry {name!r} must have known fields, got {error}") from None


def _own_shapes(model: ModelEntry) -> list[ShapeEntry]:
    account, leaf = model.name.split("/")[1], model.name.split("/")[-1]
    return [
        ShapeEntry(
            name=f"accounts/{account}/trainingShapes/{leaf}{suffix}", base_model=model.name,
            trainer_mode=mode, context_length=_with_config(model).context_length,
        )
        for suffix, mode in MODES.items()
    ]  # fmt: skip


def _with_config(entry: ModelEntry) -> ModelEntry:
    """Fill in what a model's own folder says of it."""
    if entry.context_length is not None and entry.parameters is not None:
        return entry
    try:
        path = Path(entry.source).expanduser() / "config.json"
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return entry
    experts = config.get("num_experts") or config.get("num_local_experts") or 0
    return ModelEntry(
        name=entry.name,
        source=entry.source,
        moe=entry.moe or bool(experts or config.get("n_routed_experts")),
        parameters=entry.parameters,
        context_length=entry.context_length or config.get("max_position_embeddings"),
        trust_remote_code=entry.trust_remote_code,
    )
