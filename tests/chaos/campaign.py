"""Random faults in every process of a run, and whether the run ends as if nothing had been.

Each trial is a recipe on a placement. While it trains, a process of it is killed, stopped or may
write nothing more, or the network to its platform loses, cuts and doubles requests, again and again
at random moments. A command that ends is given again. Its weights, its records and its rows are
then compared with those of a run that nobody disturbed.

    python -m tests.chaos.campaign [--minutes 30] [--seed 0] [--only served] [--first 0]
    python -m tests.chaos.campaign --soak 60

Standard output is two tables; the exit status is 1 when a trial went wrong. ``--first N`` begins
with trial number N of the seed. ``--soak`` runs ``async_rl_loop`` on one served platform for so
many minutes with a fault every five seconds, and then three without faults side by side; ``--only
every`` and ``--only beside`` are a half of it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import resource
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import orjson
from tests.chaos.proxy import FlakyProxy
from tests.integration.runs import FinishedRun, count_steps
from tests.integration.served import Recipe, Recipes, Served

ROWS = 32
STALLED_S = 240.0
"""A run that takes no step in this time has gone wrong."""
MOST_STARTS = 60
SHAPES = {"full": [], "KL": ["--kl-beta=0.1"], "LoRA": ["--lora-rank=4", "--merge-adapter"]}
_WORKERS = {
    "trainer": "trainer-rl-policy-",
    "reference": "trainer-rl-reference-",
    "deployment": "deployment-",
}
_HANG_S = 3.0
"""How long a recipe or a platform stands still: nobody above them would kill them."""
_FULL_S = 1.0
"""How long a process may write to no file."""
_BAD_NETWORK_S = 2.0
_BAD_SHARE = 0.2
"""Of the requests, while the network is bad."""


@dataclass(frozen=True)
class Setup:
    """What a trial runs, and where."""

    placement: str
    recipe: str
    shape: str

    @property
    def name(self) -> str:
        return f"{self.placement} {self.recipe} {self.shape}"

    @property
    def flags(self) -> list[str]:
        """The command line, the folder and the rows left out."""
        flags = [*SHAPES[self.shape], f"--max-rows={ROWS}"]
        if self.placement == "process":
            flags.append("--placement=process")
        if self.recipe == "async late":
            flags.append("--max-head-offpolicy-versions=1")
        return flags

    @property
    def is_exact(self) -> bool:
        """Whether its weights are those of the undisturbed run."""
        return self.recipe != "async late"

    def start(self, recipes: Recipes, url: str | None, folder: Path, flags: list[str]) -> Recipe:
        """Give its command."""
        begin = recipes.start if self.recipe == "rl_loop" else recipes.start_async
        return begin(url, folder, *self.flags, *flags)


SETUPS = [
    *(Setup(where, "rl_loop", shape) for where in ("served", "process") for shape in SHAPES),
    Setup("inline", "rl_loop", "full"),
    Setup("inline", "rl_loop", "LoRA"),
    Setup("served", "async on-policy", "full"),
    Setup("process", "async on-policy", "full"),
    Setup("served", "async late", "full"),
    Setup("inline", "async on-policy", "full"),
]


@dataclass
class Fault:
    """What was done to a process, and when the run took its next step."""

    victim: str
    kind: str
    steps: int
    """Finished before it."""
    began_s: float = field(default_factory=time.monotonic)
    recovered_s: float | None = None

    @property
    def name(self) -> str:
        return f"{self.victim}, {self.kind}"


@dataclass
class Outcome:
    """How a trial ended; ``wrong`` says what went wrong."""

    setup: Setup
    number: int
    faults: list[Fault]
    starts: int
    seconds: float
    wrong: str = ""


class Machine:
    """The processes of one run, found where they are written down."""

    def __init__(self, data_dir: Path, served: Served | None) -> None:
        self._workers = data_dir / "workers"
        self._before = set(self._workers.glob("*"))
        self.served = served
        self.recipe: Recipe | None = None

    def find(self) -> dict[str, int]:
        """The process of each part of the run that lives now."""
        assert self.recipe is not None
        found: dict[str, int] = {}
        owner = self.served.pid if self.served is not None else self.recipe.pid
        if self.recipe.code() is None:
            found["recipe"] = self.recipe.pid
        if self.served is not None:
            found["platform"] = self.served.pid
        for child in _list_children(owner):
            if b"hearth.launch.forkserver" in _read(Path(f"/proc/{child}/cmdline")):
                found["forkserver"] = child
        for name in _WORKERS:
            for folder in self.find_folders(name):
                with contextlib.suppress(orjson.JSONDecodeError, KeyError):
                    pid = orjson.loads(_read(folder / "process.json"))["pid"]
                    if _read(Path(f"/proc/{pid}/cmdline")):
                        found[name] = pid
        return found

    def find_folders(self, name: str) -> list[Path]:
        """The folders of this run's workers of one kind, oldest first."""
        found = set(self._workers.glob(f"{_WORKERS[name]}*")) - self._before
        return sorted(found, key=lambda folder: folder.stat().st_ctime)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def _list_children(pid: int) -> list[int]:
    children: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        children += map(int, _read(task).split())
    return children


