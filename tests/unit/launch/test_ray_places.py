"""What a worker reserves of a Ray cluster, and on which device it then computes."""

import pytest

from hearth.launch.ray.placing import Place, device_of, places_of
from hearth.launch.spec import DeploymentSpec, TrainerSpec


def make_trainer(**values):
    return TrainerSpec(
        worker_id="trainer-t", base_model="m", source="m", bucket="b", checkpoint_dir="c", **values
    )


def make_deployment(**values):
    return DeploymentSpec(
        worker_id="deployment-d",
        name="d",
        base_model="m",
        source="m",
        bucket="b",
        state_dir="s",
        **values,
    )


def test_servers_of_vllm_have_the_gpus_and_their_worker_has_none():
    spec = make_deployment(
        engine="vllm", replicas=2, engine_options={"tensor_parallel_size": 2}, threads=3
    )

    assert places_of(spec, has_gpus=True) == [
        Place("worker", 1.0),
        Place("replica-0", 3.0, 2.0),
        Place("replica-1", 3.0, 2.0),
    ]


@pytest.mark.parametrize(
    "spec",
    [make_trainer(ranks=2), make_deployment(), make_deployment(engine="vllm", replicas=2)],
    ids=["trainer", "embedded", "vllm"],
)
def test_a_worker_computes_on_the_gpus_that_it_or_its_sidecars_have(spec):
    assert device_of(spec, places_of(spec, has_gpus=True)) == "cuda"
    assert device_of(spec, places_of(spec, has_gpus=False)) is None


def test_a_device_that_is_given_stays():
    spec = make_deployment(engine="vllm", device="cpu")

    assert device_of(spec, places_of(spec, has_gpus=True)) == "cpu"
