"""GRPO as a small library: plain strings and numbers, and a torch model where there is one.

Owns the names of document 002. The recipes do not use it: they train on the very tokens that were
sampled, where this library encodes texts.
"""

from training.grpo.config import GRPOConfig
from training.grpo.pipeline import GroupRewards, GRPOPipeline, TrainingMetrics
from training.grpo.policy import TorchPolicy, causal_lm_logprobs
from training.grpo.trainer import GroupSample, GRPOTrainer, UpdateResult

__all__ = [
    "GRPOConfig",
    "GRPOPipeline",
    "GRPOTrainer",
    "GroupRewards",
    "GroupSample",
    "TorchPolicy",
    "TrainingMetrics",
    "UpdateResult",
    "causal_lm_logprobs",
]
