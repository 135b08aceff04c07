"""How far the design goes: ``async_rl_loop`` at 8 to 1,024 GPUs, simulated from measured constants.

Events of one run are simulated: rows are admitted by the recipe's own staleness gate, completions
are sampled on replicas that slow down as they fill, answers go through the one gateway and then
through the one recipe process, groups are trained as they come, and every step ends with a weight
sync that overlaps with the next batch. The sync waits until running completions have ended, while
new ones wait for it, or swaps the weights amid them (``--in-flight``). Trainers of several ranks
keep no graph between two requests, so a loss of the recipe costs them a second forward pass.
What a sample costs on its way, and what a byte of weights costs, is measured on this machine first
(``scale_constants.py``). What a GPU does is estimated from its datasheet
(``hearth.planning.rates``): 8 billion parameters in bfloat16 on H100s by default.
``scale_check.py`` compares the simulation with measured runs.

    python benchmarks/scale_simulation.py [--gpus 8 64 256 1024] [--constants FILE] [--json]

Not in it: a reward's own computing, tools that rollouts wait for, machines that fail.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from hearth.planning.architecture import Architecture
from hearth.planning.memory import TrainerSetting
from hearth.planning.plan import MOST_REPLICAS
from hearth.planning.rates import Gpu, training_tokens_per_s
from training.rollouts.staleness import GateLimits, StalenessGate

MODEL = Architecture(
    model_type="qwen3",
    parameters=8_190_735_360,
    outer_parameters=1_244_663_808,
    layer_parameters=192_946_432,
    largest_tensor=622_329_856,
    lookup_parameters=622_329_856,
    num_layers=36,
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    inner=12288,
    vocab=151936,
    has_head_norms=True,
    cache_width=2 * 8 * 128,
    cache_heads=8,
    cached_layers=36,
)
"""Qwen3-8B."""
ROWS = 256
"""Completions that a GPU samples at a time."""
SPLITS = (1, 2, 4, 8)
"""GPUs of a replica."""
MACHINE = 8
"""GPUs of a machine, which loads weights once for all of them."""
FULL = 0.75
"""Share of the time from which on something counts as what holds up the rest."""
WARM_UP = 2
"""Steps left out at the start."""

Then = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """What was measured of the platform's own work."""

    recipe_s: float
    """CPU seconds of the recipe process for a sample, whatever its length."""
    recipe_token_s: float
    """The same for each of its tokens."""
    gateway_s: float
    gateway_token_s: float
    answer_bytes_per_token: float
    """JSON of a completion's answer."""
    datum_bytes_per_token: float
    """JSON of what is sent to the trainer for a sample."""
    save_s_per_byte: float
    """Seconds to make and write a delta, for each byte of the whole weights."""
    load_s_per_byte: float
    """Seconds to read, prove and take it, for each byte of the whole weights."""
    delta_share: float
    """Bytes of a delta over those of the whole weights."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """What runs, how fast it is, and what a sample costs on its way. Seconds and tokens."""

    replicas: int
    ranks: int = 1
    gpus_of_a_replica: int = 1
    rows: int = 256
    """Completions that a replica samples at a time; more wait."""
    step_s: float
    """What a decoding step takes however many rows it has."""
    row_s: float
    """What each row adds to it."""
    least_rows: int = 0
    """Rows that a step of fewer takes as long as."""
    training_s: float
    """Seconds of a token with all of the trainer's ranks."""
    optimizer_s: float = 0.2
    gateway_s: float
    gateway_token_s: float = 0.0
    recipe_s: float
    recipe_token_s: float = 0.0
    save_s: float = 0.0
    """The trainer's part of a weight sync; it does nothing else meanwhile."""
    transfer_s: float = 0.0
    load_s: float = 0.0
    """Reading and proving it, beside the sampling."""
    swap_s: float = 0.0
    """The replicas' pause."""
    in_flight: bool = False
    """Whether running completions go on under the new weights (``in_flight_weight_updates``).
    Else the weights are swapped when all have ended, and new ones wait."""
    cores: float = math.inf
    """Processors that trainer, replicas, gateway and recipe share; on GPUs each has its own."""
    training_alone: float = 1.0
    """How many times as fast the trainer computes while nobody else does, with all processors."""
    sampling_alone: float = 1.0
    """A replica likewise."""
    prompts: int
    """Rows of a step."""
    group: int = 16
    late: int = 1
    """``max_head_offpolicy_versions``."""
    prompt_tokens: int = 256
    median_tokens: float = 1500.0
    """Of a completion. Lengths are log-normal, as those of reasoning models roughly are."""
    sigma: float = 0.8
    longest: int = 8192
    """Completions are cut there."""

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return self.prompts * self.group

    @property
    def mean_tokens(self) -> float:
        """Of a sample with its prompt, as sampled."""
        return self.prompt_tokens + statistics.fmean(self.lengths(20_000, seed=0))

    @property
    def drawing_per_s(self) -> float:
        """Tokens a second of all replicas, when what is in flight is divided evenly."""
        rows = min(self.rows, (1 + self.late) * self.batch / self.replicas)
        return self.replicas * rows / (self.step_s + self.row_s * rows)

    def lengths(self, count: int, *, seed: int) -> Iterator[int]:
        """Sampled tokens of that many completions."""
        chance = random.Random(seed)
        for _ in range(count):
            sampled = chance.lognormvariate(math.log(self.median_tokens), self.sigma)
            yield max(1, min(self.longest, round(sampled)))


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run after its warm-up. Shares are of the time."""

    samples_per_s: float
    step_s: float
    samplers: float
    """Tokens sampled over those that the replicas sample when they are evenly full."""
    trainer: float
    recipe: float
    gateway: float
    sync: float
    """Time in which a weight sync was under way, draining included."""
    drain: float
    """Time in which a weight sync waited for running completions."""
    sync_s: float
    mean_offset: float
    """Versions by which a row was late when it was trained."""
    most_offset: int
    submitted: int
    """Samples since the beginning; each is one of the following two at the end."""
    trained: int
    unresolved: int

    @property
    def bottleneck(self) -> str:
        """What is fullest; where nothing is full, batches wait for completions that are due."""
        shares = {
            "samplers": self.samplers,
            "trainer": self.trainer,
            "recipe process": self.recipe,
            "gateway": self.gateway,
            "weight sync": self.sync,
        }
        fullest = max(shares, key=lambda name: shares[name])
        if shares[fullest] < FULL:
            return "long completions"
        return "drain" if fullest == "weight sync" and self.drain > self.sync / 2 else fullest


class Clock:
    """Simulated time, and what is to happen when."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Then]] = []
        self._number = 0

    def after(self, seconds: float, then: Then) -> None:
        """Have ``then`` called so much later; of one moment, in the order of the calls."""
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, then))

    def run(self, is_over: Callable[[], bool]) -> None:
        """Let things happen until it is over, or nothing is left."""
        while self._events and not is_over():
            self.now, _, then = heapq.heappop(self._events)
            then()