class Trial:
    """One disturbed run."""

    def __init__(
        self,
        setup: Setup,
        number: int,
        seed: int,
        recipes: Recipes,
        served: Served | None,
        proxy: FlakyProxy,
    ) -> None:
        self._proxy = proxy
        """Before ``served``."""
        self._setup = setup
        self._number = number
        self._random = random.Random(f"{seed}-{number}")
        self._recipes = recipes
        self._served = served
        self._later: list[threading.Timer] = []
        self._strikes = 0
        """Since the command was given."""
        self._is_broken = False
        """Whether a process could not write since the command was given."""
        self._saves = False
        """Whether its command asks for checkpoints."""

    def run(self, folder: Path, whole: FinishedRun) -> Outcome:
        """Disturb the run until it is done, then compare it."""
        began_s = time.monotonic()
        served = self._served
        machine = Machine(served.data_dir if served is not None else folder, served)
        left = self._random.randint(2, 7)
        flags = self._random.choice(([], ["--dcp-save-interval=1"], ["--dcp-save-interval=3"]))
        self._saves = bool(flags)
        url = self._proxy.url if served is not None else None
        faults: list[Fault] = []
        starts, steps, stepped_s, wrong, code = 0, 0, time.monotonic(), "", None
        strike_s = time.monotonic() + self._wait_s()
        while not wrong and code != 0:
            if machine.recipe is None or code is not None:
                machine.recipe = self._setup.start(self._recipes, url, folder, flags)
                starts += 1
                self._strikes, self._is_broken = 0, False
            code = machine.recipe.code()
            now_s = time.monotonic()
            if left and now_s >= strike_s and (fault := self._strike(machine, folder)):
                faults.append(fault)
                left -= 1
                strike_s = time.monotonic() + self._wait_s()
            if code is not None:
                wrong = self._judge_end(code, machine.recipe, starts)
            if (finished := count_steps(folder)) != steps:
                steps, stepped_s = finished, now_s
            _note_recovery(faults, steps, now_s, is_over=code == 0)
            if now_s - stepped_s > STALLED_S:
                wrong = f"no step in {STALLED_S:.0f} s"
            time.sleep(0.005)
        for timer in self._later:
            timer.join()
        if wrong:
            assert machine.recipe is not None
            machine.recipe.send(signal.SIGKILL)
        else:
            wrong = self._compare(folder, whole, machine)
        seconds = time.monotonic() - began_s
        return Outcome(self._setup, self._number, faults, starts, seconds, wrong)

    def _wait_s(self) -> float:
        return self._random.expovariate(1 / 1.5)

    def _strike(self, machine: Machine, folder: Path) -> Fault | None:
        """Do something to one of the processes; None where the one that was chosen is gone."""
        self._strikes += 1
        pids = machine.find()
        if not pids:
            return None
        network = ["network"] if self._served is not None else []
        victim = self._random.choice([*sorted(pids), *network])
        if victim == "network":
            self._proxy.share = _BAD_SHARE
            self._do_later(_BAD_NETWORK_S, self._mend_network)
            return Fault(victim, "bad", count_steps(folder))
        kind = self._choose_kind(victim)
        pid = pids[victim]
        fault = Fault(victim, kind, count_steps(folder))
        try:
            if kind == "killed":
                os.kill(pid, signal.SIGKILL)
            elif kind == "stopped":
                os.kill(pid, signal.SIGSTOP)
                if victim in ("recipe", "platform"):
                    self._do_later(_HANG_S, lambda: os.kill(pid, signal.SIGCONT))
            else:
                self._is_broken = True
                _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, -1))
                free = (resource.RLIM_INFINITY, hard)
                self._do_later(_FULL_S, lambda: resource.prlimit(pid, resource.RLIMIT_FSIZE, free))
        except ProcessLookupError:
            return None
        if kind == "killed" and victim == "platform":
            assert self._served is not None
            time.sleep(self._random.choice((0.0, 0.5, 2.0)))
            self._served.come_back()
        return fault

    def _mend_network(self) -> None:
        self._proxy.share = 0.0

    def _choose_kind(self, victim: str) -> str:
        chance = self._random.random()
        if victim in ("trainer", "recipe") and chance < 0.15:
            return "cannot write"
        return "stopped" if chance < 0.3 else "killed"

    def _do_later(self, seconds: float, work: Callable[[], object]) -> None:
        def run() -> None:
            with contextlib.suppress(ProcessLookupError):
                work()

        self._later.append(threading.Timer(seconds, run))
        self._later[-1].start()

    def _judge_end(self, code: int, recipe: Recipe, starts: int) -> str:
        """What is wrong with the end of a command; empty if it may be given again, or is done."""
        if "Traceback" in recipe.output:
            return "a traceback: " + recipe.output[-3000:]
        if starts >= MOST_STARTS:
            return f"not done after {starts} starts: " + recipe.output[-3000:]
        asks_again = "start the same command again" in " ".join(recipe.output.split())
        # A worker that is killed twice while it starts is not started a third time.
        asks_again = asks_again or (self._strikes > 1 and "provisioning failed" in recipe.output)
        if code in (0, -signal.SIGKILL) or asks_again or self._is_broken:
            return ""
        return f"exit code {code}: " + recipe.output[-3000:]

    def _compare(self, folder: Path, whole: FinishedRun, machine: Machine) -> str:
        """What the finished run has that the undisturbed one has not."""
        root = folder if self._served is None else self._served.data_dir
        done = FinishedRun(folder, root / "models" / folder.name)
        steps, expected = ([record["step"] for record in run.records] for run in (done, whole))
        if steps != expected:
            return f"the steps are {steps}, those of the undisturbed run {expected}"
        # A served platform saves no checkpoint of a run that does not ask for them.
        has_checkpoint = self._served is None or self._saves
        if has_checkpoint and (done.last.step, done.last.cursor) != (expected[-1], ROWS):
            return f"the last checkpoint is of step {done.last.step}, row {done.last.cursor}"
        if self._setup.is_exact:
            if not done.has_weights_of(whole):
                return "other weights than the undisturbed run"
            if _leave_counts(done.records) != _leave_counts(whole.records):
                return "other records than the undisturbed run"
        left = {name for name in machine.find() if name not in ("platform", "forkserver")}
        return f"still there: {sorted(left)}" if left else ""


