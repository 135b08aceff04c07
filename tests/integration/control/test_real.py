"""The control plane over the real inline launcher, with the tiny model that Hearth ships."""

import asyncio
import time
from datetime import UTC, datetime

import pytest
import tinker
import torch
import transformers
from tests.unit.control.conftest import PlatformClient

from hearth.control.gateway import Access
from hearth.local import EmbeddedPlatform
from hearth.sdk import FiretitanServiceClient
from training.quickstart import MODEL

BASE = str(MODEL)
JOBS = "rlorTrainerJobs"
ADAM = tinker.AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


class Platform:
    """An embedded platform, asked over HTTP."""

    def __init__(self, folder):
        self.embedded = EmbeddedPlatform(work_dir=folder)
        self.url = self.embedded.base_url
        self.plane = self.embedded.plane
        self.folder = folder

    def __call__(self, method, path, body=None):
        async def run():
            asked = PlatformClient(self.plane)
            try:
                return await asked(method, path, body)
            finally:
                await asked.close()

        return asyncio.run(run())

    def job(self, id, base=BASE, wait=True, **more):
        body = {"trainingConfig": {"baseModel": base}} | more
        status, content = self("POST", f"{JOBS}?rlorTrainerJobId={id}", body)
        assert status == 200, content
        return (
            self.wait_for_state(f"{JOBS}/{id}", "JOB_STATE_RUNNING,JOB_STATE_FAILED")
            if wait
            else content
        )

    def wait_for_state(self, path, states):
        return self("GET", f"{path}?waitForState={states}&timeoutS=20")[1]

    def train(self, id, base=BASE, lora_rank=0):
        url = f"{self.url}/training/v1/rlorTrainerJobs/me/{id}"
        service = FiretitanServiceClient(url, "key")
        return service.create_training_client(base, lora_rank, seed=1)


@pytest.fixture(scope="module")
def platform(tmp_path_factory):
    made = Platform(tmp_path_factory.mktemp("platform"))
    yield made
    made.embedded.close()


@pytest.fixture(scope="module")
def trained(platform):
    """A platform with a job that has saved one of each kind, ``began_s`` before it did."""
    platform.job("policy")
    platform.began_s = time.time()
    client = platform.train("policy")
    client.save_state("step-0").result()
    client.save_weights_for_sampler_ext("first", checkpoint_type="base")
    client.optim_step(ADAM).result()
    client.save_weights_for_sampler_ext("second", checkpoint_type="delta")
    client.save_weights_for_sampler_ext("third", checkpoint_type="base")
    platform.job("adapter", trainingConfig={"baseModel": BASE, "loraRank": 2})
    adapter = platform.train("adapter", lora_rank=2)
    adapter.save_state("step-0").result()
    adapter.save_weights_for_sampler_ext("tiny", checkpoint_type="base")
    return platform


def records(platform, id):
    status, page = platform("GET", f"{JOBS}/{id}/checkpoints")
    assert status == 200
    return page["checkpoints"]


def kinds(platform, id):
    return [
        (
            record["name"].rsplit("/", 1)[-1].split("-")[0],
            record["checkpointType"],
            record["promotable"],
        )
        for record in records(platform, id)
    ]


def identity(platform, id, prefix):
    names = [record["name"].rsplit("/", 1)[-1] for record in records(platform, id)]
    return next(name for name in names if name.startswith(prefix))


def promote(platform, job, prefix, name, **more):
    body = {"output_model": f"accounts/me/models/{name}", "base_model": BASE} | more
    found = identity(platform, job, prefix)
    path = f"checkpoints/{found}:promote"
    return platform("POST", path, body | {"trainer_job_id": f"accounts/me/{JOBS}/{job}"})


def test_a_listing_has_resumable_and_sampler_rows_with_their_types(trained):
    assert kinds(trained, "policy") == [
        ("step", "CHECKPOINT_TYPE_TRAINING", False),
        ("first", "CHECKPOINT_TYPE_INFERENCE_BASE", True),
        ("second", "CHECKPOINT_TYPE_INFERENCE_ARC_V2", True),
        ("third", "CHECKPOINT_TYPE_INFERENCE_BASE", True),
    ]
    assert kinds(trained, "adapter") == [
        ("step", "CHECKPOINT_TYPE_TRAINING_LORA", False),
        ("tiny", "CHECKPOINT_TYPE_INFERENCE_LORA", True),
    ]


