"""The deployment's sampler for rollout functions: it seeds requests and records completions.

``current_rollout`` holds the row and the number of the running rollout. A request without a seed
gets one that depends on them alone, so a run repeats. The weight versions and experts of its
completions are recorded for ``RolloutSample``. Trained tokens must come from the distribution that
the trainer scores.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import ConfigError, TransportError
from hearth.sdk import (
    DeploymentSampler,
    FixedConcurrencyController,
    SampledCompletion,
    SamplingRetryPolicy,
)
from hearth.sdk.sampling import completion_seed
from training.data.seeds import call_seed
from training.rollouts.router_replay import ROUTING_OPTIONS, find_routing
from training.samples.rollout import RolloutRun, RolloutSetup

current_rollout: ContextVar[RolloutContext | None] = ContextVar("current_rollout", default=None)
"""The rollout that is running; None outside of a rollout function."""


_CUT = "and a token that is cut off is never sampled, so no importance ratio corrects for it"


@dataclass
class RolloutContext:
    """One attempt at rollout number ``sample`` of the row with ``row_seed``."""

    row_seed: int
    sample: int
    weight_version: int
    """What the deployment served when the row was submitted."""
    is_trained: bool = True
    """False for held-out rows."""
    calls: int = 0
    seen: list[SampledCompletion] = field(default_factory=list[SampledCompletion])

    def next_seed(self, n: int) -> int:
        """The seed of the next request, for ``n`` completions.

        The first request for one completion gets the seed that ``rl_loop`` uses at this place.
        """
        call, self.calls = self.calls, self.calls + 1
        if call == 0 and n == 1:
            return completion_seed(self.row_seed, self.sample - 1)
        return call_seed(self.row_seed, self.sample, call)

    def fill_versions(self, runs: Sequence[RolloutRun]) -> None:
        """Fill in the weight versions of samples that do not name them."""
        samples = [segment for run in runs for segment in run.segments if segment.versions is None]
        versions = [
            pair for completion in self.seen for pair in get_versions(completion) if pair[1]
        ]
        for sample in samples:
            if len(samples) == 1 and sum(count for _, count in versions) == sample.completion_len:
                sample.versions = versions
            else:
                sample.versions = [[self.weight_version, sample.completion_len]]

    def fill_seeds(self, runs: Sequence[RolloutRun]) -> None:
        """Fill in the seeds of samples that do not name them: of the completions in them."""
        for sample in (segment for run in runs for segment in run.segments):
            if sample.seeds is None:
                sample.seeds = [
                    completion.seed
                    for completion in self.seen
                    if completion.seed is not None
                    and sample.tokens[: len(completion.full_tokens)] == completion.full_tokens
                ]

    def fill_routing(self, runs: Sequence[RolloutRun]) -> None:
        """Fill in the experts of samples that do not name them."""
        for sample in (segment for run in runs for segment in run.segments):
            if sample.routing_matrices is None:
                sample.routing_matrices = find_routing(sample.tokens, sample.loss_mask, self.seen)


def get_versions(completion: SampledCompletion) -> list[list[int]]:
    """Run lengths ``[weight version, tokens]`` of a completion."""
    whole = [[completion.weight_version, completion.completion_len]]
    return completion.versions or whole


class RolloutSampler:
    """Samples completions for rollout functions; ``deployment`` is the sampler underneath.

    ``options`` hold for every request that does not name them. ``temperature`` is the run's: a
    request at another one, or with ``top_p`` or ``top_k``, is refused in a rollout that is trained.
    """

    def __init__(
        self,
        deployment: DeploymentSampler,
        options: Mapping[str, Any] | None = None,
        *,
        temperature: float = 1.0,
    ) -> None:
        self.deployment = deployment
        self._temperature = temperature
        self._options = {"temperature": temperature, **(options or {})}

    async def sample_with_prompt_tokens(
        self,
        prompt_token_ids: Sequence[int],
        n: int = 1,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> list[SampledCompletion]:
        """``n`` completions of a prompt, as ``DeploymentSampler.sample_with_prompt_tokens``.

        Raises:
            ConfigError: a trained sample would come from another distribution.
            TransportError: the deployment sent no logprobs, without which nothing can be trained.
        """
        sample = self.deployment.sample_with_prompt_tokens
        return await self._sample(sample, prompt_token_ids, n, seed, options)

    async def sample_with_tokens(
        self,
        messages: Sequence[Mapping[str, str]],
        n: int = 1,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> list[SampledCompletion]:
        """``n`` completions of a conversation; raises as ``sample_with_prompt_tokens``."""
        return await self._sample(self.deployment.sample_with_tokens, messages, n, seed, options)

    def close(self) -> None:
        """Refuse further calls and close the connections."""
        self.deployment.close()

    async def _sample(
        self,
        sample: Callable[..., Awaitable[list[SampledCompletion]]],
        prompt: Sequence[Any],
        n: int,
        seed: int | None,
        options: Mapping[str, Any],
    ) -> list[SampledCompletion]:
        rollout = current_rollout.get()
        merged = {**self._options, **options}
        if rollout is not None and rollout.is_trained:
            refuse_other_distribution(merged, self._temperature)
        if seed is None and rollout is not None:
            seed = rollout.next_seed(n)
        completions = await sample(prompt, n=n, seed=seed, **merged)
        for completion in completions:
            if completion.inference_logprobs is None:
                raise TransportError(
                    "a completion must come with logprobs, got none: the deployment does not "
                    "report what it sampled with, and without that nothing can be trained"
                )
            if rollout is not None:
                rollout.seen.append(completion)
        return completions


def refuse_other_distribution(options: Mapping[str, Any], temperature: float) -> None:
    """Refuse options that sample trained tokens from another distribution than the run's.

    The trainer's logprobs are of the whole distribution at that temperature, and so must be the
    sampler's. A token that truncation cuts off is never sampled, and no importance ratio corrects
    for that.

    Raises:
        ConfigError: ``top_p``, ``top_k`` or ``temperature`` asks for another distribution.
    """
    for name, whole, why in (
        ("top_p", 1, f"off, {_CUT}"),
        ("top_k", 0, f"off, {_CUT}"),
        ("temperature", temperature, "the run's (config.temperature), at which the trainer scores"),
    ):
        merged = options.get(name, whole)
        if merged != whole:
            raise ConfigError(
                f"{name} must be {whole} in a rollout that is trained, got {merged!r}: {whole} is "
                f"{why}; sample what is not trained with sampler.deployment"
            )


# The recipe's gate says how many rollouts run; the sampler adds no limit of its own.
NO_LIMIT = 2**31


def build_deployment_sampler(setup: RolloutSetup) -> RolloutSampler:
    """A sampler on the run's deployment, closed with the run.

    Requests without a seed get one from the rollout's place, so a run repeats. Completions have the
    logprobs that they were sampled with, and with ``router_replay`` the experts. What is trained is
    sampled at the run's temperature and never truncated: another ``temperature``, ``top_p`` or
    ``top_k`` ends the run. To be made once, in ``make_rollout_fn``.
    """
    options = setup.sample_kwargs
    sampler = RolloutSampler(
        DeploymentSampler(
            setup.inference_base_url,
            setup.model,
            setup.api_key,
            setup.tokenizer,
            concurrency_controller=FixedConcurrencyController(NO_LIMIT),
            retry_policy=SamplingRetryPolicy(boot_s=setup.boot_timeout_s),
        ),
        {name: options[name] for name in ROUTING_OPTIONS if name in options},
        temperature=options.get("temperature", 1.0),
    )
    setup.closing.callback(sampler.close)
    return sampler
