from __future__ import annotations

import dataclasses
import inspect
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tests.integration.launch.conftest import CLIENT_KEY, RecordingWatcher, start_worker
from tests.waiting import is_running, wait_until
from transformers import AutoModelForCausalLM

from hearth.errors import ClosedError, ConfigError, EngineError, NotFoundError, StorageError
from hearth.inference import worker as deployment_worker
from hearth.launch.gpus import VISIBLE_VARIABLE
from hearth.launch.processes import ProcessLauncher, end_process
from hearth.launch.records import ProcessHandle, ProcessId, WorkerFolder
from hearth.launch.spec import (
    DeploymentSpec,
    Endpoint,
    ExitReport,
    ExportSpec,
    TrainerSpec,
    spec_as_dict,
)
from hearth.models.loading import base_tensors, load_model
from hearth.sync.chain import Published
from hearth.sync.store import FolderBuckets, FolderSnapshotStore, Snapshot
from hearth.trainer import worker as trainer_worker
from hearth.trainer.export import ExportOptions
from hearth.trainer.options import TrainerWorkerOptions

Specs = Callable[..., TrainerSpec]
LIMIT_S = 2.0
"""How soon a death must be known."""
HOT_LOAD = "/hot_load/v1/models/hot_load"


def connect(endpoint: Endpoint) -> httpx.AsyncClient:
    transport = httpx.AsyncHTTPTransport(uds=endpoint.socket)
    return httpx.AsyncClient(transport=transport, base_url="http://worker", timeout=30)


async def run(http: httpx.AsyncClient, operation: str, **body: Any) -> Any:
    """The result of a trainer's operation."""
    future = (await http.post(f"/api/v1/{operation}", json=body)).json()
    return (await http.post("/api/v1/retrieve_future", json=future)).json()


@pytest.fixture
def start(launcher: ProcessLauncher, trainer_spec: Specs) -> Callable[..., Any]:
    """Start a trainer, or what another spec describes; the worker and its watcher once it answers.

    Its arguments are those of ``trainer_spec``, and the launcher if it is not the module's.
    """

    def run(number: int = 0, *, by: Any = launcher, spec: Any = None, **options: Any) -> Any:
        return start_worker(by, spec or trainer_spec(number, **options))

    return run


def test_a_start_from_a_warm_forkserver_takes_seconds_at_most(start, record_property):
    first, _ = start(1)

    start_s = time.perf_counter()
    second, _ = start(2)
    took_s = time.perf_counter() - start_s

    record_property("warm_start_s", took_s)
    assert took_s < 5
    assert is_running(first.pid)
    assert is_running(second.pid)
    assert first.endpoint.socket != second.endpoint.socket


async def test_a_trainer_answers_at_its_socket(start, launcher):
    worker, _ = start()

    async with connect(worker.endpoint) as http:
        assert (await http.get("/api/v1/healthz")).status_code == 200
        model = await run(http, "create_model", base_model="tiny", session_id="s", model_seq_id=0)
        targets = {"data": [9, 11], "dtype": "int64", "shape": [2]}
        datum = {
            "model_input": {"chunks": [{"type": "encoded_text", "tokens": [5, 9]}]},
            "loss_fn_inputs": {"target_tokens": targets},
        }
        result = await run(
            http,
            "forward",
            model_id=model["model_id"],
            seq_id=1,
            forward_input={"data": [datum], "loss_fn": "cross_entropy"},
        )
    assert len(result["loss_fn_outputs"][0]["logprobs"]["data"]) == 2
    assert WorkerFolder(launcher.log_path(worker.spec.worker_id).parent).report("").phase == "idle"