def test_no_row_is_older_than_the_request_that_made_it(trained):
    # As clients compare it: texts, in UTC, to the microsecond.
    before = datetime.fromtimestamp(trained.began_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")

    times = [record["createTime"] for record in records(trained, "policy")]

    assert all(time >= before for time in times)
    assert times == sorted(times)


def test_a_promoted_model_loads_with_transformers_and_is_the_base_of_a_new_job(trained):
    status, content = promote(trained, "policy", "first", "tuned")
    assert status == 200, content
    model = content["model"]
    assert model["kind"] == "HF_BASE_MODEL"

    loaded = transformers.AutoModelForCausalLM.from_pretrained(model["source"])
    shipped = transformers.AutoModelForCausalLM.from_pretrained(BASE)
    for name, weight in shipped.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)
    assert transformers.AutoTokenizer.from_pretrained(model["source"]).encode("a")

    job = trained.job("next", base=model["name"])
    assert job["state"] == "JOB_STATE_RUNNING"
    assert job["trainingConfig"]["maxContextLength"] == shipped.config.max_position_embeddings


def test_a_repeated_run_promotes_over_its_own_model_and_no_other_job_does(trained):
    status, first = promote(trained, "policy", "first", "again")
    assert status == 200
    status, third = promote(trained, "policy", "third", "again")
    assert status == 200
    assert third["model"]["source"] == first["model"]["source"]
    assert transformers.AutoModelForCausalLM.from_pretrained(third["model"]["source"])
    folders = [path.name for path in (trained.folder / "models").iterdir() if path.name[0] != "."]
    assert folders.count("again") == 1

    status, content = promote(trained, "adapter", "tiny", "again")
    assert (status, content["error"]["status"]) == (409, "ALREADY_EXISTS")


def test_a_promoted_adapter_says_what_it_adapts(trained):
    _, content = promote(trained, "adapter", "tiny", "small")

    assert content["model"]["kind"] == "HF_PEFT_ADDON"
    details = content["model"]["peftDetails"]
    assert (details["baseModel"], details["r"]) == (BASE, 2)
    assert any(name.endswith("q_proj") for name in details["targetModules"])
    assert (trained.folder / "models" / "small" / "adapter_config.json").exists()

    _, merged = promote(trained, "adapter", "tiny", "merged", merge_adapter=True)
    assert merged["model"]["kind"] == "HF_BASE_MODEL"
    assert transformers.AutoModelForCausalLM.from_pretrained(merged["model"]["source"])


def test_a_promoted_delta_is_the_whole_model_of_its_step_also_when_it_is_saved_again(platform):
    platform.job("chain")
    client = platform.train("chain")
    client.save_weights_for_sampler_ext("before", checkpoint_type="base")
    tokens = tinker.ModelInput.from_ints([5, 6, 7])
    targets = {"target_tokens": [6, 7, 8], "weights": [1.0, 1.0, 1.0]}
    datum = tinker.Datum(model_input=tokens, loss_fn_inputs=targets)
    client.forward_backward([datum], "cross_entropy").result()
    client.optim_step(ADAM).result()
    saved = client.save_weights_for_sampler_ext("after", checkpoint_type="delta")
    client.save_weights_for_sampler_ext("after", checkpoint_type="base")
    client.save_weights_for_sampler_ext("whole", checkpoint_type="base")
    assert kinds(platform, "chain")[1] == ("after", "CHECKPOINT_TYPE_INFERENCE_ARC_V2", True)

    models = [
        promote(platform, "chain", name, f"chain-{name}")[1]["model"]
        for name in ("before", "after", "whole")
    ]

    assert models[1]["sourceCheckpoint"] == saved.snapshot_name
    before, after, whole = (
        transformers.AutoModelForCausalLM.from_pretrained(model["source"]).state_dict()
        for model in models
    )
    assert all(torch.equal(after[name], whole[name]) for name in whole)
    assert not all(torch.equal(after[name], before[name]) for name in before)


def test_the_rows_of_a_deleted_job_are_listed_and_promoted(platform):
    platform.job("brief")
    client = platform.train("brief")
    client.save_state("step-1").result()
    client.save_weights_for_sampler_ext("last", checkpoint_type="base")
    listed = records(platform, "brief")
    assert len(listed) == 2

    assert platform("DELETE", f"{JOBS}/brief") == (200, {})

    assert records(platform, "brief") == listed
    assert promote(platform, "brief", "last", "late")[0] == 200


