"""What vLLM's workers do beside vLLM's own calls: they read a snapshot while they sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hearth.inference.vllm.plugin.transfer import SnapshotTransferEngine


class SnapshotWorker:
    """Methods that vLLM adds to its worker class (``--worker-extension-cls``)."""

    weight_transfer_engine: SnapshotTransferEngine

    def prepare_snapshot(self, root: str, identity: str) -> dict[str, Any]:
        """Have a snapshot under ``root`` read, and return how far that is; call it again.

        Example: ``{"is_ready": False, "error": None}``
        """
        try:
            return {"is_ready": self.weight_transfer_engine.prepare(root, identity), "error": None}
        except Exception as error:  # noqa: BLE001 - the boundary: the deployment reports it
            return {"is_ready": False, "error": str(error)}
