"""Deployments: creating one, linking it to a trainer, and which snapshot it serves."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

from hearth.errors import ConflictError, EngineError, NotFoundError, NotReadyError, TransportError
from hearth.sdk.background import APIFuture, start
from hearth.sdk.deployment_config import DeploymentConfig, DeploymentInfo
from hearth.sdk.readiness import DEPLOYMENT_STATES, GONE, JOBS, wait_for_deployment
from hearth.sdk.resources import ControlPlaneClient, ResourceManager, WaitPolicy, Watch
from hearth.sdk.snapshot_loading import ONCE, SnapshotLoad, SnapshotLoader, build_load_request
from hearth.sdk.transport import RetryPolicy
from hearth.wire.completions import (
    CompletionRequest,
    DeltaMetadata,
    HotLoadState,
    ReplicaState,
    RunningRequests,
)
from hearth.wire.fireworks import Deployment, DeploymentPage, DeploymentPatch
from hearth.wire.messages import HttpRequest

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 600.0
HOTLOAD_TIMEOUT_S = 600.0
REPLICA_TIMEOUT_S = 300.0
_DELETE_TIMEOUT_S = 60.0
_DELETE = {"ignoreChecks": "true", "hard": "true"}


class DeploymentManager(ResourceManager):
    """The deployments of one account, and what they serve.

    ``account_id`` ``""`` or None: the key's own account. Methods block; those that end in
    ``_async`` return a future instead (``await`` it, or ``.result()``).

    Raises:
        ConfigError: no key or no URL, neither here nor in the environment.
    """

    collection = "deployments"

    def __init__(
        self,
        api_key: str | None = None,
        base_url: str | None = None,
        *,
        account_id: str | None = None,
        inference_url: str | None = None,
        retries: RetryPolicy | None = None,
        wait_policy: WaitPolicy | None = None,
    ) -> None:
        super().__init__(ControlPlaneClient(api_key, base_url, account_id, retries, wait_policy))
        self.inference_url = (inference_url or self.base_url).rstrip("/")
        self._inference = self._control.http
        if self.inference_url != self.base_url:
            self._inference = self._control.connect(self.inference_url)

    def deployment_name(self, deployment_id: str) -> str:
        """The full resource name; a full name stays as it is."""
        return self._full_name(deployment_id)

    def create_or_get(
        self, config: DeploymentConfig, force_recreate: bool = False
    ) -> DeploymentInfo:
        """The deployment of this id; made where there is none, or only a failed or deleted one.

        ``force_recreate`` deletes a living one first.

        Raises:
            ConfigError: the config breaks a rule; no request was sent.
            EngineError: the old one was still there a minute after its deletion.
        """
        config.validate()
        name = self._full_name(config.deployment_id)
        existing = start(self._control.find(name, Deployment)).result()
        if existing is not None and existing.state not in GONE and not force_recreate:
            return DeploymentInfo.from_record(existing, name)
        if existing is not None:
            start(self._control.delete(name, _DELETE)).result()
            start(self._wait_until_deleted(name)).result()
        body = config.body(self._resolve_trainer(config.hot_load_trainer_job))
        collection = name.removesuffix(f"/{config.deployment_id}")
        try:
            answer = start(self._control.send("POST", collection, body, config.params())).result()
            record = Deployment.parse(answer)
        except ConflictError as error:
            logger.warning("the existing deployment %s is used as it is: %s", name, error)
            record = start(self._control.get(name, Deployment)).result()
        return DeploymentInfo.from_record(record, name)

    def get(self, deployment_id: str) -> DeploymentInfo | None:
        """The deployment; None where there is none."""
        name = self._full_name(deployment_id)
        record = start(self._control.find(name, Deployment)).result()
        return None if record is None else DeploymentInfo.from_record(record, name)

    def wait_for_ready(
        self, deployment_id: str, timeout_s: float = READY_TIMEOUT_S
    ) -> DeploymentInfo:
        """The deployment once it is ``READY``.

        Raises:
            EngineError: it failed or is being deleted (with the platform's reason), or the time is
                over.
            NotFoundError: there is none.
        """
        return self.wait_for_ready_async(deployment_id, timeout_s).result()

    def wait_for_ready_async(
        self, deployment_id: str, timeout_s: float = READY_TIMEOUT_S
    ) -> APIFuture[DeploymentInfo]:
        """``wait_for_ready`` as a future."""

        async def wait() -> DeploymentInfo:
            name = await self._control.resolve_name(self.collection, deployment_id)
            return await wait_for_deployment(self._control, name, timeout_s, None)

        return start(wait())

    def update(
        self,
        deployment_id: str,
        *,
        hot_load_trainer_job: str | None = None,
        hot_load_transition_type: str | None = None,
        min_replica_count: int | None = None,
        max_replica_count: int | None = None,
    ) -> DeploymentInfo:
        """Change what is given; the rest stays."""
        patch = DeploymentPatch(
            hot_load_trainer_job=self._resolve_trainer(hot_load_trainer_job),
            hot_load_transition_type=hot_load_transition_type,
            min_replica_count=min_replica_count,
            max_replica_count=max_replica_count,
        )
        return self._patch(self._full_name(deployment_id), patch)

    def reattach_trainer(
        self, deployment_id: str, trainer_job_name: str, timeout_s: float = READY_TIMEOUT_S
    ) -> DeploymentInfo:
        """Serve another trainer's snapshots from now on; returns when that is so.

        Raises:
            EngineError: the deployment failed, or is not ready and attached within ``timeout_s``.
        """
        start_s = time.monotonic()
        name, trainer = self._full_name(deployment_id), self._resolve_trainer(trainer_job_name)
        before = start(wait_for_deployment(self._control, name, timeout_s, None)).result()
        if before.hot_load_trainer_job == trainer:
            return before
        self._patch(name, DeploymentPatch(hot_load_trainer_job=trainer))
        left_s = timeout_s - (time.monotonic() - start_s)
        return start(wait_for_deployment(self._control, name, left_s, trainer)).result()

    def scale_to_zero(self, deployment_id: str) -> None:
        """Stop its replicas; the deployment and its name stay."""
        body = DeploymentPatch(min_replica_count=0, max_replica_count=0).as_dict()
        start(self._control.send("PATCH", self._full_name(deployment_id), body)).result()

    def delete(self, deployment_id: str) -> None:
        """Delete it for good; no error where there is none."""
        start(self._control.delete(self._full_name(deployment_id), _DELETE)).result()

    def replica_state(self, deployment_id: str, base_model: str) -> ReplicaState | None:
        """What the deployment serves now; None while it has no replica."""
        replicas = self.hotload_check_status(deployment_id, base_model).replicas
        return replicas[0] if replicas else None

    def wait_for_replica(
        self, deployment_id: str, base_model: str, timeout_s: float = REPLICA_TIMEOUT_S
    ) -> ReplicaState:
        """What the deployment serves, once it has a replica.

        Raises:
            EngineError: it failed, or has no replica within ``timeout_s``.
            NotFoundError: there is no such deployment.
        """
        loader = self._make_loader(deployment_id, base_model)
        return start(loader.wait_for_replica(timeout_s)).result()

    def hotload_check_status(self, deployment_id: str, base_model: str) -> HotLoadState:
        """What each replica serves and loads."""
        return start(self._make_loader(deployment_id, base_model).fetch_state()).result()

    def hotload(
        self,
        deployment_id: str,
        base_model: str,
        identity: str,
        *,
        incremental: DeltaMetadata | None = None,
        running_requests: RunningRequests = "drain",
    ) -> None:
        """Request that the snapshot ``identity`` is served, and return at once.

        ``running_requests`` is that of ``hotload_and_wait``.
        """
        request = build_load_request(identity, incremental, running_requests)
        start(self._make_loader(deployment_id, base_model).request_load(request)).result()

    def hotload_and_wait(
        self,
        deployment_id: str,
        base_model: str,
        identity: str,
        *,
        incremental: DeltaMetadata | None = None,
        timeout_s: float = HOTLOAD_TIMEOUT_S,
        running_requests: RunningRequests = "drain",
    ) -> ReplicaState:
        """Serve the snapshot ``identity``; returns when it is served.

        Completions that run end on the old weights before that (``drain``), or go on under the new
        ones (``keep``). A deployment that restarts meanwhile gets the request again.

        Raises:
            ConfigError: ``running_requests`` is neither.
            EngineError: the deployment could not load it, or not within ``timeout_s``.
            NotFoundError: there is no such deployment.
        """
        request = build_load_request(identity, incremental, running_requests)
        loader = self._make_loader(deployment_id, base_model)
        return start(SnapshotLoad(loader, request, timeout_s).run()).result()

    def warmup(self, deployment_id: str, attempts: int = 10) -> bool:
        """Sample a few tokens, so that the first real request is fast; False if none came."""
        name = self._full_name(deployment_id)
        request = CompletionRequest(model=name, prompt=[1, 2], max_tokens=4, temperature=0.0)
        sent = HttpRequest("POST", "/inference/v1/completions", request.dump())

        async def sample() -> bool:
            for _, pause_s in zip(
                range(attempts), self._control.wait_policy.pauses_s(), strict=False
            ):
                with contextlib.suppress(NotFoundError, NotReadyError, TransportError):
                    await self._inference.request(sent, ONCE)
                    return True
                await asyncio.sleep(pause_s)
            return False

        return start(sample()).result()

    def close(self) -> None:
        """Close the connections."""
        super().close()
        if self._inference is not self._control.http:
            start(self._inference.close()).result()

    def list(self) -> list[DeploymentInfo]:
        """All deployments of the account."""
        name = f"accounts/{self.account_id}/{self.collection}"
        records = start(
            self._control.list_records(name, DeploymentPage, lambda page: page.deployments)
        ).result()
        return [DeploymentInfo.from_record(record, record.name or name) for record in records]

    def _make_loader(self, deployment_id: str, base_model: str) -> SnapshotLoader:
        return SnapshotLoader(self._control, self._full_name(deployment_id), base_model)

    def _resolve_trainer(self, job: str | None) -> str | None:
        return None if job is None else self._full_name(job, JOBS)

    async def _wait_until_deleted(self, name: str) -> None:
        deadline_s = time.monotonic() + _DELETE_TIMEOUT_S
        watch = Watch(self._control, name, Deployment, DEPLOYMENT_STATES)
        try:
            record = await watch.fetch()
            while record.state != "DELETED":
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise EngineError(
                        f"{name} must be gone within {_DELETE_TIMEOUT_S:g} s of its deletion, "
                        f"still {record.state}"
                    )
                record = await watch.wait_for_change(record.state, left_s)
        except NotFoundError:
            return

    def _patch(self, name: str, patch: DeploymentPatch) -> DeploymentInfo:
        query = {"updateMask": ",".join(patch.model_dump(exclude_none=True))}
        answer = start(self._control.send("PATCH", name, patch.as_dict(), query)).result()
        return DeploymentInfo.from_record(Deployment.parse(answer), name)
