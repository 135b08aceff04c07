"""What a recipe hands to the factory of its rollout function."""

from __future__ import annotations

from hearth.errors import ConfigError
from training.config.async_recipe import AsyncConfig
from training.config.named import find_named
from training.platform.run_infra import RunInfra
from training.rollouts.router_replay import routing_options
from training.samples.rollout import RolloutFnFactory, RolloutSetup


def rollout_setup(config: AsyncConfig, infra: RunInfra) -> RolloutSetup:
    """The deployment, the tokenizer and the sampling settings of a run."""
    assert infra.inference_model is not None, "provisioned with inference"
    return RolloutSetup(
        tokenizer=infra.tokenizer,
        tokenizer_id=config.merged_deployment.tokenizer_model,
        sample_kwargs={
            "max_tokens": config.max_completion_tokens,
            "temperature": config.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_seq_len": config.max_seq_len,
            "http_timeout": config.deployment.sample_timeout,
            "logprobs": True,
            **routing_options(config.replay, has_experts=infra.has_experts),
        },
        inference_base_url=infra.inference_url,
        api_key=infra.api_key,
        model=infra.inference_model,
        completions_per_prompt=config.completions_per_prompt,
        extras=dict(config.rollout_extras),
        boot_timeout_s=config.deployment.deployment_timeout_s,
        concurrency=infra.sampler.concurrency,
    )


def choose_rollout(config: AsyncConfig, factory: RolloutFnFactory | None) -> RolloutFnFactory:
    """The factory of a run's rollout function, from the program or from ``config.rollout``.

    Raises:
        ConfigError: both are given, or neither; or ``config.rollout`` names no function.
    """
    if factory is not None and config.rollout is not None:
        raise ConfigError(
            f"rollout must be None where main gets a rollout_fn_factory, got {config.rollout!r}: "
            "give one"
        )
    if factory is not None:
        return factory
    if config.rollout is None:
        raise ConfigError(
            "rollout must be MODULE:FUNCTION, got None: it makes the function that samples and "
            "scores a row (docs/async_rl.md); or give main a rollout_fn_factory"
        )
    return find_named("rollout", config.rollout)
