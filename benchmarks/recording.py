"""What recording every sample costs, or looking at the run: share of a step's time, bytes on disk.

Runs ``grpo_step.py`` in alternating pairs, with samples recorded and without, and compares the
medians of the steps' wall time over all pairs. Bytes are those of merged files, against 4 bytes for
each token and each logprob in them.

    python benchmarks/recording.py --pairs 3 [--model 1m] [--steps 80]

With ``--viewer`` all runs record, and of each pair one is looked at from its start to its end, at
its curves, by ``hearth view`` on this machine: ``page`` in a Chromium beside it, ``api`` by a
program that asks for what the page asks for whenever the run grows, as a browser elsewhere would.

    python benchmarks/recording.py --viewer page --pairs 6 --steps 200
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import psutil
import pyarrow.parquet as pq

from hearth.records.layout import list_files

SERVE = "import sys; from hearth.viewer.verb import view; sys.exit(view(sys.argv[1:]))"
CURVES = (
    "rollout/raw_reward,eval/accuracy,train/ref_kl,rollout/entropy,train/grad_norm,"
    "train/ppo_clip_frac,parity/p95,version/sample_staleness_mean,rollout/response_len/mean,"
    "rollout/truncated_ratio,signal/useful_row_ratio,perf/rollout_samples_per_s"
)
"""What the page of a run draws first."""
PAUSE_S = 10.0
"""The page asks again at most this often (``viewer/src/live.ts``)."""
LOGPROBS = ("behavior_logprobs", "policy_logprobs", "old_logprobs", "ref_logprobs")


def measure_steps(asked: argparse.Namespace, record: str, folder: Path) -> list[float]:
    """Seconds of each step after the warm-up."""
    script = Path(__file__).parent / "grpo_step.py"
    command = [sys.executable, str(script), "--model", asked.model, "--steps", str(asked.steps)]
    subprocess.run(
        [*command, "--record", record, "--keep", str(folder), "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"PYTHONPATH": str(script.parent)},
    )
    records = map(orjson.loads, (folder / "run" / "metrics.jsonl").read_bytes().splitlines())
    return [record["perf/step_wall_time"] for record in records if record["type"] == "train"][3:]


@contextlib.contextmanager
def open_viewer(kind: str, folder: Path) -> Iterator[dict[str, float]]:
    """A viewer of the runs below ``folder`` with the curves of the one called run in sight.

    Gives numbers that are there afterwards: seconds that its server and the browser computed, and
    how often the page or the program asked for the curves.
    """
    found: dict[str, float] = {}
    command = [sys.executable, "-c", SERVE, str(folder), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None, "it is a pipe"
        url = server.stdout.readline().split()[-1]
        process = psutil.Process(server.pid)
        before_s = sum(process.cpu_times()[:2])
        try:
            with _open_page(url) if kind == "page" else _follow(url) as read:
                yield found
                found |= read()
            found["server_s"] = sum(process.cpu_times()[:2]) - before_s
        finally:
            server.terminate()


@contextlib.contextmanager
def _open_page(url: str) -> Iterator[Callable[[], dict[str, float]]]:
    """The page, opened before there is a run; it shows it by itself."""
    from viewer_page import Chromium  # needs selenium

    page = Chromium(url)
    try:
        page.driver.get(page.root + "/run/run/curves")
        page.driver.execute_script("performance.setResourceTimingBufferSize(1e6)")
        asked = (
            "performance.getEntriesByType('resource').filter(({name}) => name.includes('/series'))"
        )
        before_s = _browser_s(page)
        yield lambda: {
            "refreshes": float(page.driver.execute_script(f"return {asked}.length")),
            "browser_s": _browser_s(page) - before_s,
        }
    finally:
        page.driver.quit()


def _browser_s(page: Any) -> float:
    """Seconds that the browser's processes have computed."""
    tree = psutil.Process(page.driver.service.process.pid).children(recursive=True)
    return sum(sum(process.cpu_times()[:2]) for process in tree)


