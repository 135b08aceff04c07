"""Small arrays between the CPU and the model's device, without blocking a GPU's queue."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def stage(values: NDArray[Any], device: torch.device) -> Tensor:
    """``values`` on the CPU, ready to be copied to ``device`` with ``non_blocking=True``.

    For a GPU they are in pinned memory, which is not reused before the copy has been made.
    """
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory() if device.type == "cuda" else host


def fetch(values: Tensor) -> NDArray[Any]:
    """``values`` on the CPU, after everything in the device's queue has been computed."""
    if values.device.type != "cuda":
        return values.numpy()
    host = values.to("cpu", non_blocking=True)  # into pinned memory
    torch.cuda.current_stream(values.device).synchronize()
    return host.numpy()
