"""Jobs that sample again: what their process prints, as a browser can read it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.integration.viewer import made_up
from tests.unit.viewer.conftest import open_viewer
from tests.unit.viewer.test_api import FIRST, ask

from hearth.viewer.jobs import MOST_RUNNING, SamplingJobs

PRINTS = 'print(\'{"text": "", "answers": [{"seed": 9007199254740993, "tokens": [7]}]}\')'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    made_up.write_run(folder / "first", steps=4)
    return folder


async def test_a_seed_that_a_browser_would_round_is_a_text(tmp_path: Path) -> None:
    jobs = SamplingJobs((sys.executable, "-c", PRINTS))
    name = jobs.start(tmp_path, "train.1.0.0.0", 1, is_exact=True)
    while jobs.find(name)["state"] == "running":
        await asyncio.sleep(0.01)

    assert jobs.find(name)["answers"] == [{"seed": "9007199254740993", "tokens": [7]}]


async def test_asking_again_is_a_job_in_a_process_of_its_own(runs, tmp_path):
    script = tmp_path / "again.py"
    answers = [{"text": "7", "tokens": [1], "equal": True, "seed": 3}]
    script.write_text(
        "import json, sys\nprint('loading')\n"
        f"print(json.dumps({{'text': ' '.join(sys.argv[2:]), 'answers': {answers!r}}}))\n"
    )
    jobs = SamplingJobs((sys.executable, str(script)))
    async with open_viewer(runs, jobs=jobs) as client:
        body = {"sample": "train.3.4.1.0", "count": 2, "exact": False}
        started = await client.post(f"{FIRST}/again", json=body)
        job = started.json()["job"]
        while (state := await ask(client, f"/api/jobs/{job}"))["state"] == "running":
            await asyncio.sleep(0.01)  # or the loop does nothing else
        missing = await client.get("/api/jobs/nothing")
        wrong = await client.post(f"{FIRST}/again", json={"sample": "x"})

    assert state == {
        "state": "done",
        "text": "train.3.4.1.0 --count 2 --others",
        "answers": answers,
    }
    assert (missing.status_code, wrong.status_code) == (404, 404)


async def test_a_job_that_fails_says_its_last_line(runs, tmp_path):
    may_end = tmp_path / "may_end"
    script = tmp_path / "failing.py"
    script.write_text(
        "import pathlib, sys, time\n"
        f"while not pathlib.Path({str(may_end)!r}).exists(): time.sleep(0.01)\n"
        "sys.exit('error: no snapshot')\n"
    )
    jobs = SamplingJobs((sys.executable, str(script)))
    async with open_viewer(runs, jobs=jobs) as client:
        answers = [
            await client.post(f"{FIRST}/again", json={"sample": "train.3.4.1.0"})
            for _ in range(MOST_RUNNING + 1)
        ]
        may_end.touch()
        job = answers[0].json()["job"]
        while (state := await ask(client, f"/api/jobs/{job}"))["state"] == "running":
            await asyncio.sleep(0.01)  # or the loop does nothing else
        await jobs.close()

    assert [answer.status_code for answer in answers] == [200] * MOST_RUNNING + [429]
    assert (state["state"], state["text"]) == ("failed", "error: no snapshot")
