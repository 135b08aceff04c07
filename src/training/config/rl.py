"""The settings of recipes that sample and train what they sampled, beside those of all recipes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from tyro.conf import Suppress

from training.config.json_flag import JsonObject
from training.config.parts import (
    CheckpointType,
    CISPOConfig,
    DAPOConfig,
    DefaultFloat,
    DefaultInt,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    HotloadConfig,
    InfraConfig,
    Replay,
    SyncSettings,
    TISConfig,
    TokenizerConfig,
    WeightSyncConfig,
    merge_infra,
    merge_sync,
    read_share,
)
from training.config.recipe import RecipeConfig

GSM8K_SAMPLE = (
    "https://raw.githubusercontent.com/eval-protocol/python-sdk/main/development/gsm8k_sample.jsonl"
)


@dataclass(kw_only=True)
class RLConfig(RecipeConfig):
    """Sampling, objective and weight sync. Names from older documents are accepted and mean the
    same."""

    dataset: str = GSM8K_SAMPLE
    """Rows to train on, each {messages, ground_truth}: a JSONL, Parquet or CSV file, a folder of
    them, an http(s) URL of JSONL, or hf:ORG/NAME[/CONFIG][:SPLIT] of the Hugging Face hub."""
    environment: str | None = None
    """Environment to train on in place of dataset and reward: LIBRARY:TASK, as
    reasoning_gym:chain_sum, or MODULE:CLASS of your own, found in the current folder too
    (docs/environments.md). max_rows of its tasks are trained, eval_rows others are held out."""
    environment_args: JsonObject = field(default_factory=dict[str, Any])
    """What the environment is made with, as {"max_terms": 2}; a flag takes JSON."""
    eval_rows: int = 256
    """Number of held-out rows to use; with an environment 0 evaluates nothing."""

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

    grad_accumulation_normalization: Literal["num_loss_tokens", "num_sequences", "none"] = (
        "num_loss_tokens"
    )
    """What the summed gradient is divided by, in the one place that averages."""
    zero_gradient_steps: Literal["skip", "take"] = "skip"
    """What an optimizer step does whose gradient is all zeros, as where all rewards of each group
    are equal: skip changes nothing; take lets moments and weight decay move the weights."""
    ppo_n_minibatches: int = 1
    """Optimizer steps per batch."""
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
    first_checkpoint_type: CheckpointType = "base"
    """Kind of the first snapshot. "direct" sends every snapshot without files. "merged_base" sends
    the whole model with the adapter merged in, every time: vLLM serves no adapter of experts."""

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

    deployment: DeployConfig = field(default_factory=DeployConfig)
    """The inference deployment and the tokenizer."""
    infra: Suppress[InfraConfig] = field(default_factory=InfraConfig)
    """Older spelling of ``trainer``."""
    weight_sync: Suppress[WeightSyncConfig] = field(default_factory=WeightSyncConfig)
    """Older spelling of the ``weight_sync_*`` and ``dcp_*`` fields."""
    hotload: Suppress[HotloadConfig] = field(default_factory=HotloadConfig)
    """Oldest spelling of the same."""

    @property
    def merged_deployment(self) -> DeployConfig:
        """The deployment's settings, with the base model's tokenizer where none is named."""
        return self.name_tokenizer(self.deployment)

    @property
    def tokenizer_config(self) -> TokenizerConfig:
        """The deployment's tokenizer."""
        return self.merged_deployment

    @property
    def objective_name(self) -> str:
        """What is minimized."""
        return self.policy_loss

    @property
    def card_tags(self) -> list[str]:
        """The model's tags."""
        return ["reinforcement-learning", self.policy_loss]

    @property
    def least_completions(self) -> int:
        """Fewest completions of a group: rewards that are centered need two."""
        return 2

    @property
    def needs_inference(self) -> bool:
        """It samples."""
        return True

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
