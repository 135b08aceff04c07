"""Sessions, runs, samplers and their results, as Tinker's clients see them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
import uuid
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from hearth.control.gateway import Gateway
from hearth.control.plane import ControlPlane
from hearth.control.resource_names import format_timestamp
from hearth.control.store import Records, StoredRecord
from hearth.errors import (
    BusyError,
    ClosedError,
    EngineError,
    HearthError,
    NotFoundError,
    RequestError,
)
from hearth.tinker import records
from hearth.tinker.bases import Base, Bases
from hearth.tinker.journal import RunJournal
from hearth.tinker.protobuf import PassRequest
from hearth.tinker.runs import BINARY, HELD_BYTES, JSON, RunOperation, TinkerRun, make_key
from hearth.tinker.sampling import build_completion, check_samples, read_prompt, write_samples
from hearth.tinker.saved import Kind, SavedWeights, check_name, taken_error
from hearth.tinker.targets import build_scoring, read_scores, read_targets
from hearth.wire import tinker_requests as requests
from hearth.wire.http import describe_failure
from hearth.wire.room import Room
from hearth.wire.tinker import AdamParams, LoraSpec

logger = logging.getLogger(__name__)

POLL_S = 25.0
"""How long a question for a result is held; clients time out at 45 s."""
SESSION_S = 3600.0
"""A session without a heartbeat for so long has ended: its runs are unloaded."""
MOST_SAMPLES = 16384
"""Samples of one key that are not there yet. A deployment takes no more of one client."""
_KEPT_SAMPLES = 4096
"""Results of samples that were fetched stay, since clients ask again."""
_SWEEP_S = 60.0
_LINK_S = 3600.0
_CISPO = {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}
"""Where a client gives no bounds: one-sided, as Tinker documents them."""
_STABLE_REINFORCE = {"clip_low_threshold": 0.0, "clip_high_threshold": 1.0}
"""Its formula is not public. Here it is REINFORCE whose importance weights are at most 1."""
_ALPHA = 32.0


@dataclass(eq=False)
class _Sampling:
    """A sampling request."""

    owner: str
    task: asyncio.Task[bytes]
    running: int
    """How many of its samples are not there yet."""


class SamplingRequests:
    """Sampling requests by id: those that run, and the last ones that have ended.

    Results that are not fetched are kept longer than those that are: clients ask for them again.
    """

    def __init__(self, most_kept: int = 16384) -> None:
        self._most_kept = most_kept
        """Requests that have ended and wait to be fetched."""
        self._known: dict[str, _Sampling] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._fetched: OrderedDict[str, None] = OrderedDict()
        self._running: Counter[str] = Counter()
        """Samples of each owner that are not there yet."""

    def begin(
        self, request_id: str, owner: str, work: Callable[[], Awaitable[bytes]], count: int = 1
    ) -> None:
        """Run ``work``, which makes ``count`` samples, for a new id; a known one stays as it is.

        Raises:
            BusyError: the owner has too many samples that are not there yet.
        """
        if request_id in self._known:
            return
        if self._running[owner] + count > MOST_SAMPLES:
            raise BusyError(
                f"samples in flight of one key must be at most {MOST_SAMPLES}, got "
                f"{self._running[owner] + count}: wait for earlier ones"
            )
        self._running[owner] += count
        sampling = _Sampling(owner, asyncio.ensure_future(_run(work)), count)
        self._known[request_id] = sampling

        def end(_: asyncio.Task[bytes]) -> None:
            self._release(sampling)
            if request_id in self._known:
                self._keep_last(self._ended, request_id, self._most_kept)

        sampling.task.add_done_callback(end)

    async def wait(self, request_id: str, owner: str, timeout_s: float) -> bytes | None:
        """A result; None while there is none.

        Raises:
            ClosedError: the id is unknown: a client asks for new samples then.
        """
        sampling = self._known.get(request_id)
        if sampling is None or sampling.owner != owner:
            raise ClosedError(f"request_id must name a recent sample, got {request_id[:200]!r}")
        await asyncio.wait([sampling.task], timeout=timeout_s)
        if not sampling.task.done():
            return None
        if sampling.task.cancelled():
            raise ClosedError(f"request_id must name a sample that goes on, got {request_id!r}")
        self._ended.pop(request_id, None)
        self._keep_last(self._fetched, request_id, _KEPT_SAMPLES)
        return sampling.task.result()

    def cancel(self, request_id: str, owner: str) -> None:
        """Give up a request; unknown ones are none."""
        sampling = self._known.get(request_id)
        if sampling is not None and sampling.owner == owner:
            self._drop(request_id)

    def end_session(self, session_id: str) -> None:
        """Give up a session's requests."""
        prefix = f"sample:{session_id}:"
        for request_id in [each for each in self._known if each.startswith(prefix)]:
            self._drop(request_id)

    def _keep_last(self, ids: OrderedDict[str, None], request_id: str, most: int) -> None:
        ids[request_id] = None
        ids.move_to_end(request_id)
        while len(ids) > most:
            self._drop(next(iter(ids)))

    def _drop(self, request_id: str) -> None:
        self._ended.pop(request_id, None)
        self._fetched.pop(request_id, None)
        if (sampling := self._known.pop(request_id, None)) is not None:
            self._release(sampling)
            sampling.task.cancel()

    def _release(self, sampling: _Sampling) -> None:
        self._running[sampling.owner] -= sampling.running
        sampling.running = 0
        if not self._running[sampling.owner]:
            del self._running[sampling.owner]


