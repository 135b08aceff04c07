"""Publishing the policy's weights to a deployment, as a small state machine.

The first snapshot is a base; later ones are deltas on the last one that was served (LoRA always
sends its whole adapter). A failed load breaks the chain: the next snapshot is a base again.
"""

from __future__ import annotations

import logging
import time
from typing import Protocol

from hearth.errors import ConfigError
from hearth.sdk.deployments import DeploymentManager
from hearth.wire.completions import DeltaMetadata
from hearth.wire.tinker import CheckpointType

logger = logging.getLogger(__name__)


class SnapshotSaver(Protocol):
    """The side that holds the weights."""

    lora_rank: int

    def save_weights_for_sampler_ext(
        self, name: str, checkpoint_type: CheckpointType = "base"
    ) -> SavedSnapshot:
        """Save a snapshot under a name made unique for this client."""
        ...


class SavedSnapshot(Protocol):
    """What a save returns."""

    @property
    def snapshot_name(self) -> str:
        """The identity that a deployment loads."""
        ...


class WeightSyncer:
    """Saves snapshots of a policy and has a deployment serve them.

    Raises:
        ConfigError: ``first_checkpoint_type`` is neither ``base`` nor ``delta``.
    """

    def __init__(
        self, policy_client: SnapshotSaver, deploy_mgr: DeploymentManager, deployment_id: str,
        base_model: str, *, hotload_timeout: float = 600.0,
        first_checkpoint_type: CheckpointType = "base",
    ) -> None:  # fmt: skip
        if first_checkpoint_type not in ("base", "delta"):
            raise ConfigError(
                f"first_checkpoint_type must be 'base' or 'delta', got {first_checkpoint_type!r}"
            )
        self._policy = policy_client
        self._deployments = deploy_mgr
        self._deployment_id = deployment_id
        self._base_model = base_model
        self._timeout_s = hotload_timeout
        self._first_type: CheckpointType = first_checkpoint_type
        self._base_saved = False
        self._served: str | None = None
        self._deployment_checked = False
        self.version = 0
        self.last_sync_s = 0.0

    def save_and_hotload(self, name: str, checkpoint_type: CheckpointType | None = None) -> str:
        """Publish the current weights; returns the identity that is served now.

        Raises:
            EngineError: the deployment did not take the snapshot.
        """
        start_s = time.perf_counter()
        kind = checkpoint_type or self._next_type()
        identity = self.save_only(name, kind)
        self.hotload(identity, kind)
        self.last_sync_s = time.perf_counter() - start_s
        return identity

    def save_only(self, name: str, checkpoint_type: CheckpointType | None = None) -> str:
        """Save a snapshot without serving it; returns its identity."""
        kind = checkpoint_type or self._next_type()
        saved = self._policy.save_weights_for_sampler_ext(name, kind)
        self._base_saved = True
        return saved.snapshot_name

    def hotload(self, identity: str, checkpoint_type: CheckpointType = "base") -> None:
        """Have the deployment serve a saved snapshot.

        Raises:
            EngineError: the deployment did not take the snapshot; the next save is a base again.
        """
        self._check_deployment()
        incremental = None
        if checkpoint_type == "delta" and self._served is not None:
            incremental = DeltaMetadata(previous_snapshot_identity=self._served)
        try:
            state = self._deployments.hotload_and_wait(
                self._deployment_id, self._base_model, identity, incremental=incremental,
                timeout_s=self._timeout_s,
            )  # fmt: skip
        except Exception:
            self.reset_delta_chain()
            raise
        self._served = identity
        self.version = state.weight_version
        logger.debug("weight sync %s is version %d", identity, self.version)

    def reset_delta_chain(self) -> None:
        """Make the next snapshot a base."""
        self._base_saved = False
        self._served = None

    def _next_type(self) -> CheckpointType:
        if self._policy.lora_rank > 0:
            return "base"
        return "delta" if self._base_saved else self._first_type

    def _check_deployment(self) -> None:
        """A deployment that already serves some snapshot is first given a whole one."""
        if self._deployment_checked:
            return
        state = self._deployments.replica_state(self._deployment_id, self._base_model)
        if state is not None and state.current_snapshot_identity is not None:
            self._served = None
        self._deployment_checked = True
