"""What makes a run resumable: its cursor, its checkpoints, and the manifest that names them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import orjson

from hearth.errors import ConfigError
from hearth.files import CHECKSUM, is_intact, seal, write_file
from training.platform.run_infra import TrainerInfra

MANIFEST = "run.json"


@dataclass
class Cursor:
    """Which rows are finished: all below ``start``, and those in ``beyond``.

    A row is finished when the step that trained it is done, or when it was dropped for good. Rows
    finish out of order inside a window; the set stays exact, so that a resumed run neither repeats
    nor skips one.
    """

    start: int = 0
    beyond: set[int] = field(default_factory=set)

    def finish(self, indices: Iterable[int]) -> None:
        """Mark rows as finished."""
        self.beyond.update(index for index in indices if index >= self.start)
        while self.start in self.beyond:
            self.beyond.remove(self.start)
            self.start += 1

    @property
    def count(self) -> int:
        """Number of finished rows."""
        return self.start + len(self.beyond)

    def list_finished(self) -> frozenset[int]:
        """All finished rows' indices."""
        return frozenset(range(self.start)) | self.beyond


@dataclass(frozen=True)
class Checkpoint:
    """One resumable point: the trainer's checkpoint and what the recipe knew when it was written.

    Example: ``{"name": "step-00004", "step": 4, "cursor": 9, "beyond": [11], "seed": 0,
    "version": 4, "job": "rl-policy-1f3a9c02"}``
    """

    name: str
    step: int
    cursor: int
    beyond: list[int]
    seed: int
    version: int = 0
    """Weight syncs that the deployment of that time had had."""
    job: str | None = None
    """The trainer job that holds it."""
    kl_beta: float | None = None
    """The KL coefficient in force, where it follows the KL (``kl_target``)."""
    accepted_samples: int = 0
    """Samples of the groups that were trained and published until then, in loops that overlap."""
    stale_drops: int = 0
    """Rows that were given up as too late until then."""
    save_id: str | None = None
    """Made up for each save, and in the trainer's checkpoint too: another one of the same name, as
    on a platform that was set back, is told by it. None in manifests of older versions."""


def write_manifest(log_path: Path, checkpoints: list[Checkpoint]) -> None:
    """Replace ``log_path/run.json`` at once: after a crash it is the old one or the new one."""
    content = seal({"checkpoints": [asdict(checkpoint) for checkpoint in checkpoints]})
    write_file(log_path / MANIFEST, orjson.dumps(content, option=orjson.OPT_INDENT_2))


def read_manifest(log_path: Path) -> list[Checkpoint]:
    """The checkpoints of a run, oldest first; none where the run never wrote one.

    Raises:
        ConfigError: the manifest is damaged. Starting fresh must be somebody's decision.
    """
    path = log_path / MANIFEST
    if not path.exists():
        return []
    try:
        content = orjson.loads(path.read_bytes())
        if not is_intact(content):
            raise ValueError(f"its {CHECKSUM} is that of other content")
        return [Checkpoint(**load) for load in content["checkpoints"]]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} must be a run's manifest, got a damaged file ({error}): put back a copy, take "
            f"out its {CHECKSUM} if it was changed on purpose, or move it away to start from the "
            "base model"
        ) from None


def choose_checkpoint(checkpoints: list[Checkpoint], wanted: str | None) -> Checkpoint | None:
    """The checkpoint to go on from: the named one, else the newest, else None.

    Raises:
        ConfigError: the named one does not exist.
    """
    if wanted is None or wanted == "latest":
        if wanted == "latest" and not checkpoints:
            raise ConfigError("resume.resume_from must name a checkpoint, got 'latest' of none")
        return checkpoints[-1] if checkpoints else None
    for checkpoint in checkpoints:
        if checkpoint.name == wanted:
            return checkpoint
    known = [checkpoint.name for checkpoint in checkpoints]
    raise ConfigError(f"resume.resume_from must be one of {known}, got {wanted!r}")


def checkpoint_reference(wanted: str, infra: TrainerInfra) -> str:
    """What a trainer loads for ``init_from_checkpoint``: a folder, or ``JOB:NAME``.

    The embedded platform only reads checkpoints inside the run's folder, so that another run's is
    linked into it.

    Raises:
        ConfigError: it is neither, or a folder and the platform is served.
    """
    check_reference(wanted, is_embedded=infra.is_embedded)
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        place = infra.work_dir / "checkpoints" / "imported" / folder.name
        if folder.resolve() != place.resolve():
            shutil.rmtree(place, ignore_errors=True)  # another one of that name, or half of it
            shutil.copytree(folder, place, copy_function=_link_or_copy)
        return f"cross_job://imported/{folder.name}"
    job, _, name = wanted.partition(":")
    return f"cross_job://{job}/{name}"


def check_reference(wanted: str, *, is_embedded: bool) -> None:
    """Judge ``init_from_checkpoint`` before anything is provisioned.

    Raises:
        ConfigError: it is neither a checkpoint's folder nor ``JOB:NAME``, or a folder where the
            platform is served.
    """
    folder = Path(wanted).expanduser()
    if folder.is_dir():
        if not is_embedded:
            raise ConfigError(
                "init_from_checkpoint must be JOB:NAME on a served platform, got the folder "
                f"{wanted!r}: the platform reads its own data only"
            )
        if not (folder / "manifest.json").is_file():
            raise ConfigError(
                f"init_from_checkpoint must be a checkpoint's folder, got {wanted!r}, which has no "
                "manifest.json: a run's are log_path/checkpoints/JOB/NAME"
            )
        return
    job, separator, name = wanted.partition(":")
    if not (separator and job and name):
        raise ConfigError(
            f"init_from_checkpoint must be a checkpoint's folder or JOB:NAME, got {wanted!r}"
        )


def check_adapter(folder: str, *, is_embedded: bool) -> None:
    """Judge ``warm_start_from_adapter`` before anything is provisioned.

    A served platform reads it on its own machine, which is not looked at.

    Raises:
        ConfigError: it is no PEFT adapter's folder.
    """
    if is_embedded and not (Path(folder).expanduser() / "adapter_config.json").is_file():
        raise ConfigError(
            f"warm_start_from_adapter must be a PEFT adapter's folder, got {folder!r}, which has "
            "no adapter_config.json"
        )


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
