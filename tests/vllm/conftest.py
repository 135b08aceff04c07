"""Everything here needs vLLM; servers are shared, because one takes many seconds to start."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.vllm.stack import Deployment, Trainer

from hearth.settings import VLLM_PYTHON_VARIABLE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(VLLM_PYTHON_VARIABLE):
        return
    here = Path(__file__).parent
    reason = f"{VLLM_PYTHON_VARIABLE} names no interpreter with vLLM: run make test-vllm"
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two replicas of the shipped model."""
    made = Deployment(tmp_path_factory.mktemp("deployment"), replicas=2)
    yield made
    made.close()


@pytest.fixture(scope="module")
def trainer(deployment: Deployment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    made = Trainer(deployment, tmp_path_factory.mktemp("trainer"))
    yield made
    made.close()
