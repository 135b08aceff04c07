"""What ``hearth doctor`` looks at: a function for each line of its answer."""

from __future__ import annotations

import fcntl
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import orjson

import hearth
from hearth.cli.strangers import DISTRIBUTION, find_shadow, find_strangers
from hearth.settings import VLLM_PYTHON_VARIABLE

GIB = 2**30
LEAST_MEMORY_GIB = 2.0
LEAST_DISK_GIB = 5.0
PARITY_NATS = 1e-3
"""Gap between sampler and trainer at or above which a float32 model is computed wrongly."""
TEST_STEPS = 2
_TEST_TIMEOUT_S = 300.0
_ASK_TIMEOUT_S = 20.0


@dataclass(frozen=True)
class Place:
    """Where a platform would be."""

    data_dir: Path
    port: int
    database_url: str


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and what to do unless it is ok."""

    topic: str
    level: Literal["ok", "warning", "error"]
    text: str
    advice: str = ""


def check_python(_: Place) -> Finding:
    """The interpreter; it is new enough, or nothing would run."""
    return Finding("python", "ok", f"{platform.python_version()} at {sys.executable}")


def check_package(_: Place) -> Finding:
    """Our own package, and others that have packages of its names."""
    place = f"{hearth.__version__} at {hearth.__path__[0]}"
    shadow = find_shadow()
    if shadow:
        return Finding("hearth", "error", place, shadow)
    strangers = find_strangers(sys.path)
    if strangers:
        return Finding("hearth", "warning", place, "; ".join(strangers))
    return Finding("hearth", "ok", place)


def check_torch(_: Place) -> Finding:
    """torch can be imported, and is of a version that we know."""
    try:
        import torch
    except (ImportError, OSError) as error:
        advice = f"install it again: pip install --force-reinstall torch ({error})"
        return Finding("torch", "error", "cannot be imported", advice)
    versions = ", ".join(
        f"{name} {metadata.version(name)}" for name in ("transformers", "peft", "numpy")
    )
    return Finding("torch", "ok", f"{torch.__version__}, {versions}")


def check_threads(_: Place) -> Finding:
    """Threads that torch computes with, and whether others compute on the same cores."""
    import torch

    cores = len(os.sched_getaffinity(0))
    load = os.getloadavg()[0]
    text = f"{torch.get_num_threads()} for {cores} cores, load {load:.1f}"
    if torch.get_num_threads() > cores:
        return Finding("threads", "warning", text, f"set OMP_NUM_THREADS={cores}")
    if load > 1.5 * cores:
        return Finding("threads", "warning", text, "others compute here: steps will take longer")
    return Finding("threads", "ok", text)


def check_kernels(_: Place) -> Finding:
    """The loops in C are compiled; without them everything works, more slowly."""
    from hearth.kernels.build import COMPILERS, SWITCH, load_library

    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if os.environ.get(SWITCH) == "0":
        return Finding("kernels", "warning", f"switched off by {SWITCH}=0", f"unset {SWITCH}")
    if compiler is None:
        advice = "install gcc or clang: training on the CPU is then several times as fast"
        return Finding("kernels", "warning", "no C compiler", advice)
    if load_library() is None:
        advice = f"try another compiler, or switch them off with {SWITCH}=0"
        return Finding("kernels", "warning", f"{compiler} does not compile them", advice)
    return Finding("kernels", "ok", f"compiled by {compiler}")


def check_gpu(_: Place) -> Finding:
    """GPUs, by torch and by the driver."""
    import torch

    driver = _ask("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    if torch.cuda.is_available():
        gpus = [torch.cuda.get_device_properties(n) for n in range(torch.cuda.device_count())]
        names = ", ".join(f"{gpu.name} ({gpu.total_memory / GIB:.0f} GiB)" for gpu in gpus)
        version = driver.splitlines()[0].rpartition(",")[2].strip() if driver else "unknown"
        return Finding("gpu", "ok", f"{names}; driver {version}, CUDA {torch.version.cuda}")
    if driver:
        advice = (
            "this torch is a build for CPUs: install one for CUDA"
            if torch.version.cuda is None
            else f"torch wants CUDA {torch.version.cuda}: update the driver, or unset "
            "CUDA_VISIBLE_DEVICES"
        )
        return Finding("gpu", "warning", f"{driver.splitlines()[0]}, unused", advice)
    return Finding("gpu", "ok", "none: models run on the CPU")


def check_memory(_: Place) -> Finding:
    """Memory that is free now."""
    import psutil

    memory = psutil.virtual_memory()
    free, whole = memory.available / GIB, memory.total / GIB
    text = f"{free:.1f} of {whole:.1f} GiB free"
    if free < LEAST_MEMORY_GIB:
        return Finding("memory", "warning", text, "end what else runs, or take a smaller model")
    return Finding("memory", "ok", text)


def check_disk(place: Place) -> Finding:
    """Room for a platform's data and for runs of this folder."""
    free = {
        str(folder): shutil.disk_usage(_find_existing(folder)).free / GIB
        for folder in (place.data_dir, Path.cwd())
    }
    text = ", ".join(f"{size:.0f} GiB free for {name}" for name, size in free.items())
    if min(free.values()) < LEAST_DISK_GIB:
        advice = "free some: each checkpoint takes 16 bytes a parameter"
        return Finding("disk", "warning", text, advice)
    return Finding("disk", "ok", text)


