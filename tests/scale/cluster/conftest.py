"""A cluster of two nodes on this machine, which all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.runs import Trial
from tests.scale.cluster.clusters import Nodes
from tests.scale.cluster.greedy import Greedy, train
from tests.unit.tiny import write_qwen


@pytest.fixture(scope="session", autouse=True)
def no_tokens() -> Iterator[None]:
    """Who starts a cluster of its own has tokens asked for in this process from then on.

    Nodes that are added later would not be let into the cluster that all tests share.
    """
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_AUTH_MODE", "disabled")
    yield
    patch.undo()


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    """Nodes beside the one of the control plane; ``cluster`` and ``two_nodes`` say how large.

    Who kills one adds another.
    """
    nodes = Nodes()
    yield nodes
    nodes.shutdown()


@pytest.fixture
def cluster(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """The nodes, one CPU each, which ``RAY_ADDRESS`` names."""
    nodes.become(1, 1)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    return nodes


@pytest.fixture
def two_nodes(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> Nodes:
    """Nodes of four CPUs and of one: a trainer of two ranks and two vLLM servers take all five."""
    nodes.become(4, 1)
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    return nodes


@pytest.fixture(scope="session")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Greedy]:
    """The greedy recipe, all in this process."""
    greedy = Greedy()
    return train(tmp_path_factory.mktemp("embedded"), greedy), greedy


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen(tmp_path_factory.mktemp("model"))
