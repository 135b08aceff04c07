"""A recipe as a call and as a command: event loops, signals, short errors, flags, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any, ParamSpec, TypeVar

import tyro

import hearth
import training
from hearth.errors import HearthError
from hearth.exit_codes import ExitCode, exit_code
from hearth.telemetry import setup_logging
from training.config.files import format_settings, read_settings_file
from training.config.help import format_help
from training.rewards.scoring import is_of_reward
from training.rollouts.daemon_threads import DaemonThreads
from training.run.state import RunSummary

ConfigT = TypeVar("ConfigT")
P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

_OURS = tuple(str(Path(package.__path__[0])) for package in (hearth, training))


class StopRequest:
    """Asks a run in another thread to end, now or as soon as its loop begins."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._end: Callable[[], object] | None = None
        self.is_made = False

    def make(self) -> None:
        """Ask the run to end; it ends as after Ctrl-C, with everything closed."""
        with self._lock:
            self.is_made = True
            if self._end is not None:
                self._end()

    def attach(self, end: Callable[[], object] | None) -> None:
        """``end`` is called when the request is made, at once where it was made before."""
        with self._lock:
            self._end = end
            if self.is_made and end is not None:
                end()


_stop_request: contextvars.ContextVar[StopRequest | None] = contextvars.ContextVar(
    "stop_request", default=None
)


def run_command(
    default: ConfigT,
    main: Callable[[ConfigT], Any],
    arguments: Sequence[str] | None,
    *,
    program: str | None = None,
    description: str | None = None,
) -> int:
    """Read settings files and flags, each a field of ``default``, and run ``main``.

    Files come first, as ``@run.toml``; flags win over them. ``--help`` shows the settings that most
    runs give, ``--help-all`` every one, ``--print-config`` prints them as a file.

    Returns the exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    module = type(default).__module__
    summary = description or (inspect.getdoc(sys.modules[module]) or "").partition("\n\n")[0]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    program = program or f"python {sys.argv[0] if spec is None else f'-m {spec.name}'}"
    if any(argument in ("-h", "--help") for argument in given):
        sys.stdout.write(format_help(module, program, summary) + "\n")
        return ExitCode.DONE

    def parse_and_run() -> object:
        config, flags = default, list(given)
        while flags and flags[0].startswith("@"):
            config = read_settings_file(config, flags.pop(0)[1:])
        is_printed = "--print-config" in flags
        flags = ["--help" if flag == "--help-all" else flag for flag in flags]
        flags = [flag for flag in flags if flag != "--print-config"]
        config = tyro.cli(
            type(default), default=config, args=flags, description=summary, prog=program
        )
        if not is_printed:
            return main(config)
        sys.stdout.write(format_settings(config))
        return None

    return run_to_exit_code(parse_and_run)


def run_to_exit_code(run: Callable[[], object]) -> int:
    """``exit_code`` of a recipe, which logs to stderr; one that took no step has failed."""

    def run_checked() -> None:
        setup_logging()
        result = run()
        if isinstance(result, RunSummary) and result.steps == 0:
            raise HearthError(
                f"the run must take an optimizer step, got none in {result.rows} rows: "
                "the lines above say why"
            )

    return exit_code(run_checked, interrupted="interrupted")


def recipe(main: Callable[P, R]) -> Callable[P, R]:
    """A recipe's ``main`` that may be called anywhere, and whose errors are short.

    Inside a running event loop, as in a notebook, it runs in a thread of its own, and the caller
    waits; Ctrl-C and a notebook's stop button end it. An error that says what to do has no frames
    of ours in its traceback, nor the errors of libraries that it comes from; all of them are logged
    for DEBUG. An error of a reward function has the function's own frames.
    """

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            if not _is_inside_event_loop():
                return main(*args, **kwargs)
            return _run_in_thread(functools.partial(main, *args, **kwargs))
        except Exception as error:
            logger.debug("the run has failed", exc_info=error)
            raise _shorten(error) from error.__cause__

    return run


async def run_async(main: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """``main(*args, **kwargs)`` of a recipe, awaited: the caller's event loop goes on meanwhile.

    A task that is cancelled ends the run, and waits until it has closed everything.
    """
    stop, future = _begin_in_thread(functools.partial(main, *args, **kwargs))
    waiting = asyncio.wrap_future(future)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        stop.make()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            waiting.exception()  # what it ended with is known
        raise


def run_until_signal(work: Coroutine[Any, Any, None]) -> None:
    """``asyncio.run`` that SIGTERM ends like Ctrl-C, so that every ``with`` still closes.

    Raises:
        KeyboardInterrupt: Ctrl-C came, or who waits for the run's thread made a ``StopRequest``.
        SystemExit: SIGTERM came; the code is 143.
    """
    terminated = False
    before = signal.getsignal(signal.SIGTERM)
    stop = _stop_request.get() or StopRequest()

    async def run_work() -> None:
        # asyncio would wait at its end for what a thread still does, as for a hot-load.
        loop = asyncio.get_running_loop()
        loop.set_default_executor(DaemonThreads("hearth-recipe"))
        task = asyncio.ensure_future(work)

        def terminate() -> None:
            nonlocal terminated
            terminated = True
            task.cancel()

        if threading.current_thread() is threading.main_thread():
            loop.add_signal_handler(signal.SIGTERM, terminate)
        stop.attach(lambda: loop.call_soon_threadsafe(task.cancel))
        try:
            await task
        finally:
            stop.attach(None)

    try:
        asyncio.run(run_work())
    except asyncio.CancelledError:
        if stop.is_made:
            raise KeyboardInterrupt from None
        if not terminated:
            raise
        raise SystemExit(ExitCode.TERMINATED) from None
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)  # asyncio leaves the default, which kills


def _is_inside_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _run_in_thread(run: Callable[[], R]) -> R:
    stop, future = _begin_in_thread(run)
    with _ctrl_c_raises():
        try:
            return future.result()
        except KeyboardInterrupt:
            if not future.done():
                stop.make()
                future.exception()  # waits until everything is closed
            raise


@contextlib.contextmanager
def _ctrl_c_raises() -> Iterator[None]:
    """Ctrl-C raises here, and does not just cancel a task of the loop that is held up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _begin_in_thread(run: Callable[[], R]) -> tuple[StopRequest, Future[R]]:
    stop, future = StopRequest(), Future[R]()
    # A running future cannot be cancelled by who waits for it.
    future.set_running_or_notify_cancel()

    def work() -> None:
        _stop_request.set(stop)
        try:
            future.set_result(run())
        except BaseException as error:  # noqa: BLE001 - raised again where the run is waited for
            future.set_exception(error)

    context = contextvars.copy_context()
    threading.Thread(target=context.run, args=(work,), name="hearth-run", daemon=True).start()
    return stop, future


def _shorten(error: Exception) -> Exception:
    """The error without what does not help whoever made the mistake."""
    cause = error.__cause__
    if cause is not None and is_of_reward(cause):
        cause.__traceback__ = _skip_ours(cause.__traceback__)
    elif isinstance(error, HearthError):
        error.__cause__ = None
    if is_of_reward(error):
        return error.with_traceback(_skip_ours(error.__traceback__))
    if isinstance(error, HearthError):
        return error.with_traceback(None)
    return error


def _skip_ours(traceback: TracebackType | None) -> TracebackType | None:
    """The frames behind the last one of this program's."""
    found, frame = traceback, traceback
    while frame is not None:
        if frame.tb_frame.f_code.co_filename.startswith(_OURS):
            found = frame.tb_next
        frame = frame.tb_next
    return found