async def test_a_deployment_serves_what_a_trainer_published_also_after_a_crash(
    start, deployment_spec
):
    trainer, _ = start(bucket=deployment_spec.bucket)
    worker, watcher = start(spec=deployment_spec)

    async with connect(trainer.endpoint) as http:
        model = await run(http, "create_model", base_model="tiny", session_id="s", model_seq_id=0)
        await run(http, "save_weights_for_sampler", model_id=model["model_id"], seq_id=1, path="v1")
    async with connect(worker.endpoint) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok", "weight_version": 0}
        await http.post(HOT_LOAD, json={"identity": "v1"})
        state = (await http.get(HOT_LOAD, params={"wait_for": "v1", "timeout_s": 20})).json()
        assert state["replicas"][0]["current_snapshot_identity"] == "v1"
        request = {"model": deployment_spec.name, "prompt": [5, 9], "max_tokens": 3, "seed": 1}
        answer = await http.post("/inference/v1/completions", json=request)
    assert answer.status_code == 200, answer.text
    assert 1 <= answer.json()["usage"]["completion_tokens"] <= 3

    os.kill(worker.pid, signal.SIGKILL)
    watcher.wait_failed(LIMIT_S)
    again, _ = start(spec=deployment_spec)
    async with connect(again.endpoint) as http:
        assert (await http.get("/healthz")).json() == {"status": "ok", "weight_version": 1}


def test_a_killed_worker_is_reported_within_two_seconds(start, record_property):
    worker, watcher = start()

    start_s = time.perf_counter()
    os.kill(worker.pid, signal.SIGKILL)
    report = watcher.wait_failed(LIMIT_S)

    record_property("noticed_s", time.perf_counter() - start_s)
    assert (report.code, report.signal, report.phase) == (None, "SIGKILL", "idle")
    assert report.peak_rss_mb > 50
    assert report.last_lines[-1].endswith("answers")
    assert "ended by SIGKILL, last phase idle, peak memory" in report.describe()
    assert not Path(worker.endpoint.socket).exists()


def test_an_end_that_its_watcher_cannot_write_down_is_told_again(launcher, trainer_spec):
    class FullDisk(RecordingWatcher):
        refusals = 0

        def failed(self, worker, report):
            if self.refusals < 2:
                self.refusals += 1
                raise StorageError("control.db must be writable, got a full disk")
            super().failed(worker, report)

    watcher = FullDisk()
    worker = launcher.start(trainer_spec(), watcher)
    watcher.wait_ready()

    os.kill(worker.pid, signal.SIGKILL)

    assert watcher.wait_failed(60.0).signal == "SIGKILL"
    assert watcher.refusals == 2


def test_a_crash_leaves_its_traceback_at_the_end_of_the_log(start):
    worker, watcher = start()

    os.kill(worker.pid, signal.SIGSEGV)

    report = watcher.wait_failed(LIMIT_S)
    assert report.signal == "SIGSEGV"
    assert any("Fatal Python error: Segmentation fault" in line for line in report.last_lines)


def test_a_worker_that_cannot_load_its_model_says_why(launcher, trainer_spec):
    watcher = RecordingWatcher()
    launcher.start(trainer_spec(source="/nonexistent/model"), watcher)

    report = watcher.wait_failed(60)

    assert report.code == 1
    assert report.reason == (
        "could not start: base_model must be an existing folder or a hub id, got "
        "'/nonexistent/model'"
    )
    assert report.phase == "loading model"
    assert not watcher.is_ready.is_set()


def test_a_deployment_that_has_lost_its_snapshot_ends_and_names_it(launcher, deployment_spec):
    state = Path(deployment_spec.state_dir)
    state.mkdir(parents=True, exist_ok=True)
    served = '{"identity": "step-7", "weight_version": 7, "bucket": "b"}'
    (state / "serving.json").write_text(served)
    watcher = RecordingWatcher()
    launcher.start(deployment_spec, watcher)

    report = watcher.wait_failed(LIMIT_S)

    assert report.reason.startswith("ended: snapshot 'step-7', which this deployment served before")
    assert not watcher.is_ready.is_set()
    assert (state / "serving.json").read_text() == served
    (state / "serving.json").unlink()


def test_each_worker_has_its_own_thread_budget(start, launcher):
    for threads in (1, 3):
        worker, _ = start(threads, threads=threads)
        log = launcher.log_path(worker.spec.worker_id).read_text()

        assert f"{threads} threads" in log


def test_workers_are_given_gpus_of_their_own(start, tmp_path, monkeypatch):
    monkeypatch.setenv(VISIBLE_VARIABLE, "0,1")
    launcher = ProcessLauncher(tmp_path, die_with_parent=True)
    try:
        for number, given in enumerate(["GPU 0 of 0, 1", "GPU 1 of 0, 1"]):
            # Where torch sees no GPU it computes on the CPU all the same.
            worker, _ = start(number, by=launcher, device=None)
            log = launcher.log_path(worker.spec.worker_id).read_text()
            assert f"worker {worker.spec.worker_id}: {given}" in log
    finally:
        launcher.close()


