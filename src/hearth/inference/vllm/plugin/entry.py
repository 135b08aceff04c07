"""The entry point ``vllm.general_plugins``, which vLLM calls in each of its processes."""

from __future__ import annotations

NAME = "hearth"
"""Name of the weight-transfer engine in ``--weight-transfer-config``."""
UNCHANGED = "the served weights are unchanged"
"""Begins the error of an update that failed before it changed a weight; ``client`` looks for it."""


def register() -> None:
    """Register the engine that reads snapshot folders; another call changes nothing."""
    # vLLM exists only in the environment where this is called.
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    try:
        WeightTransferEngineFactory.register_engine(
            NAME, "hearth.inference.vllm.plugin.transfer", "SnapshotTransferEngine"
        )
    except ValueError:  # registered already, by an earlier call in this process
        return
