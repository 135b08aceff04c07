"""The control plane's protocol: accounts, models, training shapes, trainer jobs, checkpoints,
deployments and operations.

JSON is camelCase; readers take snake_case too. A resource's ``name`` is its whole path, such as
``accounts/me/rlorTrainerJobs/policy``.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import ConfigDict, Field
from pydantic.alias_generators import to_camel

from hearth.wire.base import Record

JobState = Literal[
    "JOB_STATE_CREATING",
    "JOB_STATE_PENDING",
    "JOB_STATE_RUNNING",
    "JOB_STATE_PAUSED",
    "JOB_STATE_FAILED",
    "JOB_STATE_CANCELLED",
    "JOB_STATE_COMPLETED",
    "JOB_STATE_DELETED",
]
"""``PENDING`` waits for room, ``CREATING`` loads its model, ``RUNNING`` answers."""
DeploymentState = Literal["CREATING", "READY", "UPDATING", "FAILED", "DELETING", "DELETED"]
"""``UPDATING`` is a replica that is started anew. Scaled to zero is ``READY`` with no replica."""
CheckpointKind = Literal[
    "CHECKPOINT_TYPE_INFERENCE_BASE",
    "CHECKPOINT_TYPE_INFERENCE_LORA",
    "CHECKPOINT_TYPE_INFERENCE_ARC_V2",
    "CHECKPOINT_TYPE_TRAINING",
    "CHECKPOINT_TYPE_TRAINING_LORA",
]
"""``ARC_V2`` is a delta. ``TRAINING`` ones are resumable; all others can be promoted."""
TrainerMode = Literal["POLICY_TRAINER", "LORA_TRAINER", "FORWARD_ONLY"]


class Resource(Record):
    """A record whose JSON is camelCase."""

    model_config = ConfigDict(
        extra="ignore", populate_by_name=True, protected_namespaces=(), alias_generator=to_camel
    )


class Account(Resource):
    """Who owns jobs and deployments. Hearth has one: ``accounts/me``."""

    name: str


class AccountPage(Resource):
    """All accounts."""

    accounts: list[Account]


class BaseModelDetails(Resource):
    """What a client asks of a model before it provisions anything."""

    moe: bool
    world_size: int = 1


class PeftDetails(Resource):
    """What a promoted adapter adapts."""

    base_model: str
    r: int
    target_modules: list[str] = Field(default_factory=list)


class Model(Resource):
    """A model that jobs and deployments may name."""

    name: str
    kind: Literal["HF_BASE_MODEL", "HF_PEFT_ADDON"] = "HF_BASE_MODEL"
    state: Literal["READY"] = "READY"
    display_name: str | None = None
    source: str | None = None
    """The folder or hub id behind the name."""
    create_time: str | None = None
    model_type: str | None = None
    parameter_count: str | None = None
    base_model_details: BaseModelDetails | None = None
    peft_details: PeftDetails | None = None
    source_job: str | None = None
    """Ours: the trainer job that it was promoted from."""
    source_checkpoint: str | None = None
    """Ours: the sampler snapshot of that job that it was made of."""


class ModelPage(Resource):
    """One page of models."""

    models: list[Model]
    next_page_token: str = ""


class ShardingScheme(Resource):
    """How a shape splits a model."""

    pipeline_parallelism: int = 1


class ShapeSnapshot(Resource):
    """What a training shape fixes."""

    base_model: str | None = None
    trainer_mode: TrainerMode = "POLICY_TRAINER"
    max_supported_context_length: int = 4096
    node_count: int = 1
    accelerator_type: str = ""
    accelerator_count: int = 0
    trainer_image_tag: str = ""
    deployment_image_tag: str = ""
    base_model_weight_precision: str = ""
    deployment_shape_version: str = ""
    trainer_sharding_scheme: ShardingScheme = Field(default_factory=ShardingScheme)


class TrainingShapeVersion(Resource):
    """One version of a training shape."""

    name: str
    snapshot: ShapeSnapshot
    latest_validated: bool = True
    create_time: str | None = None


class TrainingShapePage(Resource):
    """One page of versions."""

    training_shape_versions: list[TrainingShapeVersion]
    next_page_token: str = ""


class TrainingConfig(Resource):
    """What a trainer job trains."""

    base_model: str
    lora_rank: int = 0
    learning_rate: float | None = Field(default=None, allow_inf_nan=False)
    max_context_length: int | None = None
    custom_image_tag: str | None = None
    accelerator_type: str | None = None
    accelerator_count: int | None = None
    region: str | None = None
    extra_args: list[str] | None = None


class WorkerResource(Resource):
    """What responses say of a resource with a worker; a request that repeats it sets nothing."""

    name: str | None = None
    state: str | None = None
    """One of ``JobState`` or ``DeploymentState`` here; another platform may know more."""
    status_message: str | None = None
    create_time: str | None = None
    update_time: str | None = None
    created_by: str | None = None
    """The name of the key that created it, where the platform has keys."""
    worker_placement: str | None = None
    pid: int | None = None


class TrainerJob(WorkerResource):
    """A trainer job, as it is asked for and as it is answered."""

    display_name: str | None = None
    training_config: TrainingConfig
    forward_only: bool = False
    hot_load_deployment_id: str | None = None
    training_shape: str | None = None
    node_count: int | None = None
    trainer_replica_count: int | None = None
    purpose: str | None = None
    managed_by: str | None = None
    extra_values: dict[str, Any] | None = None
    """Ours: ``dtype``, ``device``, ``micro_batch_tokens``, ``recompute_above``, ``threads``,
    ``ranks``, ``rank_timeout_s``, ``offload_optimizer``, ``optimizer``, ``max_policies``,
    ``keep_snapshots``."""
    bucket: str | None = None


class TrainerJobPage(Resource):
    """One page of jobs."""

    rlor_trainer_jobs: list[TrainerJob]
    next_page_token: str = ""


class CheckpointEntry(Resource):
    """One checkpoint or sampler snapshot of a job."""

    name: str
    create_time: str
    update_time: str
    checkpoint_type: CheckpointKind
    promotable: bool
    metadata: dict[str, Any] | None = None


class CheckpointPage(Resource):
    """One page of checkpoints."""

    checkpoints: list[CheckpointEntry]
    next_page_token: str = ""


class Promote(Resource):
    """Make a model of a sampler snapshot; this body is snake_case on the wire."""

    output_model: str
    trainer_job_id: str
    base_model: str
    async_promotion: bool = False
    hot_load_deployment_id: str | None = None
    merge_adapter: bool = False
    """Ours: write an adapter as a whole model."""
    card: str | None = None
    """Ours: the model card, README.md of the model's folder."""