class Cores:
    """Processors that all who compute share evenly."""

    def __init__(self, clock: Clock, count: float) -> None:
        self._clock = clock
        self._count = count
        self._users: list[Computer] = []
        self._busy = 0

    def add(self, user: Computer) -> None:
        """One more that computes at times."""
        self._users.append(user)

    def share(self) -> None:
        """Divide the processors anew, since somebody begins or ends to compute."""
        if math.isinf(self._count):
            return
        busy = sum(user.processes for user in self._users if user.is_busy)
        if busy == self._busy:
            return
        for user in self._users:
            user.advance()
        self._busy = busy
        for user in self._users:
            user.expect()

    def rate(self, alone: float) -> float:
        """Work that one who computes does in a second; ``alone``, while nobody else does."""
        return alone if self._busy <= 1 else min(1.0, self._count / self._busy)


class Computer:
    """What does work at the rate that the processors allow, and then calls."""

    def __init__(self, clock: Clock, cores: Cores, processes: int = 1, alone: float = 1.0) -> None:
        self.processes = processes
        self._alone = alone
        self._clock = clock
        self._cores = cores
        self._seen_s = 0.0
        self._number = 0
        cores.add(self)

    @property
    def is_busy(self) -> bool:
        """Whether it computes now."""
        raise NotImplementedError

    def advance(self) -> None:
        """Note what was done until now."""
        if self.is_busy:
            self.work((self._clock.now - self._seen_s) * self._cores.rate(self._alone))
        self._seen_s = self._clock.now

    def expect(self) -> None:
        """Look again when the next work ends; what was expected before is forgotten."""
        self._number += 1
        if self.is_busy:
            seconds = max(0.0, self.left_s()) / self._cores.rate(self._alone)
            self._clock.after(seconds, functools.partial(self._end, self._number))

    def work(self, seconds: float) -> None:
        """Do that much work."""
        raise NotImplementedError

    def left_s(self) -> float:
        """Work until the next end."""
        raise NotImplementedError

    def end(self) -> Then | None:
        """Take out what has ended, and give what is to be called."""
        raise NotImplementedError

    def _end(self, number: int) -> None:
        if number != self._number:
            return
        self.advance()
        then = self.end()
        self.expect()
        self._cores.share()
        if then is not None:
            then()


