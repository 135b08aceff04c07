"""A crowd at a served platform on which somebody trains: is everybody answered, and how late?

A platform with keys is served. While ``rl_loop`` trains on it, in turn: a client asks for 2,000
completions at once, 50 deployments and trainers are created at once, 500 clients leave in the
middle of their streams, and 500 connections send half a request or nothing. A second client asks
for a short completion again and again meanwhile.

    python -m tests.chaos.load [--scale 1.0]

Standard output is a table; the exit status is 1 when anything was wrong. ``--scale 0.1`` is a tenth
of the crowd.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import os
import resource
import select
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from tests.integration.runs import count_steps
from tests.integration.served import Recipes, Served

from training.quickstart import MODEL

ACCOUNT = "/v1/accounts/me"
CROWD, QUIET = ({"x-api-key": key} for key in ("crowd", "quiet"))
SHORT = {"model": "busy", "prompt": [5, 6, 7], "max_tokens": 4, "seed": 1}
LONG = SHORT | {"max_tokens": 64, "ignore_eos": True}
MOST_TRAINING_PAUSE_S = 60.0


@dataclass
class Crowd:
    """What one kind of crowd got, and what the quiet client saw meanwhile."""

    name: str
    seconds: float = 0.0
    answers: Counter[str] = field(default_factory=Counter[str])
    quiet_s: list[float] = field(default_factory=list[float])
    steps: int = 0
    """That the training took meanwhile."""
    wrong: list[str] = field(default_factory=list[str])

    def line(self) -> str:
        """Its line of the table."""
        answers = ", ".join(f"{count} x {what}" for what, count in sorted(self.answers.items()))
        times = sorted(self.quiet_s)
        late = [statistics.median(times), times[int(0.99 * (len(times) - 1))]] if times else [0, 0]
        late += times[-1:]
        cells = [f"{self.seconds:.1f}", answers, *(f"{1000 * value:.0f}" for value in late)]
        return f"| {self.name} | {' | '.join(cells)} | {self.steps} |"


class Platform:
    """The served platform, its training run, and the two clients."""

    def __init__(self, folder: Path) -> None:
        os.environ["HEARTH_API_KEYS"] = "crowd,quiet,x"
        self.served = Served(folder / "platform", trainer_threads=1, deployment_threads=1)
        self.recipes = Recipes()
        self._folder = folder / "run"
        flags = ["--max-rows=1000", "--epochs=50"]
        self.recipe = self.recipes.start(self.served.url, self._folder, *flags)

    def steps(self) -> int:
        """Finished by the training run."""
        return count_steps(self._folder)

    def close(self) -> None:
        """End everything."""
        self.recipe.send(signal.SIGTERM)
        with contextlib.suppress(AssertionError):
            self.recipe.wait(60)
        self.recipes.close()
        self.served.stop()

    def client(self, headers: dict[str, str]) -> httpx.AsyncClient:
        """A client of the platform, with as many connections as it wants."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.served.url, headers=headers, timeout=300, limits=limits
        )

    def rss_mib(self) -> float:
        """Memory of the platform's own process."""
        return psutil.Process(self.served.pid).memory_info().rss / 2**20


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """How a completion was answered."""
    try:
        answer = await http.post("/inference/v1/completions", json=body)
    except httpx.TransportError as error:
        return type(error).__name__
    if answer.status_code in (429, 503) and "retry-after" not in answer.headers:
        return f"{answer.status_code} without Retry-After"
    return str(answer.status_code)


