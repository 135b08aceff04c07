"""What the platform keeps of sessions, runs, samplers and checkpoints of Tinker's programs."""

from __future__ import annotations

from typing import Any, Literal

from hearth.wire.base import Record
from hearth.wire.tinker import LoraSpec


class SessionFacts(Record):
    """A session, as it is kept."""

    owner: str
    user_metadata: dict[str, Any] | None = None
    display_name: str | None = None


class RunFacts(Record):
    """A run, as it is kept."""

    owner: str
    session_id: str
    base_model: str
    lora: LoraSpec
    user_metadata: dict[str, Any] | None = None


class SamplerFacts(Record):
    """A sampling session, as it is kept."""

    owner: str
    session_id: str
    base_model: str
    identity: str | None = None
    """The snapshot that it samples from; None for the base."""
    path: str | None = None
    inflight_of: str | None = None
    """The run whose newest save of this kind it samples from."""


class SavedFacts(Record):
    """Saved weights, as they are kept."""

    owner: str
    run_id: str
    base_model: str
    lora: LoraSpec
    kind: Literal["weights", "sampler_weights", "external_weights"]
    name: str
    identity: str
    """Of the trainer's checkpoint or snapshot."""
    size_bytes: int | None = None
    is_public: bool = False
    expires_s: float | None = None
    user_metadata: dict[str, str] | None = None

    @property
    def path(self) -> str:
        """Its name for clients."""
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"