class Line(Computer):
    """One server, first come first served."""

    def __init__(self, clock: Clock, cores: Cores, processes: int = 1, alone: float = 1.0) -> None:
        super().__init__(clock, cores, processes, alone)
        self._works: deque[tuple[float, Then | None]] = deque()
        self._done_s = 0.0
        """Of the first work."""
        self._busy_s = 0.0

    @property
    def is_busy(self) -> bool:
        return bool(self._works)

    @property
    def busy_s(self) -> float:
        """Seconds in which it had work so far."""
        return self._busy_s + (self._clock.now - self._seen_s if self.is_busy else 0.0)

    def put(self, work_s: float, then: Then | None = None) -> None:
        """Do so much work when all before it is done."""
        self.advance()
        self._works.append((work_s, then))
        if len(self._works) == 1:
            self.expect()
            self._cores.share()

    def advance(self) -> None:
        """Note what was done until now."""
        self._busy_s += self._clock.now - self._seen_s if self.is_busy else 0.0
        super().advance()

    def work(self, seconds: float) -> None:
        self._done_s += seconds

    def left_s(self) -> float:
        return self._works[0][0] - self._done_s

    def end(self) -> Then | None:
        self._done_s = 0.0
        return self._works.popleft()[1]


class Replica(Computer):
    """Rows that are sampled side by side, each as fast as the others; more of them wait."""

    def __init__(self, clock: Clock, fleet: Fleet, cores: Cores) -> None:
        super().__init__(clock, cores, alone=fleet.sampling_alone)
        self._fleet = fleet
        self._running: list[tuple[float, int, int, Then]] = []
        """By the progress at which they end."""
        self._waiting: deque[tuple[int, Then]] = deque()
        self._progress = 0.0
        """Tokens that a row has sampled which ran from the beginning."""
        self._order = 0
        self._is_paused = self._is_shut = False
        self.when_idle: Then | None = None
        """Is called once when nothing runs any more."""
        self.sampled = 0
        """Tokens of the completions that ended."""

    @property
    def is_busy(self) -> bool:
        return bool(self._running) and not self._is_paused

    def add(self, tokens: int, then: Then) -> None:
        """Sample a completion."""
        self.advance()
        self._waiting.append((tokens, then))
        self._begin()
        self.expect()
        self._cores.share()

    def drain(self, then: Then) -> None:
        """Begin no more completions, and call when those that run have ended."""
        self._is_shut, self.when_idle = True, then
        self._tell_idle()

    def pause(self, seconds: float, then: Then) -> None:
        """Sample nothing for a while; then all that waits may begin."""
        self.advance()
        self._is_paused = True
        self.expect()
        self._cores.share()
        self._clock.after(seconds, functools.partial(self._resume, then))

    def _resume(self, then: Then) -> None:
        self.advance()
        self._is_paused = self._is_shut = False
        self._begin()
        self.expect()
        self._cores.share()
        then()

    def _begin(self) -> None:
        while self._waiting and len(self._running) < self._fleet.rows and not self._is_shut:
            tokens, then = self._waiting.popleft()
            self._order += 1
            heapq.heappush(self._running, (self._progress + tokens, self._order, tokens, then))

    def _row_s(self) -> float:
        """Seconds of a token of each row."""
        rows = max(len(self._running), self._fleet.least_rows)
        return self._fleet.step_s + self._fleet.row_s * rows

    def work(self, seconds: float) -> None:
        self._progress += seconds / self._row_s()

    def left_s(self) -> float:
        return (self._running[0][0] - self._progress) * self._row_s()

    def end(self) -> Then | None:
        _, _, tokens, then = heapq.heappop(self._running)
        self.sampled += tokens
        self._begin()
        if not self._running and self.when_idle is not None:
            self._clock.after(0.0, self._tell_idle)
        return then

    def _tell_idle(self) -> None:
        if not self._running and self.when_idle is not None:
            then, self.when_idle = self.when_idle, None
            then()