def _note_recovery(faults: Sequence[Fault], steps: int, now_s: float, *, is_over: bool) -> None:
    for fault in faults:
        # A run that goes on from a checkpoint takes steps again.
        fault.steps = min(fault.steps, steps)
        if fault.recovered_s is None and (steps > fault.steps or is_over):
            fault.recovered_s = now_s - fault.began_s


def _leave_counts(records: list[dict[str, object]]) -> list[dict[str, object]]:
    """Records without what counts from the start of a deployment: versions."""
    return [
        {name: value for name, value in record.items() if "version" not in name}
        for record in records
    ]


class Campaign:
    """Trials, one after the other, each against the undisturbed run of its setup."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self._seed = seed
        self.recipes = Recipes()
        self.served = Served(folder / "platform", trainer_threads=1, deployment_threads=1)
        self._proxy = FlakyProxy(self.served.port, seed)
        self._proxy.__enter__()
        self._wholes: dict[tuple[str, str], FinishedRun] = {}

    def close(self) -> None:
        """End the platform and whatever it started."""
        self.recipes.close()
        self._proxy.__exit__()
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.served.pid, signal.SIGCONT)
        self.served.stop()

    def run(self, number: int, setups: Sequence[Setup]) -> Outcome:
        """Trial number ``number`` of the seed."""
        setup = setups[number % len(setups)]
        whole = self._find_whole(setup)
        served = self.served if setup.placement == "served" else None
        folder = self.folder / f"trial-{number}"
        trial = Trial(setup, number, self._seed, self.recipes, served, self._proxy)
        outcome = trial.run(folder, whole)
        if not outcome.wrong:
            shutil.rmtree(folder)
        return outcome

    def _find_whole(self, setup: Setup) -> FinishedRun:
        """The undisturbed run of a setup, the same for all placements."""
        key = (setup.recipe, setup.shape)
        if key not in self._wholes:
            folder = self.folder / f"whole-{len(self._wholes)}"
            recipe = Setup("inline", *key).start(self.recipes, None, folder, [])
            assert recipe.wait(STALLED_S) == 0, recipe.output
            self._wholes[key] = FinishedRun(folder, folder / "models" / folder.name)
        return self._wholes[key]


def soak(campaign: Campaign, minutes: float, seed: int, only: str) -> Iterator[str]:
    """Lines that tell of asynchronous runs with a fault every five seconds, and of some without.

    ``only`` is a text in the name of the half that is wanted.
    """
    chance = random.Random(seed)
    setup = Setup("served", "async late", "full")

    def run_until(end_s: float, name: str, *, has_faults: bool) -> tuple[int, int, int]:
        """Runs that ended, their steps, and the faults."""
        runs = steps = faults = 0
        while time.monotonic() < end_s:
            folder = campaign.folder / f"{name}-{runs}"
            flags = ["--max-rows=256", "--epochs=2", "--dcp-save-interval=5"]
            machine = Machine(campaign.served.data_dir, campaign.served)
            machine.recipe = setup.start(campaign.recipes, campaign.served.url, folder, flags)
            stepped_s, strike_s, finished = time.monotonic(), time.monotonic() + 5, 0
            while (code := machine.recipe.code()) != 0:
                if code is not None:
                    ended = " ".join(machine.recipe.output.split())
                    assert has_faults, machine.recipe.output[-3000:]
                    assert code == -signal.SIGKILL or "the same command again" in ended, ended
                    machine.recipe = setup.start(
                        campaign.recipes, campaign.served.url, folder, flags
                    )
                if has_faults and time.monotonic() >= strike_s:
                    victim, pid = chance.choice(sorted(machine.find().items()))
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                        faults += 1
                    if victim == "platform":
                        campaign.served.come_back()
                    strike_s = time.monotonic() + 5
                if (now := count_steps(folder)) != finished:
                    finished, stepped_s = now, time.monotonic()
                assert time.monotonic() - stepped_s < STALLED_S, machine.recipe.output[-3000:]
                time.sleep(0.01)
            assert "Traceback" not in machine.recipe.output, machine.recipe.output[-3000:]
            done = FinishedRun(folder, campaign.served.data_dir / "models" / folder.name)
            assert [record["step"] for record in done.records] == list(range(1, 257))
            runs, steps = runs + 1, steps + len(done.records)
        return runs, steps, faults

    yield "| soak | minutes | runs that ended | steps | faults |"
    yield "|---|---:|---:|---:|---:|"
    if only in (name := "a fault every 5 s"):
        runs, steps, faults = run_until(time.monotonic() + 60 * minutes, "soak", has_faults=True)
        yield f"| {name} | {minutes:g} | {runs} | {steps} | {faults} |"
    if only in (name := "three beside one another, no fault"):
        end_s = time.monotonic() + 60 * minutes
        with ThreadPoolExecutor(3) as pool:
            names = ("beside-1", "beside-2", "beside-3")
            all_three = list(pool.map(lambda name: run_until(end_s, name, has_faults=False), names))
        runs, steps = (sum(found[place] for found in all_three) for place in (0, 1))
        yield f"| {name} | {minutes:g} | {runs} | {steps} | 0 |"


def report(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The lines of both tables."""
    yield "| placement, recipe, training | runs | faults | starts | as if undisturbed |"
    yield "|---|---:|---:|---:|---:|"
    for name in dict.fromkeys(outcome.setup.name for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.setup.name == name]
        faults = sum(len(outcome.faults) for outcome in own)
        starts = sum(outcome.starts for outcome in own)
        right = sum(not outcome.wrong for outcome in own)
        yield f"| {name} | {len(own)} | {faults} | {starts} | {right} of {len(own)} |"
    yield ""
    yield "| fault | number | next step after, median s | longest s |"
    yield "|---|---:|---:|---:|"
    faults = [fault for outcome in outcomes for fault in outcome.faults]
    for name in sorted({fault.name for fault in faults}):
        times = [fault.recovered_s for fault in faults if fault.name == name]
        known = [seconds for seconds in times if seconds is not None]
        if known:
            yield (f"| {name} | {len(times)} | {statistics.median(known):.1f} | {max(known):.1f} |")
    for outcome in outcomes:
        if outcome.wrong:
            faults_told = ", ".join(fault.name for fault in outcome.faults)
            yield f"\ntrial {outcome.number} ({outcome.setup.name}; {faults_told}): {outcome.wrong}"


