"""A platform of its own for tests: `hearth serve` in a process, its workers, and how to end them.

And recipes in processes of their own, forked from one that has imported everything.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import orjson
from tests.integration.runs import count_steps
from tests.waiting import wait_until

from training.quickstart import MODEL, TRAIN_ROWS

HEARTH = Path(sys.executable).with_name("hearth")
ACCOUNT = "/v1/accounts/me"
_NAMES = {
    "trainer": "trainer-rl-policy-",
    "reference": "trainer-rl-reference-",
    "deployment": "deployment-",
    "export": "export-",
}


KEY = {"x-api-key": "x"}
_PLATFORM = ("HEARTH_URL", "HEARTH_API_KEY", "FIREWORKS_BASE_URL", "FIREWORKS_API_KEY")


class Served:
    """`hearth serve` on a data folder, to be ended and started again."""

    def __init__(self, data_dir: Path, *, host: str = "127.0.0.1", **options: Any) -> None:
        self.data_dir = data_dir
        self.port = _free_port()
        self.url = f"http://{host}:{self.port}"
        options["host"] = host
        self._flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Begin to serve; returns once requests are answered."""
        self.data_dir.mkdir(exist_ok=True)
        command = [str(HEARTH), "serve", "--port", str(self.port), "--data-dir"]
        with (self.data_dir / "serve.log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, str(self.data_dir), *self._flags],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        wait_until(self._answers, 60, "the platform to answer")

    def kill(self) -> None:
        """SIGKILL to the platform's own process, and to no other."""
        os.kill(self.pid, signal.SIGKILL)
        assert self._process is not None
        self._process.wait(10)

    def stop(self) -> None:
        """SIGTERM, as a person ends it; then nothing of it is left."""
        assert self._process is not None
        if self._process.poll() is None:
            self._process.terminate()
            assert self._process.wait(30) in (0, 143), self.log[-3000:]

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def log(self) -> str:
        return (self.data_dir / "serve.log").read_text(encoding="utf-8", errors="replace")

    def come_back(self) -> None:
        """Start again on the same port and folder after a SIGKILL."""
        assert self._process is not None
        self._process.wait(10)
        self.start()

    def processes(self) -> list[int]:
        """Every process that works on the data folder: the forkserver and its workers."""
        found: list[int] = []
        for folder in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                is_its = str(self.data_dir).encode() in (folder / "cmdline").read_bytes()
                if folder.name.isdigit() and is_its and int(folder.name) != self.pid:
                    found.append(int(folder.name))
        return found

    def workers(self) -> list[int]:
        """The processes of trainers and deployments that run now."""
        paths = (self.data_dir / "workers").glob("*/process.json")
        return [pid for path in paths if (pid := _read(path).get("pid")) in self.processes()]

    def resources(self, kind: str, of: str = "") -> list[dict[str, Any]]:
        """What `hearth ps -a` reads: ``rlorTrainerJobs`` or ``deployments`` whose id has ``of``."""
        answer = httpx.get(f"{self.url}{ACCOUNT}/{kind}", headers=KEY, timeout=30)
        return [resource for resource in answer.json()[kind] if of in resource["name"]]

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self.log[-3000:]
        try:
            return httpx.get(f"{self.url}/healthz", headers=KEY, timeout=5).is_success
        except httpx.TransportError:
            return False


class Victims:
    """The workers of the run that begins next on a platform, and what they do."""

    def __init__(self, served: Served) -> None:
        self._workers = served.data_dir / "workers"
        self._before = set(self._workers.glob("*"))

    def folder(self, kind: str) -> Path | None:
        """The folder of the run's trainer or deployment, once there is one."""
        found = set(self._workers.glob(f"{_NAMES[kind]}*")) - self._before
        return min(found, default=None)

    def phase(self, kind: str) -> str:
        """What a worker does now."""
        folder = self.folder(kind)
        if folder is None:
            return ""
        try:
            return (folder / "phase").read_bytes().decode().strip()
        except OSError:
            return ""

    def pid(self, kind: str) -> int | None:
        """A worker's process."""
        folder = self.folder(kind)
        return None if folder is None else _read(folder / "process.json").get("pid")


class Killer(threading.Thread):
    """Sends SIGKILL to a victim at a moment in which a worker is in a phase, once ``is_time``.

    The worker is stopped first and looked at again: who is killed, is killed in that very phase.
    ``times`` says how often; ``hits`` are the pids. ``then`` is called after each. One that
    ``hangs`` is stopped in place of being killed.
    """

    def __init__(
        self,
        victims: Victims,
        watched: str,
        phase: str,
        victim: Callable[[], int | None] | None = None,
        *,
        is_time: Callable[[], bool] = lambda: True,
        times: int = 1,
        then: Callable[[], None] = lambda: None,
        hangs: bool = False,
    ) -> None:
        super().__init__(daemon=True)
        self._victims = victims
        self._watched = watched
        self._phase = phase
        self._victim = victim or (lambda: victims.pid(watched))
        self._is_time = is_time
        self._times = times
        self._then = then
        self._hangs = hangs
        self._is_over = threading.Event()
        self.hits: list[int] = []

    def __enter__(self) -> Killer:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._is_over.set()
        self.join(60)

    def run(self) -> None:
        while not self._is_over.is_set() and len(self.hits) < self._times:
            if self._victims.phase(self._watched) == self._phase and self._is_time():
                self._strike()
            time.sleep(0.0002)

    def _strike(self) -> None:
        watched, victim = self._victims.pid(self._watched), self._victim()
        if watched is None or victim is None or victim in self.hits:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(watched, signal.SIGSTOP)
            if self._victims.phase(self._watched) == self._phase:
                os.kill(victim, signal.SIGSTOP if self._hangs else signal.SIGKILL)
                self.hits.append(victim)
            if not (self._hangs and self.hits == [watched]):
                os.kill(watched, signal.SIGCONT)
        if victim in self.hits:
            self._then()


def kill_in(
    victims: Victims,
    phase: tuple[str, str],
    folder: Path,
    victim: Callable[[], int | None] | None = None,
    steps: int = 2,
    **options: Any,
) -> Killer:
    """A killer that waits for so many steps of the run in ``folder``."""
    options = {"is_time": lambda: count_steps(folder) >= steps} | options
    return Killer(victims, *phase, victim, **options)


class Recipes:
    """Starts recipes as processes, forked from one that has imported them: in milliseconds.

    Any thread may call it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._folder = tempfile.TemporaryDirectory(prefix="hearth-recipes-")
        self._count = itertools.count()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.integration.recipes"],
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environment({}),
        )

    def start(self, url: str | None, folder: Path, *flags: str) -> Recipe:
        """`python -m training.recipes.rl_loop` on a platform, or with an embedded one."""
        return self._start("rl_loop", url, folder, command_line(folder, *flags))

    def start_async(self, url: str | None, folder: Path, *flags: str) -> Recipe:
        """``async_rl_loop`` with plain rollouts, likewise."""
        arguments = [*_shared_flags(folder), "--no-shuffle", *flags]
        return self._start("async_rl_loop", url, folder, arguments)

    def start_embedded(self, recipe: str, folder: Path, *flags: str) -> Recipe:
        """Another recipe on a platform of its own, on the shipped model."""
        given = {"log-path": folder, "base-model": MODEL}
        own = [f"--{name}={value}" for name, value in given.items()]
        return self._start(recipe, None, folder, [*own, *flags])

    def begin(
        self, program: str, arguments: Sequence[str], folder: Path, variables: Mapping[str, str]
    ) -> Recipe:
        """The command of a recipe, or `hearth`, as a person gives it in a folder."""
        name = f"{self._folder.name}/{next(self._count)}"
        logs = Path(f"{name}.out"), Path(f"{name}.err")
        return self._fork(program, arguments, variables, logs, folder)

    def run(
        self, program: str, arguments: Sequence[str], folder: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """The same, once it has ended."""
        recipe = self.begin(program, arguments, folder, variables)
        code = recipe.wait(900)
        return subprocess.CompletedProcess(
            [program, *arguments], code, recipe.output, recipe.errors
        )

    def status(self, pid: int) -> int | None:
        """How a recipe ended: its exit code, or minus the signal; None while it runs."""
        return self._ask({"status": pid})

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()
        self._folder.cleanup()

    def _start(
        self, recipe: str, url: str | None, folder: Path, arguments: Sequence[str]
    ) -> Recipe:
        folder.mkdir(exist_ok=True)
        variables = {"FIREWORKS_BASE_URL": url, "FIREWORKS_API_KEY": "x"} if url else {}
        log = folder.with_name(f"{folder.name}.log")
        return self._fork(recipe, arguments, variables, (log, log))

    def _fork(
        self,
        program: str,
        arguments: Sequence[str],
        variables: Mapping[str, str],
        logs: tuple[Path, Path],
        folder: Path | None = None,
    ) -> Recipe:
        request = {
            "fork": program,
            "arguments": arguments,
            "env": _environment(variables),
            "out": str(logs[0]),
            "err": str(logs[1]),
            "folder": None if folder is None else str(folder),
        }
        return Recipe(self, int(self._ask(request)), *logs)

    def _ask(self, question: dict[str, Any]) -> Any:
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(orjson.dumps(question) + b"\n")
            stdin.flush()
            return orjson.loads(stdout.readline())


@dataclass
class Recipe:
    """A recipe that runs."""

    recipes: Recipes
    pid: int
    log: Path
    error_log: Path
    _code: int | None = None

    def code(self) -> int | None:
        """How it ended; None while it runs."""
        if self._code is None:
            self._code = self.recipes.status(self.pid)
        return self._code

    def wait(self, timeout_s: float = 60) -> int:
        """Its exit code, or minus the signal that ended it."""
        wait_until(lambda: self.code() is not None, timeout_s, f"the end of {self.log.stem}")
        assert self._code is not None
        return self._code

    def send(self, number: signal.Signals) -> None:
        if self.code() is None:
            os.kill(self.pid, number)

    @property
    def output(self) -> str:
        """What it has printed; nothing where it was killed before it began."""
        return _read_log(self.log)

    @property
    def errors(self) -> str:
        """What it has printed to stderr, where that has a log of its own."""
        return _read_log(self.error_log)


@functools.cache
def share_recipes() -> Recipes:
    """The one of this process, until it ends."""
    recipes = Recipes()
    atexit.register(recipes.close)
    return recipes


def command_line(folder: Path, *flags: str) -> list[str]:
    """Flags of a run of ``rl_loop`` of a few steps on the shipped model."""
    own = ["--max-concurrent=64", "--truncated-completions=score"]
    return [*_shared_flags(folder), *own, *flags]


def _shared_flags(folder: Path) -> list[str]:
    fields = {
        "log-path": folder,
        "base-model": MODEL,
        "dataset": TRAIN_ROWS,
        "max-rows": 16,
        "completions-per-prompt": 4,
        "prompt-groups-per-step": 2,
        "max-completion-tokens": 16,
        "max-seq-len": 128,
        "learning-rate": 1e-3,
        "kl-beta": 0,
        "deployment.tokenizer-model": MODEL,
        "output-model-id": folder.name,
    }
    return [f"--{name}={value}" for name, value in fields.items()]


def name_anew(folder: Path) -> Path:
    """The folder of a run whose model no other has made: a fixture or a test may run again."""
    return folder.with_name(f"{folder.name}-{time.monotonic_ns() % 10**6}")


@contextlib.contextmanager
def pointed_at(served: Served) -> Iterator[None]:
    """Inside the ``with`` recipes of this process use the platform."""
    variables = {"FIREWORKS_BASE_URL": served.url, "FIREWORKS_API_KEY": "x"}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _environment(variables: Mapping[str, str]) -> dict[str, str]:
    """Of a recipe: that of the tests, with no platform but the one that is among ``variables``."""
    kept = {name: value for name, value in os.environ.items() if name not in _PLATFORM}
    return kept | {"OPENBLAS_NUM_THREADS": "1"} | dict(variables)


def _read_log(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _read(path: Path) -> dict[str, Any]:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
