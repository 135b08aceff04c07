"""``hearth serve``: a platform on a port."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro
from rich.console import Console

from hearth.exit_codes import exit_code
from hearth.settings import Settings, read_settings
from hearth.telemetry import setup_logging


@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """Serve a platform on a port, until Ctrl-C."""

    settings: Path | None = None
    """TOML file with the same names as these flags, underscores for dashes."""
    host: str | None = None
    """Address to listen on (127.0.0.1). Any but a loopback address needs a key."""
    port: int | None = None
    """Port to listen on (8000); 0 takes a free one."""
    data_dir: Path | None = None
    """State, logs, checkpoints, snapshots and promoted models (~/.hearth)."""
    placement: Literal["process", "inline", "ray"] | None = None
    """A process for each trainer and deployment (the default), threads of this one, or actors of a
    Ray cluster: RAY_ADDRESS names it, else one starts here."""
    snapshot_store: str | None = None
    """Weights go through data_dir, which all nodes of Ray share (the default, folder), through
    Ray's object store (ray), or through a bucket (s3://BUCKET/PREFIX)."""
    placement_timeout_s: float | None = None
    """With ray: how long a worker may wait for room in the cluster (300)."""
    database_url: str | None = None
    """SQLAlchemy URL; not given, SQLite in data_dir."""
    catalog: Path | None = None
    """TOML file with models and training shapes of your own."""
    api_keys_file: Path | None = None
    """A key a line, and its name if it has one; HEARTH_API_KEYS (separated by commas) adds."""
    workers_per_key: int | None = None
    """Trainers, and deployments, that may run at once for one key; not given, any number."""
    requests_per_key: int | None = None
    """Requests of one key that are answered at once; not given, any number."""
    gateways: int | None = None
    """Processes that listen at the address and pass completions to deployments (1)."""
    trainer_threads: int | None = None
    """CPU threads of a trainer's process; not given, its share of all cores."""
    deployment_threads: int | None = None
    """CPU threads of a deployment's process; not given, its share of all cores."""
    allow_folders: bool | None = None
    """Let requests name folders of this machine as models; not given, only on loopback."""
    keep_snapshots: int | None = None
    """Snapshots of each bucket to keep (32); 0 keeps all. Promote what is to stay."""
    max_body_mb: int | None = None
    """Longest request body to a trainer (1024); others take 1/16 of it."""
    orphan_timeout_s: float | None = None
    """A worker whose platform died ends itself after this time without a request (900)."""
    traces: bool | None = None
    """Send a span for each request to OTEL_EXPORTER_OTLP_ENDPOINT; it needs the extra otel."""


def serve(arguments: list[str]) -> int:
    """Serve a platform on a port, until Ctrl-C."""
    flags = tyro.cli(ServeFlags, args=arguments, prog="hearth serve")

    def run() -> None:
        from hearth.local.server import serve as serve_platform  # heavy, and --help is not

        given = {name: value for name, value in vars(flags).items() if value is not None}
        settings = read_settings(given.pop("settings", None), given)
        setup_logging()
        serve_platform(settings, on_ready=lambda url: _print_address(url, settings))

    return exit_code(run)


def _print_address(url: str, settings: Settings) -> None:
    key = "any text" if not settings.api_keys() else "one of its keys"
    # Never wrapped: people copy the second line.
    console = Console(soft_wrap=True, highlight=False, markup=False)
    console.print(f"serving at {url}, data in {settings.data_dir}")
    console.print(f"export HEARTH_URL={url} HEARTH_API_KEY=x   # the key is {key}")
