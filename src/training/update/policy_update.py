"""One update of the policy: frozen logprobs, gradients in pieces, optimizer steps.

What every recipe does with the groups of a batch, whichever way it came by them.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import tinker
from torch import Tensor

from hearth.losses.corrections import WithReference
from hearth.losses.objective import Objective
from hearth.telemetry import Stopwatch
from training.config.objective import objective_options, tis_options
from training.config.recipe import RecipeConfig
from training.platform.run_infra import RunInfra
from training.samples.groups import PromptGroup, TrainSample
from training.update.kl_control import AdaptiveKL
from training.update.objectives import builtin_call, old_rows, ref_rows, samples_of
from training.update.parity import logprob_gaps, parity_metrics
from training.update.policy_losses import LossFunction, make_policy_loss_fn

OLD_POLICY = "old-policy"
"""Under which the trainer keeps the pass that scored the policy before a batch."""


class PolicyUpdate:
    """The update of one batch; its groups may come in pieces, while others are still drawn.

    The gradient of several pieces is that of one, but for the order of the sums. With
    ``ppo_n_minibatches`` above 1 the whole batch is one piece, cut into minibatches with an
    optimizer step each. Seconds go to ``clock``. ``kl`` gives the weight of the KL, the same all
    through the batch, and sees what the batch's KL was; without it that is ``config.kl_beta``.
    ``version`` is the weight version that the trainer's weights are served as: of samples that it
    drew, trainer's and sampler's logprobs are compared (``parity``). None compares nothing.
    ``before_step`` is awaited right before each optimizer step is asked for.
    """

    def __init__(
        self,
        config: RecipeConfig,
        infra: RunInfra,
        clock: Stopwatch,
        kl: AdaptiveKL | None = None,
        version: int | None = None,
        before_step: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._config = config
        self._infra = infra
        self._clock = clock
        self._kl = kl
        self._version = version
        self._before_step = before_step
        self._gaps: list[Tensor] = []
        self.groups: list[PromptGroup] = []
        """The groups that have gone through forward and backward."""
        self.optimizer_steps = 0
        self.results: list[tuple[int, Mapping[str, float]]] = []
        """(samples, metrics) of each call; 0 samples is an optimizer's."""

    async def add(self, piece: Sequence[PromptGroup]) -> None:
        """Add the policy loss's gradient of some groups; between minibatches step the optimizer."""
        samples = samples_of(piece)
        await self._score_reference(samples)
        if self._config.ppo_n_minibatches > 1:
            await self._score_old_policy(samples)
        minibatches = chunks(samples, math.ceil(len(samples) / self._config.ppo_n_minibatches))
        for number, minibatch in enumerate(minibatches, start=1):
            for part in chunks(minibatch, self._config.max_samples_per_fwd_bwd):
                if self._config.runs_builtin_loss and self._config.ppo_n_minibatches == 1:
                    await self._score_old_policy(part)
                with self._clock.span("perf/fwd_bwd_time"):
                    result = await self._policy_gradient(part)
                self.results.append((len(part), result.metrics))
            if number < len(minibatches):
                await self._optimizer_step()
        self.groups.extend(piece)

    async def finish(self) -> None:
        """The optimizer step of what has accumulated."""
        await self._optimizer_step()
        if self._kl is not None:
            # Beside the optimizer's own, since every entry of 0 samples counts as one step of it.
            self.results[-1] = (0, {**self.results[-1][1], "kl_beta": self._kl.coefficient})
            self._kl.observe(self._mean_kl())

    def parity(self) -> dict[str, float]:
        """``parity/*`` of the batch so far."""
        return parity_metrics(self._gaps)

    def _compare(
        self, samples: Sequence[TrainSample], policy: Sequence[Sequence[float] | Tensor]
    ) -> None:
        """Note how far the policy, before the batch moves it, is from what the samples say."""
        if self._version is not None:
            self._gaps.append(logprob_gaps(samples, policy, self._version))

    def _mean_kl(self) -> float:
        """The batch's k3 estimate of the KL to the reference, in nats per token."""
        calls = [(count, metrics["ref_kl"]) for count, metrics in self.results if count]
        return math.fsum(count * kl for count, kl in calls) / sum(count for count, _ in calls)

    def _objective(self) -> Objective:
        objective = objective_options(self._config)
        if self._kl is None or not isinstance(objective, WithReference):
            return objective
        return replace(objective, kl_beta=self._kl.coefficient)

    async def _policy_gradient(
        self, samples: Sequence[TrainSample]
    ) -> tinker.ForwardBackwardOutput:
        config, policy = self._config, self._infra.policy_client
        objective, tis = self._objective(), tis_options(config)
        if config.runs_builtin_loss:
            call = builtin_call(objective, config.policy_loss, tis, samples)
            return await policy.forward_backward(
                call.data,
                call.loss_fn,
                call.loss_fn_config | {"temperature": config.temperature},
                graph=OLD_POLICY,
            )
        loss_fn = make_policy_loss_fn(
            config.policy_loss,
            advantages=[sample.advantage for sample in samples],
            behavior_logprobs=[sample.behavior_logprobs for sample in samples],
            old_logprobs=old_rows(samples),
            ref_logprobs=ref_rows(samples),
            config=objective,
            tis=tis,
        )
        seen: list[Tensor] = []
        result = await policy.forward_backward_custom(
            [sample.datum for sample in samples],
            noting(loss_fn, seen),
            temperature=config.temperature,
        )
        if config.ppo_n_minibatches == 1:  # else the policy before the batch was asked
            self._compare(samples, seen)
        return result

    async def _score_reference(self, samples: Sequence[TrainSample]) -> None:
        """Give every sample the frozen reference's logprobs, where there is a reference."""
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
        """Give every sample the policy's logprobs before this batch moves it.

        Without minibatches nothing moves in between. A loss of ours then takes the policy's own
        logprobs as the old ones, and one inside the trainer goes backward through this very pass.
        """
        with self._clock.span("perf/old_policy_forward_time"):
            scored = await self._infra.policy_client.forward(
                [sample.datum for sample in samples],
                "cross_entropy",
                {"temperature": self._config.temperature},
                graph=OLD_POLICY if self._config.ppo_n_minibatches == 1 else None,
            )
        rows = [output["logprobs"].data for output in scored.loss_fn_outputs]
        for sample, row in zip(samples, rows, strict=True):
            sample.old_logprobs = row
        self._compare(samples, rows)

    async def _optimizer_step(self) -> None:
        """One AdamW step on what has accumulated."""
        config = self._config
        params = tinker.AdamParams(
            learning_rate=config.learning_rate,
            beta1=config.beta1,
            beta2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            grad_clip_norm=config.grad_clip_norm,
        )
        if self._before_step is not None:
            await self._before_step()
        with self._clock.span("perf/optim_step_time"):
            done = await self._infra.policy_client.optim_step(
                params, config.grad_accumulation_normalization
            )
        self.optimizer_steps += 1
        self.results.append((0, done.metrics or {}))


def noting(loss_fn: LossFunction, seen: list[Tensor]) -> LossFunction:
    """The same loss function, which writes down the logprobs that it is called with."""

    def noting_fn(
        data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        seen.extend(logprob.detach() for logprob in logprobs)
        return loss_fn(data, logprobs)

    return noting_fn


def chunks(samples: Sequence[TrainSample], size: int) -> list[Sequence[TrainSample]]:
    """Contiguous slices of at most ``size`` samples."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]
