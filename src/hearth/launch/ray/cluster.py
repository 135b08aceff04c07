"""This process's connection to a Ray cluster, what is known of its nodes, and why actors die."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import OutOfMemoryError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hearth.errors import ConfigError
from hearth.launch.heartbeat import is_stopped

ADDRESS_VARIABLE = "RAY_ADDRESS"
_LEAST_CPUS = 16
"""Workers of one machine share its cores by themselves (``hearth.threads``): a laptop with two
cores may have a trainer, a reference and a deployment."""


@dataclass(frozen=True)
class Node:
    """One machine of the cluster, or what counts as one."""

    node_id: str
    address: str
    resources: Mapping[str, float]
    """What it has in all, such as ``{"CPU": 8.0, "GPU": 1.0}``."""

    def __str__(self) -> str:
        return f"node {self.node_id[:8]} ({self.address})"


def check_is_node() -> None:
    """Refuse an address at which this machine would only be a client of the cluster.

    Raises:
        ConfigError: ``RAY_ADDRESS`` is such an address.
    """
    address = os.environ.get(ADDRESS_VARIABLE, "")
    if address.startswith("ray://"):
        raise ConfigError(
            f"{ADDRESS_VARIABLE} must be HOST:PORT of a cluster that this machine is a node of, "
            f"got {address!r}: run `ray start --address=HOST:PORT --num-cpus=0` here first"
        )


def connect(namespace: str | None = None, *, least_cpus: int | None = _LEAST_CPUS) -> bool:
    """Connect to the cluster that ``RAY_ADDRESS`` names, or start one on this machine.

    One that is started counts as many CPUs as the machine has, and at least ``least_cpus``. Returns
    False when this process was connected before: then somebody else ends the connection.

    Raises:
        ConfigError: the cluster cannot be reached.
    """
    if ray.is_initialized():
        return False
    address = os.environ.get(ADDRESS_VARIABLE, "")
    own_cluster: dict[str, Any] = {}
    if not address:
        # What runs here is nobody else's business, unless somebody says that it is.
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cpus = None if least_cpus is None else max(least_cpus, os.cpu_count() or 1)
        own_cluster = {"num_cpus": cpus, "include_dashboard": False}
    # Ray replaces the handler of SIGTERM; it is put back.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        ray.init(
            address=address or "local",
            namespace=namespace,
            log_to_driver=False,
            logging_level=logging.ERROR,
            **own_cluster,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"{ADDRESS_VARIABLE} must be the address of a running cluster, got {address!r}: "
            f"{_first_line(error)}; `ray status` shows what runs"
        ) from None
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)
    return True


def living_nodes() -> list[Node]:
    """The nodes that are alive."""
    return [
        Node(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def has_gpus() -> bool:
    """Whether any node has a GPU."""
    return ray.cluster_resources().get("GPU", 0) > 0


def own_node_id() -> str:
    """The node of this process."""
    return ray.get_runtime_context().get_node_id()


def call_on(
    node_id: str, function: Callable[..., Any], *arguments: Any, timeout_s: float | None
) -> Any:
    """What ``function`` returns in a process of that node.

    Raises:
        RayError: the node or the process died, or took longer than ``timeout_s``; or what the
            function raised.
    """
    strategy: Any = NodeAffinitySchedulingStrategy(node_id, soft=False)
    # A process of its own, so that what it imports is not kept.
    alone = ray.remote(num_cpus=0, max_calls=1, max_retries=0, scheduling_strategy=strategy)
    return ray.get(alone(function).remote(*arguments), timeout=timeout_s)


def kill_if_stopped(pid: int, is_over: bool) -> bool:
    """Kill a process of this node that is stopped, or any where ``is_over``; was it stopped?"""
    was_stopped = is_stopped(pid)
    if was_stopped or is_over:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return was_stopped


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


_DETAIL = re.compile(
    r"Worker exit detail: (?P<detail>.*?)(?: There are some potential|$)", re.DOTALL
)
_LONGEST = 300


def explain_death(error: Exception, lost_node: str | None) -> str:
    """The reason of an actor's end; ``lost_node`` names its node where that is gone, too."""
    text = str(error)
    if lost_node is not None:
        return f"its machine was lost: {lost_node} is no longer in the cluster"
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return f"its machine ran out of memory: {shorten_error(error)}"
    return f"its actor died: {shorten_error(error)}"


def shorten_error(error: Exception) -> str:
    """The text of an error of Ray's, without its advice."""
    text = str(error)
    match = _DETAIL.search(text)
    useful = match["detail"] if match is not None else text
    line = " ".join(useful.split()) or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."


_PROBE = ".shared-with-every-node"
_VISIBLE_S = 5.0
"""How long a network file system may take to show a new file."""


@dataclass(frozen=True)
class Probe:
    """A file with a text that nobody else knows."""

    folder: str
    text: str

    def check(self, node: str, *, patience_s: float = _VISIBLE_S) -> None:
        """Look for the file from ``node``.

        Raises:
            ConfigError: it is not there.
        """
        end_s = time.monotonic() + patience_s
        while self._read() != self.text:
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"data_dir must be a folder that all nodes share, got {self.folder!r}, which "
                    f"{node} does not see: mount it there under the same path, or set "
                    "snapshot_store='ray'"
                )
            time.sleep(0.05)

    def _read(self) -> str | None:
        try:
            return (Path(self.folder) / _PROBE).read_text(encoding="ascii")
        except (OSError, UnicodeDecodeError):
            return None


def write_probe(folder: Path) -> Probe:
    """The probe of ``folder``, which is made where it is missing.

    One that is there stays: workers of an earlier platform still look for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _PROBE
    if not path.exists():
        path.write_text(secrets.token_hex(16), encoding="ascii")
    return Probe(str(folder), path.read_text(encoding="ascii"))
