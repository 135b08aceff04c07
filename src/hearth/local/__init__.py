"""The embedded platform: trainers and deployments inside the process that uses them."""

from hearth.local.platform import EmbeddedPlatform, resolve_model

__all__ = ["EmbeddedPlatform", "resolve_model"]
