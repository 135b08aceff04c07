"""Publishing the policy's weights to a deployment, as a small state machine.

The first snapshot is a base; a later one is a delta where its predecessor is served (LoRA always
sends its whole adapter, or the model with the adapter merged in). A failed load breaks the chain:
the next snapshot is a base again.
"""

from __future__ import annotations

import logging
from typing import get_args

from hearth.errors import ConfigError
from hearth.sdk.deployments import REPLICA_TIMEOUT_S, DeploymentManager
from hearth.sdk.snapshot_loading import check_running_requests
from hearth.sdk.training import FiretitanTrainingClient
from hearth.wire.completions import DeltaMetadata, ReplicaState, RunningRequests
from hearth.wire.tinker import CheckpointType

logger = logging.getLogger(__name__)


class WeightSyncer:
    """Saves snapshots of a policy and has a deployment serve them.

    ``lora_rank`` is by default the policy client's, or 0 where it has none; with a rank above 0
    every snapshot is whole: the adapter, or with ``first_checkpoint_type="merged_base"`` the model
    with the adapter merged in, for deployments that cannot serve the adapter. With ``direct`` the
    trainer sends every snapshot without files. ``running_requests`` decides about completions that
    run during a weight sync: they end on the old weights, and the weight sync waits for them
    (``drain``), or they continue under the new ones (``keep``), and name both versions.

    Raises:
        ConfigError: ``first_checkpoint_type`` is none of ``base``, ``delta``, ``direct`` and
            ``merged_base``, or is ``direct`` with an adapter or ``merged_base`` without one, or
            ``running_requests`` is neither ``drain`` nor ``keep``.
    """

    # The parameters are the product documents'.
    def __init__(
        self,
        policy_client: FiretitanTrainingClient,
        deploy_mgr: DeploymentManager,
        deployment_id: str,
        base_model: str,
        *,
        hotload_timeout: float = 600.0,
        first_checkpoint_type: CheckpointType = "base",
        lora_rank: int | None = None,
        running_requests: RunningRequests = "drain",
    ) -> None:
        known = get_args(CheckpointType)
        if first_checkpoint_type not in known:
            raise ConfigError(
                f"first_checkpoint_type must be one of {list(known)}, got {first_checkpoint_type!r}"
            )
        check_running_requests(running_requests)
        self.lora_rank = getattr(policy_client, "lora_rank", 0) if lora_rank is None else lora_rank
        if first_checkpoint_type == "direct" and self.lora_rank > 0:
            raise ConfigError(
                "first_checkpoint_type must be 'base' for an adapter, got 'direct': an adapter is "
                "small, and is sent by files"
            )
        if first_checkpoint_type == "merged_base" and self.lora_rank == 0:
            raise ConfigError(
                "first_checkpoint_type must be 'base', 'delta' or 'direct' for full weights, got "
                "'merged_base': there is no adapter to merge"
            )
        self._policy = policy_client
        self._deployments = deploy_mgr
        self._deployment_id = deployment_id
        self._base_model = base_model
        self._timeout_s = hotload_timeout
        self.running_requests: RunningRequests = running_requests
        # What to save where no chain can continue.
        self._chainless_type: CheckpointType = first_checkpoint_type
        self._saved: tuple[str, CheckpointType] | None = None
        self._served: str | None = None
        self._has_replica = False
        self.version = 0

    def save_and_hotload(self, name: str, checkpoint_type: CheckpointType | None = None) -> str:
        """Publish the current weights; returns the identity that is served now.

        Raises:
            EngineError: the deployment did not take the snapshot; the next one is a base again.
        """
        identity = self.save_only(name, checkpoint_type)
        self.hotload(identity)
        return identity

    def save_only(self, name: str, checkpoint_type: CheckpointType | None = None) -> str:
        """Save a snapshot without serving it; returns its identity."""
        kind = checkpoint_type or self._choose_type()
        saved = self._policy.save_weights_for_sampler_ext(name, kind)
        self._saved = (saved.snapshot_name, kind)
        return saved.snapshot_name

    def hotload(self, identity: str, checkpoint_type: CheckpointType | None = None) -> None:
        """Have the deployment serve a saved snapshot; by default as the type that it was saved as.

        Raises:
            EngineError: the deployment did not take the snapshot; the next save is a base again.
        """
        kind = checkpoint_type
        if kind is None and self._saved is not None and self._saved[0] == identity:
            kind = self._saved[1]
        try:
            if not self._has_replica:
                self.wait_for_hotload_ready()
                self._has_replica = True
            # A snapshot from before this syncer is no predecessor: start with a base.
            incremental = None
            if kind == "delta" and self.lora_rank == 0 and self._served is not None:
                incremental = DeltaMetadata(previous_snapshot_identity=self._served)
            state = self._deployments.hotload_and_wait(
                self._deployment_id,
                self._base_model,
                identity,
                incremental=incremental,
                timeout_s=self._timeout_s,
                running_requests=self.running_requests,
            )
        except Exception:
            self.reset_delta_chain()
            raise
        self._served = identity
        self.version = state.weight_version
        logger.debug("weight sync %s is version %d", identity, self.version)

    def reset_delta_chain(self) -> None:
        """Make the next snapshot a base."""
        if self._chainless_type == "delta":
            self._chainless_type = "base"
        self._saved = None
        self._served = None

    def wait_for_hotload_ready(self, timeout: float = REPLICA_TIMEOUT_S) -> ReplicaState:
        """What the deployment serves, once it has a replica that can take a snapshot.

        Raises:
            EngineError: it failed, or has no replica within ``timeout`` seconds.
            NotFoundError: there is no such deployment.
        """
        return self._deployments.wait_for_replica(self._deployment_id, self._base_model, timeout)

    def _choose_type(self) -> CheckpointType:
        if self.lora_rank > 0:
            return "merged_base" if self._chainless_type == "merged_base" else "base"
        if self._chainless_type == "direct":
            return "direct"
        is_chained = self._saved is not None and self._saved[0] == self._served
        return "delta" if is_chained else self._chainless_type