@contextlib.contextmanager
def _follow(url: str) -> Iterator[Callable[[], dict[str, float]]]:
    """Ask for what the page of curves asks for, each time that the run grew."""
    address = httpx.URL(url)
    headers = {"authorization": f"Bearer {address.params['key']}"}
    client = httpx.Client(base_url=address.join("/"), headers=headers, timeout=60)
    grew = threading.Event()
    count = 0

    def listen() -> None:
        with contextlib.suppress(httpx.HTTPError), client.stream("GET", "/api/live") as events:
            for line in events.iter_lines():
                if line.startswith("data:"):
                    grew.set()

    def ask() -> None:
        nonlocal count
        with contextlib.suppress(httpx.HTTPError):
            while grew.wait():
                grew.clear()
                for path in ("", f"/series?names={CURVES}", "/events"):
                    client.get(f"/api/runs/run{path}")
                count += 1
                time.sleep(PAUSE_S)

    for work in (listen, ask):
        threading.Thread(target=work, daemon=True).start()
    yield lambda: {"refreshes": float(count), "browser_s": 0.0}


def measure_bytes(log_path: Path) -> tuple[int, int, int]:
    """Bytes of merged files, those of the tokens and logprobs in them, and the samples."""
    files = [file for file in list_files(log_path, "train") if file.is_merged]
    size = sum(file.path.stat().st_size for file in files)
    plain = samples = 0
    for file in files:
        table = pq.read_table(file.path, columns=["tokens", *LOGPROBS])
        samples += len(table)
        plain += 4 * len(table["tokens"].combine_chunks().flatten())
        for name in LOGPROBS:
            values = table[name].combine_chunks().flatten().to_numpy(zero_copy_only=False)
            plain += 4 * int(np.isfinite(values).sum())
    return size, plain, samples


def compare_recording(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Steps with samples recorded and without, and the bytes of what is recorded."""
    seconds: dict[str, list[list[float]]] = {"all": [], "none": []}
    for pair in range(asked.pairs):
        for record in ("all", "none") if pair % 2 else ("none", "all"):
            seconds[record].append(measure_steps(asked, record, folder / f"{record}-{pair}"))
    size, plain, samples = measure_bytes(folder / "all-0" / "run")
    result: dict[str, object] = {"bytes": size, "plain_bytes": plain, "samples": samples}
    result["bytes_ratio"] = round(size / plain, 3) if plain else None
    return result | compare_steps(seconds, "all", "none")


def compare_viewing(asked: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Steps with an open viewer and without, and what the viewer did in a step."""
    seconds: dict[str, list[list[float]]] = {"viewed": [], "alone": []}
    facts: list[dict[str, float]] = []
    for pair in range(asked.pairs):
        for name in ("viewed", "alone") if pair % 2 else ("alone", "viewed"):
            place = folder / f"{name}-{pair}"
            place.mkdir()
            if name == "alone":
                seconds[name].append(measure_steps(asked, "all", place))
                continue
            with open_viewer(asked.viewer, place) as found:
                seconds[name].append(measure_steps(asked, "all", place))
            facts.append(found)
    steps = asked.steps * asked.pairs
    return compare_steps(seconds, "viewed", "alone") | {
        "refreshes_per_step": round(sum(each["refreshes"] for each in facts) / steps, 3),
        "server_ms_per_step": round(1e3 * sum(each["server_s"] for each in facts) / steps, 2),
        "browser_ms_per_step": round(1e3 * sum(each["browser_s"] for each in facts) / steps, 2),
    }


def compare_steps(seconds: dict[str, list[list[float]]], slow: str, fast: str) -> dict[str, object]:
    """Medians over the steps of all pairs, and by how much each pair's differ."""
    medians = {
        name: statistics.median(itertools.chain.from_iterable(runs))
        for name, runs in seconds.items()
    }
    pairs = [
        round(100 * (statistics.median(with_it) / statistics.median(without) - 1), 2)
        for with_it, without in zip(seconds[slow], seconds[fast], strict=True)
    ]
    return {
        "median_step_s": {name: round(value, 4) for name, value in medians.items()},
        "slower_percent": round(100 * (medians[slow] / medians[fast] - 1), 2),
        "slower_percent_of_pairs": sorted(pairs),
    }


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1m")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--viewer", choices=["page", "api"], help="compare with an open viewer")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        compare = compare_viewing if asked.viewer else compare_recording
        result = compare(asked, Path(name))
    sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")


if __name__ == "__main__":
    main()
