"""What all tests share."""

import logging
import socket

import hypothesis
import pytest

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
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True


@pytest.fixture(autouse=True)
def leave_logging_as_it_was():
    """A command that runs in the tests' process logs to stderr; the tests after it do not."""
    yield
    for name in ("hearth", "training"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.setLevel(logging.NOTSET)
        logger.propagate = True
