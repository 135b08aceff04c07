"""What the pipeline itself costs: ``async_rl_loop`` with rollouts that are there at once.

Rows of 8 samples go through the recipe as it is, on the embedded platform. The rollout function
answers at once, with canned samples of 8 tokens, half of them sampled (``--prompt-tokens``,
``--new-tokens``), whose rewards differ within a group. Training is real, of a Qwen3 with 340
parameters. The rest is queues, checks, advantages, datums, wire, losses, metrics, weight syncs and
checkpoints: Python, of which one thread runs at a time. A step has 128 rows, so that what each step
costs (an optimizer step, a weight sync, a dozen requests) counts little beside what each sample
costs.

With ``--placement served`` the platform is `hearth serve`, and the gateway is another process's
work; ``--rollouts ray`` then runs the rollout function in a process of Ray.

Each number of rows is a process of its own. Nothing may grow with it: neither the time of a sample
nor, beyond what is kept of the last ones, memory.

    python benchmarks/pipeline.py [--rows 2500 5000 10000 20000] [--prompts 128] [--new-tokens 4]
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the cores from whoever works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

sys.path.insert(0, str(Path(__file__).parents[1]))

import orjson
import torch
from tests.integration.served import Served
from workload import make_model, make_rows, processor

from training.recipes.async_rl_loop import Config, main
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup
from training.utils import DeployConfig

GROUP = 8
LOGPROBS = [-8 * (place * 0.6180339887 % 1) for place in range(2**16)]
"""Numbers that do not repeat, so that files of them are as long as real ones."""
WARM_UP = 2
"""Steps left out at the start."""
SAMPLE_S = 0.1
"""Between two looks at memory and threads."""
ROLLOUTS = "hearth-rollouts"
"""The thread that asks for samples and judges them."""
PARTS = {
    "recipe": ("MainThread", ROLLOUTS),
    "SDK": ("hearth-sdk", "asyncio"),
    "trainer": ("trainer",),
    "deployment": ("hearth-inference", "hearth-snapshots"),
}
"""Threads of each part, by the beginnings of their names. Requests are answered on the SDK's."""


@dataclass(frozen=True)
class Result:
    """One run."""

    rows: int
    steps: int
    samples_per_s: float
    """Over the steps after the warm-up."""
    rss_mib: tuple[float, float]
    """Mean of each half of the time in which there were rollouts."""
    rss_mib_by_tenth: list[float]
    """Over the same time, the first tenth left out."""
    cpu_ms_per_1000: dict[str, float]
    """Milliseconds for 1,000 samples by part; ``rest`` is threads that have ended, and torch's."""


class Watch:
    """Looks at memory and threads now and then, on a thread of its own, once rollouts begin."""

    def __init__(self) -> None:
        self.rss: list[float] = []
        """MiB since rollouts began."""
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Look for the last time."""
        self._is_over.set()
        self._thread.join()

    def _look(self) -> None:
        while not any(thread.name == ROLLOUTS for thread in threading.enumerate()):
            if self._is_over.wait(SAMPLE_S):
                return
        self.first = cpu_seconds()
        while not self._is_over.wait(SAMPLE_S):
            self.rss.append(rss_mib())
            self.last = cpu_seconds()


def rss_mib() -> float:
    """What this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def cpu_seconds() -> dict[str, float]:
    """CPU seconds by part so far."""
    found = dict.fromkeys(PARTS, 0.0)
    for thread in threading.enumerate():
        part = next((part for part, names in PARTS.items() if thread.name.startswith(names)), None)
        if part is not None and thread.native_id is not None:
            found[part] += thread_seconds(thread.native_id)
    return found | {"rest": time.process_time() - sum(found.values())}


def thread_seconds(native_id: int) -> float:
    """CPU seconds of a thread; 0 once it has ended."""
    try:
        text = Path(f"/proc/self/task/{native_id}/stat").read_text()
    except FileNotFoundError:
        return 0.0
    # After the name, which may hold blanks, the 12th and 13th fields.
    fields = text.rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def canned_rollouts(prompt_tokens: int, new_tokens: int) -> Any:
    """A factory of rollout functions that answer at once."""
    prompt = [4 + place % 40 for place in range(prompt_tokens)]
    answers = [[4 + (first + place) % 40 for place in range(new_tokens)] for first in range(40)]

    def make_rollout_fn(setup: RolloutSetup) -> RolloutFn:
        async def rollout_fn(
            row: Mapping[str, Any], row_index: int, rollout_idx: int
        ) -> RolloutSample:
            first = row_index + rollout_idx
            return RolloutSample(
                tokens=prompt + answers[first % 40],
                logprobs=[0.0] * prompt_tokens + LOGPROBS[first : first + new_tokens],
                loss_mask=[0] * prompt_tokens + [1] * new_tokens,
                reward=float(first % 3),
                text="four",
            )

        return rollout_fn

    return make_rollout_fn


