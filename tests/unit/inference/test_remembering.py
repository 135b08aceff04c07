"""What a deployment serves after a restart, from which bucket, and what it says meanwhile."""

import asyncio
import itertools
import threading
from pathlib import PosixPath

import orjson
import pytest
from tests.unit.inference.conftest import AppClient, until

from hearth.errors import ConfigError
from hearth.files import seal
from hearth.inference.backend import SampleRequest
from hearth.inference.service import create_app
from hearth.sync.store import FolderBuckets, MemoryBuckets, MemorySnapshotStore

pytestmark = pytest.mark.slow

HOT_LOAD = "/hot_load/v1/models/hot_load"
COMPLETIONS = "/inference/v1/completions"
BODY = {"prompt": [1, 2, 3], "max_tokens": 8, "seed": 7, "ignore_eos": True, "raw_output": True}


class Deployment(AppClient):
    """An engine with its app; made again on the same folder it is the deployment restarted."""

    def __init__(self, engine, snapshots, state_dir, **options):
        self.engine = engine
        super().__init__(
            create_app(engine, model_name="d", snapshots=snapshots, state_dir=state_dir, **options)
        )

    async def post(self, identity, bucket=None):
        headers = {} if bucket is None else {"x-hearth-snapshot-bucket": bucket}
        return await self.call("POST", HOT_LOAD, json={"identity": identity}, headers=headers)

    async def load(self, identity, *, bucket=None):
        posted = await self.post(identity, bucket)
        assert posted.status_code == 200, posted.text
        return await self.replica(wait_for=identity, timeout_s="20")

    async def replica(self, **question):
        answer = await self.call("GET", HOT_LOAD, params=question)
        return answer.json()["replicas"][0]

    async def sample(self):
        answer = (await self.call("POST", COMPLETIONS, json=BODY)).json()
        return answer["choices"][0]["raw_output"]["completion_token_ids"], answer["weight_version"]


@pytest.fixture
def snapshot(trained):
    """Weights of their own for each seed."""
    return lambda identity, seed=1: trained(identity, seed)[1]


@pytest.fixture
def buckets(tmp_path):
    return FolderBuckets(tmp_path / "buckets")


@pytest.fixture
def deploy(start, buckets, tmp_path):
    def make(snapshots=None, **options):
        return Deployment(start(), snapshots or buckets, tmp_path / "state", **options)

    return make


def remembered(tmp_path):
    content = orjson.loads((tmp_path / "state" / "serving.json").read_bytes())
    assert content.pop("checksum").startswith("blake2b:")
    return content


async def test_a_restarted_deployment_serves_the_same_weights_under_the_same_version(
    deploy, buckets, snapshot, tmp_path
):
    for number in (1, 2, 3):
        buckets.bucket("default").put(snapshot(f"step-{number}", number))
    before = deploy()
    await before.load("step-1")
    await before.load("step-2")
    sampled = await before.sample()

    after = deploy()
    after.app.state.restored.result(timeout=20)

    assert remembered(tmp_path) == {"identity": "step-2", "weight_version": 2, "bucket": "default"}
    assert sampled[1] == 2
    assert await after.sample() == sampled
    replica = await after.replica()
    assert (replica["current_snapshot_identity"], replica["weight_version"]) == ("step-2", 2)
    assert replica["loading_state"]["stage"] == "done"
    assert (await after.load("step-3"))["weight_version"] == 3


async def test_a_deployment_is_not_ready_before_its_snapshot_is_loaded_again(
    deploy, buckets, snapshot
):
    gate = threading.Event()

    class Slow:
        def bucket(self, name):
            gate.wait(20)
            return buckets.bucket(name)

    buckets.bucket("default").put(snapshot("step-1"))
    await deploy().load("step-1")

    after = deploy(Slow())
    early = [await after.call("POST", COMPLETIONS, json=BODY), await after.call("GET", "/healthz")]
    loading = await after.replica()
    gate.set()
    await after.replica(wait_for="step-1", timeout_s="20")

    assert [answer.status_code for answer in early] == [425, 425]
    assert "loads 'step-1' again" in early[0].json()["error"]["message"]
    assert loading["readiness"] is False
    assert loading["loading_state"]["stage"] == "loading"
    assert (await after.replica())["readiness"] is True
    assert (await after.call("GET", "/healthz")).json()["weight_version"] == 1


