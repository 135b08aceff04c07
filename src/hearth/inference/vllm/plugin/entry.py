"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

NAME = "hearth"
"""Of the weight-transfer engine, as ``--weight-transfer-config`` names it."""
UNCHANGED = "the served weights are unchanged"
"""Begins the error of an update that failed before it changed a weight; ``client`` looks for it."""


def register() -> None:
    """Make the engine that reads snapshot folders known; calling it again changes nothing."""
    # vLLM is only there where this is called.
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # pyright: ignore[reportMissingImports]

    try:
        WeightTransferEngineFactory.register_engine(
            NAME, "hearth.inference.vllm.plugin.transfer", "SnapshotTransferEngine"
        )
    except ValueError:  # registered already, by an earlier call in this process
        return
