"""Starts and watches a deployment's servers, replaces those that die, and assigns requests to them.

All on one event loop. A request acquires a replica and releases it. Requests on a replica that dies
fail with ``LostError``, and the backend runs them again on another one.
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
"""If a replica dies more often within ``RESTART_WINDOW_S``, the deployment fails."""
RESTART_WINDOW_S = 600.0
SILENT_S = 60.0
"""A running server that does not answer for so long is ended."""
_POLL_S = 0.1
_HEALTH_CHECK_S = 5.0
"""How often the health of a server that answers is checked."""
_END_S = 10.0
"""How long a server that has failed may take to end."""
_UNWIND_S = 0.5
"""How long requests on a discarded server may take to end by themselves."""
_MOST_PORTS = 3

T = TypeVar("T")


class Replica:
    """One place for a server; a server that dies is replaced by the next one."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.sidecar: Sidecar | None = None
        self._client: VllmClient | None = None
        self._work: set[asyncio.Task[Any]] = set()
        self.silent_since_s: float | None = None
        """Since when it has not answered; None while it does."""
        self.serves = False
        """Whether its server has the deployment's weights and takes part in weight syncs."""

    @property
    def name(self) -> str:
        """Of its process."""
        return f"replica-{self.lane.number}"

    @property
    def client(self) -> VllmClient:
        """The client of its server.

        Raises:
            LostError: no server runs here now.
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
            # A second cancellation would end it while it closes its connection.
            if not task.cancelling():
                task.cancel()
            raise
        finally:
            task.add_done_callback(self._work.discard)
        if task.cancelled():
            raise LostError(f"{self.name} was interrupted")
        return task.result()

    def interrupt(self) -> None:
        """Cancel all requests here; they are run again."""
        for task in self._work:
            if not task.cancelling():
                task.cancel()

    async def connect(self, sidecar: Sidecar, token: str, timeout_s: float) -> None:
        """Use a server that was started and requires ``token``; ``timeout_s`` is for its calls."""
        await self.disconnect()
        self.sidecar = sidecar
        self._client = VllmClient(f"http://{sidecar.host}:{sidecar.port}", token, timeout_s)
        self.silent_since_s = None
        self.lane.forget()

    async def disconnect(self) -> None:
        """Stop using the server; its requests are lost."""
        self.serves = self.lane.is_open = False
        client, self._client = self._client, None
        # Requests on a dead server end by themselves, and close their connections.
        if self._work:
            await asyncio.wait(list(self._work), timeout=_UNWIND_S)
        self.interrupt()
        if self._work:
            await asyncio.wait(list(self._work))
        if client is not None:
            await client.close()


class Fleet:
    """The replicas of one deployment.

    ``bring_up`` makes a new server serve what the deployment serves. It is called with ``lock``
    held; weight syncs must hold it, too.
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
        self._is_shut = False
        self._idle = asyncio.Event()
        self._failure: EngineError | None = None
        self._watches: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all servers in parallel, and watch them from then on.

        Raises:
            ConfigError: a server does not start; the message says why and what to do.
        """
        await asyncio.gather(*map(self._start_server, self._replicas))
        for replica in self._replicas:
            self._watches.append(asyncio.create_task(self._watch(replica)))

    async def close(self) -> None:
        """End all servers."""
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*map(self.discard, self._replicas))

    def ready(self) -> list[Replica]:
        """Replicas that serve what the deployment serves."""
        return [replica for replica in self._replicas if replica.serves]

    async def acquire(self, blocks: Sequence[int]) -> Replica:
        """Wait until a replica has room for a prompt; ``release`` it afterwards.

        Raises:
            EngineError: the deployment has failed.
        """
        if self._failure is not None:
            raise self._failure
        waiter: asyncio.Future[Replica] = asyncio.get_running_loop().create_future()
        self._waiting.append((blocks, waiter))
        self._assign()
        try:
            return await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.release(waiter.result())
            raise

    def release(self, replica: Replica) -> None:
        """Return a replica after a request."""
        replica.lane.running -= 1
        self._assign()

    def suspend(self, replica: Replica) -> None:
        """Assign no more requests to a replica until it answers again."""
        if replica.lane.is_open:
            replica.lane.is_open = False
            replica.silent_since_s = time.monotonic()

    def shut(self) -> None:
        """Assign no request until ``open``."""
        self._is_shut = True

    def open(self) -> None:
        """Assign requests again."""
        self._is_shut = False
        self._assign()

    async def wait_until_idle(self) -> None:
        """Return once no request runs."""
        while any(replica.lane.running for replica in self._replicas):
            self._idle.clear()
            await self._idle.wait()

    def interrupt(self) -> None:
        """Cancel all running requests; they are run again."""
        for replica in self._replicas:
            replica.interrupt()

    async def discard(self, replica: Replica) -> None:
        """End a server; its watch starts another one."""
        await replica.disconnect()
        if replica.sidecar is not None:
            await asyncio.to_thread(replica.sidecar.stop)

    def _assign(self) -> None:
        if not any(replica.lane.running for replica in self._replicas):
            self._idle.set()
        lanes = {replica.lane: replica for replica in self._replicas}
        while self._waiting and not self._is_shut:
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

    async def _start_server(self, replica: Replica) -> None:
        """Start a replica's server, and have it serve what the others serve.

        Raises:
            ConfigError: it does not start.
            EngineError: it cannot load the deployment's weights; it is ended.
        """
        sidecar = await self._find_port_and_start(replica)
        try:
            async with self.lock:
                await self._bring_up(replica)
                replica.serves = replica.lane.is_open = True
        except (LostError, EngineError, RequestError) as error:
            # If its process ends by itself, its log has the cause.
            report = await _wait_for_end(sidecar)
            await self.discard(replica)
            if report is not None:
                raise self._start_error(report) from None
            raise EngineError(
                f"{replica.name} must serve what the deployment serves, got: {error}"
            ) from error
        self._assign()

    async def _find_port_and_start(self, replica: Replica) -> Sidecar:
        """A server that answers; started again when another process has taken its port.

        Raises:
            ConfigError: it does not start.
        """
        attempts = 0
        while True:
            command = self._plan.command(replica.name)
            sidecar = await asyncio.to_thread(self._sidecars.start, command)
            await replica.connect(sidecar, self._plan.token, self._plan.options.start_timeout_s)
            report = await self._wait_until_healthy(replica, sidecar)
            if report is None:
                return sidecar
            attempts += 1
            if attempts == _MOST_PORTS or not is_port_taken(report.last_lines):
                raise self._start_error(report)
            logger.warning("%s starts again: its port was taken", replica.name)

    def _start_error(self, report: ExitReport) -> ConfigError:
        # Without its last lines, which explain_start appends.
        how = report.describe().partition("; its log ends with: ")[0]
        return ConfigError(explain_start(how, report.last_lines, self._plan.python))

    async def _wait_until_healthy(self, replica: Replica, sidecar: Sidecar) -> ExitReport | None:
        """Wait until a server answers; the report of its end, if it ends before."""
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
            await asyncio.sleep(_POLL_S)
        return None

    async def _watch(self, replica: Replica) -> None:
        """Replace a server whenever it dies, until it has died too often."""
        deaths: deque[float] = deque()
        while True:
            reason = (await self._watch_server(replica)).describe()
            while True:
                deaths.append(time.monotonic())
                while deaths[0] < time.monotonic() - RESTART_WINDOW_S:
                    deaths.popleft()
                if len(deaths) > MOST_RESTARTS:
                    self._give_up(replica, reason)
                    return
                logger.warning("%s %s: it is replaced", replica.name, reason)
                try:
                    await self._start_server(replica)
                    break
                except (ConfigError, EngineError) as error:
                    reason = f"could not be replaced: {error}"

    async def _watch_server(self, replica: Replica) -> ExitReport:
        """Check a server's health until it ends, then disconnect from it."""
        sidecar = replica.sidecar
        assert sidecar is not None, "it was started"
        checked_s = time.monotonic()
        while (report := sidecar.poll()) is None:
            is_due = time.monotonic() > checked_s + _HEALTH_CHECK_S
            if replica.silent_since_s is not None or is_due:
                await self._check_health(replica, sidecar)
                checked_s = time.monotonic()
            await asyncio.sleep(_POLL_S)
        await replica.disconnect()
        return report

    async def _check_health(self, replica: Replica, sidecar: Sidecar) -> None:
        """Open a replica that answers, suspend one that does not, end one that is long silent."""
        try:
            is_healthy = await replica.client.is_healthy()
        except LostError:  # it was discarded, and is about to end
            return
        if not is_healthy:
            self.suspend(replica)
            since_s = replica.silent_since_s
            if since_s is not None and time.monotonic() - since_s > SILENT_S:
                await asyncio.to_thread(sidecar.stop)
        elif replica.silent_since_s is not None:
            replica.silent_since_s = None
            replica.lane.is_open = replica.serves
            self._assign()

    def _give_up(self, replica: Replica, reason: str) -> None:
        self._failure = EngineError(
            f"deployment must keep its replicas running, got {replica.name} ended more than "
            f"{MOST_RESTARTS} times in {RESTART_WINDOW_S:.0f} s, the last time it {reason}"
        )
        self.interrupt()
        waiting, self._waiting = self._waiting, deque()
        for _, waiter in waiting:
            if not waiter.done():
                waiter.set_exception(self._failure)
        self._on_failed(self._failure)


async def _wait_for_end(sidecar: Sidecar) -> ExitReport | None:
    """Wait some seconds for a process to end; None where it keeps running."""
    end_s = time.monotonic() + _END_S
    while (report := sidecar.poll()) is None and time.monotonic() < end_s:
        await asyncio.sleep(_POLL_S)
    return report
