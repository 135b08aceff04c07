"""The dataclasses that a recipe's config is built from, and how three generations of them agree.

The documents show one setting under several names (``weight_sync_interval``, also inside
``weight_sync`` and ``hotload``). A default is marked, so that a value somebody gave can be told
from one nobody gave even when they are equal; ``agreed`` picks the given one and refuses two.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from enum import StrEnum
from typing import Any, Literal

from hearth.errors import ConfigError
from hearth.losses.cispo import CISPO
from hearth.losses.clipped import DAPO
from hearth.losses.corrections import TIS
from hearth.losses.policy_gradients import DRO
from hearth.losses.sequence import GSPO
from training.config.json_flag import JsonObject

CheckpointType = Literal["base", "delta", "direct", "merged_base"]
LoraTarget = Literal["attn", "mlp", "unembed"]
"""Linear layers that a LoRA adapter may change."""
ResumeMode = Literal["auto", "never", "force"]
Replay = Literal["none", "completion", "all"]
"""Whose experts are replayed: nobody's, those of sampled tokens, or those of prompts as well."""


class DefaultInt(int):
    """An int that nobody gave."""


class DefaultFloat(float):
    """A float that nobody gave."""


def is_given(value: object) -> bool:
    """Whether somebody set this value; for a bool, whether it differs from False."""
    if isinstance(value, bool):
        return value
    return value is not None and not isinstance(value, DefaultInt | DefaultFloat)


def choose_value(*candidates: tuple[str, Any]) -> Any:
    """The value that was given under one of several names; the first one's default if none was.

    Raises:
        ConfigError: two names were given different values.
    """
    given = [(name, value) for name, value in candidates if is_given(value)]
    for name, value in given[1:]:
        if value != given[0][1]:
            raise ConfigError(
                f"{given[0][0]} and {name} must agree, got {given[0][1]!r} and {value!r}: they are "
                "two names of one setting, give one of them"
            )
    return given[0][1] if given else candidates[0][1]


class WeightSyncScope(StrEnum):
    """Which side owns the place where snapshots are exchanged."""

    PER_TRAINER = "per_trainer"
    PER_DEPLOYMENT = "per_deployment"


@dataclass(kw_only=True)
class InfraConfig:
    """Where trainer jobs run, as older configs say it. Newer ones say ``TrainerConfig``."""

    training_shape_id: str | None = None
    """Training shape of the policy trainer, ``accounts/NAME/trainingShapes/NAME``."""
    ref_training_shape_id: str | None = None
    """Training shape of the reference trainer; giving one asks for a reference."""
    region: str | None = None
    """A label: trainers run where the platform runs."""
    custom_image_tag: str | None = None
    """A label: trainers run in the platform's environment."""
    accelerator_type: str | None = None
    """A label, where no shape says it; ``TrainerConfig.device`` chooses."""
    accelerator_count: int | None = None
    """Accelerators per node, where no shape says it; 1 at most (``TrainerConfig.ranks``)."""
    node_count: int | None = None
    """Nodes, where no shape says it; 1 at most (``TrainerConfig.ranks``)."""
    trainer_timeout_s: float = DefaultFloat(3600.0)
    """Seconds until a trainer must be ready."""
    extra_args: list[str] | None = None
    """``--forward-only`` makes a frozen trainer; others are labels."""
    trainer_replica_count: int | None = None
    """Data-parallel copies of the trainer; 1 at most (``TrainerConfig.ranks``)."""
    purpose: str | None = None
    """Free label of the job."""
    managed_by: str | None = None
    """Free label of the job's owner."""
    skip_validations: bool = False
    """Create the job without the shape's checks."""


@dataclass(kw_only=True)
class TrainerConfig:
    """Where trainer jobs run."""

    job_id: str | None = None
    """An existing policy trainer to attach to."""
    training_shape_id: str | None = None
    """Training shape of the policy trainer; None picks one."""
    reference_training_shape_id: str | None = None
    """Training shape of the reference trainer; giving one asks for a reference."""
    reference_job_id: str | None = None
    """An existing reference trainer to attach to."""
    timeout_s: float = DefaultFloat(3600.0)
    """Seconds until a trainer must be ready."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the weights in trainer and deployment. None takes the shape's, or bfloat16
    on a GPU and float32 on a CPU."""
    device: str | None = None
    """``cpu``, ``cuda`` or ``cuda:N``, of trainers and deployment; None takes a GPU where there is
    one (docs/scale.md)."""
    micro_batch_tokens: int | None = None
    """Padded tokens of one forward and backward pass; None takes the shape's, or 16384."""
    recompute_above: int | None = None
    """Passes of more tokens than this compute activations again in their backward pass instead of
    keeping them (activation checkpointing): slower, in less memory. None takes the shape's, or
    never does."""
    ranks: int | None = None
    """Processes that share each trainer's weights (FSDP2); more than one needs
    ``placement="process"``, ``"ray"`` or a served platform. None takes the shape's, or 1."""

    @property
    def options(self) -> dict[str, Any]:
        """Hearth's own settings of a trainer job, where they are given; a shape has the others."""
        options = {
            "dtype": self.dtype,
            "device": self.device,
            "micro_batch_tokens": self.micro_batch_tokens,
            "recompute_above": self.recompute_above,
            "ranks": self.ranks,
        }
        return {name: value for name, value in options.items() if value is not None}


