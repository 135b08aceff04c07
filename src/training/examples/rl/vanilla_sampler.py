"""The sampler of rollout functions that ask the deployment themselves (document 004)."""

from __future__ import annotations

from hearth.sdk import DeploymentSampler, FixedConcurrencyController, SamplingRetryPolicy
from training.rollouts.router_replay import ROUTING_OPTIONS
from training.rollouts.sampler import RolloutSampler
from training.samples.rollout import RolloutSetup

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
