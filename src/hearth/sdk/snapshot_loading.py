"""Having a deployment load a snapshot, also when it is restarted meanwhile.

The request is idempotent: a replica that lost it in a restart gets it again.
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
from hearth.wire.messages import HttpRequest

_PATH = "/hot_load/v1/models/hot_load"
_POST_TIMEOUT_S = 60.0
_STATE_TIMEOUT_S = 30.0
# Each request has one attempt: what to do after a failure depends on what failed.
ONCE = RetryPolicy(attempts=1)
_ADVICE = (
    "With full parameters save the next snapshot as a base; with LoRA attach the deployment to "
    "this trainer again (reattach_trainer)"
)


def build_load_request(
    identity: str, incremental: DeltaMetadata | None, running_requests: RunningRequests
) -> HotLoadRequest:
    """The request to a deployment.

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
    """Check what is to become of running completions.

    Raises:
        ConfigError: it is neither ``drain`` nor ``keep``.
    """
    if value not in get_args(RunningRequests):
        raise ConfigError(
            f"running_requests must be 'drain' or 'keep', got {value!r}: running completions end "
            "on the old weights ('drain'), or go on under the new ones ('keep')"
        )


class SnapshotLoader:
    """Has one deployment load snapshots; its coroutines run on the SDK's loop only."""

    def __init__(self, control: ControlPlaneClient, name: str, base_model: str) -> None:
        self.name = name
        self.wait_policy = control.wait_policy
        self._http = control.http
        self._headers = {"fireworks-model": base_model, "fireworks-deployment": name}

    @property
    def waited_s(self) -> float:
        """How long the platform could not be reached."""
        return self._http.waited_s

    async def request_load(
        self,
        request: HotLoadRequest,
        retries: RetryPolicy | None = None,
        timeout_s: float = _POST_TIMEOUT_S,
    ) -> None:
        """Ask the deployment to serve a snapshot."""
        await self._http.request(
            HttpRequest(
                "POST",
                _PATH,
                request.dump(),
                headers=self._headers,
                timeout_s=timeout_s,
                waits=True,
            ),
            retries,
        )

    async def fetch_state(
        self,
        query: Mapping[str, str] | None = None,
        retries: RetryPolicy | None = None,
        timeout_s: float = _STATE_TIMEOUT_S,
    ) -> HotLoadState:
        """What the deployment's replicas serve."""
        answer = await self._http.request(
            HttpRequest(
                "GET",
                _PATH,
                params=query,
                headers=self._headers,
                timeout_s=timeout_s,
                waits=query is not None,
            ),
            retries,
        )
        return HotLoadState.parse(answer.content)

    async def wait_for_replica(self, timeout_s: float) -> ReplicaState:
        """The state of the deployment's replica, once it has one.

        Raises:
            EngineError: it failed for good, or has none within ``timeout_s``.
            NotFoundError: there is no such deployment.
        """
        deadline_s = time.monotonic() + timeout_s
        pauses_s = self.wait_policy.pauses_s()
        trouble = "it has no replica"
        while True:
            try:
                replicas = (await self.fetch_state(retries=ONCE)).replicas
                if replicas:
                    return replicas[0]
            except (NotFoundError, NotReadyError, TransportError) as error:
                trouble = str(error)
                await self.refuse_dead_deployment(error)
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                raise EngineError(
                    f"{self.name} must have a replica within {timeout_s:g} s, got none: {trouble}; "
                    "look at its log, or scale it up"
                )
            await asyncio.sleep(min(next(pauses_s), left_s))

    async def refuse_dead_deployment(self, refusal: Exception) -> None:
        """Do not wait for a deployment that failed for good, or that never existed.

        Raises:
            EngineError: it failed or is being deleted; the message is the platform's reason.
            NotFoundError: the control plane does not know it.
        """
        try:
            answer = await self._http.request(HttpRequest("GET", f"/v1/{self.name}"), ONCE)
        except NotFoundError:
            if isinstance(refusal, NotFoundError):
                raise refusal from None
            return
        except (NotReadyError, TransportError):
            return
        deployment = Deployment.parse(answer.content)
        if deployment.state in GONE:
            reason = deployment.status_message or "the platform gave no reason"
            raise EngineError(
                f"{self.name} must run to serve snapshots, got {deployment.state}: {reason}"
            )