def test_the_forkserver_forks_from_one_thread(start, launcher, data_dir):
    start()

    assert len(list(Path(f"/proc/{launcher.forkserver_pid}/task").iterdir())) == 1
    assert "threads of its own" not in (data_dir / "forkserver.log").read_text()


def test_an_end_that_was_asked_for_is_clean_and_no_news(start, launcher):
    worker, watcher = start()
    folder = WorkerFolder(launcher.log_path(worker.spec.worker_id).parent)

    worker.stop()

    assert not is_running(worker.pid)
    assert folder.report("").code == 0
    assert folder.report("").last_lines[-1].endswith("closes")
    assert not watcher.has_failed.is_set()


def test_a_worker_that_does_not_end_in_time_is_killed(start):
    worker, watcher = start()
    os.kill(worker.pid, signal.SIGSTOP)

    worker.stop(grace_s=0.1)

    assert not is_running(worker.pid)
    assert not watcher.has_failed.is_set()


def test_a_worker_that_hangs_is_killed_and_reported_as_one_that_died(start, record_property):
    worker, watcher = start()
    os.kill(worker.pid, signal.SIGSTOP)
    start_s = time.monotonic()

    report = watcher.wait_failed(240.0)

    record_property("noticed_s", time.monotonic() - start_s)
    assert not is_running(worker.pid)
    assert report.reason.startswith("hung, and was killed: it is stopped since ")
    assert (report.signal, report.phase) == ("SIGKILL", "idle")


def test_a_worker_can_be_stopped_before_it_answers(launcher, trainer_spec):
    watcher = RecordingWatcher()
    worker = launcher.start(trainer_spec(), watcher)

    worker.stop()

    assert worker.pid is None or not is_running(worker.pid)
    assert not watcher.is_ready.is_set()
    assert not watcher.has_failed.is_set()


def test_an_id_that_runs_is_not_started_twice(start, launcher, trainer_spec):
    worker, _ = start()

    with pytest.raises(ConfigError, match="worker_id must be new"):
        launcher.start(trainer_spec(), RecordingWatcher())
    assert is_running(worker.pid)


def test_an_id_that_has_ended_may_start_again_and_keeps_its_log(start, launcher):
    worker, watcher = start()
    os.kill(worker.pid, signal.SIGKILL)
    watcher.wait_failed(LIMIT_S)

    again, second = start()

    assert again.pid != worker.pid
    assert not second.has_failed.is_set()
    assert launcher.log_path(worker.spec.worker_id).read_text().count("answers") == 2


@pytest.mark.parametrize("worker_id", ["", "../x", "a/b", ".hidden"])
def test_an_id_that_is_no_folders_name_is_refused(launcher, trainer_spec, worker_id):
    with pytest.raises(ConfigError, match="worker_id must be letters"):
        launcher.start(trainer_spec(worker_id=worker_id), RecordingWatcher())


def test_a_later_launcher_adopts_what_still_runs(start, make_launcher):
    first = make_launcher()
    worker, _ = start(by=first)
    record, forkserver = worker.record(), first.forkserver_pid
    first.release()

    second, watcher = make_launcher(), RecordingWatcher()
    adopted = second.adopt(record, watcher)

    assert not isinstance(adopted, ExitReport)
    watcher.wait_ready()
    assert (adopted.pid, adopted.endpoint, adopted.spec) == (
        worker.pid,
        worker.endpoint,
        worker.spec,
    )
    assert is_running(forkserver)
    os.kill(adopted.pid, signal.SIGKILL)
    assert watcher.wait_failed(LIMIT_S).signal == "SIGKILL"
    wait_until(lambda: not is_running(forkserver), LIMIT_S)


