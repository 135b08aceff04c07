"""Where a run's numbers go beside ``metrics.jsonl``: W&B, TensorBoard, trackio and MLflow.

The trackers are those of Hugging Face accelerate. Each works in a thread of its own, so that a
server that is slow or gone never holds up the run: its failure is said once, and the run goes on.
What it needs to go on in the same tracker run later is in the run's folder. So are its numbers,
unless the tracker's own environment variables name another place.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import netrc
import os
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import orjson

from hearth.errors import ConfigError
from hearth.files import write_file
from training.config.parts import flatten, plain_config
from training.config.recipe import RecipeConfig

if TYPE_CHECKING:  # a second to import
    from accelerate.tracking import GeneralTracker

logger = logging.getLogger(__name__)

Metrics = Mapping[str, float]
DEFAULT_PROJECT = "hearth"
START_S = 120.0
"""Seconds that a tracker may take to start."""
FINISH_S = 60.0
"""Seconds for which the end of a run waits for what a tracker has still to send."""


def check_trackers(config: RecipeConfig) -> None:
    """Look for the packages of a run's trackers.

    Raises:
        ConfigError: one is not installed.
    """
    for name in config.trackers:
        lacking = [package for package in _needed_packages(name) if not _is_installed(package)]
        if not lacking:
            continue
        field = _wandb_field(config)
        if name == "wandb" and field is not None:
            raise ConfigError(
                f"wandb.{field} must be unset without the wandb package, got "
                f"{getattr(config.wandb, field)!r}: pip install wandb"
            )
        raise ConfigError(
            f"report_to must name trackers that are installed, got {name!r} without "
            f"{' and '.join(lacking)}: pip install 'hearth-rl[{name}]'"
        )


@contextlib.contextmanager
def open_trackers(
    config: RecipeConfig, log_path: Path, resumed_step: int | None = None
) -> Iterator[list[Tracker]]:
    """The started trackers of a run, finished at the end of the ``with``.

    A resumed run goes on in the tracker runs of its folder. It does without a tracker that does not
    start, and says so.

    Raises:
        ConfigError: a tracker of a new run does not start.
    """
    run = _TrackedRun(config, log_path, resumed_step)
    if config.trackers:
        from accelerate import PartialState

        PartialState(cpu=True)  # accelerate's loggers want it
    trackers: list[Tracker] = []
    try:
        for name in config.trackers:
            tracker = Tracker(name, lambda name=name: _STARTS[name](run))
            try:
                tracker.wait_until_started()
            except Exception as error:  # what their servers and packages may raise has no bounds
                problem = f"report_to must name trackers that start, got {name!r}: {error!r}"
                if resumed_step is None:
                    raise ConfigError(problem) from error
                logger.warning("%s; the run goes on without it", problem)
            else:
                trackers.append(tracker)
        yield trackers
    finally:
        for tracker in trackers:
            tracker.finish()


class Tracker:
    """One tracker in a thread of its own, started by ``start`` there."""

    def __init__(self, name: str, start: Callable[[], StartedTracker]) -> None:
        self.name = name
        self._start = start
        self._started: Future[None] = Future()
        self._records: queue.SimpleQueue[tuple[int, Metrics] | None] = queue.SimpleQueue()
        self._has_failed = False
        # A daemon: one that never comes back must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"hearth-{name}", daemon=True)
        self._thread.start()

    def wait_until_started(self) -> None:
        """Wait for the start.

        Raises:
            TimeoutError: it takes longer than ``START_S``.
            Exception: what the tracker raised.
        """
        self._started.result(START_S)

    def log(self, step: int, metrics: Metrics) -> None:
        """Hand over the metrics of a step."""
        self._records.put((step, metrics))

    def finish(self, within_s: float = FINISH_S) -> None:
        """End the tracker's run; it is left alone where that takes longer than ``within_s``."""
        self._records.put(None)
        self._thread.join(within_s)
        if self._thread.is_alive():
            left = self._records.qsize()
            logger.warning(
                "%s did not end within %.0f s; %d records may be missing there, metrics.jsonl has "
                "all of them",
                self.name,
                within_s,
                left,
            )

    def _run(self) -> None:
        try:
            started = self._start()
        except BaseException as error:  # noqa: BLE001 - the thread that waits for it raises it
            self._started.set_exception(error)
            return
        self._started.set_result(None)
        while (record := self._records.get()) is not None:
            step, metrics = record
            with self._saying_failures():
                started.log(step, metrics)
        with self._saying_failures():
            started.tracker.finish()

    @contextlib.contextmanager
    def _saying_failures(self) -> Iterator[None]:
        """Log the first failure; later ones are most likely the same."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - as at the start
            if not self._has_failed:
                logger.warning(
                    "%s failed; the run goes on, and metrics.jsonl has every record: %r",
                    self.name,
                    error,
                )
            self._has_failed = True


@dataclass(frozen=True)
class StartedTracker:
    """A tracker's run, and what gives it the metrics of a step."""

    tracker: GeneralTracker
    log: Callable[[int, Metrics], None]


