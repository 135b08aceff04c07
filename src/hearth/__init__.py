"""Hearth, a self-hosted RL post-training stack: the platform, the SDK and the objectives."""

import os
import sys

__version__ = "0.1.0"

# Intel's library of matrix products, MKL, then rounds alike on any number of threads. It reads this
# when it computes for the first time.
os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")

if sys.platform == "win32":
    raise ImportError(
        "hearth must run on Linux, got Windows: install WSL (`wsl --install` in a terminal), and "
        "install and run hearth inside of it"
    )
