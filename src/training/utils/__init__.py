"""The names that the product documents import from ``training.utils``, and nothing else.

The helper that they import of ``tinker_cookbook`` is found where that package is not installed.
"""

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
from training.utils.cookbook import offer_cookbook

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

offer_cookbook()
