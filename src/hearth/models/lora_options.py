"""The options of a LoRA adapter. What they do to a model is in ``hearth.models.lora``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from hearth.errors import ConfigError, EngineError


@dataclass(frozen=True)
class LoraOptions:
    """Which layers an adapter changes, and how. The update is scaled by ``alpha / rank``."""

    rank: int
    """At least 1."""
    alpha: float = 32.0
    """Above 0."""
    seed: int = 0
    """Fixes the initial values."""
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = False

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"lora rank must be >= 1, got {self.rank}")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ConfigError(f"lora alpha must be finite and > 0, got {self.alpha}")
        if not (self.train_attn or self.train_mlp or self.train_unembed):
            raise ConfigError(
                "lora must train at least one of attn, mlp and unembed, got none of them"
            )

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> LoraOptions:
        """The options in a snapshot's or checkpoint's ``metadata["lora"]``.

        Raises:
            EngineError: there are none.
        """
        try:
            return cls(**metadata["lora"])
        except (KeyError, TypeError) as error:
            raise EngineError(f"metadata must describe a LoRA adapter, got {error}") from None

    def as_metadata(self) -> dict[str, Any]:
        """What ``from_metadata`` reads: ``{"lora": {...}}``."""
        return {"lora": asdict(self)}
