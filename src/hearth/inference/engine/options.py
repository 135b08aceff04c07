"""Limits of an engine's batch, caches and prefills."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from hearth.errors import ConfigError

_MIB = 2**20
_CACHE_MB = 1024
_PROMPT_CACHE_MB = 256

DecoderKind = Literal["fused", "plain", "module"]


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Limits of an engine's batch, caches and prefills.

    Raises:
        ConfigError: a number is below 1, or ``gather_s`` is negative.
    """

    max_seq_len: int | None = None
    """Longest sequence, prompt included; None takes the model's own, up to 32768."""
    max_slots: int = 256
    """Most completions that run at the same time."""
    max_adapters: int = 0
    """Most LoRA adapters in memory that requests name; 0 refuses such requests."""
    cache_mb: int | None = None
    """Budget of the KV cache in MiB; it grows on demand. None: 1024, or a third of a GPU's free
    memory when the engine starts."""
    prompt_cache_mb: int | None = None
    """Budget of prefilled prompts kept for later requests, in MiB. None: 256, or on a GPU
    ``cache_mb / 16`` where that is more."""
    prefill_tokens: int | None = None
    """Most prompt tokens that are prefilled between two decoding steps. None: 4096, or 16384 on a
    GPU."""
    gather_s: float = 0.001
    """How long an idle engine waits for another request after each that arrives."""
    cuda_graphs: bool = True
    """Record decoding steps on a GPU and replay them; False launches each kernel every time."""
    decoder: DecoderKind | None = None
    """What decodes: the loop in C of ``FusedDecoder``, the torch operations of ``PlainStep``, or
    the whole module. None takes the fastest one that the model and the device allow."""

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "max_slots", "cache_mb", "prompt_cache_mb", "prefill_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be >= 1, got {value}")
        if self.max_adapters < 0:
            raise ConfigError(f"max_adapters must be >= 0, got {self.max_adapters}")
        if not self.gather_s >= 0:
            raise ConfigError(f"gather_s must be >= 0, got {self.gather_s}")

    def budgets(self, device: torch.device) -> Budgets:
        """The budgets of an engine on ``device``, with defaults for what is None."""
        is_on_gpu = device.type == "cuda"
        cache_mb = self.cache_mb
        if cache_mb is None:
            # The rest is for prefills, for recorded steps, and for a trainer on the same GPU.
            free = torch.cuda.mem_get_info(device)[0] if is_on_gpu else 0
            cache_mb = max(_CACHE_MB, free // (3 * _MIB))
        return Budgets(
            cache_mb=cache_mb,
            prompt_cache_mb=self.prompt_cache_mb
            or (max(_PROMPT_CACHE_MB, cache_mb // 16) if is_on_gpu else _PROMPT_CACHE_MB),
            prefill_tokens=self.prefill_tokens or (16384 if is_on_gpu else 4096),
        )


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Budgets of ``EngineOptions``, none of them None."""

    cache_mb: int
    prompt_cache_mb: int
    prefill_tokens: int
