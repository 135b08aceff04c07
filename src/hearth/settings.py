"""The settings of a served platform: where it listens, keeps its data, and what it may use.

They come from a TOML file and flags; keys only from the environment or a file of their own.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, Literal

from hearth.errors import ConfigError
from hearth.objects import check_store

KEYS_VARIABLE = "HEARTH_API_KEYS"
CATALOG_VARIABLE = "HEARTH_CATALOG"
VLLM_PYTHON_VARIABLE = "HEARTH_VLLM_PYTHON"
URL_VARIABLE = "HEARTH_URL"
"""Where clients find a served platform; ``FIREWORKS_BASE_URL`` is read where it is not set."""
API_KEY_VARIABLE = "HEARTH_API_KEY"
"""What they show it; ``FIREWORKS_API_KEY`` is read where it is not set."""


def read_url() -> str:
    """The URL of the served platform that the environment names; empty where it names none."""
    return os.environ.get(URL_VARIABLE) or os.environ.get("FIREWORKS_BASE_URL", "")


def read_api_key() -> str:
    """The client's API key in the environment; empty where there is none."""
    return os.environ.get(API_KEY_VARIABLE) or os.environ.get("FIREWORKS_API_KEY", "")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One served platform.

    Raises:
        ConfigError: a value breaks its rule, or others could reach the platform without a key.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Any but a loopback address needs a key."""
    port: int = 8000
    """0 takes a free one."""
    data_dir: Path = field(default_factory=lambda: Path("~/.hearth").expanduser())
    """State, logs, checkpoints, snapshots and promoted models."""
    placement: Literal["process", "inline", "ray"] = "process"
    """``process``: each trainer and deployment its own process; ``inline``: threads of this one;
    ``ray``: actors of the cluster that ``RAY_ADDRESS`` names, or of one that starts here."""
    snapshot_store: str = "folder"
    """How weights get from trainers to deployments: ``folder`` is ``data_dir``, which all nodes of
    ``ray`` then share; ``ray`` is Ray's object store; ``s3://BUCKET/PREFIX`` is a bucket."""
    placement_timeout_s: float = 300.0
    """With ``ray``, how long a worker may wait for room in the cluster."""
    database_url: str = ""
    """SQLAlchemy URL; empty is SQLite in ``data_dir``."""
    catalog: Path | None = None
    """TOML file with models and training shapes beside the documented ones."""
    api_keys_file: Path | None = None
    """A key a line, and its name if it has one; ``HEARTH_API_KEYS`` (separated by commas) adds to
    them. In records a key without a name is the beginning of its SHA-256."""
    workers_per_key: int | None = None
    """Trainers, and deployments, that may run at once for one key; empty: any number."""
    requests_per_key: int | None = None
    """Requests of one key that are answered at once; empty: any number."""
    gateways: int = 1
    """Processes that listen at the address and pass completions to deployments; with several, the
    platform's own process answers the rest."""
    trainer_threads: int | None = None
    """CPU threads of a trainer's process; empty: its share of all cores."""
    deployment_threads: int | None = None
    """CPU threads of a deployment's process."""
    allow_folders: bool | None = None
    """Whether requests may name folders of this machine as models, tokenizers and adapters; not
    given, only on a loopback address."""
    keep_snapshots: int = 32
    """Snapshots of each bucket to keep, the newest and what they are made on; 0 keeps all."""
    max_body_mb: int = 1024
    """Longest request body to a trainer; completions take 1/16 of it, resources 1 MiB."""
    orphan_timeout_s: float = 900.0
    """A worker whose platform died ends itself after this time without a request."""

    traces: bool = False
    """Record a span for each request by OpenTelemetry, whose own variables say where it goes."""

    def __post_init__(self) -> None:
        for setting in fields(self):
            kinds, rule = _KINDS[str(setting.type)]
            value = getattr(self, setting.name)
            # To Python, True is a number; in a setting it is a mistake.
            fits = isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))
            _require(fits, setting.name, rule, value)
        is_known = self.placement in ("process", "inline", "ray")
        _require(is_known, "placement", "'process', 'inline' or 'ray'", self.placement)
        check_store(self.snapshot_store, self.placement)
        _require(
            self.placement_timeout_s > 0, "placement_timeout_s", "> 0", self.placement_timeout_s
        )
        _require(0 <= self.port < 2**16, "port", "in 0..65535", self.port)
        _require(self.keep_snapshots >= 0, "keep_snapshots", ">= 0", self.keep_snapshots)
        _require(self.max_body_mb >= 1, "max_body_mb", ">= 1", self.max_body_mb)
        _require(self.orphan_timeout_s > 0, "orphan_timeout_s", "> 0", self.orphan_timeout_s)
        _require(1 <= self.gateways <= MOST_GATEWAYS, "gateways", _GATEWAYS_RULE, self.gateways)
        if self.gateways > 1:
            rule = "1 with placement 'inline', whose deployments other processes cannot reach"
            _require(self.placement != "inline", "gateways", rule, self.gateways)
            rule = "unset with several gateways, which each count their own"
            _require(self.requests_per_key is None, "requests_per_key", rule, self.requests_per_key)
        for name in ("trainer_threads", "deployment_threads", *_PER_KEY):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, ">= 1 or unset", value)
        has_keys = bool(self.api_keys())
        for name in _PER_KEY:
            value = getattr(self, name)
            rule = f"unset without API keys ({KEYS_VARIABLE})"
            _require(has_keys or value is None, name, rule, value)
        if not has_keys and not is_loopback(self.host):
            raise ConfigError(
                f"host must be a loopback address while there is no API key, got {self.host!r}: "
                f"export {KEYS_VARIABLE}, or give api_keys_file"
            )

    @property
    def may_name_folders(self) -> bool:
        """``allow_folders``; if not set, whether the address is a loopback address."""
        return is_loopback(self.host) if self.allow_folders is None else self.allow_folders

    def api_keys(self) -> dict[str, str]:
        """Accepted keys and their names; without any, every key is, on a loopback address only.

        Raises:
            ConfigError: ``api_keys_file`` cannot be read, or has no key.
        """
        listed = os.environ.get(KEYS_VARIABLE, "").split(",")
        if self.api_keys_file is not None:
            try:
                lines = self.api_keys_file.expanduser().read_text(encoding="utf-8").splitlines()
                # A platform whose key file is empty must not be open to all.
                if not any(line.strip() for line in lines):
                    raise ValueError("it has no key")
                if odd := [n for n, line in enumerate(lines, 1) if len(line.split()) > 2]:
                    raise ValueError(f"line {odd[0]} is not a key and perhaps a name")
                listed += lines
            except (OSError, ValueError) as error:
                raise ConfigError(
                    "api_keys_file must be a readable file with keys, got "
                    f"{str(self.api_keys_file)!r}: {error}"
                ) from None
        words = [line.split(maxsplit=1) for line in listed if line.strip()]
        return {key: "".join(name) or hash_key(key) for key, *name in words}


