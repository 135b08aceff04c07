"""What a program in the sandbox may use."""

from __future__ import annotations

from dataclasses import dataclass, fields

from hearth.errors import ConfigError


@dataclass(frozen=True)
class Limits:
    """What a program may use.

    Raises:
        ConfigError: a limit is not above 0, or not whole where the kernel counts whole units.
    """

    cpu_s: int = 5
    """Seconds of processor time of each of its processes, which other programs do not use up."""
    wall_s: float = 15.0
    """Seconds until it is ended, whatever it does."""
    memory_mb: int = 512
    """MiB of address space of each process, and of resident memory of all together."""
    processes: int = 16
    """Processes and threads at once."""
    disk_mb: int = 16
    """MiB of files in its working folder, which is memory, and again in /dev/shm."""
    output_kb: int = 256
    """KiB that it may write to standard output and standard error together."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            kinds = int | float if entry.name == "wall_s" else int
            if isinstance(value, bool) or not isinstance(value, kinds) or not value > 0:
                rule = "a number" if entry.name == "wall_s" else "a whole number"
                raise ConfigError(f"limits.{entry.name} must be {rule} above 0, got {value!r}")
