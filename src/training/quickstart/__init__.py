"""The embedded default: a tiny model of our own, its rows, and a run that needs nothing else.

``model`` and ``data`` are made by ``tools/make_base_model.py``.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).parent
MODEL = FOLDER / "model"
TRAIN_ROWS = FOLDER / "data" / "train.jsonl"
HELDOUT_ROWS = FOLDER / "data" / "heldout.jsonl"
