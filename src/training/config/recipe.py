"""The settings that all recipes share, as one dataclass that each recipe's ``Config`` extends."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, cast

from training.config.parts import (
    DefaultFloat,
    DefaultInt,
    InfraConfig,
    LoraTarget,
    ResumeConfig,
    ResumeMode,
    SyncSettings,
    TokenizerConfig,
    Tracker,
    TrainerConfig,
    WandBConfig,
    is_given,
    merge_infra,
)

TokenizerT = TypeVar("TokenizerT", bound=TokenizerConfig)


@dataclass(kw_only=True)
class RecipeConfig:
    """Settings of every recipe. Those that sample have ``rl.RLConfig`` besides, the others
    ``supervised.SupervisedConfig``."""

    log_path: str = "runs/hearth"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""
    base_model: str = "accounts/fireworks/models/qwen3-8b"
    """Model to start from: a registered name, a folder or a hub id."""
    dataset: str = ""
    """Rows to train on where main gets none: a JSONL, Parquet or CSV file, a folder of them, an
    http(s) URL of JSONL, or hf:ORG/NAME[/CONFIG][:SPLIT] of the Hugging Face hub."""
    columns: dict[str, str] = field(default_factory=dict[str, str])
    """Which column of the dataset a field of the row is, as {"messages": "question"}; a text there
    is one message of the user. Held-out rows too."""
    max_rows: int | None = None
    """Number of dataset rows to use, the first ones; None uses all."""
    epochs: int = 1
    """Passes over the rows."""
    shuffle: bool = False
    """Give each epoch its own order."""
    seed: int = 0
    """Fixes shuffling, sampling and adapter initialization."""
    max_seq_len: int = 4096
    """Longest sequence, prompt and answer together, in tokens."""
    optimizer: Literal["adamw", "adamw_8bit", "muon"] = "adamw"
    """What updates the weights: AdamW; AdamW with moments in eight bits, for which trainers need
    the extra bitsandbytes; or Muon for the matrices of the layers and AdamW for the rest, at the
    same learning rate and weight decay (docs/papers.md)."""
    learning_rate: float = 1e-5
    """The optimizer's learning rate, before schedule and warm-up."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls with the share of the rows that is done: not at all, linear or cosine to
    0. A step counts by the place of its first row, so that no timing changes its rate."""
    warmup_steps: float = 0.0
    """Optimizer steps over which the rate rises from 0; below 1 the share of the rows."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.999
    """AdamW's second moment decay."""
    eps: float = 1e-8
    """AdamW's denominator floor."""
    weight_decay: float = 0.01
    """Decoupled decay of the weights."""
    grad_clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    lora_rank: int = 0
    """0 trains all parameters, above 0 a LoRA adapter of that rank."""
    lora_alpha: float = 32.0
    """An adapter's update is scaled by lora_alpha / lora_rank."""
    lora_targets: list[LoraTarget] = field(default_factory=lambda: ["attn", "mlp"])
    """Which linear layers an adapter changes: those of attention, of the MLPs, the output head."""
    dcp_save_interval: int = DefaultInt(0)
    """Optimizer steps per resumable checkpoint; 0 writes none. Not given, the embedded platform
    writes one now and then, for at most a fiftieth of the time."""
    dcp_timeout: float = DefaultFloat(2700.0)
    """Seconds that writing a checkpoint may take."""
    save_final_checkpoint: bool = True
    """Write a checkpoint at the end too, where dcp_save_interval is on."""
    output_model_id: str | None = None
    """Name of the trained model, accounts/me/models/ID, which is exported in Hugging Face format at
    the end; None makes one up (log_path/models/final, on a served platform the trainer's name)."""
    merge_adapter: bool = False
    """Export a LoRA adapter merged into its model, instead of as a PEFT adapter."""
    init_from_checkpoint: str | None = None
    """Start from another run's checkpoint: its folder, or JOB:NAME on a served platform."""
    warm_start_from_adapter: str | None = None
    """Start a LoRA policy from a PEFT adapter's folder."""
    keep_checkpoints: int | None = None
    """Resumable checkpoints to keep, the newest, and two at least; None keeps all that
    dcp_save_interval asks for."""
    cleanup_on_exit: bool = True
    """At the end cancel the trainers and scale the deployment to zero, where the run started them;
    a job or a running deployment that you name goes on running."""
    eval_dataset: str | None = None
    """Held-out rows, in the forms of dataset; None evaluates nothing."""
    eval_every: int = 0
    """Optimizer steps per evaluation; 0 evaluates at the start and the end only."""
    eval_rows: int = 256
    """Number of held-out rows to use."""
    placement: Literal["inline", "process", "ray"] = "inline"
    """Embedded platform: trainers and deployments as threads of this process, as processes, or as
    actors of the Ray cluster that RAY_ADDRESS names."""
    snapshot_store: str = "folder"
    """How weights get from trainers to deployments: "folder" is log_path, which all nodes of
    placement="ray" share; "ray" is Ray's object store; s3://BUCKET/PREFIX is a bucket."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Where trainers run."""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases; project and run_name name the run in other trackers too."""
    report_to: Tracker | list[Tracker] = "none"
    """Trackers that get every record of metrics.jsonl, one or several, offline in log_path unless
    their environment variables name another place (docs/trackers.md)."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    """Whether and where to go on; a run with checkpoints in log_path goes on by itself."""

    def __post_init__(self) -> None:
        """Accept ``resume="never"`` for ``resume=ResumeConfig(mode="never")``."""
        resume: object = self.resume
        if isinstance(resume, str):
            self.resume = ResumeConfig(mode=cast(ResumeMode, resume))

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The tokenizer's settings, with that of the base model where none is named."""
        raise NotImplementedError

    @property
    def sync(self) -> SyncSettings:
        """When weights are published, and checkpoints written; nothing is published here."""
        return SyncSettings(
            interval=0,
            before_training=False,
            timeout_s=math.inf,
            dcp_save_interval=self.dcp_save_interval,
            dcp_timeout_s=self.dcp_timeout,
        )

    @property
    def merged_infra(self) -> InfraConfig:
        """Where trainers run."""
        return merge_infra(self.trainer, InfraConfig())

    @property
    def card_tags(self) -> list[str]:
        """Tags of the trained model on the hub."""
        return []

    @property
    def needs_reference(self) -> bool:
        """Whether a trainer is asked for the logprobs of frozen weights."""
        return False

    @property
    def needs_inference(self) -> bool:
        """Whether the recipe samples, and so has a deployment."""
        return False

    @property
    def kept_checkpoints(self) -> int | None:
        """Checkpoints to keep: never fewer than two, or None for all.

        The trainer drops the older one before the manifest names the newer. Where the user asked
        for no checkpoints, the automatic ones are two.
        """
        if self.keep_checkpoints is not None:
            return max(2, self.keep_checkpoints)
        return None if is_given(self.sync.dcp_save_interval) else 2

    @property
    def trackers(self) -> list[str]:
        """Trackers by name, each once; W&B too where a field of ``wandb`` is given."""
        names: list[str] = (
            list(self.report_to) if isinstance(self.report_to, list) else [self.report_to]
        )
        if any((self.wandb.entity, self.wandb.project, self.wandb.run_name)):
            names.append("wandb")
        return list(dict.fromkeys(name for name in names if name != "none"))

    def name_tokenizer(self, given: TokenizerT) -> TokenizerT:
        """The same settings with the base model's tokenizer where none is named.

        What a registered name (``accounts/...``) stands for is known to the platform alone.
        """
        if given.tokenizer_model or self.base_model.startswith("accounts/"):
            return given
        return replace(given, tokenizer_model=self.base_model)
