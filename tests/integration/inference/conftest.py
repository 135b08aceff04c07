from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.inference.scripted import Scripted


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Callable[..., Scripted]]:
    made: list[Scripted] = []

    def make(replicas: int = 1, **options: Any) -> Scripted:
        made.append(Scripted(tmp_path / str(len(made)), replicas, options))
        return made[-1]

    yield make
    for item in made:
        item.close()
