"""The deployment's sampler as rollout functions see it: reproducible, and remembered.

A draw has a place: its row and its number within the group. ``current_draw`` says which one the
running rollout is. A request without a seed of its own gets one that depends on the place alone,
so a run repeats; and the weight versions and experts of what was drawn are kept for
``RolloutSample``. What is to be trained is drawn from the distribution that the trainer scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import ConfigError, TransportError
from hearth.sdk import DeploymentSampler, SampledCompletion
from hearth.sdk.sampling import completion_seed
from training.data.seeds import call_seed
from training.rollouts.router_replay import seen_routing
from training.samples.rollout import RolloutRun

current_draw: ContextVar[DrawContext | None] = ContextVar("current_draw", default=None)
"""The draw that the running rollout function is asked for; None outside of one."""


_CUT = "and a token that is cut off is never drawn, so that no importance ratio corrects for it"


@dataclass
class DrawContext:
    """One attempt at one draw: draw number ``sample`` of the row that has ``row_seed``."""

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

        A first request for one completion draws what ``rl_loop`` draws at this place.
        """
        call, self.calls = self.calls, self.calls + 1
        if call == 0 and n == 1:
            return completion_seed(self.row_seed, self.sample - 1)
        return call_seed(self.row_seed, self.sample, call)

    def fill_versions(self, runs: Sequence[RolloutRun]) -> None:
        """Give samples that do not say which weights drew them what is known of it."""
        samples = [segment for run in runs for segment in run.segments if segment.versions is None]
        drawn = [pair for one in self.seen for pair in versions_of(one) if pair[1]]
        for sample in samples:
            if len(samples) == 1 and sum(count for _, count in drawn) == sample.completion_len:
                sample.versions = drawn
            else:
                sample.versions = [[self.weight_version, sample.completion_len]]

    def fill_routing(self, runs: Sequence[RolloutRun]) -> None:
        """Give samples that do not say which experts drew them what is known of it."""
        for sample in (segment for run in runs for segment in run.segments):
            if sample.routing_matrices is None:
                sample.routing_matrices = seen_routing(sample.tokens, sample.loss_mask, self.seen)


def versions_of(completion: SampledCompletion) -> list[list[int]]:
    """Run lengths ``[weight version, tokens]`` of what was drawn."""
    whole = [[completion.weight_version, completion.completion_len]]
    return completion.versions or whole


class RolloutSampler:
    """Draws completions for rollout functions; ``deployment`` is the sampler underneath.

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
            ConfigError: what is trained is to be drawn from another distribution than it is scored.
            TransportError: the deployment sent no logprobs, without which nothing can be trained.
        """
        asked = self._asked(options)
        call = self.deployment.sample_with_prompt_tokens(
            prompt_token_ids, n=n, seed=_seed(seed, n), **asked
        )
        return _noted(await call)

    async def sample_with_tokens(
        self,
        messages: Sequence[Mapping[str, str]],
        n: int = 1,
        *,
        seed: int | None = None,
        **options: Any,
    ) -> list[SampledCompletion]:
        """``n`` completions of a conversation, as ``DeploymentSampler.sample_with_tokens``.

        Raises:
            ConfigError: what is trained is to be drawn from another distribution than it is scored.
            TransportError: the deployment sent no logprobs, without which nothing can be trained.
        """
        asked = self._asked(options)
        call = self.deployment.sample_with_tokens(messages, n=n, seed=_seed(seed, n), **asked)
        return _noted(await call)

    def close(self) -> None:
        """Refuse further calls and close the connections."""
        self.deployment.close()

    def _asked(self, options: Mapping[str, Any]) -> dict[str, Any]:
        draw = current_draw.get()
        asked = {**self._options, **options}
        if draw is not None and draw.is_trained:
            refuse_other_distribution(asked, self._temperature)
        return asked


def refuse_other_distribution(options: Mapping[str, Any], temperature: float) -> None:
    """Judge how tokens that are to be trained are drawn, in a run at ``temperature``.

    The trainer's logprobs are of the whole distribution at that temperature, and so must be the
    sampler's. A token that truncation cuts off is never drawn, which no importance ratio mends.

    Raises:
        ConfigError: ``top_p``, ``top_k`` or ``temperature`` asks for another distribution.
    """
    for name, whole, why in (
        ("top_p", 1, f"off, {_CUT}"),
        ("top_k", 0, f"off, {_CUT}"),
        ("temperature", temperature, "the run's (config.temperature), at which the trainer scores"),
    ):
        asked = options.get(name, whole)
        if asked != whole:
            raise ConfigError(
                f"{name} must be {whole} where what is drawn is trained, got {asked!r}: {whole} is "
                f"{why}; draw what is not trained with sampler.deployment"
            )


def _seed(given: int | None, n: int) -> int | None:
    draw = current_draw.get()
    return given if given is not None or draw is None else draw.next_seed(n)


def _noted(completions: list[SampledCompletion]) -> list[SampledCompletion]:
    draw = current_draw.get()
    for completion in completions:
        if completion.inference_logprobs is None:
            raise TransportError(
                "a completion must come with logprobs, got none: the deployment does not report "
                "what it drew with, and without that nothing can be trained"
            )
        if draw is not None:
            draw.seen.append(completion)
    return completions
