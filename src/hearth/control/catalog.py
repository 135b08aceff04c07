"""Which models and training shapes there are, and what stands behind their names.

Three sources: the documented ids that ship with Hearth, a TOML file of the user's, and models that
were promoted here. What is none of these but names a folder or a hub id is a model too. Every model
of the first two sources has an own shape for each mode, beside the shapes that are registered.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import orjson
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from hearth.errors import ConfigError, NotFoundError
from hearth.launch.records import read_json
from hearth.launch.spec import Engine
from hearth.settings import CATALOG_VARIABLE
from hearth.wire.base import describe
from hearth.wire.fireworks import ShapeSnapshot, TrainerMode, TrainingShapeVersion

_BUILT_IN = Path(__file__).with_name("catalog.toml")
MODES: Mapping[str, TrainerMode] = {
    "": "POLICY_TRAINER",
    "-lora": "LORA_TRAINER",
    "-forward": "FORWARD_ONLY",
}


_Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class ModelEntry:
    """One model."""

    name: str
    source: str
    """A folder, or a hub id."""
    moe: bool = False
    parameters: _Positive | None = None
    context_length: _Positive | None = None
    """Most tokens; None where nobody says before the model is loaded."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class ShapeEntry:
    """One training shape."""

    name: str
    base_model: str
    trainer_mode: TrainerMode = "POLICY_TRAINER"
    context_length: _Positive | None = None
    dtype: Literal["float32", "bfloat16"] | None = None
    device: str | None = None
    micro_batch_tokens: _Positive | None = None
    recompute_above: _Positive | None = None
    threads: _Positive | None = None
    ranks: _Positive | None = None
    """Processes that share a trainer's weights (FSDP2)."""
    rank_timeout_s: _Positive | None = None
    """Seconds that a rank may keep the others waiting before the trainer is given up."""
    offload_optimizer: bool | None = None
    """Keep a rank's weights, gradients and moments in the host's memory between uses."""
    context_parallel: _Positive | None = None
    """Ranks that share one sequence; 1 is all there is."""
    engine: Engine | None = None
    """What samples the tokens of a deployment."""
    engine_options: dict[str, Any] | None = None
    """What that engine is told beside the fields above."""
    replicas: _Positive | None = None
    """Servers of a deployment that answer side by side."""

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


EntryT = TypeVar("EntryT", ModelEntry, ShapeEntry)
_HUB_ID = re.compile(r"[A-Za-z0-9_][\w.-]{0,95}(/[A-Za-z0-9_][\w.-]{0,95})?")
_STRICT = ConfigDict(extra="forbid")
_MODELS = TypeAdapter(with_config(_STRICT)(ModelEntry))
_SHAPES = TypeAdapter(with_config(_STRICT)(ShapeEntry))


@dataclass(frozen=True)
class Catalog:
    """Models and shapes by name."""

    models: Mapping[str, ModelEntry] = field(default_factory=lambda: {})
    shapes: Mapping[str, ShapeEntry] = field(default_factory=lambda: {})
    allow_folders: bool = True
    """Whether a request may name a folder of this machine; where others ask, it may not."""

    def find_model(self, name: str, promoted: Mapping[str, ModelEntry] | None = None) -> ModelEntry:
        """What a name stands for; a folder or a hub id stands for itself.

        Raises:
            ConfigError: the name looks registered (``accounts/...``) and is not, or is neither a
                folder nor a hub id.
        """
        known = {**self.models, **(promoted or {})}
        if name in known:
            return _add_config_facts(known[name])
        if name.startswith("accounts/"):
            raise ConfigError(
                f"base_model must be a registered name, a folder or a hub id, got {name!r}: "
                f"registered are {sorted(known)}; a catalog file ({CATALOG_VARIABLE}) adds more"
            )
        self.check_source(name, "base_model")
        return _add_config_facts(ModelEntry(name=name, source=name))

    def check_source(self, name: str, field: str) -> None:
        """Refuse what is neither a hub id nor a folder that a request may name.

        Raises:
            ConfigError: it looks like a path and is no folder, folders may not be named, or it is
                neither of the two, such as a URL.
        """
        looks_like_a_path = name.startswith((".", "/", "~")) or name.count("/") > 1
        is_folder = _is_folder(name)
        if not self.allow_folders and (looks_like_a_path or is_folder):
            raise ConfigError(
                f"{field} must be a registered name or a hub id on this platform, got the folder "
                f"{name!r}: a catalog file gives folders their names"
            )
        if looks_like_a_path and not is_folder:
            raise ConfigError(f"{field} must be an existing folder, got {name!r}")
        if not is_folder and not _HUB_ID.fullmatch(name):
            raise ConfigError(
                f"{field} must be a registered name, a folder or a hub id such as 'owner/name', "
                f"got {name[:200]!r}"
            )

    def find_shape(self, name: str) -> ShapeEntry:
        """The shape of a name, with or without its version.

        Raises:
            NotFoundError: there is none; the message lists the known ones.
        """
        bare = name.split("/versions/")[0]
        if bare in self.shapes:
            return self.shapes[bare]
        shapes = self.list_shapes()
        for shape in shapes:
            if shape.name == bare:
                return shape
        known = [shape.name for shape in shapes]
        raise NotFoundError(
            f"training_shape_id must be a known shape, got {name!r}: known are {known}; leave it "
            "unset to have one chosen"
        )

    def list_shapes(self, account: str | None = None) -> list[ShapeEntry]:
        """Every shape, or those of one account: the registered ones, then each model's own."""
        own = [shape for model in self.models.values() for shape in _derive_shapes(model)]
        shapes = [*self.shapes.values(), *own]
        return [shape for shape in shapes if account in (None, shape.name.split("/")[1])]


