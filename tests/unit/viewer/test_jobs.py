"""Jobs that sample again: what their process prints, as a browser can read it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from hearth.viewer.jobs import Jobs

PRINTS = 'print(\'{"text": "", "answers": [{"seed": 9007199254740993, "tokens": [7]}]}\')'


async def test_a_seed_that_a_browser_would_round_is_a_text(tmp_path: Path) -> None:
    jobs = Jobs((sys.executable, "-c", PRINTS))
    name = jobs.start(tmp_path, "train.1.0.0.0", 1, is_exact=True)
    while jobs.find(name)["state"] == "running":
        await asyncio.sleep(0.01)

    assert jobs.find(name)["answers"] == [{"seed": "9007199254740993", "tokens": [7]}]