@contextlib.asynccontextmanager
async def watch(platform: Platform, name: str, crowds: list[Crowd]) -> AsyncIterator[Crowd]:
    """Ask quietly, and look at the training, while a crowd is there."""
    crowd, before, began_s = Crowd(name), platform.steps(), time.monotonic()
    crowds.append(crowd)
    # A process of its own: what it measures is not how busy this one is.
    command = [sys.executable, "-m", "tests.chaos.load", "--quiet", platform.served.url]
    quiet = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert quiet.stdout is not None
    await asyncio.to_thread(quiet.stdout.readline)
    try:
        yield crowd
    finally:
        crowd.seconds = time.monotonic() - began_s
        output, _ = await asyncio.to_thread(quiet.communicate)
        for line in output.splitlines():
            status, seconds = line.split()
            crowd.quiet_s.append(float(seconds))
            if status != "200":
                crowd.wrong.append(f"the quiet client got {status}")
        end_s = time.monotonic() + MOST_TRAINING_PAUSE_S
        while platform.steps() == before and time.monotonic() < end_s:
            await asyncio.sleep(0.1)
        crowd.steps = platform.steps() - before
        if not crowd.steps:
            crowd.wrong.append("the training took no step")
        if platform.recipe.code() is not None:
            crowd.wrong.append(f"the training ended: {platform.recipe.output[-2000:]}")


def ask_quietly(url: str) -> None:
    """Ask for a short completion until standard input ends; print each status and its seconds."""
    print("begins", flush=True)
    with httpx.Client(base_url=url, headers=QUIET, timeout=300) as http:
        while not select.select([sys.stdin], [], [], 0.05)[0]:
            start_s = time.monotonic()
            status = http.post("/inference/v1/completions", json=SHORT).status_code
            print(status, time.monotonic() - start_s, flush=True)


async def flood(platform: Platform, crowd: Crowd, count: int) -> None:
    """So many completions at once."""
    async with platform.client(CROWD) as http:
        crowd.answers.update(await asyncio.gather(*(ask(http, LONG) for _ in range(count))))


async def create(platform: Platform, crowd: Crowd, count: int) -> None:
    """So many trainers and deployments at once, which are then deleted."""
    kinds = ("rlorTrainerJobs?rlorTrainerJobId", "deployments?deploymentId")
    bodies = ({"trainingConfig": {"baseModel": str(MODEL)}}, {"baseModel": str(MODEL)})
    async with platform.client(CROWD) as http:

        async def make(number: int) -> str:
            which = number % 2
            path = f"{ACCOUNT}/{kinds[which]}=crowd-{number}"
            made = await http.post(path, json=bodies[which])
            if not made.is_success:
                return f"create {made.status_code}"
            name = f"{ACCOUNT}/{kinds[which].split('?')[0]}/crowd-{number}"
            states = "JOB_STATE_RUNNING,JOB_STATE_FAILED,READY,FAILED"
            state = "none"
            for _ in range(12):
                found = await http.get(name, params={"waitForState": states, "timeoutS": 25})
                state = found.json()["state"]
                if state in states:
                    break
            await http.delete(name)
            return state

        crowd.answers.update(await asyncio.gather(*(make(number) for number in range(count))))


async def leave(platform: Platform, crowd: Crowd, count: int) -> None:
    """So many clients that leave after the first piece of their stream."""

    async def stream(http: httpx.AsyncClient) -> str:
        body = LONG | {"stream": True, "max_tokens": 200}
        try:
            async with http.stream("POST", "/v1/completions", json=body) as answer:
                async for _ in answer.aiter_raw():
                    return f"left {answer.status_code}"
        except httpx.TransportError as error:
            return type(error).__name__
        return "ended"

    async with platform.client(CROWD) as http:
        crowd.answers.update(await asyncio.gather(*(stream(http) for _ in range(count))))
        # All places are free again: as many as fit are answered at once.
        began_s = time.monotonic()
        after = Counter(await asyncio.gather(*(ask(http, SHORT) for _ in range(64))))
        crowd.answers["200 at once afterwards"] = after["200"]
        if after["200"] != 64 or time.monotonic() - began_s > 30:
            crowd.wrong.append(f"after the storm: {after} in {time.monotonic() - began_s:.0f} s")


async def dawdle(platform: Platform, crowd: Crowd, count: int) -> None:
    """So many connections that send half a head, half a body or nothing; all are ended."""
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-api-key: crowd\r\n"
    pieces = (b"", head, head + b"content-length: 1000\r\n\r\n{")

    async def hold(number: int) -> str:
        reader, writer = await asyncio.open_connection("127.0.0.1", platform.served.port)
        try:
            writer.write(pieces[number % 3])
            async with asyncio.timeout(120):
                answer = await reader.read()
            return answer.split(b"\r\n")[0].decode() or "closed"
        except (TimeoutError, ConnectionError) as error:
            return type(error).__name__
        finally:
            writer.close()

    crowd.answers.update(await asyncio.gather(*(hold(number) for number in range(count))))
    if crowd.answers["TimeoutError"]:
        crowd.wrong.append("connections were held for two minutes")


