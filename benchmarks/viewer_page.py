"""How fast the viewer's page is in a real Chromium: ``python benchmarks/viewer_page.py RUN``.

``RUN`` is a run's folder, such as the large one that benchmarks/viewer_run.py makes. Times are from
the key or click to the frame that shows the answer, the median of five; memory is that of the
process that draws the page.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import quote

import psutil
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

REPEATS = 5
PATIENCE_S = 60
STEP_S = 0.4
FOLLOW_S = 24.0
FOLLOWED_STEPS = 200
SERVE = "import sys; from hearth.viewer.verb import view; sys.exit(view(sys.argv[1:]))"

WAIT_FRAME = """
const [act, shown, done] = arguments;
const ready = new Function('return ' + shown);
const began = performance.now();
new Function(act)();
const look = () => ready()
    ? requestAnimationFrame(() => setTimeout(() => done(performance.now() - began)))
    : requestAnimationFrame(look);
look();
"""
"""Milliseconds from an action to the end of the first frame in which something is shown."""

FOLLOW = """
const link = document.createElement('a');
link.href = '{}';
document.querySelector('.frame').append(link);
link.click();
link.remove();
"""


class Chromium:
    """A headless Chromium on the viewer's page."""

    def __init__(self, url: str) -> None:
        options = Options()
        options.binary_location = str(shutil.which("chromium"))
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--window-size=1440,900"):
            options.add_argument(flag)
        self.driver = webdriver.Chrome(options, Service(str(shutil.which("chromedriver"))))
        self.driver.set_script_timeout(PATIENCE_S)
        self.root = url.split("/?")[0]
        self.driver.get(url)

    def time_ms(self, act: str, shown: str) -> float:
        """Milliseconds from an action (a script) until an expression is true and drawn."""
        return float(self.driver.execute_async_script(WAIT_FRAME, act, shown))

    def load(self, path: str, shown: str) -> float:
        """Load a view anew; milliseconds until an expression is true and drawn."""
        self.driver.get(self.root + path)
        self.time_ms("", shown)
        return float(self.driver.execute_script("return performance.now()"))

    def first_paint(self) -> float:
        """Milliseconds from the request of this page to its first content."""
        entry = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
        self.time_ms("", f"{entry} !== undefined")
        return float(self.driver.execute_script(f"return {entry}"))

    def memory_mb(self) -> tuple[float, float]:
        """MB of the page's JavaScript heap after a collection, and of its process."""
        self.driver.execute_cdp_cmd("HeapProfiler.collectGarbage", {})
        heap = self.driver.execute_script("return performance.memory.usedJSHeapSize")
        tree = psutil.Process(self.driver.service.process.pid).children(recursive=True)
        renderers = [child for child in tree if "--type=renderer" in child.cmdline()]
        return heap / 1e6, max(child.memory_full_info().uss for child in renderers) / 1e6


def median(measure: Callable[[int], float]) -> float:
    """The median of several measurements; each gets its number."""
    return round(statistics.median(measure(number) for number in range(REPEATS)), 1)


def measure_views(page: Chromium, key: str, long_sample: str) -> dict[str, float]:
    """Milliseconds of each thing that a person does, and megabytes of the page after it."""
    count = "document.querySelector('.toolbar .small').innerText"
    rows = "document.querySelector('.table-row') && !document.querySelector('.ghost')"
    charts = "document.querySelectorAll('.uplot canvas').length === 12"
    histograms = "document.querySelectorAll('.histogram rect.count').length > 40"
    found: dict[str, float] = {}
    found["runs, first paint"] = median(lambda _: page.load("/runs", rows) and page.first_paint())
    found["curves, first paint"] = median(
        lambda _: page.load(f"/run/{key}/curves", charts) and page.first_paint()
    )
    found["curves, all twelve"] = median(lambda _: page.load(f"/run/{key}/curves", charts))
    page.load(f"/run/{key}/samples", rows)

    def change(act: str) -> float:
        before = page.driver.execute_script(f"return {count}")
        changed = f"{count} !== {json.dumps(before)} && {rows}"
        return page.time_ms(act, changed)

    box = "document.querySelector('.filters input[type=checkbox]').click()"
    found["filter by outcome"] = median(lambda _: change(box))

    def sort(number: int) -> float:
        column = f"document.querySelectorAll('.table-head button')[{3 + number % 4}]"
        place = f"{column}.parentElement.getAttribute('aria-sort')"
        return page.time_ms(f"{column}.click()", f"{place} && {rows}")

    found["sort by a number"] = median(sort)

    def search(number: int) -> float:
        field = "document.querySelector('input[type=search]')"
        text = f"{field}.value = 'w{number}'; {field}.dispatchEvent(new Event('input'))"
        asked = f"location.search.includes('w{number}')"
        return page.time_ms(text, f"{asked} && ({rows} || document.querySelector('.empty'))")

    found["search in all texts"] = median(search)
    token = "document.querySelector('.token')"

    def open_tokens(number: int) -> float:
        settled = f"{rows} && {histograms}"
        if number == 0:
            page.load(f"/run/{key}/samples", settled)
        else:
            page.time_ms(FOLLOW.format(f"/run/{key}/samples"), settled)
        url = f"/run/{key}/sample/{quote(long_sample)}?view=tokens"
        return page.time_ms(FOLLOW.format(url), token)

    found["open 36,000 tokens, on a new page"] = median(lambda _: open_tokens(0))
    found["open 36,000 tokens"] = median(open_tokens)
    heap, process = page.memory_mb()
    found["heap, MB"], found["process, MB"] = round(heap, 1), round(process, 1)
    return found


