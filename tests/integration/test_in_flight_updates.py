"""Weights that are swapped amid a completion, through the SDK on an embedded platform."""

import asyncio

import pytest

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
CONTEXT = 1024
LONG = 900


class Stack:
    """A platform with one policy and one deployment, and clients of both."""

    def __init__(self, folder, running_requests):
        self._platform = EmbeddedPlatform(work_dir=folder)
        url = self._platform.base_url
        trainers = TrainerJobManager("key", base_url=url)
        deployments = DeploymentManager("key", base_url=url)
        job = trainers.create(
            TrainerJobConfig(base_model=BASE, job_id="policy", max_context_length=CONTEXT)
        )
        deployments.create_or_get(
            DeploymentConfig(
                deployment_id="d",
                base_model=BASE,
                max_context_length=CONTEXT,
                hot_load_trainer_job=job.job_name,
            )
        )
        endpoint = trainers.wait_for_ready("policy")
        model = deployments.wait_for_ready("d").inference_model
        service = FiretitanServiceClient(endpoint.base_url, "key")
        self.syncer = WeightSyncer(
            service.create_training_client(BASE, 0, seed=1),
            deployments,
            "d",
            BASE,
            running_requests=running_requests,
        )
        self.sampler = DeploymentSampler(deployments.inference_url, model, "key")
        self._clients = (self.sampler, service, trainers, deployments)

    async def draw(self, **options):
        """One completion."""
        options = {"seed": 3, "ignore_eos": True} | options
        (completion,) = await self.sampler.sample_with_prompt_tokens(PROMPT, **options)
        return completion

    def close(self):
        for client in self._clients:
            client.close()
        self._platform.close()


@pytest.fixture
def stack(tmp_path):
    made = []

    def make(running_requests):
        made.append(Stack(tmp_path, running_requests))
        return made[-1]

    yield make
    for entry in made:
        entry.close()


@pytest.mark.parametrize("running_requests", ["keep", "drain"])
async def test_a_weight_sync_waits_for_a_long_completion_only_if_it_is_to_drain(
    stack, running_requests
):
    entry = stack(running_requests)
    identity = entry.syncer.save_only("step-1")
    long = asyncio.ensure_future(entry.draw(max_tokens=LONG))
    await asyncio.sleep(0)
    # The deployment takes requests in their order: the long one runs when this one has ended.
    await entry.draw(max_tokens=4)

    await asyncio.to_thread(entry.syncer.hotload, identity)
    was_done = long.done()
    late = await entry.draw(max_tokens=4)
    completion = await long

    assert entry.syncer.version == 1
    assert late.versions == [[1, 4]]
    assert sum(count for _, count in completion.versions) == completion.completion_len == LONG
    assert len(completion.inference_logprobs) == LONG
    assert (completion.weight_version, completion.snapshot_identity) == (0, None)
    versions = [version for version, _ in completion.versions]
    if running_requests == "keep":
        assert (versions, was_done) == ([0, 1], False)
    else:
        assert versions == [0]