async def test_a_snapshot_that_is_gone_is_never_replaced_by_the_base_weights(
    deploy, snapshot, tmp_path
):
    kept = MemoryBuckets()
    kept.bucket("default").put(snapshot("step-1"))
    await deploy(kept).load("step-1")

    after = deploy(MemoryBuckets())
    error = str(after.app.state.failed.result(timeout=20))

    assert error.startswith(
        "snapshot 'step-1', which this deployment served before it restarted, must load again, "
        "got: snapshot must be one of [], got 'step-1': "
    )
    assert f"Put it back, or remove {tmp_path / 'state' / 'serving.json'} to start" in error
    refused = [
        await after.call("POST", COMPLETIONS, json=BODY),
        await after.call("GET", "/healthz"),
    ]
    assert [answer.status_code for answer in refused] == [425, 425]
    assert refused[0].json()["error"]["message"] == error
    replica = await after.replica()
    assert replica["readiness"] is False
    assert replica["current_snapshot_identity"] is None
    assert replica["loading_state"]["stage"] == "error"
    assert replica["loading_state"]["target_snapshot_identity"] == "step-1"
    assert "never saved here" in replica["loading_state"]["error_message"]
    assert remembered(tmp_path)["identity"] == "step-1"

    again = deploy(kept)
    again.app.state.restored.result(timeout=20)
    assert (await again.replica())["weight_version"] == 1


async def test_after_a_failed_restore_the_next_weight_sync_has_a_new_version(
    deploy, snapshot, tmp_path
):
    kept, fresh = MemoryBuckets(), MemoryBuckets()
    for number in (1, 2):
        kept.bucket("default").put(snapshot(f"step-{number}", number))
        await deploy(kept).load(f"step-{number}")
    fresh.bucket("default").put(snapshot("step-3", 3))
    assert remembered(tmp_path)["weight_version"] == 2

    after = deploy(fresh)
    after.app.state.restored.result(timeout=20)

    assert (await after.replica())["weight_version"] == 0
    replica = await after.load("step-3")
    assert (replica["weight_version"], replica["readiness"]) == (3, True)
    assert (await after.sample())[1] == 3


async def test_a_failed_weight_sync_is_not_remembered(deploy, buckets, snapshot, tmp_path):
    buckets.bucket("default").put(snapshot("step-1"))
    deployment = deploy()
    await deployment.load("gone")
    assert not (tmp_path / "state").exists()
    await deployment.load("step-1")

    failed = await deployment.load("gone")

    assert failed["loading_state"]["stage"] == "error"
    assert remembered(tmp_path)["identity"] == "step-1"


async def test_without_a_state_dir_nothing_is_written(start, snapshot, tmp_path):
    store = MemorySnapshotStore()
    store.put(snapshot("step-1"))
    deployment = Deployment(start(), store, None)

    await deployment.load("step-1")

    assert list(tmp_path.iterdir()) == []
    assert deployment.app.state.restored is None


class SlowFolder(PosixPath):
    """A folder on a disk that makes nothing new before ``gate`` is set."""

    gate = threading.Event()

    def mkdir(self, *args, **options):
        assert self.gate.wait(20)
        super().mkdir(*args, **options)


async def test_nobody_hears_of_a_weight_sync_before_it_is_written_down(
    start, buckets, snapshot, tmp_path
):
    """A restart between the two would serve older weights to who counts on the new ones."""
    buckets.bucket("default").put(snapshot("step-1"))
    deployment = Deployment(start(), buckets, SlowFolder(tmp_path / "state"))
    await deployment.post("step-1")
    await until(lambda: deployment.engine.state().current_identity == "step-1")

    early = await deployment.replica(wait_for="step-1", timeout_s="0.05")
    SlowFolder.gate.set()
    late = await deployment.replica(wait_for="step-1", timeout_s="20")

    assert (early["readiness"], late["readiness"]) == (False, True)
    assert remembered(tmp_path)["identity"] == "step-1"


async def test_weights_that_cannot_be_written_down_are_not_served(
    deploy, buckets, snapshot, tmp_path
):
    (tmp_path / "state").touch()
    buckets.bucket("default").put(snapshot("step-1"))
    deployment = deploy()

    replica = await deployment.load("step-1")

    assert replica["readiness"] is False
    error = str(deployment.app.state.failed.result(timeout=20))
    assert error.startswith(f"{tmp_path / 'state' / 'serving.json'} must be writable, got ")
    refused = await deployment.call("POST", COMPLETIONS, json=BODY)
    assert (refused.status_code, refused.json()["error"]["message"]) == (425, error)


SERVED = {"identity": "step-1", "weight_version": 1, "bucket": "default"}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b'{"identity": "a", "weight_version": 0}',
        orjson.dumps(seal(SERVED) | {"identity": "step-0"}),
        orjson.dumps(seal(SERVED))[:-9],
    ],
    ids=["empty", "nothing", "no version", "changed", "cut"],
)
def test_a_damaged_memory_stops_the_start_instead_of_serving_other_weights(
    deploy, tmp_path, content
):
    (tmp_path / "state").mkdir()
    (tmp_path / "state" / "serving.json").write_bytes(content)

    with pytest.raises(ConfigError, match=r"serving.json must name the served snapshot"):
        deploy()


