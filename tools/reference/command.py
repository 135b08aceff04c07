"""Every verb of the ``hearth`` command, as its ``--help`` prints it."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from hearth.cli.main import main
from hearth.cli.verbs import VERBS

WIDTH = "88"
RECIPE_VERBS = ("train",)
"""Their flags are the fields of a config, which has a page of its own."""


def capture_help(verb: str) -> str:
    """What ``hearth VERB --help`` prints on a terminal of 88 columns."""
    printed = io.StringIO()
    with (
        mock.patch.dict(os.environ, COLUMNS=WIDTH),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        main([verb, "--help"])
    return printed.getvalue().strip()


def describe_command() -> str:
    """A section for each verb."""
    sections = []
    for name, verb in VERBS.items():
        sections += [f"## hearth {name}\n", f"{verb.summary}\n"]
        if name in RECIPE_VERBS:
            sections.append("Its flags are the fields of [rl_loop's config](config.md).\n")
        else:
            sections.append(f"```text\n{capture_help(name)}\n```\n")
    return "\n".join(sections)
