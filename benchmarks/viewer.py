"""What the viewer's server takes for each question: ``python benchmarks/viewer.py --json``.

Makes a run of 100,000 samples of 300 tokens, 2,000 steps and one sample of 36,000 tokens, as
benchmarks/viewer_run.py writes it, and asks a server of its own over HTTP. ``--steps`` makes
a smaller one. A question is asked with new values each time, so that no answer of before helps; the
figure is the median of five. benchmarks/viewer_page.py times the page on the same run.
"""

from __future__ import annotations

import argparse
import json
import selectors
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from benchmarks.viewer_run import make_run

REPEATS = 5
SERVE = "import sys; from hearth.viewer.verb import view; sys.exit(view(sys.argv[1:]))"
_START_S = 60


def main() -> None:
    """Make the run, start the server, ask, and print seconds and megabytes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, help="where the run is made, or is already")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        run = options.folder or Path(temporary) / "run"
        make_run(run, steps=options.steps, tokens=300, long_tokens=36_000)
        figures = measure(run, options.steps)
    if options.json:
        sys.stdout.write(json.dumps(figures) + "\n")
    else:
        for name, value in figures.items():
            sys.stdout.write(f"{name:34} {value:10.3f}\n")


def measure(run: Path, steps: int) -> dict[str, float]:
    """Seconds of the start and of each question, megabytes of the server."""
    began = time.perf_counter()
    command = [sys.executable, "-c", SERVE, str(run), "--no-browser"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        url = httpx.URL(_read_address(server))
        figures = {"start_s": time.perf_counter() - began}
        headers = {"authorization": f"Bearer {url.params['key']}"}
        with httpx.Client(base_url=url.join("/"), headers=headers, timeout=120) as client:
            figures |= _ask_all(client, f"/api/runs/{run.name}", steps)
        figures["rss_mb"] = psutil.Process(server.pid).memory_info().rss / 2**20
    finally:
        server.send_signal(signal.SIGINT)
        server.wait(30)
    return figures


def _read_address(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None, "it is a pipe"
    with selectors.DefaultSelector() as selector:
        selector.register(server.stdout, selectors.EVENT_READ)
        if not selector.select(_START_S):
            raise TimeoutError(f"the viewer must start within {_START_S} s")
    return server.stdout.readline().split()[-1]


def _ask_all(client: httpx.Client, run: str, steps: int) -> dict[str, float]:
    middle = steps // 2
    index = 5 * middle
    questions: dict[str, Callable[[int], str]] = {
        "runs_s": lambda _: "/api/runs",
        "series_s": lambda _: (
            f"{run}/series?names=rollout/raw_reward,train/grad_norm,eval/accuracy"
        ),
        "timeline_s": lambda turn: (
            f"{run}/timeline?from_step={middle + turn}&to_step={middle + 20}"
        ),
        "filter_s": lambda turn: f"{run}/samples?reward_min=0.5&step_min={middle + turn}",
        "sort_s": lambda turn: f"{run}/samples?sort=mean_logprob&descending={turn % 2}",
        "far_page_s": lambda turn: f"{run}/samples?sort=advantage&offset={40 * middle + turn}",
        "search_s": lambda turn: f"{run}/samples?search=x{'aeiou'[turn]}q&in=text",
        "regex_literal_s": lambda turn: f"{run}/samples?regex=zq{'aeiou'[turn]}.*kk",
        "regex_s": lambda turn: f"{run}/samples?regex=[{turn}-9]%2B apples",
        "histogram_s": lambda turn: f"{run}/histogram?column=mean_logprob&bins={40 + turn}",
        "prompts_s": lambda turn: f"{run}/prompts?sort=solved_share&offset={turn}",
        "group_s": lambda turn: f"{run}/groups/train.{index + turn}",
        "sample_300_s": lambda turn: f"{run}/samples/train.{middle + 1}.{index}.{turn}.0",
        "sample_36000_s": lambda _: f"{run}/samples/train.1.{5 * steps}.0.0",
    }
    figures = {"first_samples_s": _time(client, f"{run}/samples")}
    for name, question in questions.items():
        figures[name] = statistics.median(_time(client, question(turn)) for turn in range(REPEATS))
    return figures


def _time(client: httpx.Client, path: str) -> float:
    began = time.perf_counter()
    client.get(path).raise_for_status()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
