"""The platform's numbers in Prometheus' format: what its gateway counts, and its workers say.

Numbers of workers are asked for while ``GET /metrics`` is answered; one that does not answer within
``_PATIENCE_S`` is left out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import psutil
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from hearth.control.plane import ControlPlane
from hearth.control.workers import LiveTable, fetch_json

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATS_PATH = "/stats"
"""Where a worker says its numbers, to its platform only."""
_PATIENCE_S = 2.0
_BUCKETS = (0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 60.0, 300.0)

Numbers = dict[str, Any]


class RequestMetrics:
    """Requests of one gateway; used on its event loops."""

    def __init__(self) -> None:
        self.folder: Path | None = None
        """Where gateway processes keep their numbers, which then count instead of these."""
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._finished = Counter(
            "hearth_requests",
            "Requests that were answered.",
            ("part", "status"),
            registry=self.registry,
        )
        self._seconds = Histogram(
            "hearth_request_duration_seconds",
            "Seconds until a request was answered whole.",
            ("part",),
            registry=self.registry,
            buckets=_BUCKETS,
        )
        self._running = Gauge(
            "hearth_requests_in_progress",
            "Requests that are being answered.",
            ("part",),
            registry=self.registry,
            multiprocess_mode="livesum",
        )

    def render(self) -> bytes:
        """The numbers in Prometheus' format, those of the process itself among them."""
        if self.folder is None:
            return generate_latest(self.registry)
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        MultiProcessCollector(registry, path=str(self.folder))
        return generate_latest(registry)

    def begin(self, part: str) -> None:
        """A request to a part of the platform begins."""
        self._running.labels(part).inc()

    def end(self, part: str, status: int, seconds: float) -> None:
        """It was answered, or broke off (status 0)."""
        self._running.labels(part).dec()
        self._finished.labels(part, str(status)).inc()
        self._seconds.labels(part).observe(seconds)


async def render_metrics(plane: ControlPlane, requests: RequestMetrics) -> bytes:
    """All numbers of a platform as they are now.

    Raises:
        StorageError: the database cannot be read.
    """
    trainers, deployments = await asyncio.gather(
        _ask_workers(plane.jobs.live), _ask_workers(plane.deployments.live)
    )
    states = await asyncio.to_thread(_count_states, plane)
    memory = await asyncio.to_thread(_measure_memory, plane)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Snapshot([*states, *memory, *_trainer(trainers), *_serving(deployments)]))
    return requests.render() + generate_latest(registry)


class _Snapshot(Collector):
    """Numbers that were read beforehand, since reading them waits."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


async def _ask_workers(live: LiveTable) -> dict[str, Numbers]:
    """What each worker that answers says, by its resource's id; an older release says less."""
    endpoints = {id: endpoint for id in live.ids() if (endpoint := live.endpoint(id)) is not None}
    calls = [
        asyncio.to_thread(fetch_json, endpoint, STATS_PATH, _PATIENCE_S)
        for endpoint in endpoints.values()
    ]
    answers = await asyncio.gather(*calls)
    return {
        id: cast("Numbers", answer)
        for id, answer in zip(endpoints, answers, strict=True)
        if isinstance(answer, dict)
    }


def _count_states(plane: ControlPlane) -> list[Metric]:
    families: list[Metric] = []
    tables = (("jobs", plane.store.jobs), ("deployments", plane.store.deployments))
    for name, records in tables:
        family = GaugeMetricFamily(f"hearth_{name}", f"The platform's {name}.", labels=("state",))
        for state, count in sorted(records.count_states().items()):
            family.add_metric((state,), count)
        families.append(family)
    return families


def _measure_memory(plane: ControlPlane) -> list[Metric]:
    family = GaugeMetricFamily(
        "hearth_worker_resident_memory_bytes",
        "Memory of a worker's process, without its sidecars.",
        labels=("kind", "id"),
    )
    for kind, live in (("trainer", plane.jobs.live), ("deployment", plane.deployments.live)):
        for id in live.ids():
            entry = live.get(id)
            pid = entry.worker.pid if entry is not None and entry.worker is not None else None
            try:
                if pid is not None:
                    family.add_metric((kind, id), psutil.Process(pid).memory_info().rss)
            except psutil.Error:  # it has ended, or is on another machine
                continue
    return [family]


def _trainer(trainers: dict[str, Numbers]) -> list[Metric]:
    waiting = GaugeMetricFamily(
        "hearth_trainer_operations_in_progress",
        "Operations of a trainer that run or wait.",
        labels=("job",),
    )
    finished = CounterMetricFamily(
        "hearth_trainer_operations",
        "Operations that a trainer has finished, failed ones too.",
        labels=("job", "operation"),
    )
    for job, numbers in sorted(trainers.items()):
        waiting.add_metric((job,), numbers.get("in_progress", 0))
        for name, count in sorted(numbers.get("finished", {}).items()):
            finished.add_metric((job, name), count)
    return [waiting, finished]


def _serving(deployments: dict[str, Numbers]) -> list[Metric]:
    described = (
        (GaugeMetricFamily, "completions_in_progress", "Completions that run or wait."),
        (CounterMetricFamily, "completions", "Completions that were sampled."),
        (CounterMetricFamily, "prompt_tokens", "Tokens of the prompts of these completions."),
        (CounterMetricFamily, "completion_tokens", "Tokens that were sampled for them."),
        (GaugeMetricFamily, "weight_version", "Weight syncs that are served."),
    )
    families: list[Metric] = []
    for kind, name, text in described:
        family = kind(f"hearth_deployment_{name}", text, labels=("deployment",))
        for deployment, numbers in sorted(deployments.items()):
            family.add_metric((deployment,), numbers.get(name, 0))
        families.append(family)
    return families