def test_a_length_that_no_config_says_is_the_trainers_own(platform, tmp_path):
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 48, "vocab_size": 32}
    config = transformers.GPT2Config(**sizes, bos_token_id=None, eos_token_id=3, pad_token_id=0)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)

    created = platform.job("gpt", base=str(tmp_path), wait=False)
    running = platform.wait_for_state(f"{JOBS}/gpt", "JOB_STATE_RUNNING,JOB_STATE_FAILED")

    assert "maxContextLength" not in created["trainingConfig"]
    assert running["state"] == "JOB_STATE_RUNNING"
    assert running["trainingConfig"]["maxContextLength"] == 48


def test_a_model_that_does_not_load_fails_its_job_and_its_deployment_with_the_reason(
    platform, tmp_path
):
    (tmp_path / "config.json").write_text("{}")

    job = platform.job("bad", base=str(tmp_path))
    assert job["state"] == "JOB_STATE_FAILED"
    assert job["statusMessage"].startswith("could not start: ")
    platform("POST", "deployments?deploymentId=bad", {"baseModel": str(tmp_path)})
    deployment = platform.wait_for_state("deployments/bad", "READY,FAILED")
    assert deployment["state"] == "FAILED"
    assert deployment["statusMessage"].startswith("could not start: ")
    status, content = platform("POST", "/v1/completions", {"model": "bad"})
    assert (status, content["error"]["status"]) == (410, "FAILED_PRECONDITION")


def test_a_cancelled_job_is_resumed_with_its_checkpoints(platform):
    platform.job("paused")
    platform.train("paused").save_state("step-3").result()

    assert platform("POST", f"{JOBS}/paused:cancel")[1]["state"] == "JOB_STATE_CANCELLED"
    assert platform("POST", f"{JOBS}/paused:resume")[1]["state"] == "JOB_STATE_CREATING"
    assert (
        platform.wait_for_state(f"{JOBS}/paused", "JOB_STATE_RUNNING")["state"]
        == "JOB_STATE_RUNNING"
    )

    path = "/training/v1/rlorTrainerJobs/me/paused/api/v1/list_checkpoints"
    assert platform("GET", path) == (200, {"checkpoints": ["step-3"]})
    platform.train("paused").load_state_with_optimizer("step-3").result()


def test_a_deployment_loads_what_the_trainer_it_is_attached_to_has_published(trained):
    other = "other"
    trained.job(other)
    trained.train(other).save_weights_for_sampler_ext("only", checkpoint_type="base")
    body = {"baseModel": BASE, "hotLoadTrainerJob": f"accounts/me/{JOBS}/policy"}
    trained("POST", "deployments?deploymentId=d", body)
    assert trained.wait_for_state("deployments/d", "READY,FAILED")["state"] == "READY"
    theirs, own = identity(trained, other, "only"), identity(trained, "policy", "first")

    assert loaded(trained, own) is True
    assert loaded(trained, theirs) is False
    patch = {"hotLoadTrainerJob": f"accounts/me/{JOBS}/{other}"}
    status, content = trained("PATCH", "deployments/d", patch)
    assert (status, content["state"]) == (200, "READY")
    assert loaded(trained, theirs) is True


def loaded(platform, identity):
    """Whether a hot-load of this snapshot ends with it being served."""
    path = "/hot_load/v1/models/hot_load"

    async def run():
        asked = PlatformClient(platform.plane)
        named = {"fireworks-deployment": "accounts/me/deployments/d"}
        status, content = await asked("POST", path, {"identity": identity}, headers=named)
        if status == 200:
            wait = f"{path}?wait_for={identity}&timeout_s=10"
            status, content = await asked("GET", wait, headers=named)
        await asked.close()
        return status, content

    status, content = asyncio.run(run())
    text = str(content)
    return status == 200 and f"'current_snapshot_identity': '{identity}'" in text


def test_a_chunked_body_that_grows_too_long_is_413_inline_too(platform):
    async def send(path):
        async def body():
            for _ in range(40):
                yield b"x" * 100

        client = PlatformClient(platform.plane, Access(is_local=False, max_body=2000))
        answer = await client.http.post(path, content=body())
        await client.close()
        return answer.status_code, answer.json()["error"]["message"]

    platform.job("small")
    path = "/training/v1/rlorTrainerJobs/me/small/api/v1/forward"
    status, message = asyncio.run(send(path))
    assert status == 413
    assert message.startswith("body must be at most 2000 bytes")
