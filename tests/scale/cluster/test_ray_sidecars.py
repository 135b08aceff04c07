"""Sidecars in the cluster: on the places reserved for them, and never longer than their actor."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from tests.scale.cluster.clusters import Nodes
from tests.waiting import is_running, wait_until

from hearth.errors import ClosedError, EngineError
from hearth.launch.ray.cluster import connect
from hearth.launch.ray.placing import Place
from hearth.launch.ray.sidecars import RaySidecars
from hearth.launch.sidecars import wait_for_end
from hearth.sidecars import Command

PATIENCE_S = 30.0
SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def python(code: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(code)]


@pytest.fixture
def sidecars(cluster: Nodes, tmp_path: Path) -> Iterator[RaySidecars]:
    """Of a worker that needs next to nothing itself: one sidecar on each node."""
    assert connect("test")
    places = [Place("worker", 0.1), Place("rank-1", 0.9), Place("rank-2", 1.0)]
    group = ray.util.placement_group([place.bundle() for place in places])
    assert group.wait(30)
    sidecars = RaySidecars(group, places[1:], tmp_path, None)
    yield sidecars
    sidecars.close()
    ray.util.remove_placement_group(group)
    ray.shutdown()


def test_sidecars_run_on_their_places_and_know_their_address(sidecars):
    code = "import os, sys; print(sys.argv[1], sys.argv[2], os.environ['COLOR'])"
    started = [
        sidecars.start(
            Command(name=name, argv=[*python(code), "{host}", "at:{port}"], env={"COLOR": "red"})
        )
        for name in ("rank-1", "rank-2")
    ]
    for sidecar in started:
        report = wait_for_end(sidecar, PATIENCE_S)
        assert report is not None
        assert report.code == 0
        assert list(report.last_lines) == [f"{sidecar.host} at:{sidecar.port} red"]


def test_a_place_is_one_sidecars_at_a_time(sidecars):
    first = sidecars.start(Command(name="rank-1", argv=python(SLEEP)))
    with pytest.raises(EngineError, match="must be new, got 'rank-1', which runs"):
        sidecars.start(Command(name="rank-1", argv=["true"]))
    sidecars.start(Command(name="rank-2", argv=python(SLEEP)))
    with pytest.raises(EngineError, match=r"rank-3 must have one of the places .* where 2 of"):
        sidecars.start(Command(name="rank-3", argv=["true"]))
    with pytest.raises(EngineError, match=r"1 GPUs where 2 of"):
        sidecars.start(Command(name="rank-3", argv=["true"], gpus=1.0))

    first.stop()
    assert first.poll() is not None
    again = sidecars.start(Command(name="rank-1", argv=python("print('again')")))
    report = wait_for_end(again, PATIENCE_S)
    assert report is not None
    assert report.last_lines[-1] == "again"

    sidecars.close()
    with pytest.raises(ClosedError):
        sidecars.start(Command(name="rank-4", argv=["true"]))


def test_the_process_ends_with_its_actor(sidecars):
    started = sidecars.start(Command(name="rank-1", argv=python(SLEEP)))
    wait_until(lambda: bool(started.last_lines()))
    pid = int(started.last_lines()[0])

    ray.kill(started.actor)

    report = wait_for_end(started, PATIENCE_S)
    assert report is not None
    assert report.reason is not None
    assert report.reason.startswith("its actor died: ")
    assert list(report.last_lines) == [str(pid)]
    wait_until(lambda: not is_running(pid))


def test_a_program_that_is_not_there_is_said(sidecars):
    with pytest.raises(EngineError, match=r"rank-1 must be a program that is there, got '/no/such"):
        sidecars.start(Command(name="rank-1", argv=["/no/such"]))
    sidecars.start(Command(name="rank-1", argv=["true"]))
