"""A Ray cluster whose nodes are all on this machine, and what a test asks of it."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.cluster_utils import Cluster

from hearth.launch.ray.cluster import connect

STORE_BYTES = 80 * 2**20
PATIENCE_S = 60.0


class Nodes:
    """A head that runs no workers, and nodes that do; each has as many CPUs as it is told."""

    def __init__(self, *cpus: int) -> None:
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self._nodes: dict[str, Any] = {}
        self.cpus: dict[str, int] = {}
        """How many each node has or had."""
        for count in cpus:
            self.add(count)

    def add(self, cpus: int) -> str:
        """One more node; its id."""
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)
        self._nodes[node.node_id] = node
        self.cpus[node.node_id] = cpus
        return node.node_id

    def kill(self, node_id: str) -> None:
        """End all processes of a node, as when its machine loses its power."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def become(self, *cpus: int) -> None:
        """Other nodes in the place of those that there are, the head excepted."""
        for node in self._nodes.values():
            self._cluster.remove_node(node)
        self._nodes.clear()
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
        self._cluster.shutdown()


def actors() -> dict[str, Any]:
    """The named actors of the cluster, by name; from a process that is connected to it."""
    return {
        one["name"]: ray.get_actor(one["name"], namespace=one["namespace"])
        for one in ray.util.list_named_actors(all_namespaces=True)
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

    The first is of the worker itself, the others are of its companions.
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


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not so after {timeout_s} s"
        time.sleep(0.02)
