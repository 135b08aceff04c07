"""The folder of one run: made, held by one process at a time, and what it was started with."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orjson

from hearth.errors import ConfigError
from hearth.files import write_file

LOCK = ".lock"


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
    with (folder / LOCK).open("a+") as file:
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
    """Write the resolved config to ``log_path/config.json``; another one is kept beside it."""
    path = log_path / "config.json"
    content = orjson.dumps(config, option=orjson.OPT_INDENT_2, default=str)
    if path.exists() and path.read_bytes() != content:
        keep_older(path)
    write_file(path, content)


def keep_older(path: Path) -> Path | None:
    """Keep what an existing file holds under the first free ``NAME.N.SUFFIX`` beside it too.

    Returns where that is. The file itself stays, for whoever replaces it: it is never missing.
    """
    if not path.exists():
        return None
    older = first_free(path.with_name(f"{path.stem}.{{}}{path.suffix}"))
    try:
        os.link(path, older)
    except OSError:  # a file system without links
        write_file(older, path.read_bytes())
    return older


def has_results(folder: Path) -> bool:
    """Whether a run has left records, checkpoints or a model in its folder."""
    metrics = folder / "metrics.jsonl"
    return (metrics.exists() and metrics.stat().st_size > 0) or any(
        (folder / name).exists() for name in ("run.json", "models")
    )


def aside_path(folder: Path) -> Path:
    """Where ``move_aside`` would move a run: the first free ``FOLDER.N``."""
    resolved = folder.resolve()
    return first_free(resolved.with_name(resolved.name + ".{}"))


def move_aside(folder: Path) -> Path:
    """Move all that a folder holds, but for its lock, to ``aside_path(folder)``, and return that.

    Raises:
        ConfigError: the folder is one that people work in, or it cannot be moved.
    """
    resolved = folder.resolve()
    if resolved in (Path.home(), Path.cwd(), *Path.cwd().parents):
        raise ConfigError(
            f"log_path must be a folder of its own to start anew in, got {str(folder)!r}, which "
            "holds an older run beside other work: choose another folder"
        )
    aside = aside_path(folder)
    try:
        aside.mkdir()
        for path in resolved.iterdir():
            if path.name != LOCK:
                path.rename(aside / path.name)
    except OSError as error:
        raise ConfigError(
            f"log_path must be new, got {str(folder)!r}, whose older run cannot be moved to "
            f"{str(aside)!r} ({error}): choose another folder"
        ) from None
    return aside


def first_free(pattern: Path) -> Path:
    """The path with ``{}`` in its name replaced by the first number from 1 that is free."""
    numbered = (pattern.with_name(pattern.name.format(number)) for number in itertools.count(1))
    return next(path for path in numbered if not path.exists())
