"""The settings of recipes whose rollouts run beside training."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from training.config.json_flag import JsonObject
from training.config.rl import RLConfig

SAMPLER_RATIO = frozenset({"importance_sampling", "reinforce"})
"""Losses whose ratio to the sampler's policy corrects for stale samples."""


@dataclass(kw_only=True)
class AsyncConfig(RLConfig):
    """Settings of ``async_rl_loop``, and of every recipe whose rollouts run beside training."""

    dataset: str = ""
    """Rows to train on where ``main`` gets none, in the forms that rl_loop reads; any objects."""
    shuffle: bool = True
    """Give each epoch its own order."""

    rollout: str | None = None
    """Factory of the rollout function where main gets none, as MODULE:FUNCTION; modules of the
    current folder are found too."""
    max_head_offpolicy_versions: int = 0
    """Weight syncs by which a sample may be late when it is trained; 0 is strictly on-policy."""
    synchronous_training: bool = False
    """Drain all rollouts before each step: nothing overlaps."""
    max_concurrency_rollout_sample: int | None = None
    """Rollouts in flight, counted one by one; None leaves it to the off-policy gate."""
    fifo_slack: int | None = None
    """Unfinished rows that a batch may leave behind for younger ones, 0 to prompt_groups_per_step;
    0 is strict order, None a quarter of it."""
    late_row_wait_s: float | None = None
    """Seconds that a batch waits for rows whose last chance it is; then they are dropped and
    counted. None waits until their rollouts end."""
    in_flight_weight_updates: bool = False
    """Let completions go on under new weights instead of ending them under the old ones first."""

    min_group_size: int = 1
    """Rollouts of a row that must succeed for its group to be trained."""
    rollout_timeout_s: float | None = 1800.0
    """Seconds that one rollout may take; None sets no limit."""
    rollout_retries: int = 2
    """Further attempts at a rollout that fails for a reason that may pass."""
    rollout_workers: Literal["loop", "ray"] = "loop"
    """Where rollout functions run: on an event loop of this process, or in processes of the Ray
    cluster that RAY_ADDRESS names, for environments that need cores; those reach a served platform
    alone."""
    rollout_worker_count: int = 4
    """How many such processes there are, of one CPU each; a process has many rollouts running."""
    rollout_extras: JsonObject = field(default_factory=dict[str, Any])
    """Plain values that the rollout function finds in ``setup.extras``; a flag takes JSON."""
    stall_timeout_s: float = 3600.0
    """Seconds without a finished step after which the run says who waits for whom, and ends."""

    tis_enabled: bool | None = None
    """Truncated importance sampling against the sampler's logprobs, on top of any loss; None: where
    samples may be off-policy, for the losses that have no ratio to the sampler's policy of their
    own (importance_sampling and reinforce have). Off, every ratio is to the sampler's policy."""

    parity_probe_tokens: int = 64
    """Tokens to sample and score again after each weight sync, to compare sampler and trainer where
    samples may be stale; 0 probes nothing."""

    @property
    def max_concurrent(self) -> int:
        """Sampling requests that may be in flight; the gate holds it below that."""
        batch = self.prompt_groups_per_step * self.completions_per_prompt
        return self.max_concurrency_rollout_sample or (1 + self.max_head_offpolicy_versions) * batch

    @property
    def overlaps(self) -> bool:
        """Whether training goes on while weights are synced."""
        return self.max_head_offpolicy_versions > 0 and not self.synchronous_training

    @property
    def is_off_policy(self) -> bool:
        """Whether a sample may have been sampled by other weights than those that it trains."""
        return self.overlaps or self.in_flight_weight_updates

    @property
    def uses_tis(self) -> bool:
        """Whether samples are weighted by how far the sampler's policy is off."""
        if self.tis_enabled is None:
            return self.is_off_policy and self.policy_loss not in SAMPLER_RATIO
        return self.tis_enabled

    @property
    def trains_early(self) -> bool:
        """Only off-policy, where a step's groups are there at different times."""
        return self.overlaps
