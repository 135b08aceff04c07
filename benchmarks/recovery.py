"""How long a run stands still when one of its processes dies or hangs.

A run of ``rl_loop`` with a reference and a checkpoint after each step, on a served platform, with
processes of its own, and in one process. Each fault comes after two more steps. Seconds are from
the fault until the worker is being started again ("noticed"), until it answers ("ready") and until
the run has finished its next step. A command that is killed is given again at once; its Python has
been started and has imported everything.

    python benchmarks/recovery.py [--rounds 3] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.chaos.campaign import Campaign, Machine, Setup
from tests.integration.runs import count_steps

WORKERS = ("trainer", "reference", "deployment")
KINDS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP}
FAULTS = {
    "served": [
        *((victim, kind) for victim in WORKERS for kind in KINDS),
        ("platform", "killed"),
        ("recipe", "killed"),
    ],
    "process": [*((victim, kind) for victim in WORKERS for kind in KINDS), ("recipe", "killed")],
    "inline": [("recipe", "killed")],
}
FLAGS = ["--dcp-save-interval=1", "--max-rows=1000", "--epochs=20"]
_LONGEST_S = 120.0


@dataclass(frozen=True)
class Recovery:
    """Seconds after one fault; None where nothing was started again."""

    placement: str
    victim: str
    kind: str
    noticed_s: float | None
    ready_s: float | None
    step_s: float


class DisturbedRun:
    """One run, and what is done to it."""

    def __init__(self, campaign: Campaign, placement: str, folder: Path) -> None:
        self._campaign = campaign
        self._placement = placement
        self._folder = folder
        self._served = campaign.served if placement == "served" else None
        self._url = self._served.url if self._served is not None else None
        data_dir = self._served.data_dir if self._served is not None else folder
        self._machine = Machine(data_dir, self._served)
        self._start()

    def _start(self) -> None:
        setup = Setup(self._placement, "rl_loop", "KL")
        recipes = self._campaign.recipes
        self._machine.recipe = setup.start(recipes, self._url, self._folder, FLAGS)

    def measure_all(self) -> Iterator[Recovery]:
        """Every fault of the placement, one after the other; then the run is ended."""
        for victim, kind in FAULTS[self._placement]:
            seen = count_steps(self._folder)
            self._wait(lambda seen=seen: count_steps(self._folder) >= seen + 2, "two steps")
            yield self._measure(victim, kind)
        assert self._machine.recipe is not None
        self._machine.recipe.send(signal.SIGTERM)
        self._machine.recipe.wait(60)

    def _measure(self, victim: str, kind: str) -> Recovery:
        pid = self._machine.find()[victim]
        folder = self._machine.find_folders(victim)[-1] if victim in WORKERS else None
        seen, began_s = count_steps(self._folder), time.monotonic()
        os.kill(pid, KINDS[kind])
        if victim == "platform":
            assert self._served is not None
            self._served.come_back()
        elif victim == "recipe":
            assert self._machine.recipe is not None
            self._machine.recipe.wait()
            self._start()
        noticed_s = ready_s = None
        if folder is not None:
            record, ready = folder / "process.json", folder / "ready"
            noticed_s = self._wait(lambda: _names_another(record, pid), "its end", began_s)
            ready_s = self._wait(
                lambda: ready.exists() and _names_another(record, pid), "an answer", began_s
            )
        step_s = self._wait(lambda: count_steps(self._folder) > seen, "a step", began_s)
        return Recovery(self._placement, victim, kind, noticed_s, ready_s, step_s)

    def _wait(self, is_so: Callable[[], bool], what: str, began_s: float | None = None) -> float:
        began_s = time.monotonic() if began_s is None else began_s
        recipe = self._machine.recipe
        assert recipe is not None
        while not is_so():
            assert recipe.code() is None, recipe.output[-3000:]
            assert time.monotonic() - began_s < _LONGEST_S, f"no {what}: {recipe.output[-3000:]}"
            time.sleep(0.002)
        return time.monotonic() - began_s


def _names_another(record: Path, pid: int) -> bool:
    """Whether a worker's folder no longer names its old process."""
    try:
        return json.loads(record.read_text(encoding="utf-8"))["pid"] != pid
    except (OSError, ValueError):
        return True


def list_rows(found: list[Recovery]) -> Iterator[str]:
    """The lines of the table: medians, and the longest time to the next step."""
    yield "| placement | fault | noticed, s | ready, s | next step, s | longest, s |"
    yield "|---|---|---:|---:|---:|---:|"
    for placement, faults in FAULTS.items():
        for victim, kind in faults:
            own = [
                recovery
                for recovery in found
                if (recovery.placement, recovery.victim, recovery.kind) == (placement, victim, kind)
            ]
            noticed, ready, steps = (
                [seconds for recovery in own if (seconds := getattr(recovery, name)) is not None]
                for name in ("noticed_s", "ready_s", "step_s")
            )
            if steps:
                cells = (_median(noticed), _median(ready), _median(steps), f"{max(steps):.1f}")
                yield f"| {placement} | {victim} {kind} | {' | '.join(cells)} |"


def _median(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):.1f}" if seconds else ""


def command() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="one JSON object in place of a table")
    options = parser.parse_args()
    found: list[Recovery] = []
    with tempfile.TemporaryDirectory(prefix="hearth-recovery-") as folder:
        campaign = Campaign(Path(folder), seed=0)
        try:
            for number in range(options.rounds):
                for placement in FAULTS:
                    run = DisturbedRun(campaign, placement, Path(folder) / f"{placement}-{number}")
                    for recovery in run.measure_all():
                        sys.stderr.write(f"{recovery}\n")
                        found.append(recovery)
        finally:
            campaign.close()
    if options.json:
        sys.stdout.write(json.dumps({"recoveries": [vars(recovery) for recovery in found]}) + "\n")
    else:
        sys.stdout.write("\n".join(list_rows(found)) + "\n")


if __name__ == "__main__":
    command()
