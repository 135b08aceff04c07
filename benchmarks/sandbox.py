"""How many programs a second the sandbox runs, by each way to set them apart that works here.

``python -m benchmarks.sandbox``; prints one line for each way and number of programs at once.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from hearth.errors import ConfigError
from training.sandbox import Isolation, run_code

PROGRAM = "print(sum(map(int, input().split())))"


def measure(isolation: Isolation, at_once: int, programs: int) -> float:
    """Programs a second."""
    began = time.perf_counter()
    with ThreadPoolExecutor(at_once) as pool:
        results = list(
            pool.map(lambda _: run_code(PROGRAM, "20 22", isolation=isolation), range(programs))
        )
    assert all(result.stdout == "42\n" for result in results)
    return programs / (time.perf_counter() - began)


def main() -> None:
    """Measure each way three times and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200)
    programs = parser.parse_args().programs
    console = Console(highlight=False, soft_wrap=True)
    cores = len(os.sched_getaffinity(0))
    ways: tuple[Isolation, ...] = ("bubblewrap", "namespaces", "rlimits")
    for isolation in ways:
        try:
            run_code("", isolation=isolation)
        except ConfigError as error:
            console.print(str(error))
            continue
        for at_once in (1, cores, 4 * cores):
            rates = [measure(isolation, at_once, programs) for _ in range(3)]
            rate = statistics.median(rates)
            console.print(
                f"{isolation:10} {at_once:3} at once on {cores} cores: {rate:6.1f} programs/s"
            )


if __name__ == "__main__":
    main()
