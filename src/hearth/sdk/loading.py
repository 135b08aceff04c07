"""Having a deployment serve a snapshot, also when it is started anew in the middle.

The order is idempotent: a replica that forgot it, because it was restarted, is given it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import get_args

from hearth.errors import ConfigError, EngineError, NotFoundError, NotReadyError, TransportError
from hearth.sdk.readiness import GONE
from hearth.sdk.resources import ControlPlaneClient
from hearth.sdk.transport import RetryPolicy
from hearth.wire.completions import (
    DeltaMetadata,
    HotLoadRequest,
    HotLoadState,
    ReplicaState,
    RunningRequests,
)
from hearth.wire.fireworks import Deployment

_HOT_LOAD = "/hot_load/v1/models/hot_load"
_POST_TIMEOUT_S = 60.0
_STATE_TIMEOUT_S = 30.0
# Each question has one try: what to do after a failure depends on what failed.
ONCE = RetryPolicy(attempts=1)


def hot_load_headers(name: str, base_model: str) -> dict[str, str]:
    """The headers that say which deployment is meant."""
    return {"fireworks-model": base_model, "fireworks-deployment": name}


def hot_load_request(
    identity: str, incremental: DeltaMetadata | None, running_requests: RunningRequests
) -> HotLoadRequest:
    """What is asked of a deployment.

    Raises:
        ConfigError: ``running_requests`` is neither ``drain`` nor ``keep``.
    """
    check_running_requests(running_requests)
    return HotLoadRequest(
        identity=identity,
        incremental_snapshot_metadata=incremental,
        running_requests=running_requests,
    )


def check_running_requests(value: RunningRequests) -> None:
    """Refuse what says nothing about running completions.

    Raises:
        ConfigError: it is neither ``drain`` nor ``keep``.
    """
    if value not in get_args(RunningRequests):
        raise ConfigError(
            f"running_requests must be 'drain' or 'keep', got {value!r}: running completions end "
            "on the old weights ('drain'), or go on under the new ones ('keep')"
        )


async def order(
    control: ControlPlaneClient,
    headers: Mapping[str, str],
    request: HotLoadRequest,
    *,
    retries: RetryPolicy | None = None,
    timeout_s: float = _POST_TIMEOUT_S,
) -> None:
    """Ask the deployment to serve a snapshot."""
    await control.http.post(
        _HOT_LOAD, request.dump(), headers=headers, retries=retries, timeout_s=timeout_s
    )


async def hot_load_state(
    control: ControlPlaneClient,
    headers: Mapping[str, str],
    question: Mapping[str, str] | None = None,
    *,
    retries: RetryPolicy | None = None,
    timeout_s: float = _STATE_TIMEOUT_S,
) -> HotLoadState:
    """What the deployment's replicas serve."""
    answer = await control.http.request(
        "GET", _HOT_LOAD, headers=headers, params=question, retries=retries, timeout_s=timeout_s
    )
    return HotLoadState.parse(answer.content)


async def load_and_wait(
    control: ControlPlaneClient,
    headers: Mapping[str, str],
    request: HotLoadRequest,
    timeout_s: float,
) -> ReplicaState:
    """The replica's state once it serves the snapshot that is asked for.

    Raises:
        EngineError: it refused the snapshot, failed for good, or took longer than ``timeout_s``.
        NotFoundError: there is no such deployment.
    """
    return await _Load(control, headers, request, timeout_s).run()


