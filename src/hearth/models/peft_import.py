"""peft without bitsandbytes, which it imports where that is installed.

bitsandbytes prepares compiled functions while it is imported, which takes a quarter of a worker's
start. peft needs it for quantized layers alone, and there are none here.
"""

from __future__ import annotations

import sys
from typing import Any

_NAME = "bitsandbytes"
_modules: dict[str, Any] = sys.modules
_is_hidden = _NAME not in _modules
if _is_hidden:
    # An import of it fails, as if it were not installed.
    _modules[_NAME] = None
try:
    import peft
finally:
    if _is_hidden:
        del _modules[_NAME]

__all__ = ["peft"]
