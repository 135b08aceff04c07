"""``hearth ps``, ``logs`` and ``stop`` against a platform that listens in this process."""

import os
import threading
import time

import pytest
from tests.listening import AppListener
from tests.unit.control.conftest import ScriptedLauncher
from tests.waiting import wait_until

from hearth.cli.models import chat, deploy
from hearth.cli.resources import Platform as Address
from hearth.cli.resources import find_new, logs, ps, start, stop
from hearth.control.access import Access
from hearth.control.app import create_gateway
from hearth.control.catalog import read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store
from hearth.errors import ConfigError, TransportError, UnreachableError
from hearth.records.models import find_model, name_deployment
from hearth.wire.fireworks import Deployment, TrainerJob
from training.quickstart import MODEL

LONG = "an" + "-long" * 12 + "x"
"""As long as an id may be, and nothing that a terminal would break at."""


class Logged(ScriptedLauncher):
    """Its workers have logs."""

    folder = None

    def log_path(self, worker_id):
        return self.folder / f"{worker_id}.log"


class Platform:
    """A platform on a port, over a launcher that does as told."""

    def __init__(self, folder):
        self.script = Logged()
        self.script.folder = folder
        context = Context(launcher=self.script, catalog=read_catalog(), data_dir=folder)
        self.plane = ControlPlane(Store(), context)
        self.app = create_gateway(self.plane, Access(api_keys={"the-key": "me"}))

    def job(self, id, **more):
        body = {"trainingConfig": {"baseModel": str(MODEL)}} | more
        self.plane.jobs.create(id, TrainerJob.from_dict(body), None)
        self.script.last(id).starts()
        return self.script.last(id)

    def deployment(self, id):
        self.plane.deployments.create(id, Deployment(base_model=str(MODEL)))
        self.script.last(id).starts()
        return self.script.last(id)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    platform = Platform(tmp_path_factory.mktemp("platform"))
    with AppListener(platform.app) as listening:
        platform.url = listening.url
        yield platform
    platform.plane.close()


@pytest.fixture
def platform(served, monkeypatch):
    monkeypatch.setenv("FIREWORKS_BASE_URL", served.url)
    monkeypatch.setenv("FIREWORKS_API_KEY", "the-key")
    monkeypatch.setenv("COLUMNS", "80")
    for record in served.plane.store.jobs.list_all():
        served.plane.jobs.cancel(record.id)
        served.plane.store.jobs.delete(record.id)
    for record in served.plane.store.deployments.list_all():
        served.plane.deployments.delete(record.id)
    return served


def shown(capsys):
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_what_runs_is_shown_one_line_each(platform, capsys):
    platform.job("policy")
    platform.job("reference", forwardOnly=True)
    platform.deployment("rollouts")

    assert ps([]) == 0

    lines = [line.split() for line in shown(capsys)]
    assert lines[0] == ["ID", "KIND", "STATE", "MODEL", "PID", "MEMORY", "AGE", "NOTE"]
    assert [line[:3] for line in lines[1:]] == [
        ["policy", "trainer", "RUNNING"],
        ["reference", "reference", "RUNNING"],
        ["rollouts", "deployment", "READY"],
    ]


@pytest.mark.slow
@pytest.mark.parametrize("width", ["20", "40", "80", "200"])
def test_ids_and_states_are_whole_whatever_the_width(platform, capsys, monkeypatch, width):
    monkeypatch.setenv("COLUMNS", width)
    platform.job(LONG).dies("a reason " * 40)
    platform.deployment(LONG)

    assert ps([]) == 0

    lines = shown(capsys)
    assert len(lines) == 3
    assert [line.split()[:3] for line in lines[1:]] == [
        [LONG, "trainer", "FAILED"],
        [LONG, "deployment", "READY"],
    ]
    assert lines[1].endswith("…"), "a long note is cut at its end"
    assert " a reason a reas" in lines[1]


@pytest.mark.slow
def test_a_note_is_whole_where_it_fits_and_one_line_however_it_was_said(
    platform, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "300")
    platform.job("j").dies("ended by [bold]SIGKILL[/bold]\nwith more; its log ends with: noise")

    ps([])

    assert shown(capsys)[1].endswith("ended by [bold]SIGKILL[/bold] with more")