class Pool:
    """Replicas behind one deployment: a completion goes to one that has least to do."""

    def __init__(self, clock: Clock, fleet: Fleet, cores: Cores) -> None:
        self._fleet = fleet
        self._replicas = [Replica(clock, fleet, cores) for _ in range(fleet.replicas)]
        self._loads = [0] * fleet.replicas
        self._clock = clock
        self.drained_s = 0.0
        """Seconds in which swaps waited for running completions."""

    @property
    def sampled(self) -> int:
        """Tokens of all completions that ended."""
        return sum(replica.sampled for replica in self._replicas)

    def add(self, tokens: int, then: Then) -> None:
        """Sample a completion."""
        place = self._loads.index(min(self._loads))
        self._loads[place] += 1
        self._replicas[place].add(tokens, functools.partial(self._ended, place, then))

    def swap(self, then: Then) -> None:
        """Swap the weights of all replicas at one time, and call when they sample again.

        Without in-flight updates all completions that run anywhere end first.
        """
        pause = functools.partial(self._pause, self._clock.now, then)
        if self._fleet.in_flight:
            pause()
            return
        idle = _count_down(len(self._replicas), pause)
        for replica in self._replicas:
            replica.drain(idle)

    def _pause(self, asked_s: float, then: Then) -> None:
        self.drained_s += self._clock.now - asked_s
        resumed = _count_down(len(self._replicas), then)
        for replica in self._replicas:
            replica.pause(self._fleet.swap_s, resumed)

    def _ended(self, place: int, then: Then) -> None:
        self._loads[place] -= 1
        then()


def _count_down(count: int, then: Then) -> Then:
    """What calls ``then`` when it was called so often."""
    left = iter(range(count - 1, -1, -1))

    def note() -> None:
        if next(left) == 0:
            then()

    return note


