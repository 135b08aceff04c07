"""Which places a worker needs in the cluster, and what is short when it does not get them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hearth.launch.ray.cluster import Node
from hearth.launch.spec import TrainerSpec, WorkerSpec


@dataclass(frozen=True)
class Place:
    """What one process of a worker reserves on one node."""

    name: str
    """``worker``, or the sidecar that it is meant for."""
    cpus: float
    gpus: float = 0.0

    def bundle(self) -> dict[str, float]:
        """The place as Ray's placement groups have it."""
        return {"CPU": self.cpus} | ({"GPU": self.gpus} if self.gpus else {})


def places_of(spec: WorkerSpec, *, has_gpus: bool) -> list[Place]:
    """The worker's own place, then one for each sidecar that its spec asks for.

    A process that computes takes a GPU where its device is one, or where no device is said and the
    cluster has some; and ``threads`` CPUs, or one.
    """
    uses_gpu = spec.device.startswith("cuda") if spec.device is not None else has_gpus
    cpus, gpus = float(spec.threads or 1), float(uses_gpu)
    if isinstance(spec, TrainerSpec):
        others = [Place(f"rank-{rank}", cpus, gpus) for rank in range(1, spec.ranks)]
        return [Place("worker", cpus, gpus), *others]
    if spec.engine == "embedded":
        return [Place("worker", cpus, gpus)]
    # The worker itself only passes requests on; its servers compute.
    gpus *= int(spec.engine_options.get("tensor_parallel_size", 1))
    servers = [Place(f"replica-{number}", cpus, gpus) for number in range(spec.replicas)]
    return [Place("worker", 1.0), *servers]


def device_of(spec: WorkerSpec, places: Sequence[Place]) -> str | None:
    """The device of a worker that has ``places``.

    Where only its sidecars have GPUs, as those of vLLM, the worker's own process sees none.
    """
    if spec.device is None and any(place.gpus for place in places):
        return "cuda"
    return spec.device


def shortage(
    places: Sequence[Place], nodes: Sequence[Node], free: Mapping[str, float], waited_s: float
) -> str:
    """Why there was no room for ``places``, as a sentence for a person.

    ``free`` is what the cluster has left of each resource.
    """
    for resource in ("GPU", "CPU"):
        needed = sum(place.bundle().get(resource, 0.0) for place in places)
        largest = max(place.bundle().get(resource, 0.0) for place in places)
        has = [node.resources.get(resource, 0.0) for node in nodes]
        left = free.get(resource, 0.0)
        if needed > left or largest > max(has, default=0.0):
            return (
                f"placement must be met within {waited_s:g} s, got too few {resource}s: it needs "
                f"{needed:g} ({_list_needs(places, resource)}), the {len(nodes)} nodes have "
                f"{sum(has):g} ({_join_numbers(has)}), {left:g} of them free: add nodes, end other "
                "workers, or ask for less"
            )
    return (
        f"placement must be met within {waited_s:g} s, got none for {len(places)} processes, "
        "although enough is free in all: no node has enough for one of "
        f"{_list_needs(places, 'CPU')}"
    )


def _list_needs(places: Sequence[Place], resource: str) -> str:
    parts = [f"{place.name} {place.bundle().get(resource, 0.0):g}" for place in places]
    return ", ".join(parts)


def _join_numbers(values: Sequence[float]) -> str:
    return " + ".join(f"{value:g}" for value in values) or "none"
