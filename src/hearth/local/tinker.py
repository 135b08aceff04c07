"""A platform in a process of its own, for programs of Tinker's in notebooks and tests."""

from __future__ import annotations

import contextlib
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hearth.errors import EngineError

_START_S = 120.0
_END_S = 30.0
_ANNOUNCEMENT = "serving at "


@contextlib.contextmanager
def tinker_server(data_dir: Path | str | None = None) -> Iterator[str]:
    """Serve until the ``with`` ends; the URL is for ``tinker.ServiceClient(base_url=url)``.

    What it saves is in ``data_dir``, where the next one finds it; without one it is lost.

    Raises:
        EngineError: it does not start; the message has its last lines.
    """
    with contextlib.ExitStack() as stack:
        if data_dir is None:
            data_dir = stack.enter_context(
                tempfile.TemporaryDirectory(prefix="hearth-", ignore_cleanup_errors=True)
            )
        folder = Path(data_dir).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        log = stack.enter_context((folder / "serve.log").open("ab"))
        start = "import sys; from hearth.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "serve", "--port", "0"]
        process = subprocess.Popen(
            [*command, "--data-dir", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )
        stack.callback(_end, process)
        yield _read_url(process, folder / "serve.log")


def _read_url(process: subprocess.Popen[bytes], log: Path) -> str:
    assert process.stdout is not None, "it is a pipe"
    end_s = time.monotonic() + _START_S
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while selector.select(max(0.0, end_s - time.monotonic())):
            line = process.stdout.readline().decode()
            if not line:
                break
            if line.startswith(_ANNOUNCEMENT):
                return line.removeprefix(_ANNOUNCEMENT).split(",")[0].strip()
    lines = log.read_text(errors="replace").splitlines()[-10:]
    raise EngineError("platform must start, got a process that does not:\n" + "\n".join(lines))


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()
