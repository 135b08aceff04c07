import importlib.util
import io
import sys
from types import SimpleNamespace

import orjson
import pytest
from rich.console import Console

from hearth.errors import ConfigError
from hearth.telemetry import BusyClock
from training.run.metrics import Display, MetricsLog, check_wandb, choose_wandb_mode
from training.run.step_metrics import batch_metrics
from training.utils import WandBConfig

STEP = {"rollout/raw_reward": 0.25, "train/grad_norm": 1.5, "perf/step_wall_time": 0.125}


def test_records_are_json_lines_with_type_and_step(tmp_path):
    with MetricsLog.open(tmp_path, WandBConfig(), {}) as log:
        log.write("train", 1, STEP)
        log.write("eval", 1, {"eval/accuracy": 0.5})

    first, second = map(orjson.loads, (tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert first == {"type": "train", "step": 1, **STEP}
    assert second == {"type": "eval", "step": 1, "eval/accuracy": 0.5}


@pytest.mark.parametrize("name", ["entity", "project", "run_name"])
def test_wandb_is_named_when_it_is_missing_and_a_run_is_to_be_logged_there(name, monkeypatch):
    # As it is for whoever has not installed it.
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    check_wandb(WandBConfig())
    with pytest.raises(
        ConfigError, match=rf"wandb\.{name} must be unset without the wandb package, got 'x'"
    ):
        check_wandb(WandBConfig(**{name: "x"}))


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
    with MetricsLog.open(tmp_path, WandBConfig(), {}) as log:
        log.write("train", 1, STEP)

    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("name", ["entity", "project", "run_name"])
def test_any_name_of_a_wandb_run_starts_one_that_gets_every_record_whole(
    name, tmp_path, monkeypatch
):
    started, logged, finished = [], [], []
    run = SimpleNamespace(log=logged.append, finish=lambda: finished.append(True))
    wandb = SimpleNamespace(init=lambda **options: started.append(options) or run)
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)

    with MetricsLog.open(tmp_path, WandBConfig(**{name: "ours"}), {"seed": 3}) as log:
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
            "config": {"seed": 3},
            "dir": str(tmp_path),
            "mode": "offline",
        }
    ]
    assert logged == [STEP | {"train/step": 1}, {"eval/accuracy": 0.5, "train/step": 1}]
    assert finished == [True]


def test_a_step_is_one_plain_line_without_a_terminal():
    out = io.StringIO()

    display = Display(8, Console(file=out, width=200))
    display.step(3, 5, STEP)
    display.close()

    assert out.getvalue() == "step    3  reward 0.250  grad 1.500  s 0.12\n"


def test_a_terminal_gets_a_live_bar_that_leaves_only_notes_behind():
    out = io.StringIO()

    display = Display(8, Console(file=out, force_terminal=True, width=120))
    display.step(3, 5, STEP)
    display.note("held-out accuracy 0.5")
    display.close()

    assert "5/8" in out.getvalue()
    assert "held-out accuracy 0.5" in out.getvalue()


def test_busy_time_is_split_into_both_and_each_alone():
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0, 21.0, 28.0])
    clock = BusyClock(now=lambda: next(now))

    with clock.sample():  # from 1
        with clock.sample():  # from 3
            pass  # to 6
        with clock.train():  # 10 to 15
            pass
    # to 21; taken at 28

    assert clock.take() == (5.0, 2.0 + 3.0 + 4.0 + 6.0, 0.0)


def test_training_alone_is_the_samplers_wait():
    now = iter([0.0, 2.0, 7.0, 7.5])
    clock = BusyClock(now=lambda: next(now))

    with clock.train():
        pass

    assert clock.take() == (0.0, 0.0, 5.0)


def test_batch_metrics_say_how_a_step_was_cut():
    metrics = batch_metrics([(8, {}), (4, {}), (0, {})], completions_per_prompt=4)

    assert metrics["rollout/fwd_bwd_count"] == 2.0
    assert metrics["train/effective_grad_accum_steps"] == 2.0
    assert metrics["batch/mean_samples_per_fwd_bwd"] == 6.0
    assert metrics["batch/max_prompt_groups_per_fwd_bwd"] == 2.0
    assert metrics["batch/min_prompt_groups_per_fwd_bwd"] == 1.0