@pytest.mark.slow
def test_ended_jobs_are_shown_when_all_are_asked_for(platform, capsys):
    platform.job("over")
    platform.job("there")
    platform.plane.jobs.cancel("over")

    ps([])
    assert [line.split()[0] for line in shown(capsys)] == ["ID", "there"]
    ps(["--all"])
    assert [line.split()[0] for line in shown(capsys)] == ["ID", "over", "there"]


@pytest.mark.slow
def test_nothing_that_runs_is_said_so(platform, capsys):
    assert ps([]) == 0

    assert shown(capsys) == [f"nothing runs at {platform.url}"]


@pytest.mark.slow
def test_the_end_of_a_workers_log_is_shown_as_it_is(platform, capsys):
    platform.job("j")
    platform.deployment("d")
    text = "".join(f"line {number} [red]{'x' * 200}\n" for number in range(10))
    (platform.script.folder / "trainer-j.log").write_text(text)
    (platform.script.folder / "deployment-d.log").write_text("of d\n")

    assert logs(["j", "-n", "2"]) == 0
    assert shown(capsys) == text.splitlines()[-2:]
    assert logs(["d"]) == 0
    assert shown(capsys) == ["of d"]


@pytest.mark.slow
def test_a_log_that_is_not_there_is_one_line(platform, capsys):
    platform.job("silent")

    assert logs(["silent"]) == 2

    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert "worker 'trainer-silent' must have a log of its own" in error[0]


@pytest.mark.slow
def test_a_job_is_cancelled_and_a_deployment_scaled_to_zero(platform, capsys):
    worker, replica = platform.job("j"), platform.deployment("d")

    assert stop(["j"]) == 0
    assert stop(["d"]) == 0

    assert shown(capsys) == [
        "trainer job j is cancelled; its checkpoints are kept",
        "deployment d is scaled to zero",
    ]
    assert (worker.stops, replica.stops) == (1, 1)
    assert platform.plane.jobs.get("j").state == "JOB_STATE_CANCELLED"
    assert platform.plane.deployments.get("d").max_replica_count == 0


@pytest.mark.slow
def test_what_was_stopped_starts_again(platform, capsys):
    platform.job("j")
    platform.deployment("d")
    assert [verb([id]) for verb in (stop, start) for id in ("j", "d")] == [0] * 4

    assert shown(capsys)[2:] == [
        "trainer job j starts, from its base weights: a client that resumes it loads its last "
        "checkpoint: hearth ps",
        "deployment d starts: hearth ps",
    ]
    assert platform.plane.jobs.get("j").state == "JOB_STATE_CREATING"
    assert platform.plane.deployments.get("d").max_replica_count == 1


@pytest.mark.slow
def test_a_followed_log_shows_each_new_line_once(platform, capsys, monkeypatch):
    platform.job("j")
    log = platform.script.folder / "trainer-j.log"
    log.write_text("one\ntwo\n")
    later = iter(["two\n", "three\nfour\n", None])

    def wait(_seconds):
        text = next(later)
        if text is None:
            raise KeyboardInterrupt
        with log.open("a") as file:
            file.write(text)

    monkeypatch.setattr("time.sleep", wait)

    assert logs(["j", "--follow", "-n", "1"]) == 0

    assert shown(capsys) == ["two", "two", "three", "four"]


@pytest.mark.parametrize(
    ("known", "lines", "new"),
    [
        (["a", "b"], ["a", "b", "c"], ["c"]),
        (["a", "b"], ["a", "b"], []),
        (["a", "b"], ["x", "y"], ["x", "y"]),
        ([], ["a"], ["a"]),
        (["a", "b", "c"], ["b", "c", "d"], ["d"]),
    ],
)
def test_new_lines_are_those_after_the_known_ones(known, lines, new):
    assert find_new(known, lines) == new


@pytest.mark.slow
def test_a_model_is_deployed_under_its_name(platform, capsys):
    platform.deployment("model")

    assert deploy([str(MODEL)]) == 0

    assert shown(capsys) == [
        f"deployment model loads {MODEL}",
        "it is ready: hearth chat model, or with OpenAI's clients",
        f"  base_url={platform.url}/v1 model=accounts/me/deployments/model",
    ]
    assert platform.plane.deployments.get("model").base_model == str(MODEL)


