"""A Ray cluster whose nodes are all on this machine, and what a test asks of it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ray
from ray.cluster_utils import Cluster

STORE_BYTES = 80 * 2**20
PATIENCE_S = 60.0


class Nodes:
    """A head that runs no workers, and nodes that do; each has as many CPUs as it is told."""

    def __init__(self, *cpus: int) -> None:
        head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self.address = str(self._cluster.address)
        self._nodes: dict[str, Any] = {}
        for count in cpus:
            self.add(count)

    def add(self, cpus: int) -> str:
        """One more node; its id."""
        node = self._cluster.add_node(num_cpus=cpus, object_store_memory=STORE_BYTES)
        self._nodes[node.node_id] = node
        return node.node_id

    def kill(self, node_id: str) -> None:
        """End all processes of a node, as when its machine loses its power."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def become(self, *cpus: int) -> None:
        """Other nodes in the place of those that there are, the head excepted."""
        for node_id in list(self._nodes):
            self.kill(node_id)
        for count in cpus:
            self.add(count)

    def cpus(self, node_id: str) -> int:
        """How many CPUs a node was told that it has."""
        return int(self._nodes[node_id].get_resource_spec().num_cpus)

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
def held(cpus: int) -> Iterator[None]:
    """Inside the ``with`` so many CPUs of one node are nobody's else."""
    group = ray.util.placement_group([{"CPU": cpus}], name="held-0")
    assert group.wait(PATIENCE_S)
    yield
    ray.util.remove_placement_group(group)


def wait_until(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    end_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end_s, f"not so after {timeout_s} s"
        time.sleep(0.02)
