"""What all tests share."""

import logging


def pytest_collection_finish():
    """Let the libraries' loggers propagate.

    Pytest attaches its handlers to each logger that does not, for every phase of every test: with
    torch's 57 of them that costs as much as a third of the unit tests.
    """
    for logger in logging.root.manager.loggerDict.values():
        if isinstance(logger, logging.Logger):
            logger.propagate = True
