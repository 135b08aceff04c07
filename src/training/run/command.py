"""A recipe as a command: flags from its config, errors as one line, signals as a clean end."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import tyro

from hearth.errors import ConfigError
from hearth.exit_codes import ExitCode, exit_code
from hearth.telemetry import setup_logging
from training.rollouts.daemon_threads import DaemonThreads

ConfigT = TypeVar("ConfigT")


def run_command(
    default: ConfigT,
    main: Callable[[ConfigT], Any],
    arguments: Sequence[str] | None,
    *,
    program: str,
    description: str | None = None,
) -> int:
    """Parse the flags, each a field of ``default``, and run ``main``; returns the exit code."""
    config = tyro.cli(
        type(default), default=default, args=arguments, description=description, prog=program
    )
    return run_to_exit_code(lambda: main(config))


def run_to_exit_code(run: Callable[[], object]) -> int:
    """``exit_code`` of a recipe, which logs to stderr."""

    def log_and_run() -> None:
        setup_logging()
        run()

    return exit_code(
        log_and_run, interrupted="interrupted: finished steps and metrics are in log_path"
    )


def refuse_inside_event_loop() -> None:
    """A recipe runs an event loop of its own, which cannot stand inside another.

    Raises:
        ConfigError: a loop is running in this thread, as in a notebook.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise ConfigError(
        "main must be called outside a running event loop, got one: in a notebook write "
        "`await asyncio.to_thread(main, config)`"
    )


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run`` that SIGTERM ends like Ctrl-C, so that every ``with`` still closes.

    Raises:
        KeyboardInterrupt: Ctrl-C came.
        SystemExit: SIGTERM came; the code is 143.
    """
    terminated = False
    before = signal.getsignal(signal.SIGTERM)

    async def run_work() -> None:
        # asyncio would wait at its end for what a thread still does, as for a hot-load.
        asyncio.get_running_loop().set_default_executor(DaemonThreads("hearth-recipe"))
        task = asyncio.ensure_future(work)

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        await task

    try:
        asyncio.run(run_work())
    except asyncio.CancelledError:
        if not terminated:
            raise
        raise SystemExit(ExitCode.TERMINATED) from None
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)  # asyncio leaves the default, which kills