def check_port(place: Place) -> Finding:
    """Whether ``hearth serve`` could listen, or a platform does already."""
    import httpx

    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", place.port))
        except OSError as error:
            refusal = error
        else:
            return Finding("port", "ok", f"{place.port} is free")
    try:
        answer = httpx.get(f"http://127.0.0.1:{place.port}/healthz", timeout=2)
        if answer.is_success:
            return Finding("port", "ok", f"{place.port}: a platform answers there")
    except httpx.HTTPError:
        pass
    advice = "another program listens there: hearth serve --port 0 takes a free one"
    return Finding("port", "warning", f"{place.port} is taken ({refusal.strerror})", advice)


def check_locks(place: Place) -> Finding:
    """Whether folders can be locked, and which are in use."""
    try:
        with tempfile.NamedTemporaryFile(dir=_find_existing(place.data_dir)) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        advice = "give hearth serve a --data-dir on a disk of this machine"
        return Finding("locks", "error", f"{place.data_dir} takes none: {error}", advice)
    held = [place.data_dir, *sorted(Path("runs").glob("*"))]
    used = ", ".join(str(folder) for folder in held if _is_held(folder / ".lock"))
    return Finding("locks", "ok", f"in use: {used}" if used else "no folder is in use")


def check_vllm(_: Place) -> Finding:
    """The interpreter that has vLLM, for deployments with ``engine="vllm"``."""
    python = os.environ.get(VLLM_PYTHON_VARIABLE)
    code = "from importlib.metadata import version; print(version('vllm'))"
    found = _ask(python or sys.executable, "-c", code)
    if found:
        return Finding("vllm", "ok", f"{found} of {python or sys.executable}")
    if python:
        advice = f"name one that has it: {VLLM_PYTHON_VARIABLE}=~/vllm/bin/python"
        return Finding("vllm", "error", f"{python} has none", advice)
    return Finding("vllm", "ok", "not set up; engine='embedded' needs none (docs/serving.md)")


def check_ray(_: Place) -> Finding:
    """Ray, for ``placement="ray"``."""
    address = os.environ.get("RAY_ADDRESS")
    try:
        version = metadata.version("ray")
    except metadata.PackageNotFoundError:
        advice = f"pip install '{DISTRIBUTION}[ray]'"
        if address:
            return Finding("ray", "error", f"RAY_ADDRESS={address}, and no Ray", advice)
        return Finding("ray", "ok", f"not installed; placement='ray' needs it ({advice})")
    return Finding("ray", "ok", version + (f", cluster {address}" if address else ""))


def check_database(place: Place) -> Finding:
    """The platform's database answers."""
    import sqlalchemy as sql
    from sqlalchemy.exc import SQLAlchemyError

    file = place.data_dir / "control.db"
    if not place.database_url and not file.exists():
        return Finding("database", "ok", f"none yet: hearth serve makes {file}")
    try:
        url = sql.make_url(place.database_url or f"sqlite:///{file}")
        with sql.create_engine(url).connect() as connection:
            connection.execute(sql.text("SELECT 1"))
            tables = len(sql.inspect(connection).get_table_names())
    except (SQLAlchemyError, ModuleNotFoundError) as error:
        reason = str(error).splitlines()[0]
        advice = f"is it running, is the URL right, is {DISTRIBUTION}[postgresql] installed?"
        return Finding("database", "error", reason, advice)
    return Finding("database", "ok", f"{url.render_as_string()} answers, {tables} tables")


def check_training(_: Place) -> Finding:
    """Two steps of the shipped model, in another process; sampler and trainer must agree."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hearth-doctor-") as folder:
        log_path = Path(folder, "run")
        command = [sys.executable, "-m", "hearth", "quickstart", "--steps", str(TEST_STEPS)]
        try:
            done = subprocess.run(
                [*command, "--log-path", str(log_path)],
                capture_output=True,
                text=True,
                timeout=_TEST_TIMEOUT_S,
                check=False,
            )
        except subprocess.TimeoutExpired:
            text = f"{TEST_STEPS} steps took longer than {_TEST_TIMEOUT_S:.0f} s"
            return Finding("self-test", "error", text, "is the machine busy, or does it swap?")
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip() or "nothing").splitlines()[-1]
            return Finding("self-test", "error", f"hearth quickstart failed: {last}")
        lines = (log_path / "metrics.jsonl").read_bytes().splitlines()
    gaps = [record["parity/p95"] for record in map(orjson.loads, lines) if "parity/p95" in record]
    text = (
        f"{TEST_STEPS} steps in {time.monotonic() - began:.0f} s; sampler and trainer agree "
        f"within {max(gaps, default=float('nan')):.1e} nats"
    )
    if gaps and max(gaps) < PARITY_NATS:
        return Finding("self-test", "ok", text)
    advice = "they compute different policies: set HEARTH_KERNELS=0 and try again"
    return Finding("self-test", "error", text, advice)


CHECKS: Sequence[Callable[[Place], Finding]] = (
    check_python,
    check_package,
    check_torch,
    check_threads,
    check_kernels,
    check_gpu,
    check_memory,
    check_disk,
    check_port,
    check_locks,
    check_vllm,
    check_ray,
    check_database,
)


def _ask(*command: str) -> str:
    """What a program prints; empty if it fails or is not there."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _find_existing(folder: Path) -> Path:
    """The folder, or the nearest above it that is there."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())


def _is_held(lock: Path) -> bool:
    try:
        with lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