class _Load:
    def __init__(
        self,
        control: ControlPlaneClient,
        headers: Mapping[str, str],
        request: HotLoadRequest,
        timeout_s: float,
    ) -> None:
        self._control = control
        self._headers = headers
        self._request = request
        self._identity = request.identity
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._pause_s = control.wait_policy.first_s
        self._is_ordered = False
        self._server_holds = True
        self._last: ReplicaState | None = None
        self._trouble = ""

    @property
    def _left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    async def run(self) -> ReplicaState:
        while self._left_s > 0:
            try:
                state = await self._step()
            except (NotFoundError, NotReadyError, TransportError) as error:
                self._trouble = str(error)
                self._is_ordered = False
                await _refuse_the_dead(self._control, self._headers["fireworks-deployment"], error)
                await self._rest()
                continue
            if state is not None and serves(state, self._identity):
                return state
            if state is not None and _failed(state, self._identity):
                raise EngineError(self._refused(state))
            if state is None or not _pursues(state, self._identity):
                # Restarted since: it shows an older snapshot and knows nothing of ours.
                self._is_ordered = False
                await self._rest()
            elif not self._server_holds:
                await self._rest()
        raise EngineError(self._too_late())

    async def _step(self) -> ReplicaState | None:
        if not self._is_ordered:
            await order(
                self._control,
                self._headers,
                self._request,
                retries=ONCE,
                timeout_s=max(1.0, min(self._left_s, _POST_TIMEOUT_S)),
            )
            self._is_ordered = True
        hold_s = max(0.0, min(self._left_s, self._control.wait_policy.hold_s))
        question = {"wait_for": self._identity, "timeout_s": f"{hold_s:.3f}"}
        asked_s = time.monotonic()
        answer = await hot_load_state(
            self._control, self._headers, question, retries=ONCE, timeout_s=hold_s + 10
        )
        self._server_holds = time.monotonic() - asked_s >= 0.8 * hold_s
        self._last = answer.replicas[0] if answer.replicas else None
        self._trouble = ""
        return self._last

    async def _rest(self) -> None:
        await asyncio.sleep(max(0.0, min(self._pause_s, self._left_s)))
        self._pause_s = min(self._pause_s * 2, self._control.wait_policy.longest_s)

    def _refused(self, state: ReplicaState) -> str:
        return (
            f"snapshot {self._identity!r} was refused by {self._headers['fireworks-deployment']}: "
            f"{state.loading_state.error_message or 'no reason given'}; it still serves "
            f"{state.current_snapshot_identity!r}. {WHAT_TO_DO}"
        )

    def _too_late(self) -> str:
        served = self._last.current_snapshot_identity if self._last else None
        trouble = f" (last: {self._trouble})" if self._trouble else ""
        return (
            f"snapshot {self._identity!r} must be served within {self._timeout_s:g} s, still "
            f"{served!r} on {self._headers['fireworks-deployment']}{trouble}: raise "
            f"weight_sync_timeout, or look at its log. {WHAT_TO_DO}"
        )


WHAT_TO_DO = (
    "With full parameters save the next snapshot as a base; with LoRA attach the deployment to "
    "this trainer again (reattach_trainer)"
)


async def await_replica(
    control: ControlPlaneClient, headers: Mapping[str, str], timeout_s: float
) -> ReplicaState:
    """The state of the deployment's replica, once it has one.

    Raises:
        EngineError: it failed for good, or has none within ``timeout_s``.
        NotFoundError: there is no such deployment.
    """
    name = headers["fireworks-deployment"]
    deadline_s = time.monotonic() + timeout_s
    pause_s = control.wait_policy.first_s
    trouble = "it has no replica"
    while True:
        try:
            replicas = (await hot_load_state(control, headers, retries=ONCE)).replicas
            if replicas:
                return replicas[0]
        except (NotFoundError, NotReadyError, TransportError) as error:
            trouble = str(error)
            await _refuse_the_dead(control, name, error)
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise EngineError(
                f"{name} must have a replica within {timeout_s:g} s, got none: {trouble}; look at "
                "its log, or scale it up"
            )
        await asyncio.sleep(min(pause_s, left_s))
        pause_s = min(pause_s * 2, control.wait_policy.longest_s)


async def _refuse_the_dead(control: ControlPlaneClient, name: str, refusal: Exception) -> None:
    """Do not wait for a deployment that failed for good, or that never was.

    Raises:
        EngineError: it failed or is being deleted; the message is the platform's reason.
        NotFoundError: the control plane does not know it.
    """
    try:
        answer = await control.http.request("GET", f"/v1/{name}", retries=ONCE)
    except NotFoundError:
        if isinstance(refusal, NotFoundError):
            raise refusal from None
        return
    except (NotReadyError, TransportError):
        return
    deployment = Deployment.parse(answer.content)
    if deployment.state in GONE:
        reason = deployment.status_message or "the platform gave no reason"
        raise EngineError(f"{name} must run to serve snapshots, got {deployment.state}: {reason}")


def serves(state: ReplicaState, identity: str) -> bool:
    """Whether the replica answers with this snapshot's weights."""
    loaded = any(
        adapter.identity == identity and adapter.status == "loaded"
        for adapter in state.loaded_adapters
    )
    return state.readiness and (state.current_snapshot_identity == identity or loaded)


def _failed(state: ReplicaState, identity: str) -> bool:
    loading = state.loading_state
    return loading.stage == "error" and loading.target_snapshot_identity == identity


def _pursues(state: ReplicaState, identity: str) -> bool:
    loading = state.loading_state
    return loading.target_snapshot_identity == identity and loading.stage in ("loading", "done")
