"""What recording every sample costs: share of a step's time, and bytes on disk.

Runs ``grpo_step.py`` in alternating pairs, with samples recorded and without, and compares the
medians of the steps' wall time over all pairs. Bytes are those of merged files, against 4 bytes for
each token and each logprob in them.

    python benchmarks/recording.py --pairs 3 [--model 1m] [--steps 80]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import orjson
import pyarrow.parquet as pq

from hearth.records.layout import list_files

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


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="1m")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--pairs", type=int, default=3)
    asked = parser.parse_args()
    seconds: dict[str, list[float]] = {"all": [], "none": []}
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as name:
        for pair in range(asked.pairs):
            for record in ("all", "none") if pair % 2 else ("none", "all"):
                folder = Path(name) / f"{record}-{pair}"
                seconds[record] += measure_steps(asked, record, folder)
        size, plain, samples = measure_bytes(Path(name) / "all-0" / "run")
        result |= {"bytes": size, "plain_bytes": plain, "samples": samples}
        result["bytes_ratio"] = round(size / plain, 3) if plain else None
    medians = {record: statistics.median(steps) for record, steps in seconds.items()}
    result["median_step_s"] = {record: round(value, 4) for record, value in medians.items()}
    result["slower_percent"] = round(100 * (medians["all"] / medians["none"] - 1), 2)
    sys.stdout.write(orjson.dumps(result, option=orjson.OPT_INDENT_2).decode() + "\n")


if __name__ == "__main__":
    main()
