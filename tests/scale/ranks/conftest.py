"""Trainers of several ranks, started once and used by many tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.launch.conftest import make_trainer_spec
from tests.scale.ranks.trainers import OneProcess, RankTrainer, write_model
from tests.threads import one_thread as one_thread

from hearth.launch.processes import ProcessLauncher
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions

MICRO_BATCH_TOKENS = 128


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="session")
def checkpoints(data_dir: Path) -> Path:
    """The folder that all trainers of these tests write their checkpoints into."""
    return data_dir / "checkpoints"


@pytest.fixture(scope="session")
def launcher(data_dir: Path) -> Iterator[ProcessLauncher]:
    launcher = ProcessLauncher(data_dir, die_with_parent=True)
    yield launcher
    launcher.close()


@pytest.fixture(scope="session")
def start(
    launcher: ProcessLauncher, model_folder: Path, data_dir: Path, checkpoints: Path
) -> Callable[..., RankTrainer]:
    """A trainer of some ranks, until it is closed; keyword arguments are fields of its spec."""
    count = 0

    def start(ranks: int, **options: Any) -> RankTrainer:
        nonlocal count
        count += 1
        own = {"bucket": f"bucket-{count}", "micro_batch_tokens": MICRO_BATCH_TOKENS}
        spec = make_trainer_spec(
            model_folder, checkpoints, f"trainer-{count}", ranks=ranks, **own | options
        )
        return RankTrainer(launcher, data_dir, spec)

    return start


@pytest.fixture(scope="session")
def groups(start: Callable[..., RankTrainer]) -> Iterator[Callable[[int], RankTrainer]]:
    """The one trainer of so many ranks."""
    made: dict[int, RankTrainer] = {}

    def group(ranks: int) -> RankTrainer:
        if ranks not in made:
            made[ranks] = start(ranks)
        return made[ranks]

    yield group
    for trainer in made.values():
        trainer.close()


@pytest.fixture(params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture
def trainer(groups: Callable[[int], RankTrainer], ranks: int) -> RankTrainer:
    return groups(ranks)


@pytest.fixture
def make_single(model_folder: Path, checkpoints: Path) -> Iterator[Callable[..., OneProcess]]:
    """A trainer that is one process, on the same model and checkpoints."""
    made: list[OneProcess] = []

    def make(source: Path | None = None, **options: Any) -> OneProcess:
        values = {"micro_batch_tokens": MICRO_BATCH_TOKENS, **options}
        engine = TrainerEngine(
            source or model_folder,
            name="tiny",
            snapshots=MemorySnapshotStore(),
            checkpoint_dir=checkpoints,
            options=TrainerOptions(**values),
        )
        made.append(OneProcess(engine))
        return made[-1]

    yield make
    for single in made:
        single.engine.close()


@pytest.fixture
def single(make_single: Callable[..., OneProcess]) -> OneProcess:
    return make_single()
