import re
import signal
import subprocess
import sys

import httpx
import pytest
from tests.integration.viewer import made_up

SERVE = "import sys; from hearth.viewer.verb import view; sys.exit(view(sys.argv[1:]))"


def start(*arguments):
    command = [sys.executable, "-c", SERVE, *map(str, arguments), "--no-browser"]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_the_viewer_prints_its_address_and_ends_with_ctrl_c_while_somebody_listens(tmp_path):
    made_up.write_run(tmp_path / "run", steps=2)
    with start(tmp_path) as viewer:
        line = viewer.stdout.readline()
        url = httpx.URL(re.fullmatch(r"viewing at (http://127\.0\.0\.1:\d+/\?key=\S+)\n", line)[1])
        headers = {"authorization": f"Bearer {url.params['key']}"}
        with (
            httpx.Client(base_url=url.join("/"), headers=headers, timeout=60) as client,
            client.stream("GET", "/api/live") as events,
        ):
            assert next(events.iter_lines()) == "retry: 1000"
            assert client.get("/api/runs/run/samples").json()["total"] == 16
            viewer.send_signal(signal.SIGINT)
            output, errors = viewer.communicate(timeout=60)

    assert (viewer.returncode, output, errors) == (0, "", "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["nothing"], "run must be a folder, got 'nothing'"), ([], "run must be named")],
)
def test_a_mistake_is_one_line(tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    with start(*arguments) as viewer:
        output, errors = viewer.communicate(timeout=60)

    assert viewer.returncode == 2
    assert output == ""
    assert errors.startswith(f"error: {said}")
    assert len(errors.splitlines()) == 1
