from hearth.sdk import DeploymentManager, TrainerJobManager
from training.platform.managers import own_deployments, own_trainers

URL = "http://127.0.0.1:1"


class Official:
    """What we read of the official SDK's managers."""

    __module__ = "fireworks.training.sdk.fireworks_client"
    api_key = "a-key"
    base_url = URL
    inference_url = f"{URL}/elsewhere"


def test_our_managers_stay_themselves():
    trainers = TrainerJobManager("a-key", base_url=URL)
    deployments = DeploymentManager("a-key", base_url=URL)

    assert own_trainers(trainers) is trainers
    assert own_deployments(deployments) is deployments


def test_a_manager_of_the_official_sdk_becomes_ours_for_the_same_platform():
    trainers, deployments = own_trainers(Official()), own_deployments(Official())

    assert isinstance(trainers, TrainerJobManager)
    assert isinstance(deployments, DeploymentManager)
    assert (trainers.base_url, deployments.base_url) == (URL, URL)
    assert deployments.inference_url == f"{URL}/elsewhere"
