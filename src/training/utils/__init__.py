"""The names that the product documents import from ``training.utils``, and nothing else."""

from training.config.parts import (
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
from training.platform.cleanup import ResourceCleanup
from training.platform.provisioning import create_trainer_job, setup_deployment

__all__ = [
    "CISPOConfig",
    "DAPOConfig",
    "DROConfig",
    "DeployConfig",
    "GSPOConfig",
    "HotloadConfig",
    "ISConfig",
    "InfraConfig",
    "ResourceCleanup",
    "ResumeConfig",
    "TISConfig",
    "TrainerConfig",
    "WandBConfig",
    "WeightSyncConfig",
    "WeightSyncScope",
    "create_trainer_job",
    "setup_deployment",
]