def command() -> None:
    """Run the campaign and print its tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first trial")
    parser.add_argument("--trials", type=int, help="at most so many")
    parser.add_argument("--only", default="", help="setups, or halves of a soak, with this text")
    parser.add_argument("--soak", type=float, help="minutes of a soak in place of the trials")
    asked = parser.parse_args()
    setups = [setup for setup in SETUPS if asked.only in setup.name]
    end_s = time.monotonic() + 60 * asked.minutes
    folder = Path(tempfile.mkdtemp(prefix="hearth-chaos-"))
    campaign = Campaign(folder, asked.seed)
    outcomes: list[Outcome] = []
    try:
        if asked.soak:
            for line in soak(campaign, asked.soak, asked.seed, asked.only):
                sys.stdout.write(line + "\n")
            return
        number = asked.first
        while time.monotonic() < end_s and number - asked.first != asked.trials:
            outcome = campaign.run(number, setups)
            outcomes.append(outcome)
            faults = ", ".join(fault.name for fault in outcome.faults)
            wrong = f" WRONG: {' '.join(outcome.wrong.split())[-300:]}" if outcome.wrong else ""
            sys.stderr.write(
                f"{number} {outcome.setup.name}: {outcome.seconds:.1f} s, {faults}{wrong}\n"
            )
            number += 1
    finally:
        campaign.close()
        if outcomes:
            sys.stdout.write("\n".join(report(outcomes)) + "\n")
    wrong = [outcome for outcome in outcomes if outcome.wrong]
    if wrong:
        sys.stdout.write(
            f"\nwhat they left is in {folder}; again: python -m tests.chaos.campaign "
            f"--seed {asked.seed} --first {wrong[0].number} --trials 1 --only '{asked.only}'\n"
        )
        sys.exit(1)
    shutil.rmtree(folder)


if __name__ == "__main__":
    command()
