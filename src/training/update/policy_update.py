"""One update of the policy: frozen logprobs, gradients in pieces, optimizer steps.

The same for every recipe, however its groups were sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import tinker
from torch import Tensor

from hearth.telemetry import Stopwatch
from training.config.rl import RLConfig
from training.platform.run_infra import RunInfra
from training.samples.groups import PromptGroup, TrainSample
from training.update.builtin_loss import BuiltinLoss
from training.update.kl_control import AdaptiveKL
from training.update.optimizer import adam_params
from training.update.parity import logprob_gaps, parity_metrics
from training.update.policy_losses import LossFunction, StepBatch

OLD_POLICY = "old-policy"
"""Name of the trainer's forward pass of the policy before a batch, which it keeps for reuse."""


class PolicyUpdate:
    """The update of one step. Its groups may come in pieces, while others are still being sampled.

    The gradient of several pieces is that of one, except for the order of the sums. With
    ``ppo_n_minibatches`` above 1 the whole step is one piece, cut into minibatches with an
    optimizer step each. Seconds go to ``clock``. ``kl`` gives the weight of the KL, the same
    throughout the step, and adapts to the step's KL; without it the weight is ``config.kl_beta``.
    ``version`` is the weight version as which the trainer's weights are served: trainer's and
    sampler's logprobs are compared on the samples of that version (``parity``). None says that the
    samples are older: nothing is compared, and without TIS ratios are to the policy that sampled.
    ``before_step(update)`` is called right before each optimizer step.
    """

    def __init__(
        self,
        config: RLConfig,
        infra: RunInfra,
        clock: Stopwatch,
        kl: AdaptiveKL | None = None,
        version: int | None = None,
        before_step: Callable[[PolicyUpdate], None] | None = None,
    ) -> None:
        self._config = config
        self._infra = infra
        self._clock = clock
        self._kl = kl
        self._version = version
        self._before_step = before_step
        is_off_policy = version is None or config.is_off_policy
        self._ratio_to_sampler = is_off_policy and not config.uses_tis
        self._gaps: list[Tensor] = []
        self.groups: list[PromptGroup] = []
        """The groups of the step so far."""
        self.adam_params = adam_params(config, config.learning_rate)
        """What the next optimizer step is given; ``before_step`` may change it."""
        self.optimizer_steps = 0
        self.is_whole = False
        """Whether all groups of the step have gone through, and its last optimizer step comes."""
        self.results: list[tuple[int, Mapping[str, float]]] = []
        """(samples, metrics) of each call; 0 samples is an optimizer's."""

    async def prepare(self, groups: Sequence[PromptGroup]) -> list[StepBatch]:
        """Some groups of the step, cut into the batches of one forward and backward call each.

        Their samples then have the reference's logprobs, and before minibatches the policy's own.
        """
        config = self._config
        self.groups.extend(groups)
        samples = [sample for group in groups for sample in group.flat()]
        await self._score_reference(samples)
        # Where ratios are to the sampler and nothing is compared, nobody reads its logprobs.
        if config.ppo_n_minibatches > 1 and not (self._ratio_to_sampler and self._version is None):
            await self._score_old_policy(samples)
        kl_beta = config.kl_beta if self._kl is None else self._kl.coefficient
        minibatches = chunks(samples, math.ceil(len(samples) / config.ppo_n_minibatches))
        return [
            StepBatch(
                part,
                kl_beta,
                begins_minibatch=number > 0 and part is parts[0],
                ratio_to_sampler=self._ratio_to_sampler,
            )
            for number, minibatch in enumerate(minibatches)
            for parts in [chunks(minibatch, config.max_samples_per_fwd_bwd)]
            for part in parts
        ]

    async def forward_backward(self, batch: StepBatch, loss: LossFunction | BuiltinLoss) -> None:
        """Add a batch's gradient to what has accumulated.

        Before the first batch of a further minibatch the optimizer takes a step.
        """
        config, policy, samples = self._config, self._infra.policy_client, batch.samples
        if batch.begins_minibatch:
            await self._optimizer_step()
        if isinstance(loss, BuiltinLoss):
            if config.ppo_n_minibatches == 1:
                await self._score_old_policy(samples)
            loss_fn, data, options = loss.request(samples)
            with self._clock.span("perf/fwd_bwd_time"):
                result = await policy.forward_backward(
                    data, loss_fn, options | {"temperature": config.temperature}, graph=OLD_POLICY
                )
        else:
            seen: list[Tensor] = []
            with self._clock.span("perf/fwd_bwd_time"):
                result = await policy.forward_backward_custom(
                    [sample.datum for sample in samples],
                    recording(loss, seen),
                    temperature=config.temperature,
                )
            for sample, logprobs in zip(samples, seen, strict=True):
                sample.policy_logprobs = logprobs
            if config.ppo_n_minibatches == 1:  # otherwise _score_old_policy has compared
                self._compare(samples, seen)
        self.results.append((len(samples), result.metrics))

    async def optim_step(self) -> None:
        """The optimizer step that ends the update; the weight of the KL adapts after it."""
        self.is_whole = True
        await self._optimizer_step()
        if self._kl is not None:
            # Beside the optimizer's own, since every entry of 0 samples counts as one step of it.
            self.results[-1] = (0, {**self.results[-1][1], "kl_beta": self._kl.coefficient})
            self._kl.observe(self._mean_kl())

    def parity(self) -> dict[str, float]:
        """``parity/*`` of the step so far."""
        return parity_metrics(self._gaps)

    def _compare(
        self, samples: Sequence[TrainSample], policy: Sequence[Sequence[float] | Tensor]
    ) -> None:
        """Keep the difference between the policy's logprobs, before the step, and the sampler's."""
        if self._version is not None:
            self._gaps.append(logprob_gaps(samples, policy, self._version))

    def _mean_kl(self) -> float:
        """The step's k3 estimate of the KL to the reference, in nats per token."""
        calls = [(count, metrics["ref_kl"]) for count, metrics in self.results if count]
        return math.fsum(count * kl for count, kl in calls) / sum(count for count, _ in calls)

    async def _score_reference(self, samples: Sequence[TrainSample]) -> None:
        """Give every sample the frozen reference's logprobs, if the run has a reference."""
        if self._infra.reference_client is None:
            return
        with self._clock.span("perf/ref_forward_time"):
            scored = await self._infra.reference_client.forward(
                [sample.reference_datum for sample in samples],
                "cross_entropy",
                {"temperature": self._config.temperature},
            )
        for sample, output in zip(samples, scored.loss_fn_outputs, strict=True):
            sample.ref_logprobs = output["logprobs"].data

    async def _score_old_policy(self, samples: Sequence[TrainSample]) -> None:
        """Give every sample the policy's logprobs before the step.

        Without minibatches a loss that runs here needs no such pass: it takes the policy's own
        logprobs as the old ones. A loss inside the trainer goes backward through this pass.
        """
        with self._clock.span("perf/old_policy_forward_time"):
            scored = await self._infra.policy_client.forward(
                [sample.datum for sample in samples],
                "cross_entropy",
                {"temperature": self._config.temperature},
                graph=OLD_POLICY if self._config.ppo_n_minibatches == 1 else None,
            )
        logprobs = [output["logprobs"].data for output in scored.loss_fn_outputs]
        for sample, values in zip(samples, logprobs, strict=True):
            sample.old_logprobs = values
        self._compare(samples, logprobs)

    async def _optimizer_step(self) -> None:
        """One AdamW step on what has accumulated."""
        config = self._config
        if self._before_step is not None:
            self._before_step(self)
        with self._clock.span("perf/optim_step_time"):
            done = await self._infra.policy_client.optim_step(
                self.adam_params,
                config.grad_accumulation_normalization,
                skip_zero_gradient=config.zero_gradient_steps == "skip",
            )
        self.optimizer_steps += 1
        self.results.append((0, done.metrics or {}))


def recording(loss_fn: LossFunction, seen: list[Tensor]) -> LossFunction:
    """The same loss function, which also appends the policy's logprobs to ``seen``.

    Where a target has several candidates, those of the first one: the token that was sampled.
    """

    def recording_fn(
        data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        detached = [logprob.detach() for logprob in logprobs]
        seen.extend(values if values.dim() == 1 else values[:, 0] for values in detached)
        return loss_fn(data, logprobs)

    return recording_fn


def chunks(samples: Sequence[TrainSample], size: int) -> list[Sequence[TrainSample]]:
    """Contiguous slices of at most ``size`` samples."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]