def read_settings(path: Path | None, given: Mapping[str, Any]) -> Settings:
    """The settings of a TOML file, with ``given`` (flags) over them.

    Raises:
        ConfigError: the file cannot be read, or a name or value in it breaks its rule.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"settings must be a TOML file, got {str(path)!r}: {error}") from None
    known = {field.name for field in fields(Settings)}
    unknown = sorted(values.keys() - known)
    if unknown:
        raise ConfigError(f"settings must be among {sorted(known)}, got {unknown}")
    values |= given
    for name in ("data_dir", "catalog", "api_keys_file"):
        if isinstance(values.get(name), str):
            values[name] = Path(values[name]).expanduser()
    return Settings(**values)


def hash_key(key: str) -> str:
    """What stands for a key without a name: it tells keys apart and gives none away."""
    return hashlib.sha256(key.encode()).hexdigest()[:12]


def vllm_python() -> str:
    """The interpreter that has vLLM: ``HEARTH_VLLM_PYTHON``, or the current one."""
    return os.environ.get(VLLM_PYTHON_VARIABLE) or sys.executable


MOST_GATEWAYS = 64
_GATEWAYS_RULE = f"in 1..{MOST_GATEWAYS}"
_PER_KEY = ("workers_per_key", "requests_per_key")
_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "a text"),
    "int": ((int,), "a whole number"),
    "int | None": ((int, NoneType), "a whole number"),
    "float": ((float, int), "a number"),
    "bool": ((bool,), "true or false"),
    "bool | None": ((bool, NoneType), "true or false"),
    "Path": ((Path,), "a path"),
    "Path | None": ((Path, NoneType), "a path"),
    "Literal['process', 'inline', 'ray']": ((str,), "a text"),
}
"""Allowed values of each field's type: a file may hold anything."""


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reachable from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _require(is_met: bool, name: str, rule: str, value: object) -> None:
    if not is_met:
        raise ConfigError(f"{name} must be {rule}, got {value!r}")
