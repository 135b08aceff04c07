"""Checkpoints as the SDK sees them, on a trainer's own app."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hearth.errors import ConfigError, NotFoundError, RequestFailedError
from hearth.sdk.training import FiretitanServiceClient, FiretitanTrainingClient
from hearth.sdk.transport import mount, unmount
from hearth.sync.store import MemorySnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.service import create_app

pytestmark = pytest.mark.slow

MakePolicy = Callable[[str], FiretitanTrainingClient]


@pytest.fixture
def make_policy(qwen_folder: Path, tmp_path: Path) -> Iterator[MakePolicy]:
    """A policy on a new trainer of a job; the same job again is that trainer restarted."""
    made: list[tuple[str, FiretitanServiceClient, TrainerEngine]] = []

    def make(job: str) -> FiretitanTrainingClient:
        engine = TrainerEngine(
            qwen_folder, name="tiny", snapshots=MemorySnapshotStore(), checkpoint_dir=tmp_path / job
        )
        url = f"http://{job}-{len(made)}.test.internal"
        mount(url, create_app(engine, poll_s=0.5))
        service = FiretitanServiceClient(url, "key")
        made.append((url, service, engine))
        return service.create_training_client("tiny")

    yield make
    for url, service, engine in made:
        service.close()
        unmount(url)
        engine.close()


def test_metadata_come_back_when_a_restarted_trainer_loads(make_policy: MakePolicy) -> None:
    metadata: dict[str, Any] = {"cursor": 9, "beyond": [11], "config": {"lr": 1e-5}}
    policy = make_policy("job")
    saved = policy.save_state("step-1", metadata=metadata).result()
    policy.save_state("step-2").result()

    again = make_policy("job")

    assert (saved.path, saved.metadata) == ("step-1", None)
    assert again.list_checkpoints() == ["step-1", "step-2"]
    assert again.load_state_with_optimizer("step-1").result().metadata == metadata
    assert again.load_state("step-2").result().metadata is None


def test_another_jobs_checkpoint_is_loaded_by_its_resolved_path(make_policy: MakePolicy) -> None:
    first, second = make_policy("first"), make_policy("second")
    first.save_state("step-1", metadata={"of": "first"}).result()
    path = second.resolve_checkpoint_path("step-1", source_job_id="first")

    loaded = second.load_state_with_optimizer(path).result()

    assert path == "cross_job://first/step-1"
    assert (loaded.path, loaded.metadata) == (path, {"of": "first"})
    with pytest.raises(RequestFailedError, match=r"path must name one of \[\], got 'step-1'"):
        second.load_state(second.resolve_checkpoint_path("step-1")).result()


@pytest.mark.parametrize(
    ("name", "job", "message"),
    [
        ("a/b", None, "name must be a name without '/', got 'a/b'"),
        ("", None, "name must be a name without '/', got ''"),
        ("a", "../up", "source_job_id must be a name without '/', got '../up'"),
        ("cross_job://first/a", "other", "name must be a name without '/'"),
    ],
)
def test_a_path_is_resolved_from_plain_names_only(
    make_policy: MakePolicy, name: str, job: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_policy("job").resolve_checkpoint_path(name, job)


def test_a_client_of_before_a_restart_is_told_so(qwen_folder: Path, tmp_path: Path) -> None:
    engines = [
        TrainerEngine(
            qwen_folder, name="tiny", snapshots=MemorySnapshotStore(), checkpoint_dir=tmp_path
        )
        for _ in range(2)
    ]
    apps = [create_app(engine, poll_s=0.5) for engine in engines]

    async def trainer(scope: Any, receive: Any, send: Any) -> None:
        await apps[0](scope, receive, send)

    mount("http://restarted.test.internal", trainer)
    service = FiretitanServiceClient("http://restarted.test.internal", "key")
    policy = service.create_training_client("tiny")
    policy.save_state("step-1").result()
    del apps[0]
    assert engines[1].create_model() != policy.model_id

    with pytest.raises(NotFoundError, match=f"got '{policy.model_id}': the trainer may have been"):
        policy.save_state("step-2").result()
    assert policy.list_checkpoints() == ["step-1"]
    service.close()
    unmount("http://restarted.test.internal")
    for engine in engines:
        engine.close()
