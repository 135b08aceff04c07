"""The folder of one run: made, held by one process at a time, and what it was started with."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from hearth.errors import ConfigError
from training.run.checkpoints import write_atomically


def prepare_log_path(log_path: str) -> Path:
    """The run's folder, made if it is missing.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    folder = Path(log_path).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"log_path must be a folder, got {log_path!r}: {error}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"log_path must be writable, got {log_path!r}")
    return folder


@contextlib.contextmanager
def hold_log_path(folder: Path) -> Iterator[None]:
    """Hold the folder for one run at a time; the lock ends with the process, however it ends.

    Raises:
        ConfigError: another run holds it; nothing in it was changed.
    """
    with (folder / ".lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise ConfigError(
                f"log_path must belong to one run at a time, got {str(folder)!r}, which process "
                f"{file.read().strip() or 'unknown'} uses: wait for it, or choose another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def write_config(log_path: Path, config: Mapping[str, Any]) -> None:
    """Write the resolved config to ``log_path/config.json``."""
    write_atomically(
        log_path / "config.json", orjson.dumps(config, option=orjson.OPT_INDENT_2, default=str)
    )