@dataclass(kw_only=True)
class TokenizerConfig:
    """The base model's tokenizer."""

    tokenizer_model: str = ""
    """Folder or hub id of the base model's tokenizer, with which the client tokenizes prompts. A
    recipe takes base_model where it is a folder or a hub id; for a registered name it must be
    given."""
    tokenizer_revision: str | None = None
    """Revision of the tokenizer on its hub."""
    trust_remote_code: bool = False
    """Let a tokenizer run code of its own."""


@dataclass(kw_only=True)
class DeployConfig(TokenizerConfig):
    """The inference deployment."""

    deployment_id: str | None = None
    """Name of the deployment; None makes one up."""
    deployment_shape: str | None = None
    """Shape of the deployment; None takes the one that goes with the policy trainer's."""
    deployment_region: str | None = None
    """A label: deployments run where the platform runs."""
    hot_load_trainer_job: str | None = None
    """Trainer whose snapshots it serves, for ``setup_deployment``; recipes attach it themselves."""
    weight_sync_scope: WeightSyncScope = WeightSyncScope.PER_TRAINER
    """Whether snapshots belong to the trainer or to the deployment."""
    deployment_timeout_s: float = 5400.0
    """Seconds until the deployment must be ready."""
    sample_timeout: float = 600.0
    """Seconds that one completion may take."""
    max_batch_size: int = 64
    """Sequences that are decoded together."""
    engine: Literal["embedded", "vllm"] | None = None
    """What samples the tokens; None takes the shape's, or Hearth's own engine."""
    engine_options: JsonObject = field(default_factory=dict[str, Any])
    """What that engine is told beside these fields, as {"tensor_parallel_size": 2}; a flag takes
    JSON (docs/serving.md)."""
    replicas: int | None = None
    """Servers that answer side by side; more than one needs ``engine="vllm"``. None takes the
    shape's, or 1."""


@dataclass(kw_only=True)
class WeightSyncConfig:
    """When weights go to the deployment, and when checkpoints are written, as older configs say."""

    weight_sync_interval: int = DefaultInt(1)
    """Optimizer steps per weight sync; 0 never syncs."""
    weight_sync_before_training: bool = False
    """Publish the initial weights before the first sample."""
    weight_sync_timeout: float = DefaultFloat(600.0)
    """Seconds until a snapshot must be served."""
    dcp_save_interval: int = DefaultInt(0)
    """Optimizer steps per resumable checkpoint; 0 writes none."""
    dcp_timeout: float = DefaultFloat(2700.0)
    """Seconds that writing a checkpoint may take."""
    first_checkpoint_type: CheckpointType = "base"
    """Kind of the first snapshot."""


@dataclass(kw_only=True)
class HotloadConfig:
    """``WeightSyncConfig`` under its oldest names."""

    hot_load_interval: int = DefaultInt(1)
    """Optimizer steps per weight sync; 0 never syncs."""
    hot_load_before_training: bool = False
    """Publish the initial weights before the first sample."""
    hot_load_timeout: float = DefaultFloat(600.0)
    """Seconds until a snapshot must be served."""
    dcp_save_interval: int = DefaultInt(0)
    """Optimizer steps per resumable checkpoint; 0 writes none."""
    dcp_timeout: float = DefaultFloat(2700.0)
    """Seconds that writing a checkpoint may take."""
    first_checkpoint_type: CheckpointType = "base"
    """Kind of the first snapshot."""


Tracker = Literal["none", "wandb", "tensorboard", "trackio", "mlflow"]


@dataclass(kw_only=True)
class WandBConfig:
    """Weights & Biases. Off while all fields are None; offline where nobody has logged in."""

    entity: str | None = None
    """Team or user that owns the run."""
    project: str | None = None
    """Project; None takes the recipe's default."""
    run_name: str | None = None
    """Name of the run."""


