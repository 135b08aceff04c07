"""Where workers run when their processes cannot be watched."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from hearth.local.inline import InlineLauncher
from hearth.local.server import make_launcher
from hearth.settings import Settings


def test_without_descriptors_of_processes_workers_are_threads_and_a_warning_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)

    with contextlib.ExitStack() as stack:
        launcher = make_launcher(Settings(data_dir=tmp_path), tmp_path, stack)

    assert isinstance(launcher, InlineLauncher)
    (warning,) = caplog.messages
    assert warning.startswith("placement is 'inline', not 'process'")
