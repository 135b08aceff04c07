"""``hearth serve`` as a person runs it: a process of its own."""

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from tests.waiting import wait_until

from hearth.launch.records import ProcessId
from training.quickstart import MODEL

HEARTH = Path(sys.executable).with_name("hearth")
JOBS = "/v1/accounts/me/rlorTrainerJobs"


class Serving:
    """A `hearth serve` on a data folder; ``out`` and ``err`` are what it has printed."""

    def __init__(self, data_dir, *flags, **environment):
        self.data_dir = data_dir
        data_dir.mkdir(exist_ok=True)
        # Platforms of one folder run at once: a file each.
        number = len(list(data_dir.parent.glob("*.out")))
        self._files = [data_dir.with_name(f"serve-{number}.{name}") for name in ("out", "err")]
        kept = {name: value for name, value in os.environ.items() if name != "HEARTH_API_KEYS"}
        with self._files[0].open("wb") as out, self._files[1].open("wb") as err:
            self.process = subprocess.Popen(
                [str(HEARTH), "serve", "--data-dir", str(data_dir), *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=kept | {"COLUMNS": "40"} | environment,
            )

    @property
    def out(self):
        return self._files[0].read_text()

    @property
    def err(self):
        return self._files[1].read_text()

    def url(self):
        """Where it answers, once it says so."""
        wait_until(lambda: self.process.poll() is not None or "export " in self.out, 60)
        found = re.match(r"serving at (http://\S+), data in ", self.out)
        assert found is not None, self.err
        return found.group(1)

    def worker(self, name):
        """A worker's process, and the forkserver's that it comes from."""
        content = json.loads((self.data_dir / "workers" / name / "process.json").read_text())
        return ProcessId.of(content["pid"]), ProcessId.of(content["forkserver_pid"])

    def ends(self, within_s=10.0):
        """Its exit code and how long SIGTERM took."""
        start_s = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(within_s)
        return code, time.monotonic() - start_s


@pytest.fixture
def serving(tmp_path):
    made = []

    def make(*flags, data_dir=tmp_path / "data", **environment):
        made.append(Serving(data_dir, *flags, **environment))
        return made[-1]

    yield make
    for server in made:
        if server.process.poll() is None:
            server.process.terminate()
            server.process.wait(20)
        wait_until(lambda folder=server.data_dir: not processes_of(folder), 30)


def job(url, id, wait="JOB_STATE_RUNNING"):
    body = {"trainingConfig": {"baseModel": str(MODEL)}, "extraValues": {"device": "cpu"}}
    httpx.post(f"{url}{JOBS}?rlorTrainerJobId={id}", json=body).raise_for_status()
    path = f"{url}{JOBS}/{id}?waitForState={wait},JOB_STATE_FAILED&timeoutS=25"
    found = httpx.get(path, timeout=30).json()
    assert found["state"] == wait, found
    return found


def test_a_platform_is_served_is_one_to_its_folder_survives_a_kill_and_ends_whole(serving):
    first = serving("--port", "0", "--trainer-threads", "1")
    url = first.url()
    assert int(url.rpartition(":")[2]) > 0
    assert first.out.splitlines()[1] == (
        f"export HEARTH_URL={url} HEARTH_API_KEY=x   # the key is any text"
    )
    maps = Path(f"/proc/{first.process.pid}/maps").read_text()
    assert "libtorch" not in maps, "what computes nothing loads nothing that does"
    running = job(url, "j")
    trainer, forkserver = first.worker("trainer-j")
    assert running["pid"] == trainer.pid
    assert forkserver.is_alive()

    second = serving("--port", "0")
    assert second.process.wait(20) == 2
    error = second.err.splitlines()
    assert len(error) == 1
    assert error[0].startswith("error: data_dir must belong to one platform, got '")
    assert "which another uses: end that one, or choose another folder" in error[0]
    assert httpx.get(f"{url}{JOBS}/j").json()["state"] == "JOB_STATE_RUNNING"

    assert first.data_dir.stat().st_mode & 0o777 == 0o700

    first.process.kill()
    first.process.wait(10)
    assert trainer.is_alive(), "a worker outlives its platform"
    third = serving("--port", "0", HEARTH_API_KEYS="a-key")
    url, key = third.url(), {"x-api-key": "a-key"}
    assert third.out.splitlines()[1].endswith("# the key is one of its keys")
    assert httpx.get(f"{url}{JOBS}/j").status_code == 401
    path = f"{url}/training/v1/rlorTrainerJobs/me/j/api/v1/healthz"
    wait_until(lambda: httpx.get(path, headers=key).status_code == 200, 10)
    found = httpx.get(f"{url}{JOBS}/j", headers=key).json()
    assert (found["state"], found["pid"]) == ("JOB_STATE_RUNNING", trainer.pid)

    assert "a-key" not in third.out + third.err

    code, took_s = third.ends()
    assert (code, took_s < 10) == (143, True)
    assert not trainer.is_alive()
    wait_until(lambda: not forkserver.is_alive(), 5)


def processes_of(data_dir):
    """Living processes that were told of this folder: the platform and its forkserver."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(data_dir).encode() in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def list_listeners(pid):
    """The TCP ports at which a process listens."""
    inodes = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            inodes.add(str(link.readlink()).removeprefix("socket:[").removesuffix("]"))
    lines = [
        line.split()
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    return {
        int(line[1].rpartition(":")[2], 16)
        for line in lines
        if line[3] == "0A" and line[9] in inodes
    }


def test_keys_and_ports_of_a_platform_reach_nobody_else(serving, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("secret-of-alice Alice\n")
    platform = serving("--port=0", f"--api-keys-file={keys}", HEARTH_API_KEYS="secret-of-all")
    url, headers = platform.url(), {"x-api-key": "secret-of-alice"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as http:
        body = {"trainingConfig": {"baseModel": str(MODEL)}}
        http.post(f"{JOBS}?rlorTrainerJobId=j", json=body).raise_for_status()
        state = http.get(f"{JOBS}/j?waitForState=JOB_STATE_RUNNING,JOB_STATE_FAILED&timeoutS=50")
        assert (state.json()["state"], state.json()["createdBy"]) == ("JOB_STATE_RUNNING", "Alice")

    trainer, forkserver = platform.worker("trainer-j")
    assert list_listeners(platform.process.pid) == {int(url.rpartition(":")[2])}
    for process in (trainer, forkserver):
        assert list_listeners(process.pid) == set()
        assert b"secret" not in Path(f"/proc/{process.pid}/environ").read_bytes()
    for process in (trainer.pid, forkserver.pid, platform.process.pid):
        assert b"secret" not in Path(f"/proc/{process}/cmdline").read_bytes()

    record = json.loads((platform.data_dir / "workers/trainer-j/process.json").read_text())
    socket_folder = Path(record["socket"]).parent
    assert stat.S_IMODE(socket_folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(platform.data_dir.stat().st_mode) == 0o700
    written = [path for path in platform.data_dir.rglob("*") if path.is_file()]
    assert any(path.name == "audit.jsonl" for path in written)
    assert not [path for path in written if b"secret-of" in path.read_bytes()]
    assert "secret" not in platform.out + platform.err


def test_a_signal_while_it_starts_leaves_no_forkserver(serving):
    platform = serving("--port", "0")
    path = platform.data_dir / "forkserver.log"
    wait_until(lambda: path.exists() or platform.process.poll() is not None, 60)
    assert platform.process.poll() is None, platform.err

    code, took_s = platform.ends()

    assert (code, took_s < 10) == (143, True)
    wait_until(lambda: not processes_of(platform.data_dir), 30)
    assert "Traceback" not in platform.err


def test_what_cannot_be_used_is_one_line_and_nothing_is_started(serving, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (tmp_path / "file").write_text("")
        (tmp_path / "data-3" / "checkpoints" / "j").mkdir(parents=True)
        (tmp_path / "data-4").mkdir()
        (tmp_path / "data-4" / "control.db").write_bytes(b"no database" * 999)
        refused = {
            f"port must be free on 127.0.0.1, got {port}": ("--port", port),
            "catalog must be a TOML file, got 'none.toml'": ("--catalog", "none.toml"),
            "database_url must name a database that opens": ("--database-url", "nothing"),
            "database must have the records of what is in": ("--port", "0"),
            "database_url must name a database that opens, got 'sqlite:": ("--port=0",),
        }
        begun = {
            message: serving(*flags, data_dir=tmp_path / f"data-{number}")
            for number, (message, flags) in enumerate(refused.items())
        }
        for message, platform in begun.items():
            assert platform.process.wait(30) == 2
            error = platform.err.splitlines()
            assert len(error) == 1, platform.err
            assert error[0].startswith(f"error: {message}")
            assert platform.out == ""
            assert not (platform.data_dir / "forkserver.log").exists()
