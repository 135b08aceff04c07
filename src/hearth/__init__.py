"""Hearth, a self-hosted RL post-training stack: the platform, the SDK and the objectives."""

import sys

__version__ = "0.1.0"

if sys.platform == "win32":
    raise ImportError(
        "hearth must run on Linux, got Windows: install WSL (`wsl --install` in a terminal), and "
        "install and run hearth inside of it"
    )
