"""A gateway whose trainer is on another machine, behind a network that loses, cuts and doubles."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tinker
from tests.chaos.proxy import KINDS, FlakyProxy
from tests.listening import AppListener
from tests.unit.control.conftest import ScriptedLauncher, ScriptedWorker

from hearth.control.access import Access
from hearth.control.app import create_gateway
from hearth.control.catalog import read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store
from hearth.launch.spec import Endpoint
from hearth.local import EmbeddedPlatform
from hearth.sdk import FiretitanServiceClient, TrainerJobConfig, TrainerJobManager
from hearth.wire.fireworks import TrainerJob
from training.quickstart import MODEL

STEPS = 8
ADAM = tinker.AdamParams(learning_rate=1e-3, beta1=0.9, beta2=0.99, eps=1e-8)


@pytest.fixture(scope="module")
def trainer_app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """The app of a trainer that runs."""
    with EmbeddedPlatform(work_dir=tmp_path_factory.mktemp("platform")) as platform:
        trainers = TrainerJobManager(api_key="x", base_url=platform.base_url)
        job = trainers.create_and_wait(TrainerJobConfig(base_model=str(MODEL)))
        live = platform.plane.jobs.live.get(job.job_id)
        assert live is not None
        assert live.worker is not None
        yield live.worker.endpoint.app
        trainers.close()


def train(url: str) -> list[float]:
    """The loss of each step of a new model of the job."""
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints([5 + row, 9, 11, 40]),
            loss_fn_inputs={
                "target_tokens": tinker.TensorData(data=[9, 11, 40, 7], dtype="int64"),
                "weights": tinker.TensorData(data=[1.0] * 4, dtype="float32"),
            },
        )
        for row in range(4)
    ]
    service = FiretitanServiceClient(f"{url}/training/v1/rlorTrainerJobs/me/j", "x")
    client = service.create_training_client(str(MODEL), 0, seed=1)
    losses: list[float] = []
    for _ in range(STEPS):
        passed = client.forward_backward(data, "cross_entropy")
        stepped = client.optim_step(ADAM)
        losses.append(passed.result(120).metrics["loss:sum"])
        stepped.result(120)
    client.unload()
    service.close()
    return losses


def test_each_operation_is_executed_once_whatever_the_network_between_does(
    trainer_app: Any, tmp_path: Path
) -> None:
    with AppListener(trainer_app) as listening:
        port = int(listening.url.rpartition(":")[2])
        with FlakyProxy(port, seed=0) as proxy:

            class Elsewhere(ScriptedWorker):
                @property
                def endpoint(self) -> Endpoint:
                    return Endpoint(url=proxy.url)

            launcher = ScriptedLauncher(Elsewhere)
            context = Context(launcher=launcher, catalog=read_catalog(), data_dir=tmp_path)
            plane = ControlPlane(Store(), context)
            config = {"baseModel": str(MODEL), "maxContextLength": 64}
            plane.jobs.create("j", TrainerJob.from_dict({"trainingConfig": config}), None)
            launcher.last("j").starts()
            with AppListener(create_gateway(plane, Access())) as gateway:
                undisturbed = train(gateway.url)
                proxy.share = 0.3
                disturbed = train(gateway.url)
                proxy.share = 0.0
            plane.close()

    assert disturbed == undisturbed
    assert undisturbed[-1] < undisturbed[0]
    assert set(proxy.counts) == set(KINDS), proxy.counts
