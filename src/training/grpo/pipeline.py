"""The loop of the small GRPO library: sample groups, score them, update, remember."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hearth.errors import ConfigError
from training.grpo.config import GRPOConfig
from training.grpo.policy import TorchPolicy
from training.grpo.trainer import GroupSample, GRPOTrainer, mean_difference
from training.rewards.score import Score, as_score
from training.rewards.scoring import disagreements

logger = logging.getLogger(__name__)

PromptReward = Callable[[str, str], float | Score]
"""``(prompt, completion)`` to what the completion is worth; a ``Score`` tells an ensemble's
disagreement too, as in ``lambda prompt, text: ensemble.score(text, rows[prompt])``."""
GenerateFn = Callable[[str], str]
"""A prompt to one completion of it, another one at every call."""
LogProbFn = Callable[[str, str], float]
"""``(prompt, completion)`` to the completion's logprob."""


@dataclass(frozen=True)
class GroupRewards:
    """How the rewards of one group lie: whether its completions differ at all."""

    step: int
    prompt: str
    rewards: tuple[float, ...]
    disagreements: tuple[float, ...] = ()
    """Of each reward how far the members of an ensemble lie apart; empty where none judged."""

    @property
    def mean(self) -> float:
        """The group's mean reward."""
        return statistics.fmean(self.rewards)

    @property
    def std(self) -> float:
        """The population deviation; 0 teaches nothing."""
        return statistics.pstdev(self.rewards)


@dataclass
class TrainingMetrics:
    """What a pipeline has seen, a value per step.

    ``kl_values`` and ``losses`` stay empty where nothing says what the completions' logprobs are.
    """

    steps: list[int] = field(default_factory=list[int])
    rewards: list[float] = field(default_factory=list[float])
    kl_values: list[float] = field(default_factory=list[float])
    losses: list[float] = field(default_factory=list[float])
    groups: list[GroupRewards] = field(default_factory=list[GroupRewards])
    """Every group of every step."""


class GRPOPipeline:
    """Samples groups with the caller's function, and trains where there is something to train.

    With ``policy`` every step updates it (``GRPOTrainer.update``). With ``log_prob_fn`` and
    ``ref_log_prob_fn`` instead, somebody else trains, and a step only computes loss and KL. With
    neither it samples, scores and counts.

    Raises:
        ConfigError: as ``GRPOTrainer``; or one of the two functions without the other, or beside a
            policy.
    """

    def __init__(
        self,
        config: GRPOConfig,
        reward_fn: PromptReward,
        *,
        policy: TorchPolicy | None = None,
        reference: TorchPolicy | None = None,
        log_prob_fn: LogProbFn | None = None,
        ref_log_prob_fn: LogProbFn | None = None,
    ) -> None:
        if (log_prob_fn is None) != (ref_log_prob_fn is None):
            raise ConfigError("log_prob_fn and ref_log_prob_fn must be given both, got one of them")
        if policy is not None and log_prob_fn is not None:
            raise ConfigError("log_prob_fn must be None with a policy, which has its own logprobs")
        self.config = config
        self.reward_fn = reward_fn
        self.trainer = GRPOTrainer(config, policy, reference)
        self.metrics = TrainingMetrics()
        self._log_prob_fns = (log_prob_fn, ref_log_prob_fn)

    def generate_group(self, prompt: str, generate_fn: GenerateFn) -> GroupSample:
        """``group_size`` completions of a prompt with rewards and advantages."""
        completions = [generate_fn(prompt) for _ in range(self.config.group_size)]
        scores = [as_score(self.reward_fn(prompt, completion)) for completion in completions]
        sample = GroupSample(
            prompt,
            completions,
            rewards=[score.reward for score in scores],
            disagreements=disagreements(scores),
        )
        return self.trainer.compute_advantages(sample)

    def train_step(self, prompts: Sequence[str], generate_fn: GenerateFn, step: int) -> float:
        """Sample a group of every prompt and train on them; the mean of the groups' mean rewards.

        Raises:
            ConfigError: there are no prompts, or a reward is not finite.
            NumericsError: as ``GRPOTrainer.update``.
        """
        if not prompts:
            raise ConfigError("prompts must hold at least one prompt, got none")
        groups = [self.generate_group(prompt, generate_fn) for prompt in prompts]
        measured = self._loss_and_kl(groups)
        records = [
            GroupRewards(step, group.prompt, tuple(group.rewards), tuple(group.disagreements))
            for group in groups
        ]
        reward = statistics.fmean(record.mean for record in records)
        self.metrics.steps.append(step)
        self.metrics.rewards.append(reward)
        self.metrics.groups.extend(records)
        if measured is not None:
            self.metrics.losses.append(measured[0])
            self.metrics.kl_values.append(measured[1])
        spread = sum(record.std > 0 for record in records)
        logger.info(
            "step %d: reward %.4f, %d of %d groups with spread, KL weight %.4g",
            step,
            reward,
            spread,
            len(records),
            self.trainer.kl_coeff,
        )
        return reward

    def _loss_and_kl(self, groups: Sequence[GroupSample]) -> tuple[float, float] | None:
        if self.trainer.policy is not None:
            result = self.trainer.update(groups)
            return result.loss, result.kl
        log_prob_fn, ref_log_prob_fn = self._log_prob_fns
        if log_prob_fn is None or ref_log_prob_fn is None:
            return None
        pairs = [(group.prompt, completion) for group in groups for completion in group.completions]
        advantages = [advantage for group in groups for advantage in group.advantages]
        log_probs = [float(log_prob_fn(*pair)) for pair in pairs]
        references = [float(ref_log_prob_fn(*pair)) for pair in pairs]
        loss = self.trainer.compute_loss(log_probs, references, advantages)
        kl = mean_difference(log_probs, references)
        self.trainer.observe_kl(kl)
        return loss, kl
