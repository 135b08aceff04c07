"""The servers of a deployment: started, watched, replaced when they die, given requests.

All on one event loop. Whoever draws takes a replica and gives it back; a replica that dies loses
what it ran, which its drawers hear of as ``LostError`` and draw again elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from hearth.errors import ConfigError, EngineError, RequestError
from hearth.inference.vllm.balancing import Lane, choose
from hearth.inference.vllm.client import LostError, VllmClient
from hearth.inference.vllm.server import ServerPlan, explain_start, is_port_taken
from hearth.sidecars import ExitReport, Sidecar, Sidecars

logger = logging.getLogger(__name__)

MOST_RESTARTS = 3
"""A replica that dies more often within ``RESTART_WINDOW_S`` is given up, and the deployment."""
RESTART_WINDOW_S = 600.0
SILENT_S = 60.0
"""A server that runs and does not answer for so long is ended."""
_LOOK_S = 0.1
_ASK_S = 5.0
"""How often a server that nobody doubts is asked whether it is well."""
_END_S = 10.0
"""How long a server that has failed may take to end."""
_UNWIND_S = 0.5
"""How long what runs on a server that is let go may take to end by itself."""
_MOST_PORTS = 3

T = TypeVar("T")


class Replica:
    """One place for a server; servers that die there follow each other."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.sidecar: Sidecar | None = None
        self._client: VllmClient | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self.silent_since_s: float | None = None
        """Since when it has not answered; None while it does."""
        self.serves = False
        """Whether its server has what the deployment serves, and takes part in weight syncs."""

    @property
    def name(self) -> str:
        """Of its process."""
        return f"replica-{self.lane.number}"

    @property
    def client(self) -> VllmClient:
        """The server that stands here.

        Raises:
            LostError: there is none now.
        """
        if self._client is None:
            raise LostError(f"{self.name} is not running")
        return self._client

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The outcome of ``work`` on this server.

        Raises:
            LostError: the server died, or ``interrupt`` was called.
        """
        task = asyncio.create_task(work)
        self._work.add(task)
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            # A second time would end it while it closes its connection.
            if not task.cancelling():
                task.cancel()
            raise
        finally:
            task.add_done_callback(self._work.discard)
        if task.cancelled():
            raise LostError(f"{self.name} was interrupted")
        return task.result()

    def interrupt(self) -> None:
        """End what runs here; it is drawn again."""
        for task in self._work:
            if not task.cancelling():
                task.cancel()

    async def connect(self, sidecar: Sidecar, token: str, timeout_s: float) -> None:
        """Take a server that was started and asks for ``token``; what it is told to do may take
        ``timeout_s``."""
        await self.disconnect()
        self.sidecar = sidecar
        self._client = VllmClient(f"http://{sidecar.host}:{sidecar.port}", token, timeout_s)
        self.silent_since_s = None
        self.lane.forget()

    async def disconnect(self) -> None:
        """Let go of the server; what ran on it is lost."""
        self.serves = self.lane.is_open = False
        client, self._client = self._client, None
        # What a dead server ran ends by itself, and lets go of its connection.
        if self._work:
            await asyncio.wait(list(self._work), timeout=_UNWIND_S)
        self.interrupt()
        if self._work:
            await asyncio.wait(list(self._work))
        if client is not None:
            await client.close()


class Fleet:
    """The replicas of one deployment.

    ``bring_up`` makes a new server serve what the deployment serves; it is called with ``lock``
    held, and so is whatever changes what is served.
    """

    def __init__(
        self,
        plan: ServerPlan,
        sidecars: Sidecars,
        count: int,
        *,
        bring_up: Callable[[Replica], Awaitable[None]],
        on_failed: Callable[[EngineError], None],
    ) -> None:
        self.lock = asyncio.Lock()
        self._plan = plan
        self._sidecars = sidecars
        self._bring_up = bring_up
        self._on_failed = on_failed
        self._replicas = [Replica(Lane(number, plan.max_batch_size)) for number in range(count)]
        self._waiting: deque[tuple[Sequence[int], asyncio.Future[Replica]]] = deque()
        self._is_gated = False
        self._idle = asyncio.Event()
        self._failure: EngineError | None = None
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all servers, side by side, and look after them from then on.

        Raises:
            ConfigError: one does not start; the message says why and what to do.
        """
        await asyncio.gather(*map(self._begin, self._replicas))
        for replica in self._replicas:
            self._watches.append(asyncio.create_task(self._look_after(replica)))

    async def close(self) -> None:
        """End all servers."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*map(self.discard, self._replicas))

    def ready(self) -> list[Replica]:
        """Replicas that serve what the deployment serves."""
        return [replica for replica in self._replicas if replica.serves]

    async def take(self, blocks: Sequence[int]) -> Replica:
        """A replica for a prompt, once one has room; to be given back.

        Raises:
            EngineError: the deployment was given up.
        """
        if self._failure is not None:
            raise self._failure
        waiter: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append((blocks, waiter))
        self._hand_out()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.give(waiter.result())
            raise

    def give(self, replica: Replica) -> None:
        """Have done with a replica."""
        replica.lane.running -= 1
        self._hand_out()

    def doubt(self, replica: Replica) -> None:
        """Give a replica no more requests until it answers again."""
        if replica.lane.is_open:
            replica.lane.is_open = False
            replica.silent_since_s = time.monotonic()

    def shut(self) -> None:
        """Hand out no replica until ``open``."""
        self._is_gated = True

    def open(self) -> None:
        """Hand out replicas again."""
        self._is_gated = False
        self._hand_out()

    async def idle(self) -> None:
        """Return once nothing runs."""
        while any(replica.lane.running for replica in self._replicas):
            self._idle.clear()
            await self._idle.wait()

    def interrupt(self) -> None:
        """End all that runs; it is drawn again."""
        for replica in self._replicas:
            replica.interrupt()

    async def discard(self, replica: Replica) -> None:
        """End a server; another will take its place."""
        await replica.disconnect()
        if replica.sidecar is not None:
            await asyncio.to_thread(replica.sidecar.stop)

    def _hand_out(self) -> None:
        if not any(replica.lane.running for replica in self._replicas):
            self._idle.set()
        lanes = {replica.lane: replica for replica in self._replicas}
        while self._waiting and not self._is_gated:
            blocks, waiter = self._waiting[0]
            if waiter.done():
                self._waiting.popleft()
                continue
            lane = choose(lanes, blocks)
            if lane is None:
                return
            self._waiting.popleft()
            lane.running += 1
            lane.remember(blocks)
            waiter.set_result(lanes[lane])

    async def _begin(self, replica: Replica) -> None:
        """Start a server at a place, and have it serve what the others serve.

        Raises:
            ConfigError: it does not start.
            EngineError: it does not serve; it is ended.
        """
        sidecar = await self._started(replica)
        try:
            async with self.lock:
                await self._bring_up(replica)
                replica.serves = replica.lane.is_open = True
        except (LostError, EngineError, RequestError) as error:
            # Its process may know better why, and ends by itself then.
            report = await _ended(sidecar)
            await self.discard(replica)
            if report is not None:
                raise self._not_started(report) from None
            raise EngineError(
                f"{replica.name} must serve what the deployment serves, got: {error}"
            ) from error
        self._hand_out()

    async def _started(self, replica: Replica) -> Sidecar:
        """A server that answers, at a port that was free.

        Raises:
            ConfigError: it does not start.
        """
        attempts = 0
        while True:
            sidecar, report = await self._try(replica)
            if report is None:
                return sidecar
            attempts += 1
            if attempts == _MOST_PORTS or not is_port_taken(report.last_lines):
                raise self._not_started(report)
            logger.warning("%s starts again: its port was taken", replica.name)

    async def _try(self, replica: Replica) -> tuple[Sidecar, ExitReport | None]:
        """Start a server once; with how it ended, if it did so before it answered."""
        command = self._plan.command(replica.name)
        sidecar = await asyncio.to_thread(self._sidecars.start, command)
        await replica.connect(sidecar, self._plan.token, self._plan.options.start_timeout_s)
        return sidecar, await self._answers(replica, sidecar)

    def _not_started(self, report: ExitReport) -> ConfigError:
        return ConfigError(explain_start(_how(report), report.last_lines, self._plan.python))

    async def _answers(self, replica: Replica, sidecar: Sidecar) -> ExitReport | None:
        """Wait until a server answers; how it ended, if it did so before."""
        budget_s = self._plan.options.start_timeout_s
        end_s = time.monotonic() + budget_s
        while not await replica.client.is_healthy():
            if (report := sidecar.poll()) is not None:
                return report
            if time.monotonic() > end_s:
                lines = sidecar.last_lines()
                await asyncio.to_thread(sidecar.stop)
                return ExitReport(
                    reason=f"had not answered after {budget_s:.0f} s (engine_options."
                    "start_timeout_s raises that)",
                    last_lines=lines,
                )
            await asyncio.sleep(_LOOK_S)
        return None

    async def _look_after(self, replica: Replica) -> None:
        """Replace a server whenever it dies, until it has died too often."""
        deaths: deque[float] = deque()
        while True:
            told = (await self._end_of(replica)).describe()
            while True:
                deaths.append(time.monotonic())
                while deaths[0] < time.monotonic() - RESTART_WINDOW_S:
                    deaths.popleft()
                if len(deaths) > MOST_RESTARTS:
                    self._give_up(replica, told)
                    return
                logger.warning("%s %s: another takes its place", replica.name, told)
                try:
                    await self._begin(replica)
                    break
                except (ConfigError, EngineError) as error:
                    told = f"could not be replaced: {error}"

    async def _end_of(self, replica: Replica) -> ExitReport:
        """Wait for a server's end, with what ran on it let go."""
        sidecar = replica.sidecar
        assert sidecar is not None, "it was started"
        asked_s = time.monotonic()
        while (report := sidecar.poll()) is None:
            if replica.silent_since_s is not None or time.monotonic() > asked_s + _ASK_S:
                await self._ask(replica, sidecar)
                asked_s = time.monotonic()
            await asyncio.sleep(_LOOK_S)
        await replica.disconnect()
        return report

    async def _ask(self, replica: Replica, sidecar: Sidecar) -> None:
        """Look whether a server answers; it is given requests, doubted, or ended."""
        try:
            is_healthy = await replica.client.is_healthy()
        except LostError:  # it was let go, and is about to end
            return
        if not is_healthy:
            self.doubt(replica)
            since_s = replica.silent_since_s
            if since_s is not None and time.monotonic() - since_s > SILENT_S:
                await asyncio.to_thread(sidecar.stop)
        elif replica.silent_since_s is not None:
            replica.silent_since_s = None
            replica.lane.is_open = replica.serves
            self._hand_out()

    def _give_up(self, replica: Replica, told: str) -> None:
        self._failure = EngineError(
            f"deployment must keep its replicas running, got {replica.name} ended more than "
            f"{MOST_RESTARTS} times in {RESTART_WINDOW_S:.0f} s, the last time it {told}"
        )
        self.interrupt()
        waiting, self._waiting = self._waiting, deque()
        for _, waiter in waiting:
            if not waiter.done():
                waiter.set_exception(self._failure)
        self._on_failed(self._failure)


async def _ended(sidecar: Sidecar) -> ExitReport | None:
    """How a process ended that is about to; None where it goes on."""
    end_s = time.monotonic() + _END_S
    while (report := sidecar.poll()) is None and time.monotonic() < end_s:
        await asyncio.sleep(_LOOK_S)
    return report


def _how(report: ExitReport) -> str:
    """How a server ended, without its last lines, which are told elsewhere."""
    return report.describe().partition("; its log ends with: ")[0]
