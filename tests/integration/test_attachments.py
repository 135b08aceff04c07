"""Whose snapshots a deployment reads: a trainer's, or what trainers put into its own bucket."""

from __future__ import annotations

import pytest

from hearth.errors import RequestError
from hearth.local import EmbeddedPlatform
from hearth.sdk import DeploymentConfig, DeploymentManager, TrainerJobConfig, TrainerJobManager
from training.quickstart import MODEL

BASE = str(MODEL)


@pytest.fixture
def managers(tmp_path):
    with EmbeddedPlatform(work_dir=tmp_path) as platform:
        trainers = TrainerJobManager("a-key", base_url=platform.base_url)
        deployments = DeploymentManager("a-key", base_url=platform.base_url)
        trainers.create_and_wait(TrainerJobConfig(base_model=BASE, job_id="first"))
        deployments.create_or_get(
            DeploymentConfig(
                deployment_id="d",
                base_model=BASE,
                hot_load_trainer_job="first",
                tokenizer_model=BASE,
            )
        )
        deployments.wait_for_ready("d")
        yield trainers, deployments
        trainers.close()
        deployments.close()


def tied() -> TrainerJobConfig:
    return TrainerJobConfig(base_model=BASE, job_id="second", hot_load_deployment_id="d")


def test_a_trainer_cannot_publish_into_a_deployment_that_reads_a_running_trainers(managers):
    trainers, deployments = managers

    with pytest.raises(RequestError, match="reads that of the running trainer 'first'"):
        trainers.create(tied())

    assert trainers.get("second") is None
    info = deployments.get("d")
    assert info is not None
    assert info.hot_load_trainer_job == "accounts/me/rlorTrainerJobs/first"


def test_a_deployment_leaves_a_trainer_that_has_ended_for_one_that_names_it(managers):
    trainers, deployments = managers
    trainers.cancel("first")

    trainers.create(tied())

    info = deployments.get("d")
    assert info is not None
    assert info.hot_load_trainer_job is None
