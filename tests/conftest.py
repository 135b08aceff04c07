"""What all tests share."""

import gc
import logging
import os
import socket

import hypothesis
import pytest

from hearth.collector import COLLECT_EVERY

# Set before torch is imported, as by the command `hearth`: threads that spin while they wait make
# each pass several times slower where several tests compute at once.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

# Libraries are imported from here on, and each test makes and drops thousands of objects.
gc.set_threshold(COLLECT_EVERY)

# A busy machine takes longer for an example than the 200 ms that are usual.
hypothesis.settings.register_profile("unhurried", deadline=None)
hypothesis.settings.load_profile("unhurried")


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """Send what pytest-rerunfailures counts at once.

    It writes twice and then reads for every test: by TCP's default the second write waits 40 ms.
    """
    connection = getattr(getattr(config, "failures_db", None), "sock", None)
    if connection is not None and hasattr(config, "workerinput"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_finish():
    """Let the libraries' loggers propagate.

    Pytest attaches its handlers to each logger that does not, for every phase of every test: with
    torch's 57 of them that costs as much as a third of the unit tests.

    And let the garbage collector pass over what was imported, at which it would look in each test.
    """
    gc.freeze()
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


def pytest_terminal_summary(terminalreporter):
    """Show why a test failed that then passed."""
    for report in terminalreporter.stats.get("rerun", []):
        terminalreporter.write_sep("_", f"first try of {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)


@pytest.fixture(autouse=True)
def leave_logging_as_it_was():
    """A command that runs in the tests' process logs to stderr; the tests after it do not."""
    yield
    for name in ("hearth", "training"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
