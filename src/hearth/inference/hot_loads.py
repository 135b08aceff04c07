"""Weight syncs of one deployment: their buckets, their state, and the file that survives a restart.

``serving.json`` names the served snapshot, so that a deployment serves the same weights under the
same version number after a restart. Buckets that are reached from several machines keep that file
themselves, since a deployment may start again on another one.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import orjson
from pydantic import Field

from hearth.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    EngineError,
    NotReadyError,
    RequestError,
)
from hearth.files import SERVING_FILE, is_intact, read_file, seal, write_with_folder
from hearth.inference.backend import AdapterSource, InferenceBackend
from hearth.inference.sync_tracker import ServingState, resolve_future
from hearth.wire.base import Record, parse_json
from hearth.wire.completions import (
    HotLoadState,
    LoadedAdapter,
    LoadingState,
    ReplicaState,
    RunningRequests,
)

if TYPE_CHECKING:
    # The service itself needs no torch.
    from hearth.sync.store import Buckets, Snapshot, SnapshotStore

logger = logging.getLogger(__name__)


class Served(Record):
    """The served snapshot in ``serving.json``."""

    identity: str = Field(min_length=1)
    weight_version: int = Field(ge=1)
    bucket: str = Field(min_length=1)


@dataclass(frozen=True)
class Sources:
    """Where snapshots come from: one store, or several buckets with a default."""

    snapshots: SnapshotStore | Buckets[SnapshotStore]
    default_bucket: str

    def bucket_of(self, name: str | None) -> str:
        """The bucket of a request that names ``name``, or the default one for None.

        Raises:
            RequestError: the name is not valid, or there is only one store with another name.
        """
        # It imports torch, which a process that has snapshots has loaded.
        from hearth.sync.manifest import check_name

        bucket = check_name(name or self.default_bucket, "x-hearth-snapshot-bucket")
        if bucket != self.default_bucket and not hasattr(self.snapshots, "bucket"):
            raise RequestError(
                f"x-hearth-snapshot-bucket must be {self.default_bucket!r}, got {bucket!r}: this "
                "deployment has one bucket"
            )
        return bucket

    def get(self, bucket: str, identity: str, previous: str | None = None) -> Snapshot:
        """A snapshot of a bucket; errors are those of the stores.

        Where it is a folder, its tensors are read when the first of them is used: a backend may
        need none, since its servers read them.

        Raises:
            EngineError: it is a delta on another snapshot than ``previous``.
        """
        # It imports torch as well.
        from hearth.sync.chain import check_previous

        store = self.snapshots
        if hasattr(store, "bucket"):
            store = cast("Buckets[SnapshotStore]", store).bucket(bucket)
        find = getattr(store, "open", cast("SnapshotStore", store).get)
        snapshot: Snapshot = find(identity)
        if previous is not None:
            check_previous(snapshot, previous)
        return snapshot

    def read_served(self, file: Path) -> bytes | None:
        """What was written about the served snapshot; None where nothing was.

        Raises:
            OSError: the file cannot be read.
            EngineError: whoever keeps it does not answer.
        """
        return getattr(self.snapshots, "read_served", read_file)(file)

    def write_served(self, file: Path, content: bytes) -> None:
        """Write down what is served.

        Raises:
            StorageError: the disk refused.
            EngineError: whoever keeps it does not answer.
        """
        getattr(self.snapshots, "write_served", write_with_folder)(file, content)


@dataclass(frozen=True, eq=False)
class _Underway:
    """A load from its request until its end is written down, which ``noted`` then has."""

    bucket: str
    noted: Future[ServingState]


class HotLoads:
    """The weight syncs of a deployment. Begins with the snapshot that it served before a restart.

    Raises:
        ConfigError: the file in ``state_dir`` cannot be read.
        EngineError: whoever keeps that file does not answer.
    """

    def __init__(self, backend: InferenceBackend, sources: Sources, state_dir: Path | None) -> None:
        self._backend = backend
        self._sources = sources
        self._file = None if state_dir is None else state_dir / SERVING_FILE
        self._lock = threading.Lock()
        self._underway: dict[str, _Underway] = {}
        self._served: Served | None = None
        self._is_written = True
        self.failed: Future[EngineError] = Future()
        """Resolved when the snapshot from before a restart cannot be loaded, or what is served
        cannot be written down: no other weights may be served instead, now or after a restart."""
        self.restored: Future[ServingState] | None = self._restore()
        """The load of the snapshot from before the restart; None without one."""
        if self.restored is not None:
            self.restored.add_done_callback(self._note_restored)

    @property
    def is_ready(self) -> bool:
        """Whether the snapshot from before the restart, or a newer one, is served."""
        if not self._is_written:
            return False
        return self.restored is None or self._backend.state().current_identity is not None

    def require_ready(self) -> None:
        """Raise unless ready.

        Raises:
            NotReadyError: the snapshot from before the restart is still being loaded, or
                ``failed`` is resolved.
        """
        if self.is_ready:
            return
        if self.failed.done():
            raise NotReadyError(str(self.failed.result()))
        target = self._backend.state().target_identity
        raise NotReadyError(
            f"deployment must be ready, got one that loads {target!r} again: ask again soon"
        )

    def load(
        self,
        identity: str,
        bucket_name: str | None,
        previous: str | None = None,
        *,
        running_requests: RunningRequests = "drain",
    ) -> None:
        """Serve a snapshot; one that is served or under way is not loaded again.

        A delta on another snapshot than ``previous`` is refused. ``running_requests`` is that of
        ``HotLoadRequest``.

        Raises:
            RequestError: the bucket's name is not valid.
            ConflictError: the identity is served or loaded from another bucket.
            ClosedError: the deployment was shut down.
        """
        bucket = self._sources.bucket_of(bucket_name)
        underway = self._underway.get(identity)
        current = underway.bucket if underway is not None else None
        if self._served is not None and self._served.identity == identity:
            current = self._served.bucket
        if current not in (None, bucket):
            raise ConflictError(
                f"identity must be new, got {identity!r}: it is one of bucket {current!r} here, "
                f"not of {bucket!r}; save it under another name"
            )
        self._load(identity, bucket, previous=previous, running_requests=running_requests)

    def watch(self, identity: str) -> Future[ServingState]:
        """The state once ``identity`` is served and written down, or could not be loaded.

        Whoever hears of it sooner would go on with new weights where a restart has the old ones.
        """
        underway = self._underway.get(identity)
        if underway is None:
            return self._backend.watch_sync(identity)
        # One of its own: whoever waits may cancel it.
        waiter: Future[ServingState] = Future()
        underway.noted.add_done_callback(lambda done: _copy_end(done, waiter))
        return waiter

    def find_adapter(self, identity: str | None) -> AdapterSource | None:
        """The adapter that a request names, in the deployment's own bucket; None for None.

        Its ``fetch`` raises the errors of the stores.
        """
        if identity is None:
            return None
        bucket = self._sources.bucket_of(None)
        return AdapterSource(identity, lambda: self._sources.get(bucket, identity))

    def state(self) -> HotLoadState:
        """What is served and where the last weight sync stands, as the one replica."""
        state = self._backend.state()
        adapters: list[LoadedAdapter] = []
        if state.is_adapter and state.current_identity is not None:
            adapters.append(LoadedAdapter(identity=state.current_identity, status="loaded"))
        loading = LoadingState(
            stage=state.stage,
            target_snapshot_identity=state.target_identity,
            error_message=state.error,
        )
        replica = ReplicaState(
            current_snapshot_identity=state.current_identity,
            readiness=self.is_ready and state.current_identity not in self._underway,
            loading_state=loading,
            loaded_adapters=adapters,
            weight_version=state.weight_version,
        )
        return HotLoadState(replicas=[replica])

    def _restore(self) -> Future[ServingState] | None:
        if self._file is None:
            return None
        try:
            written = self._sources.read_served(self._file)
            if written is None:
                return None
            content = parse_json(written)
            served = Served.from_dict(content)
            if not is_intact(content):
                raise RequestError("a content that its checksum does not fit")
            bucket = self._sources.bucket_of(served.bucket)
        except (OSError, RequestError) as error:
            raise ConfigError(
                f"{self._file} must name the served snapshot, got {error}: repair it, or remove it "
                "to start with the base weights"
            ) from None
        logger.info("serving %s of bucket %s again", served.identity, bucket)
        self._served = served
        return self._load(served.identity, bucket, served.weight_version)

    def _note_restored(self, done: Future[ServingState]) -> None:
        if done.exception() is not None:
            return  # it was closed
        state = done.result()
        if state.current_identity is None:
            error = EngineError(
                f"snapshot {state.target_identity!r}, which this deployment served before it "
                f"restarted, must load again, got: {state.error}. Put it back, or remove "
                f"{self._file} to start with the base weights and sync new ones"
            )
            resolve_future(self.failed, result=error)

    def _load(
        self,
        identity: str,
        bucket: str,
        weight_version: int | None = None,
        previous: str | None = None,
        running_requests: RunningRequests = "drain",
    ) -> Future[ServingState]:
        underway = self._underway[identity] = _Underway(bucket, Future())

        def note_end(done: Future[ServingState]) -> None:
            try:
                if done.exception() is None:
                    self._note_end(done.result(), identity, bucket)
            finally:
                if self._underway.get(identity) is underway:
                    del self._underway[identity]
                _copy_end(done, underway.noted)

        try:
            done = self._backend.hot_load(
                identity,
                lambda: self._sources.get(bucket, identity, previous),
                weight_version=weight_version,
                running_requests=running_requests,
            )
        except ClosedError:
            self._underway.pop(identity, None)
            raise
        done.add_done_callback(note_end)
        return underway.noted

    def _note_end(self, state: ServingState, identity: str, bucket: str) -> None:
        """Write down what is served."""
        if state.current_identity != identity:
            return
        served = Served(identity=identity, weight_version=state.weight_version, bucket=bucket)
        with self._lock:
            # The end of an older sync may be reported after that of a newer one.
            if self._served is not None and self._served.weight_version >= served.weight_version:
                return
            self._served = served
            if self._file is None:
                return
            try:
                self._sources.write_served(self._file, orjson.dumps(seal(served.as_dict())))
            except EngineError as error:
                # A restart would serve the weights of the older file. The platform starts this
                # deployment again with those, and whoever waits for this sync repeats it.
                self._is_written = False
                resolve_future(self.failed, result=error)


def _copy_end(done: Future[ServingState], to: Future[ServingState]) -> None:
    error = done.exception()
    if error is None:
        resolve_future(to, result=done.result())
    else:
        resolve_future(to, error=error if isinstance(error, Exception) else EngineError(str(error)))
