"""The reference pages of the documentation, made from the code.

A page of ``docs/reference`` has a line ``<!-- reference: NAME -->`` where the text that
``PAGES[NAME]`` returns goes; ``docs/conf.py`` puts it there while the site is built.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from tools.reference.command import describe_command
from tools.reference.config import describe_config
from tools.reference.http import describe_http
from tools.reference.metrics import describe_metrics

PAGES: Mapping[str, Callable[[], str]] = {
    "command": describe_command,
    "config": describe_config,
    "http": describe_http,
    "metrics": describe_metrics,
}


def fill(text: str) -> str:
    """The text of a page with its reference in place."""
    return re.sub(r"^<!-- reference: (\w+) -->$", lambda found: PAGES[found[1]](), text, flags=re.M)