class SnapshotLoad:
    """One load; ``run`` once."""

    def __init__(self, loader: SnapshotLoader, request: HotLoadRequest, timeout_s: float) -> None:
        self._loader = loader
        self._request = request
        self._identity = request.identity
        self._timeout_s = timeout_s
        # The time in which the platform cannot be reached does not count.
        self._deadline_s = time.monotonic() + timeout_s - loader.waited_s
        self._pauses_s = loader.wait_policy.pauses_s()
        self._is_requested = False
        self._server_holds = True
        self._last: ReplicaState | None = None
        self._trouble = ""

    @property
    def _left_s(self) -> float:
        return self._deadline_s + self._loader.waited_s - time.monotonic()

    async def run(self) -> ReplicaState:
        """The replica's state once it serves the snapshot of the request.

        Raises:
            EngineError: it refused the snapshot, failed for good, or the time is over.
            NotFoundError: there is no such deployment.
        """
        while self._left_s > 0:
            try:
                state = await self._step()
            except (NotFoundError, NotReadyError, TransportError) as error:
                self._trouble = str(error)
                self._is_requested = False
                await self._loader.refuse_dead_deployment(error)
                await self._pause()
                continue
            if state is not None and _is_serving(state, self._identity):
                return state
            if state is not None and _has_failed(state, self._identity):
                raise EngineError(self._describe_refusal(state))
            if state is None or not _is_loading(state, self._identity):
                # The replica was restarted: it serves an older snapshot and has lost our request.
                self._is_requested = False
                await self._pause()
            elif not self._server_holds:
                await self._pause()
        raise EngineError(self._describe_timeout())

    async def _step(self) -> ReplicaState | None:
        if not self._is_requested:
            timeout_s = max(1.0, min(self._left_s, _POST_TIMEOUT_S))
            await self._loader.request_load(self._request, ONCE, timeout_s)
            self._is_requested = True
        hold_s = max(0.0, min(self._left_s, self._loader.wait_policy.hold_s))
        query = {"wait_for": self._identity, "timeout_s": f"{hold_s:.3f}"}
        start_s = time.monotonic()
        answer = await self._loader.fetch_state(query, ONCE, hold_s + 10)
        self._server_holds = time.monotonic() - start_s >= 0.8 * hold_s
        self._last = answer.replicas[0] if answer.replicas else None
        self._trouble = ""
        return self._last

    async def _pause(self) -> None:
        await asyncio.sleep(max(0.0, min(next(self._pauses_s), self._left_s)))

    def _describe_refusal(self, state: ReplicaState) -> str:
        return (
            f"snapshot {self._identity!r} was refused by {self._loader.name}: "
            f"{state.loading_state.error_message or 'no reason given'}; it still serves "
            f"{state.current_snapshot_identity!r}. {_ADVICE}"
        )

    def _describe_timeout(self) -> str:
        served = self._last.current_snapshot_identity if self._last else None
        trouble = f" (last: {self._trouble})" if self._trouble else ""
        return (
            f"snapshot {self._identity!r} must be served within {self._timeout_s:g} s, still "
            f"{served!r} on {self._loader.name}{trouble}: raise weight_sync_timeout, or look at "
            f"its log. {_ADVICE}"
        )


def _is_serving(state: ReplicaState, identity: str) -> bool:
    """Whether the replica answers with this snapshot's weights."""
    loaded = any(
        adapter.identity == identity and adapter.status == "loaded"
        for adapter in state.loaded_adapters
    )
    return state.readiness and (state.current_snapshot_identity == identity or loaded)


def _has_failed(state: ReplicaState, identity: str) -> bool:
    loading = state.loading_state
    return loading.stage == "error" and loading.target_snapshot_identity == identity


def _is_loading(state: ReplicaState, identity: str) -> bool:
    loading = state.loading_state
    return loading.target_snapshot_identity == identity and loading.stage in ("loading", "done")
