"""A Ray cluster whose nodes are all on this machine, and what a test asks of it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from tests.scale.cluster.networks import Network, can_be_made
from tests.waiting import wait_until

from hearth.launch.ray.cluster import connect

STORE_BYTES = 80 * 2**20
PATIENCE_S = 60.0
LOST_SOON = {
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 5,
}
"""With these Ray notices a lost node some 25 s sooner than with its own."""


class Nodes:
    """A head that runs no workers, and nodes that do; each has as many CPUs as it is told.

    Nodes are machines of a network of their own where one can be made, else they are processes that
    share this machine's addresses.
    """

    def __init__(self, *cpus: int) -> None:
        self.network = Network() if can_be_made() else None
        head: dict[str, Any] = {
            "num_cpus": 0,
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "_system_config": LOST_SOON,
        }
        if self.network is not None:
            head["node_ip_address"] = self.network.address
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self._nodes: dict[str, Any] = {}
        self.cpus: dict[str, int] = {}
        """How many each node has or had."""
        for count in cpus:
            self.add(count)

    @property
    def host(self) -> str:
        """An address of this machine that all nodes reach."""
        return self.network.address if self.network is not None else "127.0.0.1"

    def add(self, cpus: int) -> str:
        """One more node; its id."""
        node = self._on_machine(cpus) if self.network is not None else self._beside(cpus)
        self.cpus[node] = cpus
        return node

    def kill(self, node_id: str, *, says_so: bool = False) -> None:
        """End all processes of a node, as when its machine loses its power, or after it
        ``says_so``."""
        node = self._nodes.pop(node_id)
        if self.network is None:
            self._cluster.remove_node(node, allow_graceful=says_so)
            return
        machine, running = node
        if says_so:
            for pid in machine.pids():
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                    if Path(f"/proc/{pid}/comm").read_text().strip() == "raylet":
                        os.kill(pid, signal.SIGTERM)
            wait_until(lambda: machine.address not in self._living())
        self.network.remove(machine)
        running.wait()

    def become(self, *cpus: int) -> None:
        """Have nodes of these sizes beside the head; nothing is done where there are."""
        if sorted(self.cpus[node_id] for node_id in self._nodes) == sorted(cpus):
            return
        for node_id in list(self._nodes):
            self.kill(node_id, says_so=True)
        for count in cpus:
            self.add(count)

    @property
    def smallest(self) -> str:
        """The node with the fewest CPUs."""
        return min(self._nodes, key=self.cpus.__getitem__)

    def lose(self, node_id: str) -> None:
        """Kill a node, once there is another one of its size."""
        self.add(self.cpus[node_id])
        self.kill(node_id)

    def shutdown(self) -> None:
        """End all nodes."""
        if self.network is not None:
            self.network.close()
        for _, running in self._nodes.values() if self.network is not None else ():
            running.wait()
        self._cluster.shutdown()

    def _beside(self, cpus: int) -> str:
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)
        self._nodes[node.node_id] = node
        return node.node_id

    def _on_machine(self, cpus: int) -> str:
        assert self.network is not None
        machine = self.network.add()
        program = Path(sys.executable).with_name("ray")
        with tempfile.TemporaryFile() as said:
            running = subprocess.Popen(
                machine.argv(
                    [
                        str(program),
                        "start",
                        "--block",
                        f"--address={self.address}",
                        f"--node-ip-address={machine.address}",
                        f"--num-cpus={cpus}",
                        f"--object-store-memory={STORE_BYTES}",
                        "--disable-usage-stats",
                    ]
                ),
                stdout=said,
                stderr=said,
            )

            def is_up() -> bool:
                if running.poll() is not None:
                    said.seek(0)
                    raise AssertionError(said.read().decode())
                return machine.address in self._living()

            wait_until(is_up)
        node_id = self._living()[machine.address]
        self._nodes[node_id] = machine, running
        return node_id

    def _living(self) -> dict[str, str]:
        """Ids of the nodes that are alive, by address; the head's too."""
        return {
            node["NodeManagerAddress"]: node["NodeID"]
            for node in self._cluster.global_state.node_table()
            if node["Alive"]
        }


def actors() -> dict[str, Any]:
    """The named actors of the cluster, by name; from a process that is connected to it."""
    return {
        actor["name"]: ray.get_actor(actor["name"], namespace=actor["namespace"])
        for actor in ray.util.list_named_actors(all_namespaces=True)
    }


def nodes_of_workers() -> Mapping[str, str]:
    """The node of each worker, by ``trainer`` and ``deployment``."""
    return {
        name.partition("-")[0]: ray.get(actor.facts.remote(), timeout=PATIENCE_S).node_id
        for name, actor in actors().items()
        if name.startswith(("trainer-", "deployment-"))
    }


def places() -> dict[str, list[str]]:
    """The nodes that each worker has its places on, by ``trainer`` and ``deployment``.

    The first is of the worker itself, the others are of its sidecars.
    """
    return {
        group["name"].partition("-")[0]: [
            node for _, node in sorted(group["bundles_to_node_id"].items())
        ]
        for group in ray.util.placement_group_table().values()
        if group["state"] == "CREATED"
    }


@contextlib.contextmanager
def ranks_apart(nodes: Nodes) -> Iterator[None]:
    """Inside the ``with`` a trainer of two ranks finds one CPU free on each of two nodes.

    Once it has them, the rest of the larger node is free for whoever else waits.
    """
    assert connect("test")
    group = ray.util.placement_group([{"CPU": max(nodes.cpus.values()) - 1}], name="held")
    assert group.wait(PATIENCE_S)

    def let_go() -> None:
        wait_until(lambda: "trainer" in places())
        ray.util.remove_placement_group(group)

    letting_go = threading.Thread(target=let_go, daemon=True)
    letting_go.start()
    try:
        yield
    finally:
        letting_go.join()
        ray.shutdown()


@contextlib.contextmanager
def on_main_thread(do: Callable[[], None]) -> Iterator[Callable[[], None]]:
    """A function for other threads, which has ``do`` called on the main one and waits for it.

    Ray starts nodes nowhere else.
    """
    is_done = threading.Event()

    def handle(*_: object) -> None:
        do()
        is_done.set()

    def ask() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert is_done.wait(PATIENCE_S)

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        yield ask
    finally:
        signal.signal(signal.SIGUSR1, before)
