"""The sampler of rollout functions that ask the deployment themselves (document 004)."""

from training.rollouts.sampler import build_deployment_sampler

__all__ = ["build_deployment_sampler"]
