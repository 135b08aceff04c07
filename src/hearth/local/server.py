"""A platform on a port: the control plane with its launcher, served until it is ended."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from hearth.control.access import Access, AuditLog
from hearth.control.app import create_gateway
from hearth.control.catalog import read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store, check_records
from hearth.errors import ConfigError
from hearth.exit_codes import ExitCode
from hearth.files import explain_refusals
from hearth.launch.processes import ProcessLauncher
from hearth.launch.ray import make_ray_launcher
from hearth.launch.spec import Launcher
from hearth.local.connections import make_protocol, raise_descriptor_limit
from hearth.local.gateway_process import DRAIN_S, open_shared
from hearth.local.gateways import Gateways, listen_at
from hearth.local.tracing import trace_requests
from hearth.settings import Settings
from hearth.tinker.app import create_app as create_tinker_app
from hearth.tinker.front import Front
from hearth.wire.asgi import App
from hearth.wire.http_server import HttpServer

logger = logging.getLogger(__name__)

_WAITING_THREADS = 64
"""How many requests may wait for workers at once, to create, patch, cancel or delete them."""


def serve(settings: Settings, *, on_ready: Callable[[str], None]) -> None:
    """Serve until SIGTERM or Ctrl-C; ``on_ready`` is called with the URL at the start.

    It first adopts what an earlier platform with the same ``data_dir`` had started.

    Raises:
        ConfigError: the address is taken, the folder, the catalog or the database cannot be used,
            or another platform uses the folder.
    """
    # From here on the signal closes what was opened. uvicorn handles it while it serves, ends, and
    # raises it again.
    signal.signal(signal.SIGTERM, _exit_on_sigterm)
    catalog = read_catalog(settings.catalog, allow_folders=settings.may_name_folders)
    with contextlib.ExitStack() as stack:
        data_dir = _prepare_folder(settings.data_dir, stack)
        listener = stack.enter_context(_open_listener(settings))
        port: int = listener.getsockname()[1]
        url = f"http://{_format_host(settings.host)}:{port}"
        database = settings.database_url or f"sqlite:///{data_dir / 'control.db'}"
        store = Store(database)
        stack.callback(store.close)
        check_records(store, data_dir)
        plane = ControlPlane(
            store,
            Context(
                launcher=make_launcher(settings, data_dir, stack),
                data_dir=data_dir,
                catalog=catalog,
                trainer_threads=settings.trainer_threads,
                deployment_threads=settings.deployment_threads,
                keep_snapshots=settings.keep_snapshots or None,
                workers_per_key=settings.workers_per_key,
            ),
        )
        stack.callback(plane.close)
        stack.callback(_ignore_signals)
        plane.recover()
        access = Access(
            api_keys=settings.api_keys(),
            max_body=settings.max_body_mb * 2**20,
            requests_per_key=settings.requests_per_key,
        )
        gateway = create_gateway(plane, access, AuditLog(data_dir / "audit.jsonl"))
        gateway.tinker = create_tinker_app(Front(plane, gateway))

        def end_waiting() -> None:
            store.release_waiters()
            gateway.end()

        app: App = gateway
        gateways = None
        if settings.gateways > 1:
            folder = Path(stack.enter_context(TemporaryDirectory(prefix="hearth-gateways-")))
            # What listens from now on shares the port; this holds it.
            listener.close()
            stack.enter_context(open_shared(settings.host, port))
            gateways = Gateways(settings, port, access, gateway, plane.deployments, folder)
            listener = stack.enter_context(listen_at(gateways.socket))
            app = gateways.app
        elif settings.traces:
            app, end_traces = trace_requests(gateway)
            stack.callback(end_traces)
        server = _Server(
            app,
            gateways,
            on_ready=lambda: on_ready(url),
            on_end=end_waiting,
            drain_s=DRAIN_S,
            http=make_protocol(raise_descriptor_limit()),
            log_level="warning",
            timeout_keep_alive=75,
        )
        server.run(sockets=[listener])


def _exit_on_sigterm(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(ExitCode.TERMINATED)


def _ignore_signals() -> None:
    """Closing takes seconds; a second signal would leave behind what is not closed yet."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


class _Server(HttpServer):
    """Calls back when it answers, and when it begins to end."""

    def __init__(
        self,
        app: App,
        gateways: Gateways | None,
        *,
        on_ready: Callable[[], None],
        on_end: Callable[[], None],
        **options: Any,
    ) -> None:
        super().__init__(app, **options)
        self._gateways = gateways
        self._on_ready = on_ready
        self._on_end = on_end

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to answer, then call ``on_ready``."""
        threads = ThreadPoolExecutor(_WAITING_THREADS, thread_name_prefix="hearth-wait")
        asyncio.get_running_loop().set_default_executor(threads)
        await super().startup(sockets)
        if self._gateways is not None:
            await self._gateways.start()
        self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Answer the requests that wait, then end."""
        self._on_end()
        if self._gateways is not None:
            await self._gateways.end()
        await super().shutdown(sockets)


def make_launcher(settings: Settings, data_dir: Path, stack: contextlib.ExitStack) -> Launcher:
    """The launcher that the settings ask for; ``stack`` closes it.

    Where processes cannot be watched, the workers are threads of this one.
    """
    placement = settings.placement
    if placement == "process" and not hasattr(os, "pidfd_open"):
        logger.warning(
            "placement is 'inline', not 'process': watching processes needs Linux 5.3 and a Python "
            "that has os.pidfd_open; a crash of a trainer now ends the platform too"
        )
        placement = "inline"
    if placement == "process":
        launcher = ProcessLauncher(
            data_dir,
            orphan_timeout_s=settings.orphan_timeout_s,
            snapshot_store=settings.snapshot_store,
        )
        stack.callback(launcher.close)
        launcher.warm()
        return launcher
    if placement == "ray":
        launcher = make_ray_launcher(
            data_dir,
            snapshot_store=settings.snapshot_store,
            orphan_timeout_s=settings.orphan_timeout_s,
            placement_timeout_s=settings.placement_timeout_s,
        )
        stack.callback(launcher.close)
        return launcher
    from hearth.local.inline import InlineLauncher  # torch, which a process placement leaves out

    return InlineLauncher(data_dir)


def _prepare_folder(folder: Path, stack: contextlib.ExitStack) -> Path:
    """The data folder, made if it is missing, and this platform's alone.

    Raises:
        ConfigError: it cannot be made, or another platform uses it.
    """
    import fcntl

    try:
        folder = folder.expanduser().resolve()
        with explain_refusals(folder):
            folder.mkdir(parents=True, exist_ok=True)
            # Logs, sockets and the database are nobody else's, also in a folder that was there.
            folder.chmod(0o700)
            file = stack.enter_context((folder / ".lock").open("a+"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"data_dir must belong to one platform, got {str(folder)!r}, which another uses: end "
            "that one, or choose another folder"
        ) from None
    except OSError as error:
        raise ConfigError(f"data_dir must be a folder of this platform: {error}") from None
    return folder


@contextlib.contextmanager
def _open_listener(settings: Settings) -> Iterator[socket.socket]:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # asyncio does so only for sockets that it made itself; without it an answer takes 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            listener.bind((settings.host, settings.port))
        except OSError as error:
            raise ConfigError(
                f"port must be free on {settings.host}, got {settings.port}: {error}; 0 takes a "
                "free one"
            ) from None
        listener.listen(2048)
        yield listener


def _format_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
