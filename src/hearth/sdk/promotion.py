"""Making a model of a checkpoint."""

from __future__ import annotations

import asyncio
import time

from hearth.errors import ConfigError, EngineError, NotReadyError
from hearth.sdk.resources import ControlPlaneClient
from hearth.sdk.trainer_config import NAME
from hearth.wire.fireworks import UNAVAILABLE, Model, Operation, Promote, Promoted

PROMOTION_TIMEOUT_S = 7200.0
_POST_TIMEOUT_S = 300.0


def check_output_model(output_model_id: str) -> None:
    """Judge a model id before a run is spent on it.

    Raises:
        ConfigError: it breaks its rule.
    """
    if not NAME.fullmatch(output_model_id):
        raise ConfigError(
            f"output_model_id must be 1 to 63 of a-z, 0-9 and '-', got {output_model_id!r} "
            f"({len(output_model_id)} characters)"
        )


async def promote(
    control: ControlPlaneClient,
    job_name: str,
    checkpoint_id: str,
    output_model_id: str,
    base_model: str,
    *,
    hot_load_deployment_id: str | None,
    timeout_s: float,
    merge_adapter: bool,
) -> Model:
    """The model, once its operation is done.

    Raises:
        EngineError: the operation failed, or was not done within ``timeout_s``.
    """
    account = f"accounts/{await control.account_id()}"
    request = Promote(
        output_model=f"{account}/models/{output_model_id}",
        trainer_job_id=job_name,
        base_model=base_model,
        async_promotion=True,
        hot_load_deployment_id=hot_load_deployment_id,
        merge_adapter=merge_adapter,
    )
    checkpoint = checkpoint_id.rsplit("/", 1)[-1]
    path = f"{account}/checkpoints/{checkpoint}:promote"
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            answer = await control.send(
                "POST", path, request.model_dump(exclude_none=True), timeout_s=_POST_TIMEOUT_S
            )
        except NotReadyError:
            # A run that was killed had its own promotion under way; it is done first.
            if time.monotonic() >= deadline_s:
                raise
            await asyncio.sleep(control.wait_policy.first_s)
            continue
        promoted = Promoted.parse(answer)
        if promoted.model is not None:
            return promoted.model
        if promoted.operation is None:
            raise EngineError(f"promotion of {checkpoint!r} must answer a model or an operation")
        model = await _finished(control, promoted.operation, checkpoint, timeout_s, deadline_s)
        if model is not None:
            return model


async def _finished(
    control: ControlPlaneClient,
    operation: Operation,
    checkpoint: str,
    timeout_s: float,
    deadline_s: float,
) -> Model | None:
    """What an operation has made; None when the platform was restarted over it."""
    pause_s = control.wait_policy.first_s
    while not operation.done:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise EngineError(
                f"promotion of {checkpoint!r} must be done within {timeout_s:g} s, still running "
                f"as {operation.name}: it goes on; ask for the model later"
            )
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, control.wait_policy.longest_s)
        operation = await control.get(operation.name, Operation)
    if operation.error is not None and operation.error.code == UNAVAILABLE:
        return None
    if operation.error is not None:
        raise EngineError(f"promotion of {checkpoint!r} failed: {operation.error.message}")
    if operation.response is None:
        raise EngineError(f"promotion of {checkpoint!r} must end with a model, got none")
    return operation.response
