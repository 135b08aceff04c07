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
