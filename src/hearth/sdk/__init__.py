"""The client side of the wire, under the names that the product documents use.

A name's module is imported when the name is first used: commands that only list, read and stop what
runs need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hearth.sdk.background import APIFuture
    from hearth.sdk.batches import RoutedModelInput
    from hearth.sdk.completions_call import CompletionsCall
    from hearth.sdk.concurrency import (
        AdaptiveConcurrencyController,
        ConcurrencyController,
        FixedConcurrencyController,
        RequestOutcome,
    )
    from hearth.sdk.deployment_config import DeploymentConfig, DeploymentInfo
    from hearth.sdk.deployments import DeploymentManager
    from hearth.sdk.resources import WaitPolicy
    from hearth.sdk.sampling import DeploymentSampler, SampledCompletion
    from hearth.sdk.sampling_requests import SamplingRetryPolicy
    from hearth.sdk.shapes import TrainingShapeProfile
    from hearth.sdk.trainer_config import TrainerJobConfig
    from hearth.sdk.trainers import CreatedJob, TrainerEndpoint, TrainerJobManager
    from hearth.sdk.training import FiretitanServiceClient, FiretitanTrainingClient, SaveResult
    from hearth.sdk.weight_sync import WeightSyncer

__all__ = [
    "APIFuture",
    "AdaptiveConcurrencyController",
    "CompletionsCall",
    "ConcurrencyController",
    "CreatedJob",
    "DeploymentConfig",
    "DeploymentInfo",
    "DeploymentManager",
    "DeploymentSampler",
    "FiretitanServiceClient",
    "FiretitanTrainingClient",
    "FixedConcurrencyController",
    "RequestOutcome",
    "RoutedModelInput",
    "SampledCompletion",
    "SamplingRetryPolicy",
    "SaveResult",
    "TrainerEndpoint",
    "TrainerJobConfig",
    "TrainerJobManager",
    "TrainingShapeProfile",
    "WaitPolicy",
    "WeightSyncer",
]

_MODULES = {
    "APIFuture": "background",
    "AdaptiveConcurrencyController": "concurrency",
    "CompletionsCall": "completions_call",
    "ConcurrencyController": "concurrency",
    "CreatedJob": "trainers",
    "DeploymentConfig": "deployment_config",
    "DeploymentInfo": "deployment_config",
    "DeploymentManager": "deployments",
    "DeploymentSampler": "sampling",
    "FiretitanServiceClient": "training",
    "FiretitanTrainingClient": "training",
    "FixedConcurrencyController": "concurrency",
    "RequestOutcome": "concurrency",
    "RoutedModelInput": "batches",
    "SampledCompletion": "sampling",
    "SamplingRetryPolicy": "sampling_requests",
    "SaveResult": "training",
    "TrainerEndpoint": "trainers",
    "TrainerJobConfig": "trainer_config",
    "TrainerJobManager": "trainers",
    "TrainingShapeProfile": "shapes",
    "WaitPolicy": "resources",
    "WeightSyncer": "weight_sync",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"hearth.sdk.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
