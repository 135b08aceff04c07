"""The product documents, a served platform whose tiny model bears their names, and what they leave
to the reader.

The documents stand beside the repository (``../shared/documents``, or the folder that
``HEARTH_DOCUMENTS`` names); without them their tests are skipped. Nothing of them is copied here.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.documents import extraction
from tests.integration.served import Served

from hearth.sdk import DeploymentManager, TrainerJobManager
from training.quickstart import MODEL, TRAIN_ROWS

REPOSITORY = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("HEARTH_DOCUMENTS", REPOSITORY.parent / "shared" / "documents"))
NUM_ROWS = 6
KEY = "a-key"
DOCUMENTED_TOKENIZER = '"Qwen/Qwen3-8B"'
DOCUMENTED_DATASET = '"/path/to/gsm8k.jsonl"'


@pytest.fixture(scope="session")
def document() -> Callable[[str], Any]:
    """``document("003")``: a product document with its snippets."""

    def read(number: str) -> Any:
        found = sorted(FOLDER.glob(f"{number}*.txt"))
        if not found:
            pytest.skip(f"needs document {number} in {FOLDER}, which is not part of the repository")
        return extraction.Document.read(found[0])

    return read


class DocumentedPlatform(Served):
    """A platform in a process of its own, and what is asked of it."""

    def trainers(self) -> TrainerJobManager:
        """A manager of its trainer jobs."""
        return TrainerJobManager(KEY, base_url=self.url)

    def deployments(self) -> DeploymentManager:
        """A manager of its deployments."""
        return DeploymentManager(KEY, base_url=self.url)

    def snapshots(self, job_id: str, identity: str) -> list[str]:
        """Names of what the client saved that saved ``identity``, without suffix, oldest first.

        A job that publishes into a deployment's bucket lists what others have left there too.
        """
        with contextlib.closing(self.trainers()) as trainers:
            checkpoints = trainers.list_checkpoints(job_id)
        names = [str(point.name).rsplit("/", 1)[-1].rsplit("-", 1) for point in checkpoints]
        return [name for name, suffix in names if suffix == identity.rsplit("-", 1)[1]]

    def states(self) -> tuple[list[str | None], list[int]]:
        """The jobs' states, and how many replicas each deployment has."""
        with contextlib.closing(self.trainers()) as trainers:
            jobs = [job.state for job in trainers.list()]
        with contextlib.closing(self.deployments()) as deployments:
            return jobs, [deployment.max_replica_count for deployment in deployments.list()]

    def assert_released(self) -> None:
        """There were jobs and deployments; the jobs are cancelled, no deployment has a replica."""
        states, replicas = self.states()
        assert set(states) == {"JOB_STATE_CANCELLED"}
        assert set(replicas) == {0}

    def clear(self) -> None:
        """Delete every job and deployment."""
        with contextlib.closing(self.trainers()) as trainers:
            for job in trainers.list():
                trainers.delete(str(job.name).rsplit("/", 1)[-1])
        with contextlib.closing(self.deployments()) as deployments:
            for deployment in deployments.list():
                deployments.delete(deployment.deployment_id)


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DocumentedPlatform]:
    """``hearth serve`` with a process for each trainer and deployment, until the session ends."""
    folder = tmp_path_factory.mktemp("served")
    catalog = folder / "catalog.toml"
    catalog.write_text(
        '[models."accounts/fireworks/models/qwen3-8b"]\n'
        f"source = {json.dumps(str(MODEL))}\ncontext_length = 4096\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("HEARTH_API_KEYS", raising=False)
        platform = DocumentedPlatform(
            folder / "data", catalog=catalog, trainer_threads=1, deployment_threads=1
        )
    assert platform.processes() != [], "its forkserver"
    yield platform
    platform.stop()
    assert platform.processes() == []


@pytest.fixture(scope="module")
def platform(
    served: DocumentedPlatform, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DocumentedPlatform]:
    """The served platform as the environment names it, a new working folder, and no W&B key.

    One for a module: the snippets of a document follow one another. At its end all is deleted.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FIREWORKS_BASE_URL", served.url)
        patch.setenv("FIREWORKS_API_KEY", KEY)
        patch.setenv("HEARTH_URL", served.url)
        patch.setenv("HEARTH_API_KEY", KEY)
        patch.setenv("FIREWORKS_ACCOUNT_ID", "me")
        for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL"):
            patch.delenv(name, raising=False)
        patch.setenv("WANDB_SILENT", "true")
        patch.chdir(tmp_path_factory.mktemp("reader"))
        yield served
        served.clear()


@pytest.fixture(scope="session")
def dataset_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few rows."""
    path = tmp_path_factory.mktemp("dataset") / "rows.jsonl"
    lines = TRAIN_ROWS.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:NUM_ROWS]))
    return path


@pytest.fixture(scope="session")
def substituted(dataset_file: Path) -> Callable[[str], str]:
    """A snippet with the SDK's name, the tokenizer and the data path exchanged, and no more."""

    def substitute(code: str) -> str:
        code = code.replace("fireworks.training.sdk", "hearth.sdk")
        code = code.replace(DOCUMENTED_TOKENIZER, json.dumps(str(MODEL)))
        return code.replace(DOCUMENTED_DATASET, json.dumps(str(dataset_file)))

    return substitute


class Dataset:
    """A reader's rows. ``step`` in the namespace counts them, as document 001 leaves to him.

    ``at_end`` is called behind the last row, where the snippet's clients are still open.
    """

    def __init__(self, rows: list[dict[str, Any]], namespace: dict[str, Any]) -> None:
        self.rows = rows
        self._namespace = namespace
        self.at_end: Callable[[], None] | None = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for step, row in enumerate(self.rows, start=1):
            self._namespace["step"] = step
            yield row
        if self.at_end is not None:
            self.at_end()


def every_second() -> Callable[[Any], float]:
    """A reward for every second completion, so that no group is without spread."""
    count = itertools.count()
    return lambda completion: float(next(count) % 2)


@pytest.fixture(scope="module")
def reader(dataset_file: Path) -> Iterator[Callable[[], dict[str, Any]]]:
    """A new namespace with the names that the documents' prose leaves to the reader.

    At the module's end the clients are closed that the snippets have left open.
    """
    import httpx
    import tinker

    made: list[dict[str, Any]] = []

    def make() -> dict[str, Any]:
        rows = [json.loads(line) for line in dataset_file.read_text().splitlines()]
        names: dict[str, Any] = {"__name__": "reader", "score": every_second()}
        names |= {"tinker": tinker, "httpx": httpx}
        names["dataset"] = Dataset(rows[:3], names)
        made.append(names)
        return names

    yield make
    for names in made:
        for value in names.values():
            if type(value).__module__.startswith("hearth.sdk") and hasattr(value, "close"):
                value.close()
