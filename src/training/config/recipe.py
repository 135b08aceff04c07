"""The settings that all recipes share, as one dataclass that each recipe's ``Config`` extends."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, cast

from tyro.conf import Suppress

from training.config.parts import (
    CISPOConfig,
    DAPOConfig,
    DefaultFloat,
    DefaultInt,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    HotloadConfig,
    InfraConfig,
    LoraTarget,
    Replay,
    ResumeConfig,
    ResumeMode,
    SyncSettings,
    TISConfig,
    Tracker,
    TrainerConfig,
    WandBConfig,
    WeightSyncConfig,
    is_given,
    merge_infra,
    merge_sync,
    read_share,
)

GSM8K_SAMPLE = (
    "https://raw.githubusercontent.com/eval-protocol/python-sdk/main/development/gsm8k_sample.jsonl"
)


@dataclass(kw_only=True)
class RecipeConfig:
    """Settings of every recipe. Names from older documents are accepted and mean the same."""

    log_path: str = "runs/hearth"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""
    base_model: str = "accounts/fireworks/models/qwen3-8b"
    """Model to start from: a registered name, a folder or a hub id."""
    dataset: str = GSM8K_SAMPLE
    """Rows to train on, each {messages, ground_truth}: a JSONL, Parquet or CSV file, a folder of
    them, an http(s) URL of JSONL, or hf:ORG/NAME[/CONFIG][:SPLIT] of the Hugging Face hub."""
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
    """Fixes sampling, shuffling and adapter initialization."""

    completions_per_prompt: int = 4
    """Completions per row: the group that rewards are centered in."""
    prompt_groups_per_step: int = 1
    """Groups per optimizer step."""
    max_completion_tokens: int = 1024
    """Longest completion, in tokens."""
    truncated_completions: Literal["drop", "score"] = "score"
    """What becomes of completions cut by max_completion_tokens: score trains them with the reward
    that the rollout gave; drop leaves them out, as rl_loop does."""
    temperature: float = 1.0
    """Sampling temperature; policy logprobs are taken at the same temperature."""
    max_seq_len: int = 4096
    """Longest prompt plus completion, in tokens."""
    policy_loss: str = "grpo"
    """grpo, importance_sampling, reinforce, dapo, dro, gspo, cispo or cispo_mask. Off-policy their
    ratio is to the policy that sampled, unless truncated importance sampling corrects for it
    (docs/papers.md)."""
    kl_beta: float = 0.001
    """Weight of the KL to the frozen reference (grpo and reinforce); 0 needs no reference."""
    kl_target: float | None = None
    """KL to the reference (nats per token) that the KL's weight is adapted to hold, starting from
    kl_beta; None keeps kl_beta."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    eps_clip: float = 0.2
    """PPO clip of grpo, downward; does nothing while the ratio is 1."""
    eps_clip_high: float | None = None
    """PPO clip of grpo, upward; None is the same as eps_clip."""
    ratio_log_cap: float = 20.0
    """Guard on the size of log ratios."""
    ratio_min: float | None = None
    """Smallest ratio of importance_sampling, in [0, 1]; None sets no bound."""
    ratio_max: float | None = None
    """Largest ratio of importance_sampling, >= 1; None sets no bound."""
    tis: TISConfig = field(default_factory=TISConfig)
    """Cap and level of truncated importance sampling (tis_enabled)."""
    dapo: DAPOConfig = field(default_factory=DAPOConfig)
    """Options of dapo."""
    gspo: GSPOConfig = field(default_factory=GSPOConfig)
    """Options of gspo."""
    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    """Options of cispo and cispo_mask."""
    dro: DROConfig = field(default_factory=DROConfig)
    """Options of dro."""
    learning_rate: float = 1e-5
    """AdamW's learning rate."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.999
    """AdamW's second moment decay."""
    eps: float = 1e-8
    """AdamW's denominator floor."""
    weight_decay: float = 0.01
    """AdamW's decoupled decay."""
    grad_clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    grad_accumulation_normalization: Literal["num_loss_tokens", "num_sequences", "none"] = (
        "num_loss_tokens"
    )
    """What the summed gradient is divided by, in the one place that averages."""
    zero_gradient_steps: Literal["skip", "take"] = "skip"
    """What an optimizer step does whose gradient is all zeros, as where all rewards of each group
    are equal: skip changes nothing; take lets moments and weight decay move the weights."""
    ppo_n_minibatches: int = 1
    """Optimizer steps per batch."""
    lora_rank: int = 0
    """0 trains all parameters, above 0 a LoRA adapter of that rank."""
    lora_alpha: float = 32.0
    """An adapter's update is scaled by lora_alpha / lora_rank."""
    lora_targets: list[LoraTarget] = field(default_factory=lambda: ["attn", "mlp"])
    """Which linear layers an adapter changes: those of attention, of the MLPs, the output head."""
    router_replay: bool = False
    """Send tokens to the experts that the sampler sent them to (R3); for mixtures of experts."""
    router_replay_completion_only: bool = True
    """Replay the experts of sampled tokens alone; False replays those of prompts too."""
    min_samples_per_fwd_bwd: int | None = None
    """Samples that start a forward and backward pass while others are sampled; None is the cap."""
    max_samples_per_fwd_bwd: int = 256
    """Cap on samples per forward and backward call."""

    weight_sync_interval: int = DefaultInt(1)
    """Optimizer steps per weight sync; 0 never syncs."""
    weight_sync_before_training: bool = False
    """Publish the initial weights before the first sample."""
    weight_sync_timeout: float = DefaultFloat(600.0)
    """Seconds until a snapshot must be served."""
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
    eval_samples_per_prompt: int = 1
    """Completions per held-out row."""

    no_signal_patience: int | None = 50
    """Steps' worth of rows in a row that may teach nothing before the run ends and says why, unless
    most answers are right; None never ends it. 50 are more than chance explains where a step has
    some groups; take more for one group per step on rows that are hardly ever solved."""

    record_samples: str = "all"
    """What is recorded of what is sampled, in log_path/samples: all, none, or sampled:SHARE for a
    share of the rows with all their completions, as sampled:0.1 (docs/samples.md)."""
    record_max_gb: float = 20.0
    """Gigabytes of recorded samples at which recording stops; the run goes on."""

    parity_threshold: float = 0.2
    """Nats by which sampler and trainer may differ on 95 % of the tokens that the trainer's own
    weights sampled; beyond that it is said. 0.2 is how far PPO's usual clip reaches."""
    parity_stops: bool = False
    """End the run there."""

    placement: Literal["inline", "process", "ray"] = "inline"
    """Embedded platform: trainer and deployment as threads of this process, as processes, or as
    actors of the Ray cluster that RAY_ADDRESS names."""
    snapshot_store: Literal["folder", "ray"] = "folder"
    """With placement="ray", how weights get from node to node: through log_path, a folder that all
    nodes share, or through Ray's object store."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Where trainers run."""
    deployment: DeployConfig = field(default_factory=DeployConfig)
    """The inference deployment and the tokenizer."""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases; project and run_name name the run in other trackers too."""
    report_to: Tracker | list[Tracker] = "none"
    """Trackers that get every record of metrics.jsonl, one or several, offline in log_path unless
    their environment variables name another place (docs/trackers.md)."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    """Whether and where to go on; a run with checkpoints in log_path goes on by itself."""
    infra: Suppress[InfraConfig] = field(default_factory=InfraConfig)
    """Older spelling of ``trainer``."""
    weight_sync: Suppress[WeightSyncConfig] = field(default_factory=WeightSyncConfig)
    """Older spelling of the ``weight_sync_*`` and ``dcp_*`` fields."""
    hotload: Suppress[HotloadConfig] = field(default_factory=HotloadConfig)
    """Oldest spelling of the same."""

    def __post_init__(self) -> None:
        """Accept ``resume="never"`` for ``resume=ResumeConfig(mode="never")``."""
        resume: object = self.resume
        if isinstance(resume, str):
            self.resume = ResumeConfig(mode=cast(ResumeMode, resume))

    @property
    def record_share(self) -> float:
        """The share of the rows whose samples are recorded.

        Raises:
            ConfigError: ``record_samples`` says none.
        """
        return read_share(self.record_samples)

    @property
    def sync(self) -> SyncSettings:
        """Weight sync settings of all spellings together.

        Raises:
            ConfigError: two spellings of one setting differ.
        """
        return merge_sync(self, self.weight_sync, self.hotload)

    @property
    def merged_infra(self) -> InfraConfig:
        """Where trainers run, from both spellings.

        Raises:
            ConfigError: two spellings of one setting differ.
        """
        return merge_infra(self.trainer, self.infra)

    @property
    def merged_deployment(self) -> DeployConfig:
        """The deployment's settings, with the base model's tokenizer where none is named.

        What a registered name (``accounts/...``) stands for is known to the platform alone.
        """
        is_registered = self.base_model.startswith("accounts/")
        if self.deployment.tokenizer_model or is_registered:
            return self.deployment
        return replace(self.deployment, tokenizer_model=self.base_model)

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

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks for reference logprobs."""
        shape = self.trainer.reference_training_shape_id or self.infra.ref_training_shape_id
        return bool(self.kl_beta > 0 or shape or self.trainer.reference_job_id)

    @property
    def replay(self) -> Replay:
        """Whose experts are replayed."""
        if not self.router_replay:
            return "none"
        return "completion" if self.router_replay_completion_only else "all"

    @property
    def is_off_policy(self) -> bool:
        """Whether a sample may have been sampled by other weights than those that it trains, in
        every step."""
        return False

    @property
    def uses_tis(self) -> bool:
        """Whether samples are weighted by how far the sampler's policy is off."""
        return False

    @property
    def runs_builtin_loss(self) -> bool:
        """Whether the loss runs inside the trainer."""
        return False

    @property
    def trains_early(self) -> bool:
        """Whether a step's first groups are trained while its others are still being sampled."""
        return True