def test_a_later_launcher_reports_who_ended_and_ends_whom_nobody_adopted_on_its_next_start(
    start, make_launcher
):
    first = make_launcher()
    ended, _ = start(1, by=first)
    stray, _ = start(2, by=first)
    first.release()
    os.kill(ended.pid, signal.SIGKILL)
    folder = WorkerFolder(first.log_path(ended.spec.worker_id).parent)
    wait_until(folder.exit.exists, LIMIT_S)
    second = make_launcher()

    report = second.adopt(ended.record(), RecordingWatcher())
    worker, _ = start(2, by=second)

    assert isinstance(report, ExitReport)
    assert (report.signal, report.phase) == ("SIGKILL", "idle")
    assert report.peak_rss_mb > 50
    assert not is_running(stray.pid)
    assert is_running(worker.pid)


def test_a_record_of_nothing_is_honestly_gone(launcher, trainer_spec):
    record = {"worker_id": trainer_spec().worker_id, "spec": spec_as_dict(trainer_spec())}

    report = launcher.adopt(record, RecordingWatcher())

    assert report == ExitReport(reason="was gone when the control plane came back")


def test_the_keys_of_clients_reach_no_worker(start, launcher):
    assert os.environ["HEARTH_API_KEYS"] == CLIENT_KEY
    worker, _ = start()

    for pid in (launcher.forkserver_pid, worker.pid):
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"PATH=" in environment
        assert CLIENT_KEY.encode() not in environment


def test_workers_outlive_their_forkserver_and_their_ends_are_noticed(start, launcher):
    worker, watcher = start(1)
    forkserver = launcher.forkserver_pid
    os.kill(forkserver, signal.SIGKILL)
    wait_until(lambda: not is_running(forkserver), LIMIT_S)
    assert is_running(worker.pid)

    os.kill(worker.pid, signal.SIGKILL)

    report = watcher.wait_failed(LIMIT_S)
    assert report.reason == "ended after its forkserver, which records how workers end"
    assert report.phase == "idle"
    replacement, _ = start(2)
    assert launcher.forkserver_pid not in (None, forkserver)
    assert is_running(replacement.pid)


def test_a_worker_whose_forkserver_dies_before_it_forks_is_forked_by_another(
    tmp_path, trainer_spec
):
    launcher, watcher = ProcessLauncher(tmp_path, die_with_parent=True), RecordingWatcher()
    launcher.warm()
    importing = launcher.forkserver_pid
    worker = launcher.start(trainer_spec(), watcher)
    # Once it has the request it waits for the answer, which takes seconds of imports.
    wait_until(lambda: worker.folder.path.exists(), LIMIT_S)
    time.sleep(0.2)
    os.kill(importing, signal.SIGKILL)

    watcher.wait_ready(120)

    assert launcher.forkserver_pid != importing
    launcher.close()


def test_a_forkserver_that_was_stopped_is_continued_for_a_start_and_for_the_end(
    start, make_launcher
):
    launcher = make_launcher(die_with_parent=True)
    start(1, by=launcher)
    forkserver = launcher.forkserver_pid
    os.kill(forkserver, signal.SIGSTOP)

    worker, _ = start(2, by=launcher)
    assert launcher.forkserver_pid == forkserver
    os.kill(forkserver, signal.SIGSTOP)
    launcher.close()

    assert not is_running(forkserver, worker.pid)


def test_an_idle_worker_lives_as_long_as_its_launcher_and_ends_itself_once_that_is_gone(
    start, make_launcher
):
    launcher = make_launcher(orphan_timeout_s=0.5)
    worker, watcher = start(by=launcher)
    assert not watcher.has_failed.wait(2.0)
    assert is_running(worker.pid)

    launcher.release()

    wait_until(lambda: not is_running(worker.pid), 10)
    log = launcher.log_path(worker.spec.worker_id)
    assert log is not None
    assert "no request for 0 s" in log.read_text(encoding="utf-8")


def test_close_ends_workers_and_forkserver_and_leaves_no_socket(tmp_path, trainer_spec):
    launcher = ProcessLauncher(tmp_path, preload=())
    worker = launcher.start(trainer_spec(), RecordingWatcher())
    wait_until(lambda: worker.pid is not None, 30)
    forkserver, folder = launcher.forkserver_pid, Path(worker.endpoint.socket).parent

    launcher.close()

    assert not is_running(worker.pid)
    assert not is_running(forkserver)
    assert not folder.exists()
    with pytest.raises(ClosedError, match="launcher must be open"):
        launcher.start(trainer_spec(), RecordingWatcher())


