"""The client side of the wire, under the names that the product documents use."""

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
