"""What a bucket's folder holds, read without torch: manifests only, no weights."""

from __future__ import annotations

import json
from pathlib import Path

from hearth.launch.spec import SnapshotRecord

_KINDS = ("base", "delta", "lora")


def read_bucket(folder: Path) -> list[SnapshotRecord]:
    """The snapshots of a bucket, oldest first; without a readable manifest a folder is none."""
    records = [
        record
        for path in folder.glob("*/manifest.json")
        # Drafts and what is being removed begin with a dot.
        if not path.parent.name.startswith(".") and (record := _read(path)) is not None
    ]
    return sorted(records, key=lambda record: (record.created_s, record.identity))


def _read(manifest: Path) -> SnapshotRecord | None:
    try:
        content = json.loads(manifest.read_text(encoding="utf-8"))
        if content["kind"] not in _KINDS:
            return None
        return SnapshotRecord(
            identity=content["identity"],
            kind=content["kind"],
            base_model=content["base_model"],
            created_s=content.get("created_s") or manifest.stat().st_mtime,
            num_bytes=sum(path.stat().st_size for path in manifest.parent.iterdir()),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None