_PARENT = """
import sys, time
from pathlib import Path
from hearth.launch.processes import ProcessLauncher
from hearth.launch.spec import spec_from_dict
import json

class Deaf:
    def ready(self, worker): ...
    def failed(self, worker, report): ...

launcher = ProcessLauncher(Path(sys.argv[1]), die_with_parent=True, preload=())
worker = launcher.start(spec_from_dict(json.loads(sys.argv[2])), Deaf())
while worker.pid is None:
    time.sleep(0.01)
sys.stdout.write(f"{worker.pid} {launcher.forkserver_pid}\\n")
sys.stdout.flush()
time.sleep(60)
"""


def test_workers_that_die_with_their_parent_are_gone_when_it_is_killed(tmp_path, trainer_spec):
    command = [
        sys.executable,
        "-c",
        _PARENT,
        str(tmp_path),
        json.dumps(spec_as_dict(trainer_spec())),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert all(is_running(pid) for pid in pids)
        parent.kill()
    wait_until(lambda: not is_running(*pids), LIMIT_S)


def names_of(record: type) -> set[str]:
    return {field.name for field in dataclasses.fields(record)}


@pytest.mark.parametrize(
    ("spec", "entry", "options"),
    [
        (TrainerSpec, trainer_worker.build, TrainerWorkerOptions),
        (DeploymentSpec, deployment_worker.build, deployment_worker.DeploymentOptions),
        (ExportSpec, trainer_worker.export, ExportOptions),
    ],
)
def test_a_worker_takes_what_its_spec_has(spec, entry, options):
    taken = set(inspect.signature(entry).parameters) | (names_of(options) if options else set())

    assert names_of(spec) - taken <= {"worker_id", "threads"}


def test_a_launchers_process_needs_no_torch():
    program = "import sys, hearth.launch.processes; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def make_export(model_folder: Path, folder: Path, identity: str) -> ExportSpec:
    """The export of a snapshot of the bucket that ``published_delta`` fills."""
    return ExportSpec(
        bucket="b",
        identity=identity,
        base_model="tiny",
        source=str(model_folder),
        folder=str(folder / identity),
    )


@pytest.fixture(scope="module")
def published_delta(data_dir, model_folder):
    """The model whose weights the bucket ``b`` has: ``v1`` whole, and the delta ``v2`` on it."""
    loaded = load_model(model_folder)
    store, published = FolderBuckets(data_dir / "buckets").bucket("b"), Published()
    live = base_tensors(loaded.module)
    published.publish(store, "v1", "tiny", live, {}, as_delta=False)
    with torch.no_grad():
        live["model.norm.weight"].mul_(1.5)
    published.publish(store, "v2", "tiny", live, {}, as_delta=True)
    return loaded


def test_a_launcher_exports_a_delta_from_a_process_of_its_own(
    launcher, published_delta, model_folder, data_dir, tmp_path
):
    assert [snapshot.kind for snapshot in launcher.snapshots("b")] == ["base", "delta"]
    launcher.export(make_export(model_folder, tmp_path, "v2"))
    ids = torch.tensor([[5, 9, 11, 2]])
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "v2").eval()
    expected = published_delta.module(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, atol=1e-5, rtol=0)
    with pytest.raises(NotFoundError, match=r"snapshot must be one of \['v1', 'v2'\], got 'v3'"):
        launcher.export(make_export(model_folder, tmp_path, "v3"))
    assert [path.name for path in tmp_path.iterdir()] == ["v2"]
    assert list((data_dir / "workers").glob("export*")) == []


@pytest.mark.parametrize(("what", "times"), [("export", 1), ("forkserver", 1), ("export", 3)])
@pytest.mark.usefixtures("published_delta")
def test_an_export_that_is_killed_is_started_again_twice_at_most(
    launcher, model_folder, data_dir, tmp_path, what, times
):
    killed = set()

    def kill_next() -> bool:
        for path in (data_dir / "workers").glob("export*"):
            facts = WorkerFolder(path).read_process()
            if path.name not in killed and facts is not None:
                killed.add(path.name)
                process = facts.process if what == "export" else facts.forkserver
                os.kill(process.pid, signal.SIGKILL)
                return True
        return False

    with ThreadPoolExecutor(1) as pool:
        exporting = pool.submit(launcher.export, make_export(model_folder, tmp_path, "v2"))
        for _ in range(times):
            wait_until(lambda: kill_next() or exporting.done())
        if times < 3:
            exporting.result(120)
        else:
            with pytest.raises(EngineError, match=r"export of 'v2' must end well, got: .*SIGKILL"):
                exporting.result(120)

    assert len(killed) == times
    assert (tmp_path / "v2" / "config.json").exists() == (times < 3)
    assert list((data_dir / "workers").glob("export*")) == []


