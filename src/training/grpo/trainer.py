"""Advantages, loss and updates of the small GRPO library."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from hearth.errors import ConfigError, NumericsError
from hearth.losses import GRPO, ObjectiveOutput, TokenBatch, policy_loss_per_token, reduce_loss
from training.grpo.config import GRPOConfig
from training.grpo.policy import TorchPolicy
from training.samples.advantages import group_advantages
from training.update.kl_control import AdaptiveKL


@dataclass
class GroupSample:
    """The completions of one prompt. Lists are parallel."""

    prompt: str
    completions: list[str] = field(default_factory=list[str])
    rewards: list[float] = field(default_factory=list[float])
    advantages: list[float] = field(default_factory=list[float])
    disagreements: list[float] = field(default_factory=list[float])
    """Of each reward how far the members of an ensemble lie apart; empty where none judged."""


@dataclass(frozen=True)
class UpdateResult:
    """One update of a torch model; numbers are those of before its first optimizer step, but for
    ``clip_fraction``, which is that of the last one."""

    loss: float
    kl: float
    """Mean of policy minus reference logprob over each completion's tokens, then over completions
    (k1); 0 without a reference."""
    ref_kl: float
    """The k3 estimate of the same, a mean over all tokens: never negative, so that a target can be
    compared with it."""
    grad_norm: float
    """Before clipping."""
    clip_fraction: float
    """Share of tokens whose gradient the clip removed."""


@dataclass(frozen=True)
class _Scored:
    """A group with what does not change while the policy is updated on it: rows [T] each."""

    sample: GroupSample
    old: list[Tensor] | None
    reference: list[Tensor] | None


class GRPOTrainer:
    """Group relative policy optimization (arXiv:2402.03300) on numbers, or on a torch model.

    Without ``policy`` it computes advantages and losses. With one, ``update`` trains it; the
    ``reference`` for the KL is then a frozen copy of the policy as it is now, unless one is given.

    Raises:
        ConfigError: a setting breaks its rule, the policy has nothing to train, or a given
            reference shares a trained parameter with it.
    """

    def __init__(
        self,
        config: GRPOConfig,
        policy: TorchPolicy | None = None,
        reference: TorchPolicy | None = None,
    ) -> None:
        config.validate()
        self.config = config
        self.policy = policy
        self.reference = reference
        self._kl = None
        if config.kl_target is not None:
            self._kl = AdaptiveKL(config.kl_target, config.kl_coeff)
        self._optimizer: torch.optim.Optimizer | None = None
        if policy is None:
            if reference is not None:
                raise ConfigError("policy must be given with a reference, got None")
            return
        trained = policy.trainable()
        _check_parameters(trained, reference)
        if reference is None and config.kl_coeff > 0:
            self.reference = policy.frozen()
        self._optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=0.0)

    @property
    def kl_coeff(self) -> float:
        """The weight of the KL in force: ``config.kl_coeff``, or what ``kl_target`` made of it."""
        return self.config.kl_coeff if self._kl is None else self._kl.coefficient

    def observe_kl(self, kl: float) -> None:
        """Have the weight of the KL follow ``kl_target``, where there is one; ``update`` does so.

        Raises:
            NumericsError: the KL is not finite.
        """
        if self._kl is not None:
            self._kl.observe(kl)

    def compute_advantages(self, sample: GroupSample) -> GroupSample:
        """The same sample, with ``(reward - mean) / max(population deviation, 1e-8)`` filled in.

        0 for a single reward, and for equal ones.

        Raises:
            ConfigError: there are no rewards, or one is not finite.
        """
        rewards = sample.rewards
        if not rewards:
            raise ConfigError("rewards must hold at least one value, got []")
        if len(rewards) == 1 and math.isfinite(rewards[0]):
            sample.advantages = [0.0]
            return sample
        # Judges the rewards where nothing is divided too.
        sample.advantages = group_advantages(rewards, std="population")
        if not self.config.normalize_advantages:
            mean = math.fsum(rewards) / len(rewards)
            sample.advantages = [reward - mean for reward in rewards]
        return sample

    def compute_loss(
        self,
        log_probs: Sequence[float],
        ref_log_probs: Sequence[float],
        advantages: Sequence[float],
    ) -> float:
        """Mean of ``-advantage * log_prob`` plus the KL's weight times that of ``log_prob - ref``.

        Raises:
            ConfigError: the sequences are empty, or differ in length.
        """
        lengths = (len(log_probs), len(ref_log_probs), len(advantages))
        if len(set(lengths)) > 1 or not log_probs:
            raise ConfigError(
                "log_probs, ref_log_probs and advantages must have one value per completion each, "
                f"got {lengths[0]}, {lengths[1]} and {lengths[2]}"
            )
        policy = statistics.fmean(
            -advantage * logprob for advantage, logprob in zip(advantages, log_probs, strict=True)
        )
        return policy + self.kl_coeff * mean_difference(log_probs, ref_log_probs)

    def update(self, groups: Sequence[GroupSample]) -> UpdateResult:
        """Train the policy on some groups: ``updates_per_batch`` optimizer steps.

        Every completion weighs the same, as does every token in it (the paper's mean). The ratio of
        the clipped surrogate is to the policy as it was when the call began.

        Raises:
            ConfigError: there is no policy, no completion, or a group lacks advantages.
            NumericsError: a logprob or the gradient is not finite; that step is not taken.
        """
        if self.policy is None or self._optimizer is None:
            raise ConfigError(
                "policy must be given to update, got None: GRPOTrainer(config, policy)"
            )
        _check_groups(groups)
        scored = [self._score(self.policy, group) for group in groups if group.completions]
        first = last = self._optimizer_step(self.policy, self._optimizer, scored)
        for _ in range(self.config.updates_per_batch - 1):
            last = self._optimizer_step(self.policy, self._optimizer, scored)
        self.observe_kl(first.ref_kl)
        return replace(first, clip_fraction=last.clip_fraction)

    @torch.no_grad()
    def _score(self, policy: TorchPolicy, group: GroupSample) -> _Scored:
        return _Scored(
            group,
            # With one update the ratio is 1 whatever the policy: the loss then takes its own.
            old=None if self.config.updates_per_batch == 1 else _rows(policy, group),
            reference=None if self.reference is None else _rows(self.reference, group),
        )

    def _optimizer_step(
        self, policy: TorchPolicy, optimizer: torch.optim.Optimizer, scored: Sequence[_Scored]
    ) -> UpdateResult:
        """One step on all groups, whose gradients add up one by one to bound the memory."""
        optimizer.zero_grad()
        total = sum(len(group.sample.completions) for group in scored)
        loss = kl = ref_kl = clipped = tokens = 0.0
        for group in scored:
            batch, output = self._loss_per_token(policy, group)
            share = len(group.sample.completions) / total
            group_loss = share * reduce_loss(output.per_token, batch, "sequence_mean")
            if group_loss.requires_grad:  # not where all completions are empty
                torch.autograd.backward(group_loss)
            count = float(batch.active.sum())
            tokens += count
            loss += float(group_loss.detach())
            kl += share * _kl(batch)
            ref_kl += count * float(output.metrics.get("ref_kl", 0.0))
            clipped += count * float(output.metrics["ppo_clip_frac"])
        norm = self._clip_gradient(policy)
        if not math.isfinite(norm):
            optimizer.zero_grad()
            raise NumericsError(
                f"the gradient norm must be finite, got {norm}: the step is not taken; lower "
                "learning_rate, or look at the rewards of this batch"
            )
        optimizer.step()
        tokens = max(1.0, tokens)
        return UpdateResult(loss, kl, ref_kl / tokens, norm, clipped / tokens)

    def _loss_per_token(
        self, policy: TorchPolicy, scored: _Scored
    ) -> tuple[TokenBatch, ObjectiveOutput]:
        sample, config = scored.sample, self.config
        rows = _rows(policy, sample)
        batch = TokenBatch.concat(
            rows,
            advantages=sample.advantages,
            mask=[torch.ones_like(row) for row in rows],
            old_logprobs=scored.old,
            ref_logprobs=scored.reference,
        )
        objective = GRPO(
            kl_beta=self.kl_coeff, kl_estimator=config.kl_estimator, eps_clip=config.clip_range
        )
        return batch, policy_loss_per_token("grpo", batch, objective)

    def _clip_gradient(self, policy: TorchPolicy) -> float:
        most = self.config.max_grad_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(policy.trainable(), most))


def mean_difference(log_probs: Sequence[float], ref_log_probs: Sequence[float]) -> float:
    """Mean of ``log_prob - ref_log_prob``: the k1 estimate of the KL to the reference."""
    pairs = zip(log_probs, ref_log_probs, strict=True)
    return statistics.fmean(logprob - reference for logprob, reference in pairs)


def _rows(policy: TorchPolicy, sample: GroupSample) -> list[Tensor]:
    return [policy.logprobs(sample.prompt, completion) for completion in sample.completions]


def _kl(batch: TokenBatch) -> float:
    if batch.ref_logprobs is None:
        return 0.0
    difference = batch.policy_logprobs.detach() - batch.ref_logprobs
    return float(batch.segment_mean(difference).mean())


def _check_parameters(trained: Sequence[torch.nn.Parameter], reference: TorchPolicy | None) -> None:
    if not trained:
        raise ConfigError("policy must have a parameter that requires a gradient, got none")
    if reference is None:
        return
    own = {id(parameter) for parameter in trained}
    if any(id(parameter) in own for parameter in reference.module.parameters()):
        raise ConfigError(
            "reference must share no trained parameter with the policy, got one that does: it "
            "would move along; give policy.frozen(), or leave it to the trainer"
        )


def _check_groups(groups: Sequence[GroupSample]) -> None:
    for group in groups:
        if len(group.advantages) != len(group.completions):
            raise ConfigError(
                f"advantages must have one value per completion, got {len(group.advantages)} for "
                f"{len(group.completions)} of prompt {group.prompt!r}: call compute_advantages"
            )
    if not any(group.completions for group in groups):
        raise ConfigError("groups must hold at least one completion, got none")
