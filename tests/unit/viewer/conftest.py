"""A viewer's app over made-up runs, asked through memory."""

import contextlib

import httpx
import pytest
from tests.integration.viewer import made_up

from hearth.viewer.app import create_app
from hearth.viewer.library import Library

KEY = "a key of the tests"
ADDRESS = "http://127.0.0.1:7000"


@contextlib.asynccontextmanager
async def open_viewer(*roots, key=KEY, **options):
    """A client of a viewer of these folders; what the app raises is raised here."""
    app = create_app(Library(list(roots)), KEY, "hearth-view-7000", **options)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=True)
    async with httpx.AsyncClient(transport=transport, base_url=ADDRESS, headers=headers) as client:
        yield client


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """A folder of two runs that part at step 1, and of one without samples."""
    folder = tmp_path_factory.mktemp("runs")
    made_up.write_run(folder / "first", steps=12)
    made_up.write_run(folder / "deep" / "second", steps=12, shift=0.25, temperature=0.5)
    (folder / "old").mkdir()
    lines = ['{"type":"train","step":1,"rollout/reward":0.5,"perf/step_wall_time":2.0}\n']
    (folder / "old" / "metrics.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture
async def viewer(runs):
    async with open_viewer(runs) as client:
        yield client
