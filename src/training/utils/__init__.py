"""The names that the product documents import from ``training.utils``, and nothing else."""

from training.utils.config import (
    CISPOConfig,
    DAPOConfig,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    HotloadConfig,
    InfraConfig,
    ISConfig,
    ResumeConfig,
    TISConfig,
    TrainerConfig,
    WandBConfig,
    WeightSyncConfig,
    WeightSyncScope,
)

__all__ = [
    "CISPOConfig",
    "DAPOConfig",
    "DROConfig",
    "DeployConfig",
    "GSPOConfig",
    "HotloadConfig",
    "ISConfig",
    "InfraConfig",
    "ResumeConfig",
    "TISConfig",
    "TrainerConfig",
    "WandBConfig",
    "WeightSyncConfig",
    "WeightSyncScope",
]