async def swell(platform: Platform, crowd: Crowd, count: int) -> None:
    """Bodies that are too long, or that would be too long once they were decompressed."""
    bomb = gzip.compress(b" " * 2**28)
    before_mib = platform.rss_mib()
    async with platform.client(CROWD) as http:

        async def send(number: int) -> str:
            headers = {"content-encoding": "gzip"} if number % 2 else {}
            body = bomb if number % 2 else b" " * 2**27
            try:
                answer = await http.post("/v1/completions", content=body, headers=headers)
            except httpx.TransportError:
                return "connection closed"
            return str(answer.status_code)

        crowd.answers.update(await asyncio.gather(*(send(number) for number in range(count))))
    grown_mib = platform.rss_mib() - before_mib
    if grown_mib > 300:
        crowd.wrong.append(f"the platform grew by {grown_mib:.0f} MiB")


async def run(platform: Platform, scale: float) -> list[Crowd]:
    """All crowds, one after the other."""
    async with platform.client(QUIET) as http:
        made = await http.post(f"{ACCOUNT}/deployments?deploymentId=busy", json=_BUSY)
        made.raise_for_status()
        ready = {"waitForState": "READY,FAILED", "timeoutS": 25}
        found = await http.get(f"{ACCOUNT}/deployments/busy", params=ready)
        assert found.json()["state"] == "READY", found.text
    while not platform.steps():
        await asyncio.sleep(0.05)
    crowds: list[Crowd] = []
    kinds: dict[str, tuple[Callable[[Platform, Crowd, int], Awaitable[None]], int]] = {
        "completions at once": (flood, 2000),
        "creates at once": (create, 50),
        "streams left": (leave, 500),
        "slow connections": (dawdle, 500),
        "bodies too long": (swell, 40),
    }
    async with watch(platform, "nobody else", crowds):
        await asyncio.sleep(max(2.0, 10 * scale))
    for name, (come, most) in kinds.items():
        count = max(2, round(most * scale))
        async with watch(platform, f"{count} {name}", crowds) as crowd:
            await come(platform, crowd, count)
            crowd.wrong += [f"answered with {odd}" for odd in crowd.answers.keys() - _FINE]
    return crowds


_BUSY = {"baseModel": str(MODEL)}
_SLOW = {"closed", "HTTP/1.1 408 Request Timeout", "ConnectionResetError"}
_FINE = _SLOW | {
    *("200", "400", "413", "200 at once afterwards", "connection closed"),
    *("left 200", "READY", "JOB_STATE_RUNNING"),
    # Too many for this machine's limits, with Retry-After.
    *("429", "503", "left 429", "left 503", "create 429", "create 503"),
}
"""How a request of a crowd may be answered; anything else is wrong."""


def command() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--quiet", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.quiet:
        ask_quietly(asked.quiet)
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))
    with tempfile.TemporaryDirectory(prefix="hearth-load-") as folder:
        platform = Platform(Path(folder))
        try:
            crowds = asyncio.run(run(platform, asked.scale))
            log = platform.served.log
        finally:
            platform.close()
    sys.stdout.write("| crowd | s | its answers | quiet p50, ms | p99, ms | longest | steps |\n")
    sys.stdout.write("|---|---:|---|---:|---:|---:|---:|\n")
    sys.stdout.writelines(crowd.line() + "\n" for crowd in crowds)
    wrong = [f"{crowd.name}: {what}" for crowd in crowds for what in sorted(set(crowd.wrong))]
    if "Traceback" in log:
        wrong.append("a traceback in the platform's log: " + log[log.index("Traceback") :][:3000])
    sys.stdout.writelines(f"\nwrong: {line}\n" for line in wrong)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    command()
