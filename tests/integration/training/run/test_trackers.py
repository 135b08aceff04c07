import contextlib
import sqlite3
import subprocess
import sys

import orjson
import pytest

TRACKIO = """
import sys
from pathlib import Path
from tests.unit.training.run.test_trackers import Config, log_twice

log_twice(Config(report_to="trackio", seed=3), Path(sys.argv[1]))
"""


def test_trackio_gets_every_record_and_the_settings_in_one_run(tmp_path, monkeypatch):
    pytest.importorskip("trackio", reason="lacks trackio")
    monkeypatch.delenv("TRACKIO_DIR", raising=False)

    # In a process of its own: trackio reads its folder's name once.
    subprocess.run([sys.executable, "-c", TRACKIO, str(tmp_path)], check=True)

    with contextlib.closing(sqlite3.connect(tmp_path / "trackio" / "hearth.db")) as database:
        rows = database.execute("SELECT run_id, run_name, step, metrics FROM metrics ORDER BY id")
        runs, names, steps, metrics = zip(*rows.fetchall(), strict=True)
        ((config,),) = database.execute("SELECT config FROM configs").fetchall()
    assert len(set(runs)) == 1
    assert set(names) == {(tmp_path / "trackio_run_id.txt").read_text()}
    assert steps == (1, 2, 2, 3, 3)
    rewards = [orjson.loads(values).get("rollout/reward") for values in metrics]
    assert rewards == [0.25, 0.5, 0.75, 1.0, None]
    assert orjson.loads(config)["seed"] == 3
