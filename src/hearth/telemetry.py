"""Logging set-up, request ids, wall-clock spans and the memory of the process."""

from __future__ import annotations

import itertools
import json
import logging
import os
import resource
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TextIO

from hearth.errors import ConfigError

LOG_FORMAT_VARIABLE = "HEARTH_LOG_FORMAT"


class JsonFormatter(logging.Formatter):
    """A record as one JSON object: time, level, logger, message, process, and exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The object on one line."""
        content = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            "process": record.process,
        }
        if record.exc_info:
            content["exception"] = self.formatException(record.exc_info)
        return json.dumps(content, ensure_ascii=False)


def make_formatter() -> logging.Formatter:
    """What ``HEARTH_LOG_FORMAT`` asks for: ``text``, the default, or ``json``.

    Raises:
        ConfigError: it says something else.
    """
    name = os.environ.get(LOG_FORMAT_VARIABLE, "text")
    if name == "json":
        return JsonFormatter()
    if name != "text":
        raise ConfigError(f"{LOG_FORMAT_VARIABLE} must be 'text' or 'json', got {name!r}")
    return logging.Formatter("%(asctime)s %(levelname)s %(name)s %(message)s")


def setup_logging(level: int = logging.INFO) -> None:
    """One line per record on stderr; a second call changes the level.

    Raises:
        ConfigError: ``HEARTH_LOG_FORMAT`` names no format.
    """
    for name in ("hearth", "training"):
        logger = logging.getLogger(name)
        logger.setLevel(level)
        if not logger.handlers:
            logger.addHandler(log_handler())
            logger.propagate = False


def log_handler() -> logging.Handler:
    """What ``setup_logging`` gives each logger."""
    handler = _StderrHandler()
    handler.setFormatter(make_formatter())
    return handler


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what ``sys.stderr`` is at that moment: above a progress bar, not into it."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # pyright: ignore[reportIncompatibleVariableOverride]
        return sys.stderr


_process = secrets.token_hex(8)
_requests = itertools.count(1)


def _renew() -> None:
    global _process
    _process = secrets.token_hex(8)


# Without this, forked workers would share one prefix.
os.register_at_fork(after_in_child=_renew)


def new_request_id() -> str:
    """An id that no other request has: random per process, then counted.

    A random id per request would need a system call, which releases the GIL to a computing thread;
    measured at 0.2 ms each while an engine runs.
    """
    return f"{_process}-{next(_requests):x}"


def peak_rss_mb() -> float:
    """The most memory this process has held, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 1024 if sys.platform != "darwin" else peak / 1024**2


class BusyClock:
    """Measures how long sampler and trainer worked at the same time, and each alone.

    ``now`` is the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._last = now()
        self._samples = 0
        self._is_training = False
        self.both_s = 0.0
        self.sampling_s = 0.0
        self.training_s = 0.0

    @contextmanager
    def sample(self) -> Iterator[None]:
        """A row is sampled during the body; several bodies may run at once."""
        self._tick()
        self._samples += 1
        try:
            yield
        finally:
            self._tick()
            self._samples -= 1

    @contextmanager
    def train(self) -> Iterator[None]:
        """The trainer works during the body."""
        self._tick()
        self._is_training = True
        try:
            yield
        finally:
            self._tick()
            self._is_training = False

    def take(self) -> tuple[float, float, float]:
        """Seconds of both, of sampling alone and of training alone; resets them to 0."""
        self._tick()
        seconds = (self.both_s, self.sampling_s, self.training_s)
        self.both_s = self.sampling_s = self.training_s = 0.0
        return seconds

    def _tick(self) -> None:
        now = self._now()
        passed, self._last = now - self._last, now
        if self._samples and self._is_training:
            self.both_s += passed
        elif self._samples:
            self.sampling_s += passed
        elif self._is_training:
            self.training_s += passed


class Stopwatch:
    """Seconds by phase, added up until ``take``. ``now`` is the clock, in seconds.

    ``on_span`` is told of every span: its phase, and the unix times of its start and its end.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        on_span: Callable[[str, float, float], None] | None = None,
    ) -> None:
        self._now = now
        self._on_span = on_span
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, phase: str) -> Iterator[None]:
        """Add the body's wall time to ``phase``."""
        start, started = self._now(), time.time()
        try:
            yield
        finally:
            seconds = self._now() - start
            self.add(phase, seconds)
            if self._on_span is not None:
                self._on_span(phase, started, started + seconds)

    def add(self, phase: str, seconds: float) -> None:
        """Add ``seconds`` to ``phase``."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """Seconds by phase; resets them."""
        seconds, self._seconds = self._seconds, {}
        return seconds
