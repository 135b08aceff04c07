import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from hearth.errors import ConfigError
from training.run.watchdog import StalledError, StallLimits, Watchdog

REPORT = "the trainer waits for 3 rollouts\nrow 7: 120 s in judge.py:41"


class Stage:
    """A watchdog with a clock to turn, and what it did."""

    def __init__(
        self,
        folder: Path,
        report: Callable[[], str] = lambda: REPORT,
        *,
        on_stall=None,
        patience_s: float = 2.0,
    ) -> None:
        self.seconds = 1000.0
        self.stalls: list[StalledError] = []
        self.codes: list[int] = []
        self.watchdog = Watchdog(
            StallLimits(60.0, patience_s=patience_s),
            report,
            log_path=folder,
            on_stall=on_stall or self.stalls.append,
            exit=self.exit,
            now=lambda: self.seconds,
        )

    def exit(self, code: int) -> NoReturn:
        self.codes.append(code)
        raise SystemExit(code)

    def after(self, seconds: float) -> list[StalledError]:
        """What was called a stall so far, once that time has passed."""
        self.seconds += seconds
        self.watchdog.check()
        return self.stalls


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


def test_a_run_whose_steps_end_in_time_is_left_alone(stage, tmp_path):
    for _ in range(5):
        assert stage.after(59.0) == []
        stage.watchdog.beat()

    assert not (tmp_path / "stall.txt").exists()


def test_a_stall_is_reported_once_with_who_waits_for_whom(stage, tmp_path, caplog):
    stage.after(61.5)
    stage.after(10.0)

    (error,) = stage.stalls
    path = tmp_path / "stall.txt"
    assert str(error) == (
        "61.5 s have passed without a finished step (stall_timeout_s=60): "
        f"the trainer waits for 3 rollouts; see {path}"
    )
    assert error.category == "server"
    assert REPORT in path.read_text()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert str(error) in caplog.text
    assert REPORT in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["stall.txt"]


def test_the_report_has_the_stacks_of_all_threads_the_main_one_first(stage, tmp_path):
    may_end = threading.Event()
    waiting = threading.Thread(target=lambda: may_end.wait(10), name="a reward's thread")
    waiting.start()
    stage.after(61.0)  # this line
    may_end.set()
    waiting.join()

    text = (tmp_path / "stall.txt").read_text()
    assert text.index(REPORT) < text.index("Thread MainThread:") < text.index("Thread a reward's")
    assert text.count("Thread MainThread:") == 1
    assert "stage.after(61.0)  # this line" in text
    assert "lambda: may_end.wait(10)" in text


def test_the_process_is_ended_only_when_the_body_outlives_its_grace(stage, caplog):
    stage.after(61.0)
    stage.after(30.0)
    assert stage.codes == []

    with pytest.raises(SystemExit):
        stage.after(0.1)
    assert stage.codes == [1]
    assert "has not ended 30 s after its stall" in caplog.text


def test_after_a_stall_no_step_puts_the_end_off(stage):
    stage.after(61.0)
    stage.watchdog.beat()

    with pytest.raises(SystemExit):
        stage.after(31.0)


def failing() -> str:
    raise KeyError("rows")


def ending() -> str:
    raise SystemExit(3)


@pytest.mark.parametrize(
    ("report", "complaint"),
    [
        (failing, "(the report failed with KeyError: 'rows')"),
        (ending, "(the report failed with SystemExit: 3)"),
        (lambda: "", "no report"),
        (lambda: "\n", "no report"),
    ],
)
def test_a_report_that_fails_costs_only_itself(tmp_path, report, complaint):
    stage = Stage(tmp_path, report)

    (error,) = stage.after(61.0)

    assert f": {complaint}; see" in str(error)
    assert "Thread MainThread" in (tmp_path / "stall.txt").read_text()


@pytest.mark.slow
def test_a_report_that_hangs_costs_only_its_patience_and_is_seen_to_hang(tmp_path):
    may_end = threading.Event()
    stage = Stage(tmp_path, lambda: str(may_end.wait(10)), patience_s=0.2)

    (error,) = stage.after(61.0)
    may_end.set()

    assert "(the report did not end within 0.2 s)" in str(error)
    assert "lambda: str(may_end.wait(10))" in (tmp_path / "stall.txt").read_text()


def test_where_no_file_can_be_written_the_log_has_it_all(tmp_path, caplog):
    stage = Stage(tmp_path / "gone")

    (error,) = stage.after(61.0)

    assert "stall.txt must be writable, got No such file or directory" in str(error)
    assert REPORT in caplog.text
    assert "Thread MainThread" in caplog.text


def test_an_on_stall_that_fails_is_logged_and_the_process_ends_all_the_same(tmp_path, caplog):
    def fail(error: StalledError) -> None:
        raise KeyError("loop") from error

    stage = Stage(tmp_path, on_stall=fail)
    stage.after(61.0)
    with pytest.raises(SystemExit):
        stage.after(31.0)

    assert "on_stall failed; the process exits in 30 s" in caplog.text
    assert stage.codes == [1]


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_timeout_of_nothing_is_refused(tmp_path, seconds):
    with pytest.raises(ConfigError, match="stall_timeout_s must be > 0, got"):
        Watchdog(StallLimits(seconds), lambda: REPORT, log_path=tmp_path, on_stall=print)


def test_the_thread_notices_by_itself_and_a_body_that_ends_is_not_killed(tmp_path):
    codes: list[int] = []
    stalled = threading.Event()

    def exit(code: int) -> NoReturn:
        codes.append(code)
        raise SystemExit(code)

    with Watchdog(
        StallLimits(0.1, grace_s=5.0),
        lambda: REPORT,
        log_path=tmp_path,
        on_stall=lambda _: stalled.set(),
        exit=exit,
    ):
        assert stalled.wait(5)

    assert codes == []
    assert "hearth-watchdog" not in {thread.name for thread in threading.enumerate()}