@dataclass(kw_only=True)
class ResumeConfig:
    """Whether and where to go on with the run of ``log_path``."""

    mode: ResumeMode = "auto"
    """auto goes on with a run on the same rows and settings, and refuses others; never moves the
    run that is there aside and starts anew; force goes on with changed settings (docs/resuming.md).
    ``resume="never"`` is short for ``resume=ResumeConfig(mode="never")``."""
    resume_from: str | None = None
    """Name of a checkpoint of this run, or ``latest``."""
    step_offset: int = 0
    """Number of the step that the checkpoint counts as; 0 takes the checkpoint's own."""


# The options of the losses, as the documents name them.
TISConfig = TIS
DAPOConfig = DAPO
GSPOConfig = GSPO
CISPOConfig = CISPO
DROConfig = DRO


@dataclass(frozen=True, kw_only=True)
class ISConfig(TIS):
    """``TISConfig`` under its older name."""

    clip_high: float | None = None
    """``cap`` under its older name; None leaves ``cap`` alone."""

    def __post_init__(self) -> None:
        """Move the older name's value to the newer name."""
        if self.clip_high is not None:
            object.__setattr__(self, "cap", self.clip_high)


@dataclass(frozen=True)
class SyncSettings:
    """Weight sync and checkpoint settings that all generations agreed on."""

    interval: int
    before_training: bool
    timeout_s: float
    dcp_save_interval: int
    dcp_timeout_s: float
    first_checkpoint_type: CheckpointType = field(default="base")


def plain_config(config: Any) -> dict[str, Any]:
    """A config dataclass as nested dictionaries of plain values, for JSON."""

    def plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
        marked = {DefaultInt: int, DefaultFloat: float}
        return {name: marked.get(type(value), lambda same: same)(value) for name, value in items}

    return asdict(config, dict_factory=plain)


def own_config(config: Any) -> dict[str, Any]:
    """``plain_config`` without the older spellings that nobody has used."""
    plain = plain_config(config)
    for setting in fields(config):
        is_older = str(setting.type).startswith("Suppress")
        if is_older and getattr(config, setting.name) == _default_of(setting):
            del plain[setting.name]
    return plain


def _default_of(setting: Any) -> Any:
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Nested settings as pairs of one level, such as ``("dapo.eps_clip", 0.2)``."""
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def read_share(record_samples: str) -> float:
    """The share of the rows that ``record_samples`` asks for, in [0, 1].

    Raises:
        ConfigError: it is neither all, none nor sampled:SHARE.
    """
    fixed = {"all": 1.0, "none": 0.0}
    if record_samples in fixed:
        return fixed[record_samples]
    kind, _, share = record_samples.partition(":")
    with contextlib.suppress(ValueError):
        if kind == "sampled" and 0 < float(share) <= 1:
            return float(share)
    raise ConfigError(
        f"record_samples must be all, none or sampled:SHARE with 0 < SHARE <= 1, got "
        f"{record_samples!r}: sampled:0.1 records one row in ten"
    )


def merge_sync(
    config: object, weight_sync: WeightSyncConfig, hotload: HotloadConfig
) -> SyncSettings:
    """What the three generations of sync settings say together.

    Raises:
        ConfigError: two spellings of one setting differ.
    """

    def pick(name: str, oldest: str) -> Any:
        return choose_value(
            (name, getattr(config, name)),
            (f"weight_sync.{name}", getattr(weight_sync, name)),
            (f"hotload.{oldest}", getattr(hotload, oldest)),
        )

    name = "first_checkpoint_type"
    parts = {name: config, f"weight_sync.{name}": weight_sync, f"hotload.{name}": hotload}
    kinds = [(spelling, getattr(part, name)) for spelling, part in parts.items()]
    given = [kind for kind in kinds if kind[1] != "base"] or kinds[:1]
    return SyncSettings(
        interval=pick("weight_sync_interval", "hot_load_interval"),
        before_training=pick("weight_sync_before_training", "hot_load_before_training"),
        timeout_s=pick("weight_sync_timeout", "hot_load_timeout"),
        dcp_save_interval=pick("dcp_save_interval", "dcp_save_interval"),
        dcp_timeout_s=pick("dcp_timeout", "dcp_timeout"),
        first_checkpoint_type=choose_value(*given),
    )


def merge_infra(trainer: TrainerConfig, infra: InfraConfig) -> InfraConfig:
    """Both generations of trainer settings as one.

    Raises:
        ConfigError: two spellings of one setting differ.
    """

    def pick(name: str, older: str) -> Any:
        return choose_value(
            (f"trainer.{name}", getattr(trainer, name)), (f"infra.{older}", getattr(infra, older))
        )

    return replace(
        infra,
        training_shape_id=pick("training_shape_id", "training_shape_id"),
        ref_training_shape_id=pick("reference_training_shape_id", "ref_training_shape_id"),
        trainer_timeout_s=pick("timeout_s", "trainer_timeout_s"),
    )
