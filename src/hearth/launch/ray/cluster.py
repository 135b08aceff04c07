"""This process's connection to a Ray cluster, and what is known of the cluster's nodes."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from hearth.errors import ConfigError

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


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
