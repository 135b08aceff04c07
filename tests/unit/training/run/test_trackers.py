import contextlib
import importlib
import importlib.util
import logging
import sqlite3
import sys
import threading
from types import SimpleNamespace

import orjson
import pytest

from hearth.errors import ConfigError
from training.config.parts import plain_config
from training.config.validation import validate
from training.recipes.rl_loop import Config
from training.run.metrics import MetricsLog
from training.run.trackers import (
    StartedTracker,
    Tracker,
    check_trackers,
    choose_wandb_mode,
    open_trackers,
)
from training.utils import WandBConfig

STEP = {"rollout/raw_reward": 0.25, "train/grad_norm": 1.5, "perf/step_wall_time": 0.125}


@contextlib.contextmanager
def tracked(config, log_path, resumed_step=None):
    """The metrics of a run with its trackers, as a recipe opens them."""
    with (
        open_trackers(config, log_path, resumed_step) as trackers,
        MetricsLog.open(log_path, trackers, resumed_step) as log,
    ):
        yield log


def log_twice(config, log_path):
    """A run of two steps, and its resumption at step 1 that takes step 2 again and a third."""
    with tracked(config, log_path) as log:
        log.write("train", 1, {"rollout/reward": 0.25})
        log.write("train", 2, {"rollout/reward": 0.5})
    with tracked(config, log_path, resumed_step=1) as log:
        log.write("train", 2, {"rollout/reward": 0.75})
        log.write("train", 3, {"rollout/reward": 1.0})
        log.write("eval", 3, {"eval/accuracy": 0.5, "eval/pass@4": 0.875})


@pytest.mark.parametrize("name", ["entity", "project", "run_name"])
def test_wandb_is_named_when_it_is_missing_and_a_run_is_to_be_logged_there(name, monkeypatch):
    # As it is for whoever has not installed it.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    check_trackers(Config())
    with pytest.raises(
        ConfigError, match=rf"wandb\.{name} must be unset without the wandb package, got 'x'"
    ):
        check_trackers(Config(wandb=WandBConfig(**{name: "x"})))


@pytest.mark.parametrize(
    ("variables", "host", "mode"),
    [
        ({}, None, "offline"),
        ({"WANDB_API_KEY": "k"}, None, None),
        ({}, "api.wandb.ai", None),
        ({}, "other.example", "offline"),
        ({"WANDB_BASE_URL": "http://wandb.example:8080"}, "wandb.example", None),
        ({"WANDB_BASE_URL": "http://wandb.example:8080"}, "api.wandb.ai", "offline"),
        ({"WANDB_MODE": "disabled"}, None, None),
    ],
)
def test_wandb_is_offline_where_nobody_has_logged_in(variables, host, mode, tmp_path, monkeypatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    # What `wandb login` writes.
    logins = tmp_path / "netrc"
    monkeypatch.setenv("NETRC", str(logins))
    if host is not None:
        logins.write_text(f"machine {host}\n  login user\n  password secret\n")

    assert choose_wandb_mode() == mode


def test_without_a_wandb_setting_nothing_is_logged_there(tmp_path):
    with tracked(Config(), tmp_path) as log:
        log.write("train", 1, STEP)

    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["entity", "project", "run_name"])
def test_any_name_of_a_wandb_run_starts_one_that_gets_every_record_whole(
    name, tmp_path, monkeypatch
):
    started, logged, finished = [], [], []
    run = SimpleNamespace(
        log=lambda values, step: logged.append(values), finish=lambda: finished.append(True)
    )
    wandb = SimpleNamespace(init=lambda **options: started.append(options) or run)
    importlib.import_module("accelerate.tracking")  # it looks for the real one first
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    config = Config(seed=3, wandb=WandBConfig(**{name: "ours"}))
    with tracked(config, tmp_path) as log:
        log.write("train", 1, STEP)
        log.write("eval", 1, {"eval/accuracy": 0.5})

    names = {"entity": None, "project": "hearth", "run_name": None} | {name: "ours"}
    assert started == [
        {
            "entity": names["entity"],
            "project": names["project"],
            "name": names["run_name"],
            "id": (tmp_path / "wandb_run_id.txt").read_text(),
            "resume": "allow",
            "config": plain_config(config),
            "dir": str(tmp_path),
            "mode": "offline",
        }
    ]
    assert logged == [STEP | {"train/step": 1}, {"eval/accuracy": 0.5, "train/step": 1}]
    assert finished == [True]


@pytest.mark.parametrize(
    ("report_to", "wandb", "names"),
    [
        ("none", WandBConfig(), []),
        ("mlflow", WandBConfig(), ["mlflow"]),
        (["trackio", "none", "trackio", "tensorboard"], WandBConfig(), ["trackio", "tensorboard"]),
        ("none", WandBConfig(project="p"), ["wandb"]),
        (["mlflow", "wandb"], WandBConfig(run_name="r"), ["mlflow", "wandb"]),
    ],
)
def test_report_to_names_trackers_and_a_wandb_setting_implies_wandb(report_to, wandb, names):
    assert Config(report_to=report_to, wandb=wandb).trackers == names


