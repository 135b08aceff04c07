"""Deployments as the SDK reaches them: where to sample, and which snapshot they serve."""

from __future__ import annotations

import time

from hearth.errors import EngineError
from hearth.sdk.background import start
from hearth.sdk.transport import Http
from hearth.wire.completions import DeltaMetadata, HotLoadRequest, HotLoadState, ReplicaState

_HOT_LOAD = "/hot_load/v1/models/hot_load"
_LONGEST_POLL_S = 25.0


class DeploymentManager:
    """The deployments of one platform."""

    def __init__(
        self, api_key: str, base_url: str, *, account_id: str = "", inference_url: str | None = None
    ) -> None:
        self.account_id = account_id or "me"
        self.inference_url = (inference_url or base_url).rstrip("/")
        self._http = Http(base_url, api_key)

    def deployment_name(self, deployment_id: str) -> str:
        """The full resource name; a full name stays as it is."""
        if deployment_id.startswith("accounts/"):
            return deployment_id
        return f"accounts/{self.account_id}/deployments/{deployment_id}"

    def replica_state(self, deployment_id: str, base_model: str) -> ReplicaState | None:
        """What the deployment serves now; None while it has no replica."""
        return start(self._state(self._route(deployment_id, base_model), {}, 30.0)).result()

    def hotload_and_wait(
        self, deployment_id: str, base_model: str, identity: str, *,
        incremental: DeltaMetadata | None = None, timeout_s: float = 600.0,
    ) -> ReplicaState:  # fmt: skip
        """Serve the snapshot ``identity``; returns when it is served.

        Raises:
            EngineError: the deployment could not load it, or not within ``timeout_s``.
        """
        headers = self._route(deployment_id, base_model)
        return start(self._hotload(headers, identity, incremental, timeout_s)).result()

    def _route(self, deployment_id: str, base_model: str) -> dict[str, str]:
        name = self.deployment_name(deployment_id)
        return {"fireworks-model": base_model, "fireworks-deployment": name}

    async def _hotload(
        self, headers: dict[str, str], identity: str, incremental: DeltaMetadata | None,
        timeout_s: float,
    ) -> ReplicaState:  # fmt: skip
        request = HotLoadRequest(identity=identity, incremental_snapshot_metadata=incremental)
        await self._http.post(_HOT_LOAD, request.dump(), headers=headers)
        deadline = time.monotonic() + timeout_s
        state: ReplicaState | None = None
        while (left := deadline - time.monotonic()) > 0:
            poll_s = min(left, _LONGEST_POLL_S)
            question = {"wait_for": identity, "timeout_s": f"{poll_s:.3f}"}
            state = await self._state(headers, question, poll_s + 10)
            if state is not None and _serves(state, identity):
                return state
            if state is not None and _failed(state, identity):
                raise EngineError(
                    f"snapshot {identity!r} was refused by {headers['fireworks-deployment']}: "
                    f"{state.loading_state.error_message or 'no reason given'}"
                )
        served = state.current_snapshot_identity if state else None
        raise EngineError(
            f"snapshot {identity!r} must be served within {timeout_s:g} s, still {served!r} "
            f"on {headers['fireworks-deployment']}: raise weight_sync_timeout, or look at its log"
        )

    async def _state(
        self, headers: dict[str, str], question: dict[str, str], timeout_s: float
    ) -> ReplicaState | None:
        answer = await self._http.request(
            "GET", _HOT_LOAD, headers=headers, params=question, timeout_s=timeout_s
        )
        replicas = HotLoadState.parse(answer.content).replicas
        return replicas[0] if replicas else None

    def close(self) -> None:
        """Close the connections."""
        start(self._http.close()).result()


def _serves(state: ReplicaState, identity: str) -> bool:
    loaded = any(
        one.identity == identity and one.status == "loaded" for one in state.loaded_adapters
    )
    return state.readiness and (state.current_snapshot_identity == identity or loaded)


def _failed(state: ReplicaState, identity: str) -> bool:
    loading = state.loading_state
    return loading.stage == "error" and loading.target_snapshot_identity == identity
