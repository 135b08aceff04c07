"""The real inline launcher, with the tiny model that Hearth ships."""

import asyncio
import gc
import threading
import weakref

import httpx
import pytest
from tests.integration.launch.conftest import (
    RecordingWatcher,
    make_deployment_spec,
    make_trainer_spec,
    start_worker,
)

from hearth.errors import ClosedError, NotFoundError
from hearth.inference.engine.scheduler import Scheduler
from hearth.launch.spec import ExportSpec
from hearth.local.inline import InlineLauncher
from training.quickstart import MODEL


@pytest.fixture
def launcher(tmp_path):
    launcher = InlineLauncher(tmp_path)
    yield launcher
    launcher.close()


@pytest.fixture
def spec(tmp_path):
    def make(worker_id="trainer-j", **options):
        options = {"bucket": "b", "threads": None} | options
        return make_trainer_spec(MODEL, tmp_path / "checkpoints", worker_id, **options)

    return make


@pytest.fixture
def deployment(tmp_path):
    return make_deployment_spec(MODEL, tmp_path / "state", bucket="b")


async def get(app, path):
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as http:
        return (await http.get(f"http://worker{path}")).json()


async def test_a_trainer_answers_when_its_watcher_is_told_so(launcher, spec):
    worker, heard = start_worker(launcher, spec())

    assert heard.news == [(worker, "ready")]
    assert worker.pid is None
    answer = await get(worker.endpoint.app, "/api/v1/get_server_capabilities")
    assert answer["supported_models"][0]["model_name"] == "tiny"
    assert worker.phase == "idle"


async def test_a_deployment_answers_too(launcher, deployment, tmp_path):
    worker, heard = start_worker(launcher, deployment)

    assert heard.news == [(worker, "ready")]
    assert (await get(worker.endpoint.app, "/healthz"))["status"] == "ok"
    worker.stop()
    assert not (tmp_path / "state").exists(), "what a thread served dies with its process"


@pytest.mark.parametrize(
    "content", [None, "{}", "[", '{"model_type": "qwen3", "hidden_size": "x"}']
)
def test_a_start_that_fails_tells_why(launcher, spec, tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)

    heard = RecordingWatcher()
    worker = launcher.start(spec(source=str(tmp_path)), heard)
    heard.wait_failed(30)

    assert len(heard.news) == 1
    assert heard.news[0][1].startswith("could not start: ")
    assert worker.endpoint.app is None
    worker.stop()
    assert len(heard.news) == 1


def test_of_a_worker_that_was_stopped_nothing_is_heard(launcher, spec):
    heard = RecordingWatcher()
    worker = launcher.start(spec(), heard)

    worker.stop()

    assert heard.news in ([], [(worker, "ready")]), "ready may have been before"
    assert worker.has_ended.is_set()
    before = list(heard.news)
    worker.stop()
    assert heard.news == before


def test_a_stopped_worker_holds_no_engine(launcher, spec):
    worker, _ = start_worker(launcher, spec())
    app = weakref.ref(worker.endpoint.app)

    worker.stop()
    gc.collect()

    assert app() is None


def test_a_watcher_may_stop_the_worker_it_hears_of(launcher, spec):
    class Stopping(RecordingWatcher):
        def ready(self, worker):
            worker.stop()
            super().ready(worker)

    heard = Stopping()
    worker = launcher.start(spec(), heard)

    heard.wait_ready()
    assert worker.has_ended.is_set()


async def test_a_deployment_whose_engine_ends_is_reported_and_closed(
    launcher, deployment, monkeypatch
):
    worker, heard = start_worker(launcher, deployment)

    def fail(*_args):
        raise RuntimeError("admit")

    # Admission fails on no request that passed its checks.
    monkeypatch.setattr(Scheduler, "admit", fail)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(worker.endpoint.app)) as http:
        answer = await http.post(
            "http://worker/v1/completions", json={"prompt": [1, 2], "max_tokens": 2}
        )

    assert answer.status_code >= 500
    report = await asyncio.to_thread(heard.wait_failed, 240.0)
    assert report.reason == "ended: the engine has ended: RuntimeError: admit"
    assert worker.has_ended.is_set()


def test_no_thread_is_left_when_it_is_closed(spec, tmp_path):
    before = set(threading.enumerate())
    launcher = InlineLauncher(tmp_path)
    for number in range(2):
        start_worker(launcher, spec(f"trainer-{number}"))
    loading = launcher.start(spec("trainer-loading"), RecordingWatcher())

    launcher.close()

    assert loading.has_ended.is_set()
    assert set(threading.enumerate()) <= before
    launcher.close()
    with pytest.raises(ClosedError, match="launcher must be open, got a call after close"):
        launcher.start(spec(), RecordingWatcher())


def test_what_ran_in_a_process_before_is_not_found_again(launcher, spec):
    worker, _ = start_worker(launcher, spec())

    report = launcher.adopt(worker.record(), RecordingWatcher())

    assert report.describe() == "it ran inside a process that has ended"


def test_an_empty_bucket_lists_nothing_and_exports_nothing(launcher, tmp_path):
    export = {"base_model": "tiny", "source": str(MODEL), "folder": str(tmp_path / "out")}

    assert launcher.snapshots("empty") == []
    with pytest.raises(NotFoundError):
        launcher.export(ExportSpec(bucket="empty", identity="none", **export))
    assert launcher.log_path("trainer-j") is None
    assert not (tmp_path / "out").exists()
