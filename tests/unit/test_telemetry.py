"""Logs as JSON, for who collects them."""

from __future__ import annotations

import json
import logging
import runpy
import sys

import pytest

import hearth
from hearth.errors import ConfigError
from hearth.telemetry import make_formatter


def make_record(message: str, *values: object) -> logging.LogRecord:
    try:
        raise ValueError("why")
    except ValueError:
        problem = sys.exc_info()
    return logging.LogRecord("hearth.a", logging.ERROR, "a.py", 3, message, values, problem)


def test_with_json_each_record_is_one_line_with_its_exception(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HEARTH_LOG_FORMAT", "json")

    line = make_formatter().format(make_record('step %d said\n"no"', 3))

    content = json.loads(line)
    assert "\n" not in line
    assert content["message"] == 'step 3 said\n"no"'
    assert (content["level"], content["logger"]) == ("ERROR", "hearth.a")
    assert content["exception"].endswith("ValueError: why")
    assert content["time"].endswith("+00:00")


def test_a_format_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEARTH_LOG_FORMAT", "xml")

    with pytest.raises(ConfigError, match="HEARTH_LOG_FORMAT must be 'text' or 'json', got 'xml'"):
        make_formatter()


def test_windows_is_told_of_wsl_before_anything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")

    with pytest.raises(ImportError, match="must run on Linux, got Windows: install WSL"):
        runpy.run_path(hearth.__file__)
