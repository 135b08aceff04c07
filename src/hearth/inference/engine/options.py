"""How much an engine takes on at once."""

from __future__ import annotations

from dataclasses import dataclass

from hearth.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """How much an engine takes on at once.

    Raises:
        ConfigError: a number is below 1, or ``gather_s`` is negative.
    """

    max_seq_len: int | None = None
    """Longest sequence, prompt included; None takes the model's own, up to 32768."""
    max_rows: int = 256
    """Most completions that are drawn at the same time."""
    cache_mb: int = 1024
    """Budget of the KV cache in MiB; it grows as far as it is needed."""
    prompt_cache_mb: int = 256
    """Budget of prefilled prompts kept for later requests, in MiB."""
    prefill_tokens: int = 4096
    """Most prompt tokens that are prefilled between two decoding steps."""
    gather_s: float = 0.001
    """How long an idle engine waits for one more request after each that comes."""

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_rows", "cache_mb", "prompt_cache_mb", "prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if not self.gather_s >= 0:
            raise ConfigError(f"gather_s must be >= 0, got {self.gather_s}")
