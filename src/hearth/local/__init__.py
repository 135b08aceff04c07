"""The embedded platform: trainers and deployments inside the process that uses them.

Its names are imported when they are first used: ``hearth serve`` shares this package, and its own
process needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hearth.local.platform import (
        EmbeddedPlatform,
        check_adapter_is_servable,
        check_tokenizer,
        resolve_model,
    )
    from hearth.local.tinker import tinker_server

__all__ = [
    "EmbeddedPlatform",
    "check_adapter_is_servable",
    "check_tokenizer",
    "resolve_model",
    "tinker_server",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "tinker_server":
        from hearth.local.tinker import tinker_server

        return tinker_server
    from hearth.local import platform

    return getattr(platform, name)
