"""A platform with one policy and one deployment, and clients of both."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from hearth.local import EmbeddedPlatform
from hearth.sdk import (
    DeploymentConfig,
    DeploymentManager,
    DeploymentSampler,
    FiretitanServiceClient,
    TrainerJobConfig,
    TrainerJobManager,
    WeightSyncer,
)
from training.quickstart import MODEL

BASE = str(MODEL)
PROMPT = [5, 17, 40, 41, 9]


class PlatformStack:
    """The job is ``policy``, the deployment ``d``; further options are the service client's."""

    def __init__(
        self, folder: Path, *, lora_rank: int = 0, context_length: int = 128, **options: Any
    ) -> None:
        self.platform = EmbeddedPlatform(work_dir=folder)
        url = self.platform.base_url
        self.trainers = TrainerJobManager("key", base_url=url)
        self.deployments = DeploymentManager("key", base_url=url)
        fields = {"base_model": BASE, "max_context_length": context_length}
        job = self.trainers.create(TrainerJobConfig(job_id="policy", **fields))
        self.deployments.create_or_get(
            DeploymentConfig(deployment_id="d", hot_load_trainer_job=job.job_name, **fields)
        )
        endpoint = self.trainers.wait_for_ready("policy")
        model = self.deployments.wait_for_ready("d").inference_model
        self.service = FiretitanServiceClient(endpoint.base_url, "key", **options)
        self.policy = self.service.create_training_client(BASE, lora_rank, seed=1)
        self.syncer = WeightSyncer(self.policy, self.deployments, "d", BASE)
        self.sampler = DeploymentSampler(self.deployments.inference_url, model, "key")

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for client in (self.platform, self.trainers, self.deployments, self.service):
                stack.callback(client.close)
            stack.callback(self.sampler.close)