async def test_the_header_names_the_bucket_and_the_default_is_the_deployments_own(
    deploy, buckets, snapshot, tmp_path
):
    buckets.bucket("job-a").put(snapshot("step-1", 1))
    buckets.bucket("job-b").put(snapshot("step-2", 2))
    deployment = deploy(default_bucket="job-a")

    first = await deployment.load("step-1")
    second = await deployment.load("step-2", bucket="job-b")
    missing = await deployment.load("step-3", bucket="job-b")

    assert [item["weight_version"] for item in (first, second)] == [1, 2]
    assert remembered(tmp_path)["bucket"] == "job-b"
    assert missing["loading_state"]["stage"] == "error"
    after = deploy(default_bucket="job-a")
    after.app.state.restored.result(timeout=20)
    assert await after.sample() == await deployment.sample()


async def test_one_identity_in_two_buckets_is_refused_while_it_is_served(deploy, buckets, snapshot):
    for number, name in enumerate(("a", "b")):
        buckets.bucket(name).put(snapshot("step-1", number))
    deployment = deploy(default_bucket="a")
    await deployment.load("step-1")

    answer = await deployment.post("step-1", "b")

    assert answer.status_code == 409
    assert "it is one of bucket 'a'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("bucket", "message"),
    [("../x", "x-hearth-snapshot-bucket must be 1 to 128"), ("other", "has one bucket")],
)
async def test_a_bucket_that_cannot_be_is_refused(start, bucket, message):
    deployment = Deployment(start(), MemorySnapshotStore(), None)

    answer = await deployment.post("x", bucket)

    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_a_repeated_hot_load_loads_once_and_after_an_error_again(start, snapshot):
    store, reads, gate = MemorySnapshotStore(), [], threading.Event()

    class Counting:
        def get(self, identity):
            reads.append(identity)
            gate.wait(20)
            return store.get(identity)

    deployment = Deployment(start(), Counting(), None)
    for _ in range(3):
        await deployment.post("step-1")
    gate.set()
    failed = await deployment.replica(wait_for="step-1", timeout_s="20")
    assert (reads, failed["loading_state"]["stage"]) == (["step-1"], "error")

    store.put(snapshot("step-1"))
    for _ in range(3):
        replica = await deployment.load("step-1")

    assert reads == ["step-1"] * 2
    assert replica["loading_state"] == {"stage": "done", "target_snapshot_identity": "step-1"}
    assert replica["weight_version"] == 1


async def test_whoever_watches_the_phase_hears_each_change_once(start, snapshot):
    phases, gate = [], threading.Event()
    store = MemorySnapshotStore()
    store.put(snapshot("step-1"))

    class Slow:
        def get(self, identity):
            gate.wait(20)
            return store.get(identity)

    deployment = Deployment(start(), Slow(), None, on_phase=phases.append)
    await until(lambda: deployment.engine.stats().running == 0)

    await asyncio.gather(*(deployment.sample() for _ in range(5)))
    await until(lambda: phases[-1:] == ["idle"])
    await deployment.post("step-1")
    await until(lambda: phases[-1] == "load_snapshot")
    gate.set()
    await deployment.replica(wait_for="step-1", timeout_s="20")
    await until(lambda: phases[-1] == "idle")

    assert phases[-2:] == ["load_snapshot", "idle"]
    assert phases[0] == "sampling"
    assert phases.count("load_snapshot") == 1
    assert all(pair != other for pair, other in itertools.pairwise(phases))


def test_a_watcher_that_fails_does_not_stop_the_engine(engine):
    def fail(phase):
        raise OSError(phase)

    engine.watch_phase(fail)

    sampled = [
        engine.submit(SampleRequest(prompt=[1], max_tokens=3, ignore_eos=True)).result()
        for _ in range(2)
    ]
    assert [len(completion.token_ids) for completion in sampled] == [3, 3]


def test_the_engine_rests_before_its_last_answer_is_told(engine):
    """Whoever gets it may compute next, and then has all threads."""
    phases = ["idle"]
    engine.watch_phase(phases.append)
    at_answers = []

    def ask(max_tokens):
        future = engine.submit(SampleRequest(prompt=[1], max_tokens=max_tokens, ignore_eos=True))
        future.add_done_callback(lambda future: at_answers.append(phases[-1]))
        return future

    asked = [ask(200), ask(3)]
    for future in asked:
        future.result()
    ask(1).result()

    assert at_answers == ["sampling", "idle", "idle"]