class Front:
    """What Tinker's API keeps, over a platform's trainers and deployments.

    Must be used on one event loop. An id of another key's is like one that does not exist.
    """

    def __init__(
        self, plane: ControlPlane, gateway: Gateway, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._plane = plane
        self._clock = clock
        self.bases = Bases(plane, gateway)
        self.saved = SavedWeights(plane.store.tinker_saved, self.bases, self._is_sampled)
        self.samples = SamplingRequests()
        self._sessions, self._runs = plane.store.tinker_sessions, plane.store.tinker_runs
        self._samplers = plane.store.tinker_samplers
        self._live: dict[str, TinkerRun] = {}
        self._beginning = asyncio.Lock()
        """A client's second request for a run waits for the first."""
        self._beats: dict[str, float] = {}
        self._links: dict[str, tuple[Path, float]] = {}
        self._held_room = Room(HELD_BYTES, "bytes of operations")
        """Folders that may be downloaded until a time, by the secret part of their links."""
        self._open_samplers: dict[str, records.SamplerFacts] = {}
        self._started: asyncio.Task[None] | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the runs of before a restart; every request awaits it, the first one does it."""
        if self._started is None:
            self._started = asyncio.create_task(self._restore())
        await asyncio.shield(self._started)

    async def create_session(self, owner: str, ask: requests.CreateSessionRequest) -> str:
        """Open a session; returns its id."""
        session_id = uuid.uuid4().hex[:16]
        facts = records.SessionFacts(
            owner=owner, user_metadata=ask.user_metadata, display_name=ask.display_name
        )
        await _on_thread(self._sessions.insert, session_id, "OPEN", facts.as_dict())
        self._beats[session_id] = self._clock()
        return session_id

    async def beat(self, owner: str, session_id: str) -> None:
        """Note that a session's client lives.

        Raises:
            NotFoundError: there is no such session.
            ClosedError: it has ended.
        """
        await self._find_session(owner, session_id)

    async def end_session(self, owner: str, session_id: str) -> None:
        """End a session: its runs are unloaded, what it saved stays; raises as ``beat``."""
        await self._find_session(owner, session_id)
        await self._end(session_id, "FINISHED")

    async def create_run(self, owner: str, ask: requests.CreateModelRequest) -> str:
        """Begin a run; returns its id. What is wrong with it fails its future.

        Raises:
            NotFoundError, ClosedError: as ``beat``.
        """
        await self._find_session(owner, ask.session_id)
        lora = ask.lora_config or requests.LoraConfig(rank=32)
        spec = LoraSpec(alpha=_ALPHA, **lora.as_dict())
        facts = records.RunFacts(
            owner=owner,
            session_id=ask.session_id,
            base_model=ask.base_model,
            lora=spec,
            user_metadata=ask.user_metadata,
        )
        run_id = f"{ask.session_id}:train:{ask.model_seq_id}"
        await self._begin_run(run_id, facts, lambda: requests.check_optimizer(ask.optimizer_config))
        return run_id

    async def load_run(self, owner: str, ask: requests.LoadWeightsRequest) -> str:
        """Begin a run with saved weights; returns its id. What is wrong fails its future.

        Raises:
            NotFoundError, ClosedError: as ``beat``.
        """
        assert ask.session_id is not None, "the caller has looked"
        await self._find_session(owner, ask.session_id)
        run_id = f"{ask.session_id}:train:{ask.model_seq_id}"
        if run_id in self._live:
            return run_id
        error: HearthError | None = None
        source = None
        try:
            source = await _on_thread(self.saved.find, ask.path, owner)
            _check_loadable(source, ask)
        except HearthError as wrong:
            error = wrong
        facts = records.RunFacts(
            owner=owner,
            session_id=ask.session_id,
            base_model=source.base_model if source is not None else "",
            lora=source.lora if source is not None else LoraSpec(rank=1),
            user_metadata=ask.user_metadata,
        )
        first = None
        if source is not None:
            body = {"path": source.identity, "optimizer": ask.optimizer}
            first = RunOperation(
                "load_weights", orjson.dumps(body), seq_id=0, facts={"path": ask.path}
            )

        def check() -> None:
            if error is not None:
                raise error

        await self._begin_run(run_id, facts, check, first)
        return run_id

    async def run_pass(self, owner: str, ask: PassRequest) -> str:
        """Accept a training pass; returns its request's id. Raises as ``find_run``."""
        run = await self.find_run(owner, ask.model_id)
        name = "forward" if ask.is_forward else "forward_backward"
        content = dict(ask.content)
        refusal = None
        config = content["loss_fn_config"]
        if texts := {key for key, value in config.items() if isinstance(value, str)}:
            refusal = f"loss_fn_config must hold numbers, got texts for {sorted(texts)}"
        if content["loss_fn"] == "stable_reinforce":
            content["loss_fn"], config = "cispo", {**_STABLE_REINFORCE, **config}
            if config.pop("kl_coeff", 0.0):
                refusal = "loss_fn_config.kl_coeff must be absent or 0: put KL into the advantages"
        if content["loss_fn"] == "cispo":
            content["loss_fn_config"] = {**_CISPO, **config}
        body = orjson.dumps({f"{name}_input": content, "tensor_encoding": "base64"})
        return self._accept(
            run, RunOperation(name, body, ask.seq_id, {"lengths": ask.lengths}, refusal)
        )

    async def step(self, owner: str, ask: requests.OptimStepRequest) -> str:
        """Accept an optimizer step; returns its request's id. Raises as ``find_run``."""
        run = await self.find_run(owner, ask.model_id)
        refusal, adam = None, ask.adam_params
        if adam is None:
            kind = (ask.optimizer_params or {}).get("type")
            refusal = (
                f"optim_params must be AdamParams, got {kind!r}: runs here are trained with AdamW"
            )
        else:
            requests.log_unknown("AdamParams", adam.keys() - AdamParams.model_fields.keys())
            try:
                AdamParams.from_dict(adam)
            except RequestError as error:
                refusal = str(error)
        body = orjson.dumps({"adam_params": adam or {}})
        return self._accept(run, RunOperation("optim_step", body, ask.seq_id, {}, refusal))

    async def save(self, owner: str, ask: requests.SaveWeightsRequest) -> str:
        """Accept a save of training state; returns its request's id. Raises as ``find_run``."""
        run = await self.find_run(owner, ask.model_id)
        facts, refusal = await self._check_save(run, ask, "weights", overwrite=ask.overwrite)
        name = f"{make_key(run.id)}.{ask.seq_id}"
        body = orjson.dumps({"path": name, "overwrite": True})
        facts["identity"] = name
        return self._accept(run, RunOperation("save_weights", body, ask.seq_id, facts, refusal))

    async def save_for_sampler(self, owner: str, ask: requests.SaveForSampler) -> str:
        """Accept a save for sampling; returns its request's id. Raises as ``find_run``."""
        run = await self.find_run(owner, ask.model_id)
        facts: dict[str, Any] = {}
        refusal = None
        if ask.path is not None:
            facts, refusal = await self._check_save(run, ask, "sampler_weights", overwrite=False)
        elif ask.sampling_session_seq_id is None:
            refusal = "path must be given without sampling_session_seq_id, got neither"
        facts["sampler"] = ask.sampling_session_seq_id
        facts["is_inflight"] = ask.kind == "inflight"
        name = f"{make_key(run.id)}.s{ask.seq_id}"
        facts["identity"] = name
        body = orjson.dumps({"path": name})
        return self._accept(
            run, RunOperation("save_weights_for_sampler", body, ask.seq_id, facts, refusal)
        )

    async def save_external(self, owner: str, ask: requests.SaveExternal) -> str:
        """Accept a save for download; returns its request's id. Raises as ``find_run``."""
        run = await self.find_run(owner, ask.model_id)
        facts, refusal = await self._check_save(run, ask, "external_weights", overwrite=False)
        if ask.age_encryption_recipients:
            refusal = "age_encryption_recipients must be absent: files are not encrypted here"
        name = f"{make_key(run.id)}.x{ask.seq_id}"
        body = orjson.dumps({"path": name})
        facts["identity"] = name
        return self._accept(
            run, RunOperation("save_weights_for_sampler", body, ask.seq_id, facts, refusal)
        )

    async def list_links(self, owner: str, path: str) -> tuple[dict[str, str], float]:
        """A link's end for each file of a download, and when they expire; raises as ``find``.

        Raises:
            RequestError: the path is of another kind.
        """
        facts = await _on_thread(self.saved.find, path, owner)
        if facts.kind != "external_weights":
            raise RequestError(f"path must be of external_weights, got {path[:200]!r}")
        base = await _on_thread(self.bases.find, facts.base_model)
        folder = base.export_folder(facts.identity)
        now_s = self._clock()
        self._links = {k: v for k, v in self._links.items() if v[1] > now_s}
        token = secrets.token_urlsafe(32)
        self._links[token] = (folder, now_s + _LINK_S)
        names = sorted(each.name for each in await _on_thread(lambda: list(folder.iterdir())))
        return {name: f"{token}/{name}" for name in names}, time.time() + _LINK_S

    def find_link(self, token: str, name: str) -> Path:
        """The file of a link; whoever has the link may read it.

        Raises:
            NotFoundError: there is no such link, or it has expired.
        """
        folder, expires_s = self._links.get(token, (None, 0.0))
        is_name = Path(name).name == name
        if (
            folder is None
            or expires_s < self._clock()
            or not (is_name and (folder / name).is_file())
        ):
            raise NotFoundError(
                "link must be one that was given out within the hour: ask for a new one"
            )
        return folder / name

    async def load(self, owner: str, ask: requests.LoadWeightsRequest) -> str:
        """Accept a load into a run; returns its request's id. Raises as ``find_run``."""
        assert ask.model_id is not None, "the caller has looked"
        if ask.seq_id is None:
            raise RequestError("seq_id must be given with model_id, got none")
        run = await self.find_run(owner, ask.model_id)
        refusal, identity = None, ""
        try:
            source = await _on_thread(self.saved.find, ask.path, owner)
            _check_loadable(source, ask)
            if source.base_model != run.facts.base_model:
                raise RequestError(
                    f"path must be of {run.facts.base_model!r}, got one of {source.base_model!r}"
                )
            identity = source.identity
        except HearthError as error:
            refusal = str(error)
        body = orjson.dumps({"path": identity, "optimizer": ask.optimizer})
        facts = {"path": ask.path}
        return self._accept(run, RunOperation("load_weights", body, ask.seq_id, facts, refusal))

    async def find_run(self, owner: str, run_id: str) -> TinkerRun:
        """A run that can be trained.

        Raises:
            NotFoundError: there is none of that id.
            ClosedError: its session has ended.
        """
        run = self._live.get(run_id)
        if run is not None and run.facts.owner == owner:
            self._beats[run.facts.session_id] = self._clock()
            return run
        await _find_own(self._runs, run_id, owner, "model_id")
        raise ClosedError(
            f"model_id must name a run whose session is open, got {run_id!r}: begin a new one from "
            "its last checkpoint"
        )

    async def create_sampler(self, owner: str, ask: requests.CreateSampler) -> str:
        """Open a sampling session; returns its id.

        Raises:
            NotFoundError: no such session or saved weights.
            ConfigError: no such base model.
            RequestError: neither a model nor a path is given.
        """
        await self._find_session(owner, ask.session_id)
        identity = None
        base_model = ask.base_model
        if ask.model_path is not None:
            source = await _on_thread(self.saved.find, ask.model_path, owner)
            if source.kind != "sampler_weights":
                raise RequestError(
                    "model_path must name sampler weights (save_weights_for_sampler), got "
                    f"{ask.model_path!r}, a training state"
                )
            identity, base_model = source.identity, source.base_model
        if base_model is None:
            raise RequestError("base_model must be given without model_path, got neither")
        base = await _on_thread(self.bases.find, base_model)
        facts = records.SamplerFacts(
            owner=owner,
            session_id=ask.session_id,
            base_model=base_model,
            identity=identity,
            path=ask.model_path,
        )
        sampler_id = f"{ask.session_id}:sample:{ask.sampling_session_seq_id}"
        await _on_thread(self._put_sampler, sampler_id, facts)
        # A model takes its time to load: the first sample waits for it, and says what is wrong.
        starting = asyncio.create_task(base.start_deployment())
        starting.add_done_callback(lambda done: done.cancelled() or done.exception())
        return sampler_id

    def find_sampler(self, owner: str, sampler_id: str) -> records.SamplerFacts:
        """A sampling session.

        Raises:
            NotFoundError: there is none of that id.
        """
        facts = self._open_samplers.get(sampler_id)
        if facts is None or facts.owner != owner:
            raise NotFoundError(
                f"sampling_session_id must name a sampler of this key, got {sampler_id[:200]!r}"
            )
        return facts

    async def sample(self, owner: str, ask: requests.AskSamples) -> tuple[str, list[str]]:
        """Begin to sample; returns the request's id and one id per sample.

        Raises:
            NotFoundError: no such sampler.
            RequestError: the request names none.
            BusyError: too much is in flight.
        """
        if ask.sampling_session_id is None or ask.seq_id is None:
            raise RequestError(
                "sampling_session_id and seq_id must be given, got "
                f"{ask.sampling_session_id!r} and {ask.seq_id!r}: open a sampling session first"
            )
        facts = self.find_sampler(owner, ask.sampling_session_id)
        self._beats[facts.session_id] = self._clock()
        request_id = f"sample:{ask.sampling_session_id}:{ask.seq_id}"
        count = min(max(ask.num_samples, 0), 1024)
        self.samples.begin(request_id, owner, lambda: self._sample(ask, facts, owner), count)
        return request_id, [f"{request_id}:{place}" for place in range(count)]

    async def retrieve(self, owner: str, request_id: str) -> bytes | None:
        """A result, its first byte says of which kind; None while there is none.

        Raises:
            NotFoundError: the id is unknown.
            ClosedError: it is that of a sample, which is to be asked for again.
        """
        kind, _, rest = request_id.partition(":")
        if kind == "sample":
            return await self.samples.wait(request_id, owner, POLL_S)
        if kind == "create":
            run = await self.find_run(owner, rest)
            await asyncio.wait([run.created], timeout=POLL_S)
            return run.created.result() if run.created.done() else None
        run_id, _, number = rest.rpartition(":")
        if kind != "op" or not number.isdigit():
            raise NotFoundError(f"request_id must name a request, got {request_id[:200]!r}")
        return await (await self.find_run(owner, run_id)).wait(int(number), POLL_S)

    async def list_runs(self, owner: str) -> list[dict[str, Any]]:
        """The runs of a key, newest first, as clients read them."""
        found = await _on_thread(self._runs.list_all)
        own = [record for record in reversed(found) if record.body.get("owner") == owner]
        saved = await _on_thread(self.saved.list_own, owner)
        return [_describe_run(each.id, each.body, each.updated_s, saved) for each in own]

    async def describe_run(self, owner: str, run_id: str) -> dict[str, Any]:
        """One run of a key, as clients read it.

        Raises:
            NotFoundError: there is none of that id.
        """
        record = await _find_own(self._runs, run_id, owner, "training_run_id")
        saved = await _on_thread(self.saved.list_own, owner, run_id)
        return _describe_run(run_id, record.body, record.updated_s, saved)

    async def list_sessions(self, owner: str) -> list[str]:
        """The sessions of a key, newest first."""
        found = await _on_thread(self._sessions.list_all)
        return [each.id for each in reversed(found) if each.body.get("owner") == owner]

    async def describe_session(self, owner: str, session_id: str) -> dict[str, Any]:
        """One session of a key, as clients read it.

        Raises:
            NotFoundError: there is none of that id.
        """
        record = await _find_own(self._sessions, session_id, owner, "session_id")
        members: dict[str, list[str]] = {}
        kept: tuple[tuple[str, Records], ...] = (("run", self._runs), ("sampler", self._samplers))
        for name, table in kept:
            found = await _on_thread(table.list_all)
            members[name] = [each.id for each in found if each.body.get("session_id") == session_id]
        return {
            "training_run_ids": members["run"],
            "sampler_ids": members["sampler"],
            "user_metadata": record.body.get("user_metadata"),
            "display_name": record.body.get("display_name"),
        }

    @staticmethod
    def _accept(run: TinkerRun, operation: RunOperation) -> str:
        run.accept(operation)
        return f"op:{run.id}:{operation.seq_id}"

    async def _begin_run(
        self,
        run_id: str,
        facts: records.RunFacts,
        check: Callable[[], None],
        first: RunOperation | None = None,
    ) -> None:
        async with self._beginning:
            if run_id in self._live or await _on_thread(self._runs.find, run_id) is not None:
                return
            await self._begin_new(run_id, facts, check, first)

    async def _begin_new(
        self,
        run_id: str,
        facts: records.RunFacts,
        check: Callable[[], None],
        first: RunOperation | None,
    ) -> None:
        try:
            check()
            base = await _on_thread(self.bases.find, facts.base_model)
        except HearthError as error:
            base = None
            failure: HearthError | None = error
        else:
            failure = None
        if base is None:
            # The run exists, so that its future can say what is wrong.
            base = self.bases.make_unknown(facts.base_model)
        run = self._make_run(run_id, facts, base)
        self._live[run_id] = run
        if failure is not None:
            run.fail(failure)
            return
        try:
            await _on_thread(self._runs.insert, run_id, "LIVE", facts.as_dict())
            run.begin(first)
        except HearthError:
            del self._live[run_id]
            with contextlib.suppress(HearthError):
                await _on_thread(self._runs.delete, run_id)
            raise

    def _journal_of(self, run_id: str) -> RunJournal:
        return RunJournal(self._plane.context.data_dir / "tinker" / make_key(run_id))

    async def _check_save(
        self, run: TinkerRun, ask: requests.Save, kind: Kind, *, overwrite: bool
    ) -> tuple[dict[str, Any], str | None]:
        """The facts of an operation that saves, and why it is refused, if it is."""
        facts: dict[str, Any] = {}
        try:
            if ask.path is None:
                raise RequestError("path must be a name, got none")
            name = check_name(ask.path)
            ttl_s = requests.check_ttl(ask.ttl_seconds)
            is_new = not await _on_thread(self.saved.is_taken, run.id, kind, name)
            if not (overwrite or is_new or run.knows(ask.seq_id)):
                raise taken_error(name)
        except HearthError as error:
            return facts, str(error)
        return {
            "kind": kind,
            "name": name,
            "expires_s": None if ttl_s is None else time.time() + ttl_s,
            "user_metadata": ask.user_metadata,
        }, None

    async def _finish_save(
        self, run: TinkerRun, operation: RunOperation, result: dict[str, Any]
    ) -> dict[str, Any]:
        """Keep what an operation has saved; the answer to its client."""
        facts = operation.facts
        if operation.kind == "optim_step":
            return {"metrics": result["metrics"]}
        if operation.kind == "load_weights":
            return {"path": facts["path"], "model_id": run.id, "type": "load_weights"}
        answer: dict[str, Any] = {"type": operation.kind}
        if "name" in facts:
            size = None
            if facts["kind"] == "external_weights":
                size = await _on_thread(run.base.export, facts["identity"])
                answer |= {"type": "save_weights_external", "size_bytes": size}
            elif facts["kind"] == "weights":
                size = await _on_thread(run.base.measure_checkpoint, facts["identity"])
            saved = records.SavedFacts(
                owner=run.facts.owner,
                run_id=run.id,
                base_model=run.facts.base_model,
                lora=run.facts.lora,
                kind=facts["kind"],
                name=facts["name"],
                identity=facts["identity"],
                size_bytes=size,
                expires_s=facts["expires_s"],
                user_metadata=facts["user_metadata"],
            )
            await _on_thread(self.saved.put, saved)
            answer["path"] = saved.path
        if facts.get("sampler") is not None:
            answer["sampling_session_id"] = await self._open_sampler(run, facts)
        return answer

    async def _open_sampler(self, run: TinkerRun, facts: dict[str, Any]) -> str:
        sampler_id = f"{run.facts.session_id}:sample:{facts['sampler']}"
        sampler = records.SamplerFacts(
            owner=run.facts.owner,
            session_id=run.facts.session_id,
            base_model=run.facts.base_model,
            identity=facts["identity"],
            inflight_of=run.id if facts["is_inflight"] else None,
        )
        await _on_thread(self._put_sampler, sampler_id, sampler)
        if facts["is_inflight"]:
            # All of the run's samplers of this kind sample from the newest save.
            for id, known in list(self._open_samplers.items()):
                if known.inflight_of == run.id:
                    newer = known.model_copy(update={"identity": facts["identity"]})
                    await _on_thread(self._put_sampler, id, newer)
        return sampler_id

    def _put_sampler(self, sampler_id: str, facts: records.SamplerFacts) -> None:
        if self._samplers.find(sampler_id) is None:
            self._samplers.insert(sampler_id, "OPEN", facts.as_dict())
        else:
            self._samplers.update(sampler_id, body=facts.as_dict())
        self._open_samplers[sampler_id] = facts

    async def _sample(
        self, ask: requests.AskSamples, facts: records.SamplerFacts, owner: str
    ) -> bytes:
        check_samples(ask)
        prompt = read_prompt(ask)
        named = ask.target_prompt_logprobs
        targets = None if named is None else read_targets(named, prompt)
        base = self.bases.get(facts.base_model)
        if base is None:
            base = await _on_thread(self.bases.find, facts.base_model)
        await base.start_deployment()
        length = await base.max_seq_len()
        body = build_completion(ask, prompt, identity=facts.identity, max_seq_len=length)
        answer = await base.complete(body, owner)
        if targets is None:
            return BINARY + write_samples(ask, prompt, answer)
        scoring = build_scoring(targets, prompt, facts.identity)
        scores = None if scoring is None else await base.complete(scoring, owner)
        return BINARY + write_samples(ask, prompt, answer, read_scores(targets, scores))

    async def _find_session(self, owner: str, session_id: str) -> None:
        record = await _find_own(self._sessions, session_id, owner, "session_id")
        if record.state != "OPEN":
            raise ClosedError(f"session_id must be open, got {session_id!r}, which has ended")
        self._beats[session_id] = self._clock()

    def _make_run(self, run_id: str, facts: records.RunFacts, base: Base) -> TinkerRun:
        journal = self._journal_of(run_id)
        return TinkerRun(run_id, facts, base, journal, self._finish_save, self._held_room)

    async def _restore(self) -> None:
        for record in await _on_thread(self._sessions.list_all, ("OPEN",)):
            self._beats[record.id] = self._clock()
        for record in await _on_thread(self._samplers.list_all, ("OPEN",)):
            self._open_samplers[record.id] = records.SamplerFacts.from_dict(record.body)
        for record in await _on_thread(self._runs.list_all, ("LIVE",)):
            facts = records.RunFacts.from_dict(record.body)
            try:
                base = await _on_thread(self.bases.find, facts.base_model)
                run = self._make_run(record.id, facts, base)
                run.restore(await _on_thread(self._journal_of(record.id).read))
            except EngineError as error:
                logger.error("run %s cannot be read, and is left out: %s", record.id, error)
                continue
            except Exception:  # the boundary: one damaged run must not keep out the others
                logger.exception("run %s cannot be read, and is left out", record.id)
                continue
            self._live[record.id] = run
            run.go_on()
        self._sweeper = asyncio.create_task(self._sweep())

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(_SWEEP_S)
            await self.sweep()

    async def sweep(self) -> None:
        """End the sessions whose clients are silent, and drop saved weights that have expired."""
        now_s = self._clock()
        for session_id, beat_s in list(self._beats.items()):
            if now_s - beat_s > SESSION_S:
                with contextlib.suppress(HearthError):
                    await self._end(session_id, "EXPIRED")
        await _on_thread(self.saved.remove_expired)

    async def _end(self, session_id: str, state: str) -> None:
        self._beats.pop(session_id, None)
        await _on_thread(self._sessions.update, session_id, state=state)
        self.samples.end_session(session_id)
        for run_id, run in list(self._live.items()):
            if run.facts.session_id == session_id:
                await _on_thread(self._runs.update, run_id, state="ENDED")
                del self._live[run_id]
                await run.close()
        await _on_thread(self._close_samplers, session_id)

    def _is_sampled(self, identity: str) -> bool:
        """Whether an open sampler samples from a snapshot."""
        return any(facts.identity == identity for facts in list(self._open_samplers.values()))

    def _close_samplers(self, session_id: str) -> None:
        """Close a session's samplers; snapshots that were saved for them alone go."""
        kept = {record.body["identity"] for record in self._plane.store.tinker_saved.list_all()}
        for record in self._samplers.list_all(("OPEN",)):
            facts = records.SamplerFacts.from_dict(record.body)
            if facts.session_id != session_id:
                continue
            self._samplers.update(record.id, state="CLOSED")
            self._open_samplers.pop(record.id, None)
            if facts.identity is not None and facts.identity not in kept:
                self.bases.find(facts.base_model).remove_snapshot(facts.identity)


async def _run(work: Callable[[], Awaitable[bytes]]) -> bytes:
    """The result of a sampling request, also of one that failed."""
    try:
        return await work()
    except HearthError as error:
        failed = describe_failure(error)
        return JSON + orjson.dumps({"error": failed.error, "category": failed.category})
    except Exception as error:
        logger.exception("a sampling request failed")
        return JSON + orjson.dumps({"error": f"{type(error).__name__}", "category": "server"})


_on_thread = asyncio.to_thread


async def _find_own(table: Records, id: str, owner: str, field: str) -> StoredRecord:
    """The record of an id, if it is the owner's.

    Raises:
        NotFoundError: there is none, or it is another's.
    """
    record = await _on_thread(table.find, id)
    if record is None or record.body.get("owner") != owner:
        raise NotFoundError(
            f"{field} must name one that this key has made, got {id[:200]!r}: there is none"
        )
    return record


def _check_loadable(source: records.SavedFacts, ask: requests.LoadWeightsRequest) -> None:
    requests.check_optimizer(ask.optimizer_config)
    if ask.weights_access_token is not None:
        raise RequestError(
            "weights_access_token must be absent: the owner of weights publishes them for others"
        )
    if source.kind != "weights":
        raise RequestError(
            f"path must name a training state (save_state), got {ask.path!r}, sampler weights"
        )
    if ask.base_model is not None and ask.base_model != source.base_model:
        raise RequestError(
            f"base_model must be absent or {source.base_model!r}, got {ask.base_model!r}"
        )


def _describe_run(
    run_id: str, body: dict[str, Any], used_s: float, saved: list[dict[str, Any]]
) -> dict[str, Any]:
    facts = records.RunFacts.from_dict(body)

    def newest(kind: str) -> dict[str, Any] | None:
        own = (each for each in saved if each["tinker_path"].split("/")[2] == run_id)
        return next((each for each in own if each["checkpoint_type"] == kind), None)

    return {
        "training_run_id": run_id,
        "base_model": facts.base_model,
        "model_owner": facts.owner,
        "is_lora": True,
        "corrupted": False,
        "lora_rank": facts.lora.rank,
        "last_request_time": format_timestamp(used_s),
        "last_checkpoint": newest("training"),
        "last_sampler_checkpoint": newest("sampler"),
        "user_metadata": facts.user_metadata,
    }