@pytest.mark.parametrize("report_to", ["comet", ["mlflow", "comet"], 3])
def test_an_unknown_tracker_is_refused(report_to):
    with pytest.raises(ConfigError, match=r"report_to must be one of .*'mlflow'.* or a list of"):
        validate(Config(report_to=report_to))


@pytest.mark.parametrize(
    ("name", "lacking"),
    [
        ("wandb", "wandb"),
        ("tensorboard", "tensorboard"),
        ("trackio", "trackio"),
        ("mlflow", "mlflow and alembic"),
    ],
)
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(
    name, lacking, monkeypatch
):
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    wanted = rf"got '{name}' without {lacking}: pip install 'hearth-rl\[{name}\]'"
    with pytest.raises(ConfigError, match=wanted):
        check_trackers(Config(report_to=name))


def test_tensorboard_shows_a_resumed_run_as_one_run_with_each_step_once(tmp_path):
    pytest.importorskip("tensorboard", reason="lacks tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log_twice(Config(report_to="tensorboard", seed=3), tmp_path)

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    rewards = [(event.step, event.value) for event in events.Scalars("rollout/reward")]
    assert rewards == [(1, 0.25), (2, 0.75), (3, 1.0)]
    assert [(event.step, event.value) for event in events.Scalars("eval/pass@4")] == [(3, 0.875)]
    (config,) = events.Tensors("config/text_summary")
    text = config.tensor_proto.string_val[0].decode()
    assert orjson.loads(text.removeprefix("```json\n").removesuffix("\n```"))["seed"] == 3


@pytest.mark.slow  # makes a database
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_mlflow_gets_every_record_and_the_settings_in_one_run(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="lacks mlflow")
    pytest.importorskip("alembic", reason="lacks alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)

    log_twice(Config(report_to="mlflow", seed=3, wandb=WandBConfig()), tmp_path)

    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        ((run, status),) = database.execute("SELECT run_uuid, status FROM runs").fetchall()
        metrics = database.execute("SELECT key, step, value FROM metrics ORDER BY step, timestamp")
        rows = metrics.fetchall()
        seeds = database.execute("SELECT value FROM params WHERE key = 'seed'").fetchall()
        (name,) = database.execute("SELECT name FROM runs").fetchone()
        names = database.execute("SELECT name FROM experiments").fetchall()
    assert run == (tmp_path / "mlflow_run_id.txt").read_text()
    assert (status, name, seeds) == ("FINISHED", tmp_path.name, [("3",)])
    assert ("hearth",) in names
    rewards = [(step, value) for key, step, value in rows if key == "rollout/reward"]
    assert rewards == [(1, 0.25), (2, 0.5), (2, 0.75), (3, 1.0)]
    assert ("eval/pass_at_4", 3, 0.875) in rows


def test_a_tracker_that_fails_is_said_once_and_the_run_goes_on(tmp_path, caplog):
    got = []

    def log(step, metrics):
        if step < 3:
            raise ConnectionError("the server is gone")
        got.append(step)

    peer = SimpleNamespace(finish=lambda: got.append("finish"))
    tracker = Tracker("mlflow", lambda: StartedTracker(peer, log))
    with MetricsLog.open(tmp_path, [tracker]) as metrics:
        for step in (1, 2, 3):
            metrics.write("train", step, STEP)
    tracker.finish()

    assert got == [3, "finish"]
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 3
    (warning,) = caplog.messages
    assert warning.startswith("mlflow failed; the run goes on")
    assert "the server is gone" in warning


def test_a_tracker_that_hangs_holds_up_neither_a_step_nor_the_end(tmp_path, caplog):
    is_over = threading.Event()
    peer = SimpleNamespace(finish=lambda: None)
    tracker = Tracker("wandb", lambda: StartedTracker(peer, lambda step, metrics: is_over.wait()))

    with MetricsLog.open(tmp_path, [tracker]) as metrics:
        for step in (1, 2):
            metrics.write("train", step, STEP)
    tracker.finish(within_s=0.0)
    is_over.set()

    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 2
    assert "wandb did not end within 0 s" in caplog.text


@pytest.mark.slow  # importing mlflow
@pytest.mark.filterwarnings("ignore")  # mlflow's own
def test_a_tracker_that_does_not_start_refuses_a_new_run_but_no_resumed_one(
    tmp_path, monkeypatch, caplog
):
    pytest.importorskip("mlflow", reason="lacks mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    config = Config(report_to="mlflow")

    with (
        pytest.raises(ConfigError, match="report_to must name trackers that start, got 'mlflow'"),
        tracked(config, tmp_path),
    ):
        pass
    caplog.set_level(logging.WARNING)
    with tracked(config, tmp_path, resumed_step=1) as log:
        log.write("train", 2, STEP)

    assert "the run goes on without it" in caplog.text
    assert len((tmp_path / "metrics.jsonl").read_bytes().splitlines()) == 1
