"""The client side of the wire, under the names that the product documents use."""

from hearth.sdk.background import APIFuture
from hearth.sdk.concurrency import ConcurrencyController, FixedConcurrencyController
from hearth.sdk.deployments import DeploymentManager
from hearth.sdk.sampling import DeploymentSampler, SampledCompletion
from hearth.sdk.training import FiretitanServiceClient, FiretitanTrainingClient, SaveResult
from hearth.sdk.weight_sync import WeightSyncer

__all__ = [
    "APIFuture",
    "ConcurrencyController",
    "DeploymentManager",
    "DeploymentSampler",
    "FiretitanServiceClient",
    "FiretitanTrainingClient",
    "FixedConcurrencyController",
    "SampledCompletion",
    "SaveResult",
    "WeightSyncer",
]