class Loop:
    """One run of the recipe."""

    def __init__(self, fleet: Fleet, seed: int = 0) -> None:
        self.fleet = fleet
        self.clock = Clock()
        self.gate = StalenessGate(
            GateLimits(
                prompt_groups_per_step=fleet.prompts,
                completions_per_prompt=fleet.group,
                max_head_offpolicy_versions=fleet.late,
            )
        )
        cores = Cores(self.clock, fleet.cores)
        self.gateway, self.recipe = Line(self.clock, cores), Line(self.clock, cores)
        self.trainer = Line(self.clock, cores, fleet.ranks, fleet.training_alone)
        self.pool = Pool(self.clock, fleet, cores)
        self.submitted = self.trained = 0
        """Samples."""
        self.offsets: list[int] = []
        """Versions by which each row was late that was trained."""
        self.syncing_s = 0.0
        self._lengths = self._sample_lengths(seed)
        self._rows: dict[int, list[int]] = {}
        """Tokens of the samples of each row that are there."""
        self._is_publishing = self._wants_to_publish = self._is_full = False
        self._submit()

    def run(self, steps: int) -> None:
        """Go on until so many batches are trained and served."""
        self.clock.run(lambda: self.gate.version >= steps)

    def _sample_lengths(self, seed: int) -> Iterator[int]:
        while True:
            yield from self.fleet.lengths(4096, seed=seed)
            seed += 1

    def _submit(self) -> None:
        for _ in range(self.gate.rows_to_submit()):
            row = self.submitted // self.fleet.group
            self.gate.submit(row)
            self._rows[row] = []
            for _ in range(self.fleet.group):
                self.submitted += 1
                tokens = next(self._lengths)
                self.pool.add(tokens, functools.partial(self._answered, row, tokens))

    def _answered(self, row: int, sampled: int) -> None:
        fleet, tokens = self.fleet, self.fleet.prompt_tokens + sampled
        arrived = functools.partial(self._arrived, row, tokens)
        taken_s = fleet.recipe_s + tokens * fleet.recipe_token_s
        work_s = fleet.gateway_s + tokens * fleet.gateway_token_s
        self.gateway.put(work_s, functools.partial(self.recipe.put, taken_s, arrived))

    def _arrived(self, row: int, tokens: int) -> None:
        self._rows[row].append(tokens)
        if len(self._rows[row]) == self.fleet.group:
            self.gate.finish(row)
            self._take()

    def _take(self) -> None:
        """Train what the batch may have of what is there; the optimizer steps when it is full."""
        if self._is_full:
            return
        for taken in self.gate.take():
            self.offsets.append(taken.offset)
            tokens = self._rows.pop(taken.row)
            self.trained += len(tokens)
            self.trainer.put(sum(tokens) * self.fleet.training_s)
        if self.gate.places_left() == 0:
            self._is_full = True
            self.trainer.put(self.fleet.optimizer_s, self._stepped)

    def _stepped(self) -> None:
        if self._is_publishing:
            self._wants_to_publish = True
        else:
            self._publish()

    def _publish(self) -> None:
        self._is_publishing, self._is_full = True, False
        self.gate.end_batch()
        fleet = self.fleet
        begun_s = self.clock.now
        self.trainer.put(fleet.save_s, functools.partial(self._saved, begun_s))
        self._take()

    def _saved(self, begun_s: float) -> None:
        swap = functools.partial(self.pool.swap, functools.partial(self._served, begun_s))
        self.clock.after(self.fleet.transfer_s + self.fleet.load_s, swap)

    def _served(self, begun_s: float) -> None:
        self.syncing_s += self.clock.now - begun_s
        self._is_publishing = False
        self.gate.publish()
        self._submit()
        self._take()
        if self._wants_to_publish:
            self._wants_to_publish = False
            self._publish()


def simulate(fleet: Fleet, steps: int = 10, seed: int = 0) -> Report:
    """A run of so many steps after the warm-up."""
    loop = Loop(fleet, seed)
    loop.run(WARM_UP)
    lines = {"trainer": loop.trainer, "recipe": loop.recipe, "gateway": loop.gateway}
    busy = {name: line.busy_s for name, line in lines.items()}
    begun_s, sampled, trained = loop.clock.now, loop.pool.sampled, loop.trained
    syncing_s, drained_s = loop.syncing_s, loop.pool.drained_s
    num_offsets = len(loop.offsets)
    loop.run(WARM_UP + steps)
    seconds = loop.clock.now - begun_s
    shares = {name: (line.busy_s - busy[name]) / seconds for name, line in lines.items()}
    offsets = loop.offsets[num_offsets:]
    return Report(
        samples_per_s=(loop.trained - trained) / seconds,
        step_s=seconds / steps,
        samplers=(loop.pool.sampled - sampled) / seconds / fleet.drawing_per_s,
        **shares,
        sync=(loop.syncing_s - syncing_s) / seconds,
        drain=(loop.pool.drained_s - drained_s) / seconds,
        sync_s=(loop.syncing_s - syncing_s) / steps,
        mean_offset=statistics.fmean(offsets),
        most_offset=max(offsets),
        submitted=loop.submitted,
        trained=loop.trained,
        unresolved=loop.gate.unresolved * fleet.group,
    )


