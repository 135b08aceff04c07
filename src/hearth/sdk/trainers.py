"""Trainer jobs: creating one, waiting until it answers, and its checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass

from hearth.errors import (
    ClosedError,
    ConfigError,
    ConflictError,
    EngineError,
    NotFoundError,
    NotReadyError,
)
from hearth.sdk.background import APIFuture, start
from hearth.sdk.readiness import (
    JOBS,
    RESUMABLE,
    OnStatus,
    TrainerEndpoint,
    TrainerWait,
    trainer_url,
)
from hearth.sdk.resources import ControlPlaneClient, ResourceManager, WaitPolicy
from hearth.sdk.shapes import TrainingShapeProfile, resolve_shape, select_shape
from hearth.sdk.trainer_config import NAME, TrainerJobConfig
from hearth.sdk.transport import RetryPolicy
from hearth.wire.fireworks import (
    UNAVAILABLE,
    CheckpointEntry,
    CheckpointPage,
    Model,
    Operation,
    Promote,
    Promoted,
    TrainerJob,
    TrainerJobPage,
)

logger = logging.getLogger(__name__)

READY_TIMEOUT_S = 900.0
PENDING_TIMEOUT_S = 48 * 3600.0


PROMOTION_TIMEOUT_S = 7200.0
_POST_TIMEOUT_S = 300.0


def check_output_model(output_model_id: str) -> None:
    """Check a model id before a run starts.

    Raises:
        ConfigError: it breaks its rule.
    """
    if not NAME.fullmatch(output_model_id):
        raise ConfigError(
            f"output_model_id must be 1 to 63 of a-z, 0-9 and '-', got {output_model_id!r} "
            f"({len(output_model_id)} characters)"
        )


async def promote(
    control: ControlPlaneClient, checkpoint_id: str, request: Promote, timeout_s: float
) -> Model:
    """The model, once its operation is done.

    Raises:
        EngineError: the operation failed, or was not done within ``timeout_s``.
    """
    checkpoint = checkpoint_id.rsplit("/", 1)[-1]
    path = f"accounts/{await control.account_id()}/checkpoints/{checkpoint}:promote"
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            answer = await control.send(
                "POST", path, request.model_dump(exclude_none=True), timeout_s=_POST_TIMEOUT_S
            )
        except NotReadyError:
            # The promotion of a killed run still goes on; the platform finishes it first.
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(control.wait_policy.first_s)
            continue
        promoted = Promoted.parse(answer)
        if promoted.model is not None:
            return promoted.model
        if promoted.operation is None:
            raise EngineError(f"promotion of {checkpoint!r} must answer a model or an operation")
        model = await _wait_for_model(
            control, promoted.operation, checkpoint, timeout_s, deadline_s
        )
        if model is not None:
            return model


async def _wait_for_model(
    control: ControlPlaneClient,
    operation: Operation,
    checkpoint: str,
    timeout_s: float,
    deadline_s: float,
) -> Model | None:
    """The model that an operation made; None when a restart of the platform ended it."""
    pauses_s = control.wait_policy.pauses_s()
    while not operation.done:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise EngineError(
                f"promotion of {checkpoint!r} must be done within {timeout_s:g} s, still running "
                f"as {operation.name}: it goes on; ask for the model later"
            )
        await asyncio.sleep(min(next(pauses_s), left_s))
        operation = await control.get(operation.name, Operation)
    if operation.error is not None and operation.error.code == UNAVAILABLE:
        return None
    if operation.error is not None:
        raise EngineError(f"promotion of {checkpoint!r} failed: {operation.error.message}")
    if operation.response is None:
        raise EngineError(f"promotion of {checkpoint!r} must end with a model, got none")
    return operation.response


@dataclass(frozen=True)
class CreatedJob:
    """A job that was created; it may still be starting."""

    job_id: str
    job_name: str
    state: str | None = None


class TrainerJobManager(ResourceManager):
    """The trainer jobs of one account.

    ``account_id`` ``""`` or None: the key's own account. Methods block; those that end in
    ``_async`` return a future instead (``await`` it, or ``.result()``).

    Raises:
        ConfigError: no key or no URL, neither here nor in the environment.
    """

    collection = JOBS

    def __init__(
        self,
        api_key: str | None = None,
        account_id: str | None = None,
        base_url: str | None = None,
        *,
        retries: RetryPolicy | None = None,
        wait_policy: WaitPolicy | None = None,
    ) -> None:
        super().__init__(ControlPlaneClient(api_key, base_url, account_id, retries, wait_policy))

    def trainer_url(self, job_id: str) -> str:
        """Where the job's trainer answers once it runs."""
        return trainer_url(self.base_url, self._full_name(job_id))

    def create(self, config: TrainerJobConfig) -> CreatedJob:
        """Create a job and return at once; a job that has this id already is used as it is.

        Where that job was created with another config, the platform's objection is logged.

        Raises:
            ConfigError: the config breaks a rule; no request was sent.
            NotFoundError: the id belonged to a job that was deleted.
        """
        config.validate()
        job_id = config.job_id or f"training-api-service-{uuid.uuid4().hex[:8]}"
        name = self._full_name(job_id)
        collection = name.removesuffix(f"/{job_id}")
        body, params = config.record().as_dict(), config.params(job_id)
        try:
            answer = start(self._control.send("POST", collection, body, params)).result()
            job = TrainerJob.parse(answer)
        except ConflictError as error:
            logger.warning("the existing job %s is used as it is: %s", name, error)
            job = start(self._control.get(name, TrainerJob)).result()
            if job.state == "JOB_STATE_DELETED":
                raise NotFoundError(
                    f"job_id must be new or a living job's, got {job_id!r}: it was deleted"
                ) from None
        return CreatedJob(job_id=job_id, job_name=job.name or name, state=job.state)

    def wait_for_ready(
        self,
        job_id: str,
        timeout_s: float = READY_TIMEOUT_S,
        on_status: OnStatus | None = None,
        *,
        pending_timeout_s: float = PENDING_TIMEOUT_S,
    ) -> TrainerEndpoint:
        """The job's trainer once it answers. Waiting for room (``PENDING``) has its own time.

        Raises:
            EngineError: the job failed or ended (with the platform's reason), or the time is over.
            NotFoundError: there is no such job, or it was deleted.
        """
        return self.wait_for_ready_async(
            job_id, timeout_s, on_status, pending_timeout_s=pending_timeout_s
        ).result()

    def wait_for_ready_async(
        self,
        job_id: str,
        timeout_s: float = READY_TIMEOUT_S,
        on_status: OnStatus | None = None,
        *,
        pending_timeout_s: float = PENDING_TIMEOUT_S,
    ) -> APIFuture[TrainerEndpoint]:
        """``wait_for_ready`` as a future."""
        return start(self._wait_until_ready(job_id, timeout_s, pending_timeout_s, on_status))

    def create_and_wait(
        self,
        config: TrainerJobConfig,
        timeout_s: float = READY_TIMEOUT_S,
        on_status: OnStatus | None = None,
    ) -> TrainerEndpoint:
        """``create``, then ``wait_for_ready``."""
        return self.wait_for_ready(self.create(config).job_id, timeout_s, on_status)

    def wait_for_existing(
        self, job_id: str, timeout_s: float = READY_TIMEOUT_S, on_status: OnStatus | None = None
    ) -> TrainerEndpoint:
        """``wait_for_ready`` for a job that another program created."""
        return self.wait_for_ready(job_id, timeout_s, on_status)

    def reconnect_and_wait(
        self, job_id: str, timeout_s: float = READY_TIMEOUT_S, on_status: OnStatus | None = None
    ) -> TrainerEndpoint:
        """The trainer of a job that may have ended: it is resumed first where it has.

        Raises:
            EngineError, NotFoundError: as ``wait_for_ready``.
        """
        return self.reconnect_and_wait_async(job_id, timeout_s, on_status).result()

    def reconnect_and_wait_async(
        self,
        job_id: str,
        timeout_s: float = READY_TIMEOUT_S,
        on_status: OnStatus | None = None,
        *,
        unless: Collection[str] = (),
    ) -> APIFuture[TrainerEndpoint]:
        """``reconnect_and_wait`` as a future; a job in one of the states ``unless`` stays so.

        Raises:
            ClosedError: when awaited: the job is in one of them.
        """

        async def reconnect() -> TrainerEndpoint:
            name = await self._control.resolve_name(JOBS, job_id)
            job = await self._control.get(name, TrainerJob)
            if job.state in unless:
                raise ClosedError(
                    f"trainer job {job_id!r} must be running, got {job.state}: "
                    f"{job.status_message or 'the platform gave no reason'}"
                )
            if job.state in RESUMABLE:
                await self._control.send("POST", f"{name}:resume")
            return await self._wait_until_ready(
                job_id, timeout_s, PENDING_TIMEOUT_S, on_status, resumed_from=job.state
            )

        return start(reconnect())

    def resume(self, job_id: str) -> None:
        """Start an ended job's trainer again, from its base weights; its checkpoints are there."""
        self._post_action(job_id, "resume")

    def cancel(self, job_id: str) -> None:
        """End a job's trainer; its checkpoints stay. No error where it has ended."""
        with contextlib.suppress(NotFoundError, ConflictError, ClosedError):
            self._post_action(job_id, "cancel")

    def delete(self, job_id: str) -> None:
        """End a job and delete its record; its checkpoints stay. No error where there is none."""
        start(self._control.delete(self._full_name(job_id))).result()

    def get(self, job_id: str) -> TrainerJob | None:
        """A job's record; None where there is none."""
        return start(self._control.find(self._full_name(job_id), TrainerJob)).result()

    def list_checkpoints(self, job_id: str) -> list[CheckpointEntry]:
        """A job's checkpoints and snapshots, oldest first; also after the job was deleted."""
        name = f"{self._full_name(job_id)}/checkpoints"
        return start(
            self._control.list_records(name, CheckpointPage, lambda page: page.checkpoints)
        ).result()

    def find_model(self, model_id: str) -> Model | None:
        """A registered or promoted model by its id or full name; None where there is none."""
        return start(self._control.find(self._full_name(model_id, "models"), Model)).result()

    # The parameters are the product documents'.
    def promote_checkpoint(
        self,
        job_id: str,
        checkpoint_id: str,
        output_model_id: str,
        base_model: str,
        hot_load_deployment_id: str | None = None,
        timeout: float = PROMOTION_TIMEOUT_S,
        *,
        merge_adapter: bool = False,
        card: str | None = None,
    ) -> Model:
        """Make a model of a promotable checkpoint.

        ``merge_adapter`` writes an adapter as a whole model; ``card`` is the text of its model
        card.

        Raises:
            ConfigError: ``output_model_id`` breaks its rule; no request was sent.
            EngineError: the platform could not, or not within ``timeout`` seconds.
        """
        return self.promote_checkpoint_async(
            job_id,
            checkpoint_id,
            output_model_id,
            base_model,
            hot_load_deployment_id,
            timeout,
            merge_adapter=merge_adapter,
            card=card,
        ).result()

    def promote_checkpoint_async(
        self,
        job_id: str,
        checkpoint_id: str,
        output_model_id: str,
        base_model: str,
        hot_load_deployment_id: str | None = None,
        timeout: float = PROMOTION_TIMEOUT_S,
        *,
        merge_adapter: bool = False,
        card: str | None = None,
    ) -> APIFuture[Model]:
        """``promote_checkpoint`` as a future."""
        check_output_model(output_model_id)
        request = Promote(
            output_model=self._full_name(output_model_id, "models"),
            trainer_job_id=self._full_name(job_id),
            base_model=base_model,
            async_promotion=True,
            hot_load_deployment_id=hot_load_deployment_id,
            merge_adapter=merge_adapter,
            card=card,
        )
        return start(promote(self._control, checkpoint_id, request, timeout))

    def resolve_training_profile(self, shape_id: str) -> TrainingShapeProfile:
        """What a training shape fixes: its newest validated version, or the one that is named.

        Raises:
            ConfigError: ``shape_id`` is no name of a shape.
            NotFoundError: there is none.
        """
        return start(resolve_shape(self._control, shape_id)).result()

    def auto_select_training_shape(
        self, base_model: str, lora_rank: int = 0, forward_only: bool = False
    ) -> TrainingShapeProfile:
        """The best shape for such a job.

        Raises:
            NotFoundError: there is none.
        """
        return start(select_shape(self._control, base_model, lora_rank, forward_only)).result()

    async def _wait_until_ready(
        self,
        job_id: str,
        timeout_s: float,
        pending_timeout_s: float,
        on_status: OnStatus | None,
        *,
        resumed_from: str | None = None,
    ) -> TrainerEndpoint:
        name = await self._control.resolve_name(JOBS, job_id)
        return await TrainerWait(
            self._control, name, timeout_s, pending_timeout_s, on_status, resumed_from
        ).run()

    def _post_action(self, job_id: str, action: str) -> None:
        start(self._control.send("POST", f"{self._full_name(job_id)}:{action}")).result()

    def list(self) -> list[TrainerJob]:
        """All jobs of the account."""
        name = f"accounts/{self.account_id}/{JOBS}"
        return start(
            self._control.list_records(name, TrainerJobPage, lambda page: page.rlor_trainer_jobs)
        ).result()
