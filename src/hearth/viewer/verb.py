"""``hearth view``: the viewer's server on a loopback port, and the browser that shows it."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import socket
import sys
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import tyro
from rich.console import Console

from hearth.errors import ConfigError
from hearth.exit_codes import ExitCode, exit_code

HOST = "127.0.0.1"
_DEFAULT = Path("runs")
_DRAIN_S = 0.2
_NICENESS = 10
"""Levels below the priority of what started the viewer; Linux gives it a tenth of a busy core."""


@dataclass(frozen=True, kw_only=True)
class ViewFlags:
    """Show runs, their curves and every sample in the browser, until Ctrl-C."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """Folders of runs, or folders that have such a few levels below; not given, runs."""
    port: int = 0
    """Port of the loopback address; 0 takes a free one."""
    browser: bool = True
    """Open the browser."""
    terminal: bool = False
    """Show the runs in this terminal instead."""


def view(arguments: list[str]) -> int:
    """Show runs, their curves and every sample in the browser, until Ctrl-C."""
    flags = tyro.cli(ViewFlags, args=arguments, prog="hearth view")

    def run() -> None:
        roots = _find_roots(flags.runs)
        if flags.terminal:
            if not (sys.stdin.isatty() and sys.stdout.isatty()):
                raise ConfigError(
                    "terminal must be used in a terminal, got a pipe or a file: hearth show RUN "
                    "prints a run"
                )
            from hearth.viewer.terminal import show_runs  # only with --terminal

            show_runs(roots)
            return
        logging.getLogger("hearth").setLevel(logging.ERROR)
        urls: SimpleQueue[str] = SimpleQueue()
        if flags.browser:
            # Started before the server lowers its priority, which threads and browser inherit. Some
            # browsers return only when they end.
            threading.Thread(target=lambda: webbrowser.open(urls.get()), daemon=True).start()
        serve(roots, flags.port, lambda url: _show(url, urls))

    code = exit_code(run)
    return ExitCode.DONE if code == ExitCode.INTERRUPTED else code  # Ctrl-C is how it ends


def serve(roots: Sequence[Path], port: int, on_ready: Callable[[str], None]) -> None:
    """Serve until Ctrl-C; ``on_ready`` gets the URL with the key.

    Raises:
        ConfigError: a folder is none, or the port is taken.
    """
    asyncio.run(_serve(roots, port, on_ready))


async def _serve(roots: Sequence[Path], port: int, on_ready: Callable[[str], None]) -> None:
    # A run beside it goes first: its threads wait for each other, so a busy core slows all of them.
    os.nice(_NICENESS)
    # The server's libraries are loaded here, so that --help is quick.
    from hearth.viewer.app import create_app
    from hearth.viewer.library import Library
    from hearth.wire.http_server import HttpServer

    with _bind(port) as listening:
        port = listening.getsockname()[1]
        key = secrets.token_urlsafe(24)
        app = create_app(Library(roots), key, f"hearth-view-{port}")
        server = HttpServer(app, drain_s=_DRAIN_S, log_level="error")
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        while not server.started and not serving.done():
            await asyncio.sleep(0.005)
        if not serving.done():
            on_ready(f"http://{HOST}:{port}/?key={key}")
        await serving


def _bind(port: int) -> socket.socket:
    listening = socket.socket()
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((HOST, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise ConfigError(f"port must be free, got {port}: {error}; leave it out") from None
    return listening


def _find_roots(runs: Sequence[Path]) -> list[Path]:
    if runs:
        return [run.expanduser() for run in runs]
    if not _DEFAULT.is_dir():
        raise ConfigError(
            "run must be named where there is no folder runs, got none: hearth view RUN"
        )
    return [_DEFAULT]


def _show(url: str, urls: SimpleQueue[str]) -> None:
    Console(soft_wrap=True, highlight=False, markup=False).print(f"viewing at {url}")
    urls.put(url)
