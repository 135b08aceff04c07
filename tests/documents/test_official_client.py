"""The documents' loops with their import line unchanged, on the official client.

``HEARTH_FIREWORKS_PYTHON`` names an interpreter that has ``fireworks-ai[training]`` beside Hearth's
own requirements; not given, this one is tried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.quickstart import MODEL

HERE = Path(__file__).resolve().parent
PYTHON = os.environ.get("HEARTH_FIREWORKS_PYTHON", sys.executable)


@pytest.fixture(scope="module")
def official() -> str:
    """An interpreter that has the official client."""
    tried = [PYTHON, "-c", "import fireworks.training.sdk"]
    if subprocess.run(tried, capture_output=True).returncode != 0:
        pytest.skip(f"needs fireworks-ai[training], which {PYTHON} does not have")
    return PYTHON


@pytest.mark.parametrize("number", ["001", "003"])
def test_the_documents_loop_trains_with_the_official_client(
    number, official, document, platform, dataset_file
):
    page = document(number).path
    command = [official, str(HERE / "official_client.py"), number, str(page), str(MODEL)]
    environment = os.environ | {"PYTHONPATH": str(HERE.parents[1] / "src")}

    done = subprocess.run(
        [*command, str(dataset_file)], env=environment, capture_output=True, text=True, timeout=120
    )

    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["syncer"].startswith("fireworks.training.sdk")
    assert platform.snapshots(said["job"], said["served"]) == ["step-00001", "step-00002"]
