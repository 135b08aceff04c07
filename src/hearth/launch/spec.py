"""What a worker is to run, where it answers, and what calls a launcher makes.

A worker is one trainer or one deployment. A launcher starts it inside this process or in one of
its own, and calls a ``Watcher`` when it is ready and when it fails. Specs and reports are plain
data, so that they can be written down and read again after a restart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from hearth.planning.memory import OptimizerName
from hearth.sidecars import ExitReport
from hearth.wire.asgi import App

Placement = Literal["inline", "process", "ray"]
Engine = Literal["embedded", "vllm"]


@dataclass(frozen=True, kw_only=True)
class TrainerSpec:
    """One trainer job's engine."""

    worker_id: str
    """``trainer-<job id>``; names the worker's folder, its socket and its log."""
    base_model: str
    """The name that clients use, such as ``accounts/fireworks/models/qwen3-8b``."""
    source: str
    """The folder or hub id behind it."""
    bucket: str
    """Where its snapshots go."""
    checkpoint_dir: str
    """The folder of its resumable checkpoints."""
    forward_only: bool = False
    ranks: int = 1
    """Processes that share its weights (FSDP2)."""
    rank_timeout_s: float = 300.0
    """How long a rank may keep the others waiting before the trainer is given up."""
    offload_optimizer: bool = False
    """Keep the parts of weights, gradients and moments in the host's memory between uses."""
    dtype: str | None = None
    """None is bfloat16 on a GPU and float32 on a CPU."""
    device: str | None = None
    """None takes the GPU where there is one."""
    max_seq_len: int | None = None
    micro_batch_tokens: int = 16384
    recompute_above: int | None = None
    """Passes of more tokens than this compute activations again; None never does."""
    optimizer: OptimizerName = "adamw"
    """What updates trained weights: AdamW alone, also with moments in eight bits, or Muon for the
    matrices of layers."""
    max_policies: int = 1
    """LoRA policies that may be trained at once; 1 may also train all weights."""
    keep_checkpoints: int | None = None
    """Resumable checkpoints to keep, the newest; None keeps all."""
    keep_snapshots: int | None = None
    """Snapshots of its bucket to keep, the newest; None keeps all."""
    models_dir: str | None = None
    """Where adapters that were promoted here stand, by their names."""
    allow_folders: bool = True
    """Whether a request may name another folder of this machine."""
    threads: int | None = None
    """CPU threads of each process, always; None: its share of all cores. Unused inline."""
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class DeploymentSpec:
    """One deployment's engine."""

    worker_id: str
    """``deployment-<deployment id>``."""
    name: str
    """The resource name that clients sample from, ``accounts/me/deployments/d``."""
    base_model: str
    source: str
    bucket: str
    """Where snapshots come from, unless a hot-load request's header names another bucket."""
    state_dir: str
    """A folder where it remembers what it serves, to serve that again after a crash."""
    tokenizer: str | None = None
    """A folder or hub id; None is the model's own."""
    engine: Engine = "embedded"
    """What samples tokens: Hearth's own engine, or vLLM's server."""
    replicas: int = 1
    """Servers that answer side by side."""
    engine_options: Mapping[str, Any] = field(default_factory=lambda: {})
    """Further settings of the engine; JSON values."""
    dtype: str | None = None
    """As ``TrainerSpec`` has it."""
    device: str | None = None
    max_seq_len: int | None = None
    max_batch_size: int = 64
    max_adapters: int = 0
    """Most LoRA adapters in memory that requests name; 0 refuses such requests."""
    threads: int | None = None
    trust_remote_code: bool = False


@dataclass(frozen=True, kw_only=True)
class ExportSpec:
    """One snapshot to be written as a folder that plain ``transformers`` (or PEFT) loads."""

    bucket: str
    identity: str
    base_model: str
    source: str
    folder: str
    """Appears complete or not at all."""
    merge_adapter: bool = False
    """Write an adapter's snapshot as a whole model with the adapter merged in."""
    trust_remote_code: bool = False
    card: str = ""
    """Text of the folder's README.md."""


WorkerSpec = TrainerSpec | DeploymentSpec


@dataclass(frozen=True)
class Endpoint:
    """Where a worker answers: in this process, at a Unix socket, or at another machine's URL."""

    app: App | None = None
    socket: str | None = None
    url: str | None = None
    token: str | None = None
    """Every request to ``url`` must carry it (``TOKEN_HEADER``); others are refused."""


@dataclass(frozen=True, kw_only=True)
class SnapshotRecord:
    """One snapshot in a bucket."""

    identity: str
    kind: Literal["base", "delta", "lora"]
    created_s: float
    """Seconds since the epoch."""
    base_model: str
    num_bytes: int
    number: int = 0
    """Its place among the snapshots of its folder; 0 where none was written."""


class Worker(Protocol):
    """A trainer or deployment that was started."""

    spec: WorkerSpec

    @property
    def endpoint(self) -> Endpoint:
        """Where it answers once it is ready."""
        ...

    @property
    def pid(self) -> int | None:
        """Its process; None inline, and before there is one."""
        ...

    def record(self) -> dict[str, Any]:
        """JSON from which ``Launcher.adopt`` finds it again, also when taken early."""
        ...

    def stop(self, grace_s: float = 5.0) -> None:
        """End it, and return when it has ended. Its watcher is not called."""
        ...


class Watcher(Protocol):
    """Called when a worker is ready or fails, from a thread of the launcher's.

    A protocol, since the control plane implements it, for jobs and for deployments, and ``launch``
    imports nothing of ``control``.
    """

    def ready(self, worker: Worker) -> None:
        """It answers now."""
        ...

    def failed(self, worker: Worker, report: ExitReport) -> None:
        """It could not start, or ended although nobody stopped it."""
        ...


class Launcher(Protocol):
    """Starts workers of one placement."""

    placement: Placement

    def start(self, spec: WorkerSpec, watcher: Watcher) -> Worker:
        """Begin to start a worker, and return at once."""
        ...

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> Worker | ExitReport:
        """The worker that an earlier launcher started, if it still runs; else how it ended."""
        ...

    def export(self, spec: ExportSpec) -> None:
        """Write a snapshot as a model folder; blocks.

        Raises:
            NotFoundError: the bucket has no such snapshot.
            EngineError: it cannot be read or written.
        """
        ...

    def snapshots(self, bucket: str) -> list[SnapshotRecord]:
        """What a bucket holds, oldest first."""
        ...

    def forget_served(self, deployment_id: str) -> None:
        """Forget which snapshot a deployment served, where that is not in its folder."""
        ...

    def log_path(self, worker_id: str) -> Path | None:
        """The file of a worker's log; None inline, where it goes to the process's own."""
        ...

    def close(self) -> None:
        """Stop every worker, the newest first."""
        ...


def spec_as_dict(spec: WorkerSpec | ExportSpec) -> dict[str, Any]:
    """JSON of a spec, with its kind."""
    return {"kind": type(spec).__name__, **asdict(spec)}


def spec_from_dict(content: dict[str, Any]) -> WorkerSpec | ExportSpec:
    """The spec of ``spec_as_dict``."""
    kinds = {kind.__name__: kind for kind in (TrainerSpec, DeploymentSpec, ExportSpec)}
    values = dict(content)
    return kinds[values.pop("kind")](**values)