def fleet_of(gpus: int, found: Constants, asked: argparse.Namespace) -> Fleet:
    """What stands on so many GPUs: divided so that drawing and training take equally long."""
    gpu = Gpu()
    prompts = max(asked.least_prompts, gpus)
    weights = 2 * MODEL.parameters
    lookup = Fleet(
        replicas=1,
        step_s=1.0,
        row_s=1.0,
        training_s=1.0,
        gateway_s=0.0,
        recipe_s=0.0,
        prompts=prompts,
        group=asked.group,
        late=asked.late,
        in_flight=asked.in_flight,
        median_tokens=asked.median_tokens,
        sigma=asked.sigma,
        longest=asked.longest,
    )
    mean = lookup.mean_tokens
    read_per_s = gpu.decoding_share * gpu.bytes_per_s
    machines = -(-gpus // MACHINE)
    step_s = weights / read_per_s
    row_s = mean / 2 * MODEL.kv_bytes_per_token(2) / read_per_s
    values = asdict(lookup) | {
        "gateway_s": found.gateway_s,
        "gateway_token_s": found.gateway_token_s,
        "recipe_s": found.recipe_s,
        "recipe_token_s": found.recipe_token_s,
        "save_s": weights * found.save_s_per_byte / asked.sync_speedup,
        "transfer_s": machines * weights * found.delta_share / (asked.network_gb_per_s * 1e9),
        "load_s": weights * found.load_s_per_byte / asked.sync_speedup,
    }
    setting = TrainerSetting(recompute_above=1)
    trained_per_s = training_tokens_per_s(MODEL, setting, round(mean), gpu)
    passes = 3 + setting.recomputes

    def divided() -> Iterator[Fleet]:
        for split in SPLITS:
            for ranks in range(1, gpus - split + 1):
                replicas = (gpus - ranks) // split
                faster = split * gpu.split_share ** math.log2(split)
                if replicas > MOST_REPLICAS:
                    continue
                own = {
                    "ranks": ranks,
                    "replicas": replicas,
                    "gpus_of_a_replica": split,
                    "rows": ROWS * split,
                    "step_s": step_s / faster,
                    "row_s": row_s / faster,
                    "swap_s": weights / split / (asked.link_gb_per_s * 1e9),
                    "training_s": (1 + (ranks > 1) / passes) / (trained_per_s * ranks),
                }
                yield Fleet(**(values | own))

    def slower(fleet: Fleet) -> float:
        return max(mean * fleet.training_s, (mean - fleet.prompt_tokens) / fleet.drawing_per_s)

    return min(divided(), key=slower)


def table(reports: dict[int, tuple[Fleet, Report]]) -> str:
    """One row for each number of GPUs."""
    lines = [
        "| GPUs | ranks + replicas x GPUs | samples a step | samples/s | step s | samplers "
        "| trainer | recipe process | gateway | sync | drain | sync s | mean, most late "
        "| bottleneck |",
        "|---:|---:|---:|---:|---:|" + "---:|" * 8 + "---|",
    ]
    for gpus, (fleet, report) in reports.items():
        lines.append(
            f"| {gpus:,} | {fleet.ranks} + {fleet.replicas} x {fleet.gpus_of_a_replica} "
            f"| {fleet.batch:,} "
            f"| {report.samples_per_s:,.1f} | {report.step_s:.1f} | {report.samplers:.2f} "
            f"| {report.trainer:.2f} | {report.recipe:.2f} "
            f"| {report.gateway:.2f} | {report.sync:.2f} | {report.drain:.2f} "
            f"| {report.sync_s:.1f} | {report.mean_offset:.2f}, {report.most_offset} "
            f"| {report.bottleneck} |"
        )
    return "\n".join(lines)


def constants_text(found: Constants) -> str:
    """What was measured, and what it alone would allow."""
    return (
        f"recipe process: {1e3 * found.recipe_s:.2f} ms a sample and "
        f"{1e6 * found.recipe_token_s:.2f} us a token; gateway: {1e3 * found.gateway_s:.2f} ms and "
        f"{1e6 * found.gateway_token_s:.2f} us\n"
        f"bytes a token: {found.answer_bytes_per_token:.1f} of an answer, "
        f"{found.datum_bytes_per_token:.1f} of a datum\n"
        f"weight sync, for each GB of weights: {1e9 * found.save_s_per_byte:.2f} s to save a delta "
        f"of {1e3 * found.delta_share:.0f} MB, {1e9 * found.load_s_per_byte:.2f} s to load it"
    )


def read_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line; defaults are the table's in RESULTS.md."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 256, 1024])
    parser.add_argument("--steps", type=int, default=10, help="after the warm-up")
    parser.add_argument("--constants", type=Path, help="JSON of an earlier run's; else measured")
    parser.add_argument("--json", action="store_true", help="one JSON object, nothing else")
    parser.add_argument("--group", type=int, default=16, help="completions of a prompt")
    parser.add_argument(
        "--least-prompts", type=int, default=32, help="of a step; from there on one for each GPU"
    )
    parser.add_argument("--late", type=int, default=1, help="max_head_offpolicy_versions")
    parser.add_argument("--in-flight", action="store_true", help="in_flight_weight_updates")
    parser.add_argument("--median-tokens", type=float, default=1500.0, help="of a completion")
    parser.add_argument("--sigma", type=float, default=0.8, help="of its length's logarithm")
    parser.add_argument("--longest", type=int, default=8192, help="tokens of a completion")
    parser.add_argument(
        "--network-gb-per-s",
        type=float,
        default=12.5,
        help="at which the machines together read snapshots from where they are kept (100 Gbit/s)",
    )
    parser.add_argument(
        "--link-gb-per-s",
        type=float,
        default=50.0,
        help="from a machine's memory to one GPU, while it samples nothing",
    )
    parser.add_argument(
        "--sync-speedup",
        type=float,
        default=1.0,
        help="of saving and loading over this machine's two threads",
    )
    return parser.parse_args(arguments)


def command() -> None:
    """Measure, simulate and print the table."""
    asked = read_arguments()
    if asked.constants is not None:
        found = Constants(**orjson.loads(asked.constants.read_bytes()))
        heading = f"constants of {asked.constants}"
    else:
        from scale_constants import heading as measured_on
        from scale_constants import measure

        heading = measured_on()
        found = Constants(**measure())
    reports: dict[int, tuple[Fleet, Report]] = {}
    for gpus in asked.gpus:
        fleet = fleet_of(gpus, found, asked)
        reports[gpus] = fleet, simulate(fleet, asked.steps)
    if asked.json:
        runs = [
            {
                "gpus": gpus,
                "fleet": asdict(fleet),
                **asdict(report),
                "bottleneck": report.bottleneck,
            }
            for gpus, (fleet, report) in reports.items()
        ]
        said = orjson.dumps({"constants": asdict(found), "runs": runs}).decode()
        sys.stdout.write(f"{said}\n")
        return
    sys.stdout.write(f"{heading}\n\n{constants_text(found)}\n\n{table(reports)}\n")


if __name__ == "__main__":
    command()
