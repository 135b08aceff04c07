"""A cluster of two nodes on this machine, which all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.scale.cluster.clusters import Nodes
from tests.unit.launch.conftest import Heard
from tests.unit.tiny import write_qwen


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Two nodes with one CPU each, beside the one of the control plane.

    Who kills one adds another.
    """
    nodes = Nodes(1, 1)
    yield nodes
    nodes.shutdown()


@pytest.fixture
def cluster(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """The nodes, which ``RAY_ADDRESS`` names."""
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    return nodes


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("model"))


@pytest.fixture
def heard() -> type[Heard]:
    return Heard
