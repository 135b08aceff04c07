import io
import logging
import re
import sys

import orjson
from rich.console import Console

from hearth.telemetry import BusyClock, log_handler
from training.run.metrics import Display, MetricsLog
from training.run.step_metrics import batch_metrics

STEP = {"rollout/raw_reward": 0.25, "train/grad_norm": 1.5, "perf/step_wall_time": 0.125}


def test_records_are_json_lines_with_type_and_step(tmp_path):
    with MetricsLog.open(tmp_path) as log:
        log.write("train", 1, STEP)
        log.write("eval", 1, {"eval/accuracy": 0.5})

    first, second = map(orjson.loads, (tmp_path / "metrics.jsonl").read_bytes().splitlines())
    assert first == {"type": "train", "step": 1, **STEP}
    assert second == {"type": "eval", "step": 1, "eval/accuracy": 0.5}


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


def test_the_bar_moves_with_dropped_rows_and_a_step_stays_in_one_line_of_80_columns():
    out = io.StringIO()
    full = STEP | {"rollout/valid_prompt_groups": 16.0, "train/mean_kl": 0.01}

    display = Display(1024, Console(file=out, force_terminal=True, width=80))
    display.rows(7)
    display.step(1000, 7, full | {"rollout/response_len/mean": 12345.6, "eval/reward": 0.5})
    display.close()

    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()
    assert any("7/1024" in line for line in lines)
    assert max(len(line) for line in lines) <= 80
    assert [line for line in lines if line.strip()][-1].count("step 1000  reward 0.250") == 1


def test_log_lines_go_to_what_stderr_is_when_they_are_written(monkeypatch):
    handler = log_handler()
    later = io.StringIO()
    monkeypatch.setattr(sys, "stderr", later)

    handler.handle(logging.LogRecord("hearth.x", logging.INFO, "", 0, "over the bar", (), None))

    assert later.getvalue().endswith("INFO hearth.x over the bar\n")


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