def measure_live(page: Chromium, folder: Path) -> float:
    """Milliseconds from a step's line in metrics.jsonl to its number on the page, the median."""
    metrics = folder / "growing" / "metrics.jsonl"

    def append(step: int) -> None:
        record = {"type": "train", "step": step, "rollout/reward": 0.5}
        with metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    step = "document.querySelectorAll('.stats dd')[2]?.innerText.trim()"
    page.load("/run/growing/curves", f"{step} === '1' && document.querySelector('.link-state.on')")

    def grow(number: int) -> float:
        time.sleep(1.0)
        began = time.perf_counter()
        append(number + 2)
        page.time_ms("", f"{step} === '{number + 2}'")
        return 1000 * (time.perf_counter() - began)

    return median(grow)


def measure_following(page: Chromium, server: psutil.Process, folder: Path) -> dict[str, float]:
    """Milliseconds that server and browser compute a second, while a run with all curves grows."""
    lines = (folder / "followed" / "metrics.jsonl").read_text().splitlines()
    step = {**json.loads(lines[-1]), "type": "train"}
    page.load("/run/followed/curves", "document.querySelectorAll('.uplot canvas').length === 12")
    browser = psutil.Process(page.driver.service.process.pid)
    found: dict[str, float] = {}
    for seconds in (STEP_S, 10 * STEP_S):
        time.sleep(3.0)  # What the last change left to draw.
        processes = {"server": [server], "browser": browser.children(recursive=True)}
        before = {name: _computed_s(tree) for name, tree in processes.items()}
        began = time.perf_counter()
        while time.perf_counter() - began < FOLLOW_S:
            step["step"] += 1
            with (folder / "followed" / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(step) + "\n")
            time.sleep(seconds)
        passed = time.perf_counter() - began
        for name, tree in processes.items():
            label = f"a step each {seconds} s: {name}, ms of each second"
            found[label] = round(1000 * (_computed_s(tree) - before[name]) / passed, 1)
    return found


def _computed_s(processes: list[psutil.Process]) -> float:
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def main() -> None:
    """Print what is measured as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--long-sample", default="train.1.10000.0.0", help="id of a long sample")
    arguments = parser.parse_args()
    run: Path = arguments.run.resolve()
    with tempfile.TemporaryDirectory() as folder:
        growing = Path(folder) / "growing"
        growing.mkdir()
        (growing / "metrics.jsonl").write_text('{"type":"train","step":1,"rollout/reward":0.5}\n')
        followed = Path(folder) / "followed"
        followed.mkdir()
        metrics = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
        (followed / "metrics.jsonl").write_text("".join(metrics[:FOLLOWED_STEPS]))
        command: list[Any] = [sys.executable, "-c", SERVE, run, folder, "--no-browser"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = next(
                match[0]
                for line in server.stdout
                if (match := re.search(r"http://\S+key=\S+", line))
            )
            page = Chromium(url)
            try:
                found = measure_views(page, run.name, arguments.long_sample)
                found["a new step, from file to page"] = measure_live(page, Path(folder))
                found |= measure_following(page, psutil.Process(server.pid), Path(folder))
                server_mb = psutil.Process(server.pid).memory_full_info().uss / 1e6
                found["server, MB"] = round(server_mb, 1)
            finally:
                page.driver.quit()
                server.terminate()
    sys.stdout.write(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
