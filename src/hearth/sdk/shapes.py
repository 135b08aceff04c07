"""Training shapes: what a platform is ready to train, and with which context length."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hearth.errors import ConfigError, NotFoundError
from hearth.sdk.resources import ControlPlaneClient
from hearth.wire.fireworks import TrainerMode, TrainingShapePage, TrainingShapeVersion

_NEWEST = {"filter": "latest_validated=true", "pageSize": "1"}
_ALL = {"filter": "latest_validated=true", "orderBy": "create_time desc"}


@dataclass(frozen=True)
class TrainingShapeProfile:
    """One version of a training shape, and what it fixes."""

    training_shape_version: str
    """``accounts/x/trainingShapes/y/versions/v``, which a job may name."""
    trainer_mode: TrainerMode
    max_supported_context_length: int
    deployment_shape_version: str
    base_model: str | None
    """None serves any."""
    node_count: int
    accelerator_type: str
    accelerator_count: int
    trainer_image_tag: str
    pipeline_parallelism: int

    @property
    def training_shape_id(self) -> str:
        """The shape without its version."""
        return self.training_shape_version.split("/versions/")[0]

    @classmethod
    def from_version(cls, version: TrainingShapeVersion) -> TrainingShapeProfile:
        """The profile of a version record."""
        fixed = version.snapshot
        return cls(
            training_shape_version=version.name,
            trainer_mode=fixed.trainer_mode,
            max_supported_context_length=fixed.max_supported_context_length,
            deployment_shape_version=fixed.deployment_shape_version,
            base_model=fixed.base_model,
            node_count=fixed.node_count,
            accelerator_type=fixed.accelerator_type,
            accelerator_count=fixed.accelerator_count,
            trainer_image_tag=fixed.trainer_image_tag,
            pipeline_parallelism=fixed.trainer_sharding_scheme.pipeline_parallelism,
        )


async def resolve_shape(control: ControlPlaneClient, shape_id: str) -> TrainingShapeProfile:
    """The newest validated version of a shape, or the version that is named.

    Raises:
        ConfigError: ``shape_id`` is no name of a shape.
        NotFoundError: the platform has no such shape, or no validated version of it.
    """
    parts = shape_id.split("/")
    has_form = len(parts) in (4, 6) and parts[0] == "accounts" and parts[2] == "trainingShapes"
    if not has_form or (len(parts) == 6 and parts[4] != "versions"):
        raise ConfigError(
            "training_shape_id must be accounts/<account>/trainingShapes/<shape>, with or without "
            f"/versions/<version>, got {shape_id!r}"
        )
    if len(parts) == 6:
        return TrainingShapeProfile.from_version(await control.get(shape_id, TrainingShapeVersion))
    page = await control.get(f"{shape_id}/versions", TrainingShapePage, _NEWEST)
    if not page.training_shape_versions:
        raise NotFoundError(f"training_shape_id must have a validated version, got {shape_id!r}")
    return TrainingShapeProfile.from_version(page.training_shape_versions[0])


async def select_shape(
    control: ControlPlaneClient, base_model: str, lora_rank: int, forward_only: bool
) -> TrainingShapeProfile:
    """The best shape for a job: made for its model before any model, newer before older.

    Raises:
        NotFoundError: the platform has none.
    """
    versions = await control.list_records(
        "accounts/-/trainingShapes/-/versions",
        TrainingShapePage,
        lambda page: page.training_shape_versions,
        _ALL,
    )
    mode = choose_mode(lora_rank, forward_only)
    fitting = [
        version
        for version in versions
        if version.snapshot.trainer_mode == mode
        and version.snapshot.base_model in (None, base_model)
    ]
    if not fitting:
        raise NotFoundError(
            f"a training shape must exist for {base_model!r} as {mode}, got "
            f"{_describe(versions, base_model)}: pass training_shape_id, or none to let the "
            "platform choose"
        )
    best = max(
        fitting,
        key=lambda version: (version.snapshot.base_model is not None, version.create_time or ""),
    )
    return TrainingShapeProfile.from_version(best)


def choose_mode(lora_rank: int, forward_only: bool) -> TrainerMode:
    """The kind of trainer that a job needs."""
    if forward_only:
        return "FORWARD_ONLY"
    return "LORA_TRAINER" if lora_rank > 0 else "POLICY_TRAINER"


def _describe(versions: Sequence[TrainingShapeVersion], base_model: str) -> str:
    """The model's own shapes, or how many others there are."""
    own = [version for version in versions if version.snapshot.base_model in (None, base_model)]
    if not own:
        return f"none of this model among {len(versions)}"
    return ", ".join(f"{version.name} ({version.snapshot.trainer_mode})" for version in own)
