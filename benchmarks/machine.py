"""What a device was measured to do, and how long it takes over something."""

from __future__ import annotations

import contextlib
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

PEAKS = {
    "B200": 2250e12,
    "H200": 989.4e12,
    "H100 PCIe": 756e12,
    "H100": 989.4e12,
    "A100": 312e12,
    "L40S": 362e12,
}
"""bfloat16 operations a second on a datasheet (dense), by a part of the device's name."""


@dataclass(frozen=True)
class Machine:
    """The device, and what it was measured to do."""

    device: torch.device
    name: str
    bytes_per_s: float
    """Read and written by a large copy."""
    operations_per_s: float
    """Of a large bfloat16 matrix product."""
    datasheet: float | None
    """The same as the datasheet has it, where the device is known."""


class Times:
    """Seconds by name, once for every round of which the first warms up."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._seconds: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Note the seconds of the ``with``."""
        start_s = clock(self._device)
        yield
        self._seconds.setdefault(name, []).append(clock(self._device) - start_s)

    def medians(self) -> dict[str, float]:
        """Of each name, without the first."""
        return {name: statistics.median(samples[1:]) for name, samples in self._seconds.items()}


def measure(device: torch.device, *, copied: int, size: int) -> Machine:
    """A device's figures, from a copy of ``copied`` bytes and a product of ``size`` squared."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    source = torch.zeros(copied, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = best(device, lambda: target.copy_(source))
    left = torch.randn(size, size, device=device).bfloat16()
    product_s = best(device, lambda: left @ left)
    datasheet = next((peak for part, peak in PEAKS.items() if part in name), None)
    # A copy reads and writes.
    return Machine(device, name, 2 * copied / copy_s, 2 * size**3 / product_s, datasheet)


def clock(device: torch.device) -> float:
    """Seconds, once the device has done what was asked of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start_s = clock(device)
    run()
    return clock(device) - start_s


def best(device: torch.device, run: Callable[[], object], rounds: int = 10) -> float:
    """The least seconds of some calls, after one to warm up."""
    run()
    return min(timed(device, run) for _ in range(rounds))


def peak_bytes(device: torch.device) -> int:
    """Of the part on a GPU, of the process so far on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
