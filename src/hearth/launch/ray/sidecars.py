"""A worker's sidecars in the cluster: each an actor, which runs the process on its own node.

The process has the same supervisor as on one machine, so that it ends with the actor. The actor
ends with the worker that asked for it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from hearth.errors import ClosedError, EngineError, HearthError
from hearth.launch.ray.cluster import Probe, explain_death, shorten_error
from hearth.launch.ray.placing import Place
from hearth.launch.sidecars import LocalSidecars, stop_all
from hearth.sidecars import GRACE_S, Command, ExitReport, Sidecar

_START_TIMEOUT_S = 120.0
_CALL_TIMEOUT_S = 30.0


class SidecarHost:
    """The actor: one process, on the node of its place."""

    def __init__(self, folder: str, probe: Probe | None) -> None:
        self._host = ray.util.get_node_ip_address()
        self._sidecars = LocalSidecars(Path(folder), self._host, kills_children=True)
        self._probe = probe
        self._sidecar: Sidecar | None = None

    def start(self, command: Command) -> tuple[str, int] | str:
        """Its address, or why it cannot be started."""
        try:
            if self._probe is not None:
                self._probe.check(f"the node at {self._host}")
            self._sidecar = self._sidecars.start(command)
        except HearthError as error:
            return str(error)
        return self._sidecar.host, self._sidecar.port

    def state(self) -> tuple[ExitReport | None, tuple[str, ...]]:
        """How it ended, if it has, and its last lines."""
        assert self._sidecar is not None, "it was started"
        return self._sidecar.poll(), tuple(self._sidecar.last_lines())

    def stop(self, grace_s: float) -> None:
        """End the process."""
        assert self._sidecar is not None, "it was started"
        self._sidecar.stop(grace_s)


@dataclass
class _Reserved:
    """One place of the worker's group."""

    place: Place
    index: int
    taken_by: RaySidecar | None = None

    @property
    def is_free(self) -> bool:
        return self.taken_by is None or self.taken_by.poll() is not None


class RaySidecar:
    """A process on some node of the cluster (``Sidecar``)."""

    def __init__(self, name: str, actor: Any, address: tuple[str, int]) -> None:
        self.name = name
        self.host, self.port = address
        self.actor = actor
        """Whose process has the sidecar's as a child."""
        self._report: ExitReport | None = None
        self._lines: tuple[str, ...] = ()
        self._lock = threading.Lock()

    def poll(self) -> ExitReport | None:
        """How it ended; None while it runs."""
        self._update()
        return self._report

    def last_lines(self) -> Sequence[str]:
        """The end of what it has printed."""
        self._update()
        return self._lines

    def stop(self, grace_s: float = GRACE_S) -> None:
        """SIGTERM, and SIGKILL to all that it started when that takes longer than ``grace_s``."""
        if self.poll() is not None:
            return
        with contextlib.suppress(RayError):
            ray.get(self.actor.stop.remote(grace_s), timeout=grace_s + _CALL_TIMEOUT_S)
        if self.poll() is None:
            with self._lock:
                self._end(ExitReport(reason="was stopped, and its exit status is unknown"))

    def _update(self) -> None:
        with self._lock:
            if self._report is not None:
                return
            try:
                report, self._lines = ray.get(self.actor.state.remote(), timeout=_CALL_TIMEOUT_S)
            except GetTimeoutError:
                return  # a node that is gone is noticed by Ray, and then an error of its own
            except RayError as error:
                report = ExitReport(reason=explain_death(error, None), last_lines=self._lines)
            if report is not None:
                self._end(report)

    def _end(self, report: ExitReport) -> None:
        """Keep how it ended, and give its place back."""
        self._report = replace(report, last_lines=report.last_lines or self._lines)
        ray.kill(self.actor)


class RaySidecars:
    """Sidecars on the places that were reserved for them (``Sidecars``).

    ``places`` are the group's from its second on; the first is the worker's own.
    """

    def __init__(
        self, group: Any, places: Sequence[Place], folder: Path, probe: Probe | None
    ) -> None:
        self._group = group
        self._reserved = [_Reserved(place, number) for number, place in enumerate(places, start=1)]
        self._folder = folder
        self._probe = probe
        self._lock = threading.Lock()
        self._is_closed = False

    def start(self, command: Command) -> RaySidecar:
        """Start a process on a free place, and return when there is one.

        Raises:
            EngineError: no place is free, its node does not have the program, or one of that name
                still runs.
            ClosedError: the worker ends.
        """
        with self._lock:
            if self._is_closed:
                raise ClosedError(f"worker must be running, got a start of {command.name} after it")
            reserved = self._find_place(command)
            reserved.taken_by = self._start_on(reserved, command)
            return reserved.taken_by

    def close(self) -> None:
        """Stop all that still run, at once."""
        with self._lock:
            self._is_closed = True
            running = [slot.taken_by for slot in self._reserved if slot.taken_by is not None]
        stop_all(running)

    def _find_place(self, command: Command) -> _Reserved:
        busy = [slot for slot in self._reserved if not slot.is_free]
        if any(slot.taken_by is not None and slot.taken_by.name == command.name for slot in busy):
            raise EngineError(f"sidecar must be new, got {command.name!r}, which runs")
        free = [slot for slot in self._reserved if slot not in busy and _fits(command, slot.place)]
        if not free:
            places = [f"{slot.place.name} ({slot.place.gpus:g} GPUs)" for slot in self._reserved]
            raise EngineError(
                f"{command.name} must have one of the places that its worker reserved, got "
                f"{command.gpus:g} GPUs where {len(busy)} of {places} are taken"
            )
        named = [slot for slot in free if slot.place.name == command.name]
        return (named or free)[0]

    def _start_on(self, reserved: _Reserved, command: Command) -> RaySidecar:
        place = reserved.place
        command = replace(command, env={**hearth_variables(), **command.env})
        actor: Any = (
            ray.remote(SidecarHost)
            .options(
                num_cpus=place.cpus,
                num_gpus=place.gpus,
                max_concurrency=4,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    self._group, placement_group_bundle_index=reserved.index
                ),
            )
            .remote(str(self._folder), self._probe)
        )
        try:
            address: tuple[str, int] | str = ray.get(
                actor.start.remote(command), timeout=_START_TIMEOUT_S
            )
        except RayError as error:
            reason = shorten_error(error)
            address = f"{command.name} must start within {_START_TIMEOUT_S:g} s, got: {reason}"
        if isinstance(address, str):
            ray.kill(actor)
            raise EngineError(address)
        return RaySidecar(command.name, actor, address)


def hearth_variables() -> dict[str, str]:
    """Hearth's own settings in this process's environment, but for the keys of clients."""
    own = {name: value for name, value in os.environ.items() if name.startswith("HEARTH_")}
    own.pop("HEARTH_API_KEYS", None)
    return own


def _fits(command: Command, place: Place) -> bool:
    # CPUs are a matter of degree, a GPU is not.
    return command.gpus <= place.gpus
