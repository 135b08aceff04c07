"""The control plane's fixtures, and a PostgreSQL server."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sql
from tests.unit.control.conftest import (  # noqa: F401 - fixtures are found by their import
    ask,
    base,
    deployed,
    job,
    make_ask,
    make_plane,
    plane,
    running,
    script,
)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The URL of a PostgreSQL server of our own, at a Unix socket in a folder of its own."""
    binaries = _postgres_binaries()
    if binaries is None:
        pytest.skip("needs PostgreSQL's initdb and postgres")
    # Not below pytest's folder: another user must get there.
    folder = Path(tempfile.mkdtemp(prefix="hearth-pg-"))
    user = _unprivileged(folder)
    run = {"cwd": folder, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, **user}
    quick = ["--no-sync", "--auth=trust", "--username=hearth", "--encoding=UTF8", "--locale=C"]
    data = str(folder / "data")
    server = None
    try:
        subprocess.run([str(binaries / "initdb"), "-D", data, *quick], check=True, **run)
        options = {"listen_addresses": "", "unix_socket_directories": str(folder), "fsync": "off"}
        server = subprocess.Popen(
            [str(binaries / "postgres"), "-D", data]
            + [word for name, value in options.items() for word in ("-c", f"{name}={value}")],
            **run,
        )
        url = f"postgresql+psycopg://hearth@/postgres?host={folder}"
        _await_answer(url, server)
        yield url
    finally:
        if server is not None:
            server.terminate()
            server.wait(20)
        shutil.rmtree(folder)


@pytest.fixture
def postgres_url(postgres: str, request: pytest.FixtureRequest) -> str:
    """The URL of an empty schema of that server."""
    schema = f"test_{time.monotonic_ns()}"
    engine = sql.create_engine(postgres, isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.execute(sql.text(f"CREATE SCHEMA {schema}"))
    engine.dispose()
    return f"{postgres}&options=-csearch_path%3D{schema}"


def _postgres_binaries() -> Path | None:
    folders = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    config = shutil.which("pg_config")
    if config is not None:
        found = subprocess.run([config, "--bindir"], capture_output=True, text=True, check=False)
        folders.append(Path(found.stdout.strip() or "/"))
    return next((folder for folder in folders if (folder / "postgres").exists()), None)


def _unprivileged(folder: Path) -> dict[str, Any]:
    """As whom to run it: PostgreSQL refuses to run as root."""
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with contextlib.suppress(LookupError):
            shutil.chown(folder, user=name)
            return {"user": name, "extra_groups": []}
    pytest.skip("needs an unprivileged user to run PostgreSQL as")


def _await_answer(url: str, server: subprocess.Popen[Any]) -> None:
    engine = sql.create_engine(url)
    end_s = time.monotonic() + 20
    while True:
        try:
            engine.connect().close()
            break
        except sql.exc.OperationalError:
            assert server.poll() is None, "PostgreSQL ended"
            assert time.monotonic() < end_s, "PostgreSQL does not answer"
            time.sleep(0.02)
    engine.dispose()