@contextlib.contextmanager
def platform(placement: str, folder: Path) -> Iterator[None]:
    """A platform in processes of its own inside the ``with``, where it is to be ``served``."""
    if placement != "served":
        yield
        return
    served = Served(
        folder / "platform", allow_folders=True, trainer_threads=1, deployment_threads=1
    )
    os.environ |= {"HEARTH_URL": served.url, "HEARTH_API_KEY": "x"}
    try:
        yield
    finally:
        served.stop()


def measure(asked: argparse.Namespace, rows: int) -> Result:
    """One run in this process."""
    watch = Watch()
    with tempfile.TemporaryDirectory() as folder, platform(asked.placement, Path(folder)):
        model = make_model(Path(folder) / "model", "nano", fixed_length=True)
        config = Config(
            log_path=str(Path(folder) / "run"),
            base_model=str(model),
            shuffle=False,
            completions_per_prompt=GROUP,
            prompt_groups_per_step=asked.prompts,
            max_completion_tokens=asked.new_tokens,
            max_seq_len=asked.prompt_tokens + asked.new_tokens,
            max_head_offpolicy_versions=asked.late,
            learning_rate=1e-6,
            kl_beta=0.0,
            no_signal_patience=None,
            deployment=DeployConfig(tokenizer_model=str(model)),
            placement="inline" if asked.placement == "served" else asked.placement,
            rollout_workers=asked.rollouts,
            rollout_worker_count=1,
        )
        main(
            config,
            rollout_fn_factory=canned_rollouts(asked.prompt_tokens, asked.new_tokens),
            rows=make_rows(rows),
        )
        watch.end()
        lines = Path(folder, "run", "metrics.jsonl").read_bytes().splitlines()
    records = [record for record in map(orjson.loads, lines) if record["type"] == "train"]
    # The last step may have fewer rows.
    counted = records[WARM_UP:-1]
    rss = watch.rss[len(watch.rss) // 10 :]
    half, tenth = len(watch.rss) // 2, max(1, len(rss) // 9)
    return Result(
        rows=rows,
        steps=len(records),
        samples_per_s=asked.prompts
        * GROUP
        / statistics.fmean(record["perf/step_wall_time"] for record in counted),
        rss_mib=(statistics.fmean(watch.rss[:half]), statistics.fmean(watch.rss[half:])),
        rss_mib_by_tenth=[round(mib, 1) for mib in rss[::tenth]],
        cpu_ms_per_1000={
            part: 1e6 * (seconds - watch.first[part]) / (rows * GROUP)
            for part, seconds in watch.last.items()
        },
    )


def run(asked: argparse.Namespace, rows: int) -> Result:
    """One run in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its error output is shown.
    """
    command = [
        sys.executable,
        __file__,
        "--run",
        str(rows),
        "--prompts",
        str(asked.prompts),
        "--late",
        str(asked.late),
        "--threads",
        str(asked.threads),
        "--placement",
        asked.placement,
        "--rollouts",
        asked.rollouts,
        "--prompt-tokens",
        str(asked.prompt_tokens),
        "--new-tokens",
        str(asked.new_tokens),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    return Result(**orjson.loads(done.stdout.splitlines()[-1]))


def table(results: Sequence[Result]) -> str:
    """The runs one below the other."""
    parts = [*PARTS, "rest"]
    lines = [
        "| rows | steps | samples/s | MiB, first half | MiB, last half | "
        + " | ".join(f"{part} ms" for part in parts)
        + " |",
        "|" + "---:|" * (5 + len(parts)),
    ]
    for result in results:
        first, last = result.rss_mib
        cpu = " | ".join(f"{result.cpu_ms_per_1000[part]:.0f}" for part in parts)
        lines.append(
            f"| {result.rows:,} | {result.steps} | {result.samples_per_s:,.0f} | {first:.0f} "
            f"| {last:.0f} | {cpu} |"
        )
    lines.append("\nms: CPU milliseconds for 1,000 samples")
    lines += [f"MiB over {result.rows:,} rows: {result.rss_mib_by_tenth}" for result in results]
    return "\n".join(lines)


def command() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000])
    parser.add_argument("--prompts", type=int, default=128, help="rows per step")
    parser.add_argument("--late", type=int, default=1, help="max_head_offpolicy_versions")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--placement", choices=["inline", "process", "served"], default="inline")
    parser.add_argument("--rollouts", choices=["loop", "ray"], default="loop")
    parser.add_argument("--prompt-tokens", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=4, help="tokens of a completion")
    parser.add_argument("--json", action="store_true", help="one JSON object a run, nothing else")
    parser.add_argument("--run", type=int, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.run:
        logging.disable(logging.WARNING)
        torch.set_num_threads(asked.threads)
        sys.stdout.write(orjson.dumps(asdict(measure(asked, asked.run))).decode() + "\n")
        return
    heading = f"{processor()}, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}"
    results: list[Result] = []
    for rows in asked.rows:
        results.append(run(asked, rows))
        sys.stderr.write(f"{results[-1]}\n")
    if asked.json:
        sys.stdout.writelines(orjson.dumps(asdict(result)).decode() + "\n" for result in results)
        return
    sys.stdout.write(f"{heading} at the start\n{table(results)}\n")


if __name__ == "__main__":
    command()
