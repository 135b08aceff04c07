"""How long a worker takes to start, and what it costs: three ways to make its process.

Hearth's forkserver, the standard library's (``multiprocessing`` with a preload) and a fresh Python.
Each round is a process of its own, in turn; its first start is cold, its second one warm. Seconds
are from the request until the worker's health path has been answered with 200.

    python benchmarks/worker_start.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hearth.launch.child import Task, run_task
from hearth.launch.forkserver_client import ENVIRONMENT, ForkserverClient
from hearth.launch.processes import ENTRIES, WORKER_MODULES
from hearth.launch.records import WorkerFolder
from hearth.launch.spec import TrainerSpec

CONTENDERS = ("Hearth's forkserver", "multiprocessing's forkserver", "a fresh Python")


def start_round(contender: str, root: Path) -> list[list[float]]:
    """Wall seconds, CPU seconds and private MiB of a cold and a warm start."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(WORKER_MODULES))
    client = ForkserverClient(root, preload=WORKER_MODULES, die_with_parent=True)

    def start(task: Task, folder: WorkerFolder, socket: Path) -> None:
        if contender == CONTENDERS[0]:
            client.fork(task)
        elif contender == CONTENDERS[1]:
            # Its exit status would be lost with this process, and its peak memory always is.
            context.Process(target=run_task, args=(task, folder, socket, (), os.getpid())).start()
        else:
            command = [sys.executable, __file__, "--task", json.dumps(task.as_dict())]
            subprocess.Popen([*command, "--folder", str(folder.path), "--socket", str(socket)])

    results = [measure_start(start, root, number) for number in range(2)]
    client.end()
    return results


def measure_start(start: Callable[..., None], root: Path, number: int) -> list[float]:
    """Start a trainer, and end it when it has answered."""
    spec = TrainerSpec(
        worker_id=f"trainer-{number}",
        base_model="tiny",
        source=str(root.parent / "model"),
        bucket="b",
        device="cpu",
        checkpoint_dir=str(root / "checkpoints"),
    )
    entry, health_path = ENTRIES[TrainerSpec]
    arguments: dict[str, Any] = asdict(spec) | {"buckets": str(root / "buckets")}
    del arguments["worker_id"], arguments["threads"]
    task = Task(
        worker_id=spec.worker_id,
        entry=entry,
        health_path=health_path,
        arguments=arguments,
        threads=1,
        working_dir=str(root),
        dies_with_parent=False,
    )
    folder = WorkerFolder(root / "workers" / spec.worker_id)
    folder.prepare()
    start_s = time.perf_counter()
    start(task, folder, root / f"socket-{number}")
    while not folder.ready.exists():
        time.sleep(0.005)
    took_s = time.perf_counter() - start_s
    pid = int(folder.log.read_text().partition("process ")[2].partition(",")[0])
    ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    private_kb = sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))
    os.kill(pid, 9)
    return [took_s, sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK"), private_kb / 1024]


def main() -> None:
    """Print the table, or be one of its processes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    for name in ("--contender", "--task", "--folder", "--socket"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    given = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    if given.task is not None:
        task, folder = Task(**json.loads(given.task)), WorkerFolder(Path(given.folder))
        run_task(task, folder, Path(given.socket), (), os.getppid())
    if given.contender is not None:
        sys.stdout.write(json.dumps(start_round(given.contender, Path(given.folder))))
        return
    from workload import make_model  # with torch, which a fresh worker would pay for twice

    results: dict[str, list[Any]] = {contender: [] for contender in CONTENDERS}
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch, "model"), "1m")
        for number in range(given.rounds):
            for contender in CONTENDERS:
                root = Path(tempfile.mkdtemp(dir=scratch))
                command = [
                    sys.executable,
                    __file__,
                    "--contender",
                    contender,
                    "--folder",
                    str(root),
                ]
                results[contender].append(json.loads(subprocess.check_output(command)))
                sys.stderr.write(f"round {number}: {contender}: {results[contender][-1]}\n")
    rows = ["| process | start | seconds | least | most | CPU seconds | private MiB |"]
    rows += ["|---|---|---:|---:|---:|---:|---:|"]
    for contender, rounds in results.items():
        for start, name in enumerate(("cold", "warm")):
            seconds, cpu_s, private_mb = zip(*(starts[start] for starts in rounds), strict=True)
            rows.append(
                f"| {contender} | {name} | {statistics.median(seconds):.2f} | {min(seconds):.2f} "
                f"| {max(seconds):.2f} | {statistics.median(cpu_s):.2f} "
                f"| {statistics.median(private_mb):.0f} |"
            )
    sys.stdout.write("\n".join([*rows, f"\nload average {os.getloadavg()[0]:.1f}", ""]))


if __name__ == "__main__":
    main()