UNAVAILABLE = 14
"""The code of what may be tried again as it is; another one is final."""


class OperationError(Resource):
    """Why an operation failed."""

    code: int = 13
    message: str


class Operation(Resource):
    """Something that takes its time."""

    name: str
    done: bool
    response: Model | None = None
    error: OperationError | None = None


class Promoted(Resource):
    """Answer to ``Promote``: the model, or the operation that makes it."""

    model: Model | None = None
    operation: Operation | None = None


class Deployment(WorkerResource):
    """A deployment, as it is asked for and as it is answered."""

    base_model: str
    description: str | None = None
    display_name: str | None = None
    min_replica_count: int = 1
    max_replica_count: int | None = None
    """Absent in a request, it is the shape's number of replicas, or 1."""
    enable_hot_load: bool = True
    for_training: bool = False
    hot_load_bucket_type: str | None = None
    hot_load_bucket_url: str | None = None
    hot_load_trainer_job: str | None = None
    hot_load_transition_type: str | None = None
    deployment_shape: str | None = None
    accelerator_type: str | None = None
    extra_args: list[str] | None = None
    max_adapters: int | None = None
    """Ours: how many LoRA adapters that requests name are in memory; absent or 0 refuses them."""
    extra_values: dict[str, Any] | None = None
    """Ours: ``dtype``, ``device``, ``max_batch_size``, ``max_context_length``, ``tokenizer``,
    ``engine``, ``engine_options``, ``lora_rank``, ``train_mlp``, ``threads``."""


class DeploymentPatch(Resource):
    """What a PATCH may change; absent fields stay.

    With ``min_replica_count`` alone a stopped deployment gets its shape's number of replicas.
    """

    min_replica_count: int | None = None
    max_replica_count: int | None = None
    hot_load_trainer_job: str | None = None
    hot_load_transition_type: str | None = None


class DeploymentPage(Resource):
    """One page of deployments."""

    deployments: list[Deployment]
    next_page_token: str = ""


class Query(Record):
    """The parameters of a URL; they are camelCase alone."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=False)


LONGEST_WAIT_S = 25.0
"""How long a request for a state is held; clients' read timeout is 30 s."""


class WaitQuery(Query):
    """``wait_for_state`` holds the request until the resource is in one of these states."""

    wait_for_state: str = ""
    """A comma-separated list."""
    timeout_s: float = LONGEST_WAIT_S


class TrainerJobQuery(Query):
    """What a new trainer job is called and tied to."""

    rlor_trainer_job_id: str = ""
    training_shape: str = ""
    deployment_id: str = ""


class DeploymentQuery(Query):
    """What a new deployment is called."""

    deployment_id: str = ""


class PageQuery(Query):
    """Which page of a list."""

    page_size: int = 200
    page_token: str = ""


class LogLines(Record):
    """The last lines of a worker's log."""

    lines: list[str]


class LogQuery(Query):
    """How many of a log's last lines."""

    lines: int = 100