@pytest.mark.slow
def test_a_deployment_of_another_model_is_not_taken_for_it(platform, tmp_path, capsys):
    platform.deployment("model")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).touch()

    assert deploy([str(tmp_path / "model")]) == 2

    assert capsys.readouterr().err == (
        f"error: id must be new, got 'model', which serves {MODEL}: choose another with --id\n"
    )


@pytest.mark.slow
def test_a_stopped_deployment_is_shown_so_and_deploying_it_again_starts_it(platform, capsys):
    before = platform.deployment("model")
    assert stop(["model"]) == 0
    assert ps([]) == 0
    assert shown(capsys)[-1].split()[:3] == ["model", "deployment", "STOPPED"]

    thread = threading.Thread(target=deploy, args=([str(MODEL)],))
    thread.start()
    wait_until(lambda: platform.script.last("model") is not before)
    platform.script.last("model").starts()
    thread.join()

    assert "it is ready: hearth chat model" in capsys.readouterr().out


def test_a_run_stands_for_its_newest_model(tmp_path):
    for number, name in enumerate(("older", "newest")):
        model = tmp_path / "models" / name
        model.mkdir(parents=True)
        (model / "config.json").touch()
        os.utime(model, (number, number))

    assert find_model(str(tmp_path)) == str(tmp_path / "models" / "newest")
    assert find_model("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    assert name_deployment("Qwen/Qwen3-0.6B") == "qwen3-0-6b"
    assert name_deployment("/home/me/runs/Sums_2/models/final") == "sums-2"
    with pytest.raises(ConfigError, match="without models/NAME"):
        find_model(str(tmp_path / "models"))


@pytest.mark.slow
@pytest.mark.parametrize("verb", [logs, stop, start])
def test_an_unknown_id_lists_the_known_ones(platform, capsys, verb):
    platform.job("policy")
    platform.deployment("rollouts")

    assert verb(["other"]) == 2

    assert capsys.readouterr().err == (
        "error: id must be one of ['policy', 'rollouts'], got 'other'\n"
    )


@pytest.mark.slow
def test_who_is_talked_to_must_be_there(platform, capsys, monkeypatch):
    assert chat(["other", "-m", "hi"]) == 2
    assert "or a deployment at http" in capsys.readouterr().err
    assert chat(["accounts/me/models/mine", "-m", "hi"]) == 2
    assert "hearth deploy accounts/me/models/mine serves it" in capsys.readouterr().err
    monkeypatch.setenv("HEARTH_URL", "http://127.0.0.1:9")
    started = time.monotonic()
    assert chat(["accounts/me/deployments/other", "-m", "hi"]) == 1
    assert time.monotonic() - started < 5
    assert "got 'other', which is no folder; and no platform answers" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [(ps,), (logs, "j"), (stop, "j")], ids=["ps", "logs", "stop"])
def test_a_platform_that_is_not_there_is_one_line_that_says_how_to_start_one(
    capsys, monkeypatch, arguments
):
    monkeypatch.setenv("FIREWORKS_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("COLUMNS", "40")
    verb, *rest = arguments

    assert verb([*rest, "--api-key", "k"]) == 1

    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert "got http://127.0.0.1:9: " in error[0]
    assert "Start one with `hearth serve`" in error[0]
    assert "--base-url" in error[0]


@pytest.mark.parametrize(
    ("error", "told"),
    [(TransportError("too many"), "^too many$"), (UnreachableError("gone:"), "gone: Start one")],
)
def test_a_refusal_is_not_taken_for_a_platform_that_is_not_there(error, told):
    with pytest.raises(TransportError, match=told), Address().explain_absence():
        raise error


def test_a_wrong_key_is_one_line_that_says_what_to_do(platform, capsys):
    assert ps(["--api-key", "wrong"]) == 2

    error = capsys.readouterr().err
    assert "got a wrong one: export HEARTH_API_KEY" in error
    assert error.count("\n") == 1


@pytest.mark.slow
def test_the_flag_stands_over_the_environment(platform, capsys, monkeypatch):
    monkeypatch.setenv("FIREWORKS_BASE_URL", "http://127.0.0.1:9")

    assert ps(["--base-url", platform.url]) == 0
    assert shown(capsys) == [f"nothing runs at {platform.url}"]