def read_catalog(path: Path | None = None, *, allow_folders: bool = True) -> Catalog:
    """The documented entries, with those of ``path`` (or of ``HEARTH_CATALOG``) over them.

    Raises:
        ConfigError: the file cannot be read, or an entry breaks its rule.
    """
    catalog = _read_file(_BUILT_IN)
    variable = os.environ.get(CATALOG_VARIABLE)
    chosen = path or (Path(variable) if variable else None)
    added = _read_file(chosen.expanduser()) if chosen is not None else Catalog()
    return Catalog(
        {**catalog.models, **added.models}, {**catalog.shapes, **added.shapes}, allow_folders
    )


def _is_folder(name: str) -> bool:
    try:
        return Path(name).expanduser().is_dir()
    except (OSError, RuntimeError, ValueError):  # no such user's home, too long, or no path at all
        return False


def _read_file(path: Path) -> Catalog:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"catalog must be a TOML file, got {str(path)!r}: {error}") from None
    unknown = sorted(content.keys() - {"models", "shapes"})
    if unknown or not all(isinstance(table, dict) for table in content.values()):
        raise ConfigError(f"catalog must have the tables models and shapes, got {sorted(content)}")
    models = {
        name: _parse_entry(_MODELS, "models", name, values)
        for name, values in content.get("models", {}).items()
    }
    shapes = {
        name: _parse_entry(_SHAPES, "shapes", name, values)
        for name, values in content.get("shapes", {}).items()
    }
    return Catalog(models, shapes)


def _parse_entry(kind: TypeAdapter[EntryT], table: str, name: str, values: Any) -> EntryT:
    parts = name.split("/")
    middle = "trainingShapes" if table == "shapes" else "models"
    if len(parts) != 4 or parts[0] != "accounts" or parts[2] != middle or not all(parts):
        raise ConfigError(
            f"catalog {table} must be named accounts/ACCOUNT/{middle}/NAME, got {name!r}"
        )
    try:
        return kind.validate_json(orjson.dumps({**values, "name": name}), strict=True)
    except (TypeError, ValidationError) as error:
        shown = describe(error) if isinstance(error, ValidationError) else str(error)
        raise ConfigError(f"catalog entry {name!r} must have known fields: {shown}") from None


def _derive_shapes(model: ModelEntry) -> list[ShapeEntry]:
    account, leaf = model.name.split("/")[1], model.name.split("/")[-1]
    return [
        ShapeEntry(
            name=f"accounts/{account}/trainingShapes/{leaf}{suffix}",
            base_model=model.name,
            trainer_mode=mode,
            context_length=_add_config_facts(model).context_length,
        )
        for suffix, mode in MODES.items()
    ]


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether a model's ``config.json`` is that of a mixture of experts."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return any(config.get(name) for name in names)


def _add_config_facts(entry: ModelEntry) -> ModelEntry:
    """Fill in what a model's own folder says of it."""
    if entry.context_length is not None and entry.parameters is not None:
        return entry
    try:
        path = Path(entry.source).expanduser() / "config.json"
        config = read_json(path)
    except RuntimeError:  # no such user's home
        return entry
    if config is None:
        return entry
    length = config.get("max_position_embeddings")
    return replace(
        entry,
        moe=entry.moe or has_experts(config),
        context_length=entry.context_length or (length if isinstance(length, int) else None),
    )