@dataclass(frozen=True)
class _TrackedRun:
    """What the trackers are told of a run."""

    config: RecipeConfig
    log_path: Path
    resumed_step: int | None

    @property
    def project(self) -> str:
        return self.config.wandb.project or DEFAULT_PROJECT

    @property
    def name(self) -> str:
        return self.config.wandb.run_name or self.log_path.resolve().name

    @property
    def settings(self) -> dict[str, Any]:
        return plain_config(self.config)

    def read_id(self, tracker: str) -> str | None:
        """The id of the tracker run that this folder's run is; None of a new one."""
        path = self._id_path(tracker)
        try:
            known = path.read_text().strip()
        except (OSError, UnicodeDecodeError):
            return None
        # A crash may have left an empty file.
        return known if known and known.isprintable() else None

    def write_id(self, tracker: str, identity: str) -> str:
        write_file(self._id_path(tracker), identity.encode())
        return identity

    def _id_path(self, tracker: str) -> Path:
        return self.log_path / f"{tracker}_run_id.txt"


def _start_wandb(run: _TrackedRun) -> StartedTracker:
    from accelerate.tracking import WandBTracker

    known = run.read_id("wandb")
    if known is None or not known.isalnum():
        known = run.write_id("wandb", secrets.token_hex(4))
    tracker = WandBTracker(
        run.project,
        entity=run.config.wandb.entity,
        name=run.config.wandb.run_name,
        id=known,
        resume="allow",
        config=run.settings,
        dir=str(run.log_path),
        mode=choose_wandb_mode(),
    )
    tracker.start()
    # Without W&B's own step, which merges records of one step and refuses earlier ones.
    return StartedTracker(
        tracker, lambda step, metrics: tracker.log({**metrics, "train/step": step})
    )


def _start_tensorboard(run: _TrackedRun) -> StartedTracker:
    from accelerate.tracking import TensorBoardTracker

    # Steps that a resumed run takes again replace those of before.
    resumed = run.resumed_step
    purge_step = None if resumed is None else resumed + 1
    tracker = TensorBoardTracker("tensorboard", run.log_path, purge_step=purge_step)
    tracker.start()
    if resumed is None:
        # As a text: its "hparams" would be a second run beside this one.
        settings = orjson.dumps(run.settings, option=orjson.OPT_INDENT_2, default=str).decode()
        tracker.log({"config": f"```json\n{settings}\n```"})
    return StartedTracker(tracker, lambda step, metrics: tracker.log(dict(metrics), step=step))


def _start_trackio(run: _TrackedRun) -> StartedTracker:
    # trackio reads it when it is imported.
    os.environ.setdefault("TRACKIO_DIR", str(run.log_path.resolve() / "trackio"))
    from accelerate.tracking import TrackioTracker

    # trackio knows the run to go on with by its name.
    known = run.read_id("trackio")
    if known is None:
        known = run.write_id("trackio", f"{run.name}-{secrets.token_hex(4)}")
    tracker = TrackioTracker(
        run.project,
        name=known,
        resume="allow",
        config=run.settings,
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    tracker.start()
    return StartedTracker(tracker, lambda step, metrics: tracker.log(dict(metrics), step=step))


def _start_mlflow(run: _TrackedRun) -> StartedTracker:
    import mlflow
    from accelerate.tracking import MLflowTracker

    # Set in either case: an earlier run of this process has set its own.
    database = f"sqlite:///{run.log_path.resolve() / 'mlflow.db'}"
    mlflow.set_tracking_uri(os.environ.get("MLFLOW_TRACKING_URI") or database)
    known = run.read_id("mlflow")
    tracker = MLflowTracker(run.project, run_id=known, run_name=run.name)
    tracker.start()
    identity = tracker.tracker.info.run_id
    if known is None:
        run.write_id("mlflow", identity)
        tracker.store_init_configuration(dict(flatten(run.settings)))

    def log(step: int, metrics: Metrics) -> None:
        # Its names have no "@", as in eval/pass@4.
        values = {name.replace("@", "_at_"): value for name, value in metrics.items()}
        tracker.log(values, step=step, run_id=identity)

    return StartedTracker(tracker, log)


_STARTS: Mapping[str, Callable[[_TrackedRun], StartedTracker]] = {
    "wandb": _start_wandb,
    "tensorboard": _start_tensorboard,
    "trackio": _start_trackio,
    "mlflow": _start_mlflow,
}


def _wandb_field(config: RecipeConfig) -> str | None:
    """The first field of ``wandb`` that is given."""
    names = ("entity", "project", "run_name")
    return next((name for name in names if getattr(config.wandb, name)), None)


def _needed_packages(tracker: str) -> Sequence[str]:
    """What a tracker imports; MLflow's files without a server are a database."""
    if tracker == "mlflow" and not os.environ.get("MLFLOW_TRACKING_URI"):
        return ("mlflow", "alembic")
    return (tracker,)


def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def choose_wandb_mode() -> Literal["offline"] | None:
    """Offline where nobody has logged in; None leaves it to wandb and ``WANDB_MODE``.

    Looked up here, because wandb would ask for a key on a terminal and fail elsewhere.
    """
    if os.environ.get("WANDB_MODE") or os.environ.get("WANDB_API_KEY"):
        return None
    host = urlsplit(os.environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").hostname
    try:
        logins = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return "offline"
    return None if host in logins else "offline"
