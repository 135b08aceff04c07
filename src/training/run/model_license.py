"""The license of a base model, as its card says it."""

from __future__ import annotations

import os
import re
from pathlib import Path

UNKNOWN = "unknown"
"""What the hub calls a license that nobody has named."""
TIMEOUT_S = 5.0
_FRONT = re.compile(r"\A---\n(.*?)\n---", re.DOTALL)
_FIELD = re.compile(r"^license:[ \t]*([\w.-]+)[ \t]*$", re.MULTILINE)


def find_license(base_model: str) -> str:
    """The hub's identifier of a base model's license, as ``apache-2.0``; ``unknown`` for none.

    A folder's card is read, of a hub id the copy that was loaded, or else what the hub says.
    """
    folder = Path(base_model).expanduser()
    if folder.is_dir():
        return _read_card(folder / "README.md") or UNKNOWN
    if folder.is_absolute() or base_model.count("/") != 1:
        return UNKNOWN  # a registered name, or a folder of the platform's machine
    from huggingface_hub import HfApi, try_to_load_from_cache

    try:
        cached = try_to_load_from_cache(base_model, "README.md")
        if isinstance(cached, str):
            return _read_card(Path(cached)) or UNKNOWN
        if os.environ.get("HF_HUB_OFFLINE"):
            return UNKNOWN
        card = HfApi().model_info(base_model, timeout=TIMEOUT_S).card_data
    except Exception:  # noqa: BLE001 - a card is worth no finished run, whatever the network does
        return UNKNOWN
    named = None if card is None else card.get("license")
    return named if isinstance(named, str) else UNKNOWN


def _read_card(path: Path) -> str | None:
    try:
        front = _FRONT.match(path.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    found = _FIELD.search(front.group(1)) if front else None
    return found.group(1) if found else None