def test_a_bucket_is_listed_oldest_first(tmp_path):
    store = FolderSnapshotStore(tmp_path / "buckets" / "b")
    for number, name in enumerate(("z", "a")):
        store.put(Snapshot(name, "base", "tiny", {"w": torch.full((8,), float(number))}))
    (tmp_path / "buckets" / "b" / "half").mkdir()
    launcher = ProcessLauncher(tmp_path)

    first, second = launcher.snapshots("b")

    assert (first.identity, second.identity) == ("z", "a")
    assert (first.kind, first.base_model) == ("base", "tiny")
    assert first.created_s <= second.created_s <= time.time()
    files = (tmp_path / "buckets" / "b" / "z").iterdir()
    assert first.num_bytes == sum(path.stat().st_size for path in files)
    launcher.close()


def test_a_clock_set_back_changes_no_order_of_a_bucket(tmp_path):
    store = FolderSnapshotStore(tmp_path / "buckets" / "b")
    for number, name in enumerate(("z", "a", "m")):
        weights = {"w": torch.full((8,), float(number))}
        store.put(Snapshot(name, "base", "tiny", weights, created_s=2e9 - number))
    launcher = ProcessLauncher(tmp_path)

    assert [record.identity for record in launcher.snapshots("b")] == ["z", "a", "m"]
    launcher.close()


def test_closing_a_launcher_that_started_nothing_starts_nothing(tmp_path):
    launcher = ProcessLauncher(tmp_path)
    launcher.close()
    launcher.close()

    assert launcher.forkserver_pid is None


def test_a_forkserver_that_cannot_import_says_so_and_leaves_no_folder(
    tmp_path, trainer_spec, monkeypatch
):
    sockets = tmp_path / "sockets"
    sockets.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(sockets))
    launcher, watcher = ProcessLauncher(tmp_path, preload=("no.such_module",)), RecordingWatcher()
    launcher.start(trainer_spec(), watcher)

    report = watcher.wait_failed(30)

    assert report.reason is not None
    assert report.reason.startswith("could not start: the forkserver must")
    assert "No module named 'no'" in report.reason
    assert list(sockets.iterdir()) == []
    launcher.close()


def test_what_remains_of_a_process_until_it_is_reaped_does_not_live():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        process = ProcessId.of(child.pid)
        assert process is not None
        handle = ProcessHandle(process)
        assert not handle.wait(0)
        child.kill()
        assert handle.wait(2)
        assert not process.is_alive()
        assert ProcessHandle(process).wait(0)


def test_forked_processes_have_request_ids_of_their_own():
    program = (
        "import os\n"
        "from hearth.telemetry import new_request_id\n"
        "pid = os.fork()\n"
        "os.write(1, (new_request_id() + '\\n').encode())\n"
        "os.waitpid(pid, 0) if pid else None\n"
    )
    out = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )

    assert len(set(out.stdout.split())) == 2


class HeldByKernel:
    """Stands for a process that is held in a driver's call: no signal ends it."""

    identity = ProcessId(1, 1)

    def __init__(self) -> None:
        self.signals: list[str] = []

    def send(self, number: signal.Signals) -> None:
        self.signals.append(number.name)

    def kill_group(self) -> None:
        self.signals.append("SIGKILL")

    def wait(self, timeout_s: float | None) -> bool:
        assert timeout_s is not None, "it would never return"
        return False


def test_a_process_that_the_kernel_holds_is_given_up_and_said(caplog):
    held = HeldByKernel()

    assert not end_process(held, 0.1)

    assert held.signals == ["SIGTERM", "SIGKILL"]
    assert "a driver or a disk holds it" in caplog.text
