"""What the suite says of checks that hold, do not, are refused, lack something, or never end."""

from __future__ import annotations

import threading

import pytest
import tinker

from hearth.conformance import suite
from hearth.conformance.suite import Check, Report, Server, SkipError, run_checks


@pytest.fixture
def server() -> Server:
    return Server("http://127.0.0.1:9", "tml-any", "any")


def holds(_: Server) -> str:
    return "largest  difference\n0"


def does_not_hold(_: Server) -> None:
    raise AssertionError


def is_wrong(_: Server) -> None:
    raise AssertionError("2 must be 3")


def breaks(_: Server) -> None:
    raise tinker.TinkerError("the connection broke")


def refuses(_: Server) -> None:
    raise NotImplementedError("not here: use that")


def lacks(_: Server) -> None:
    raise SkipError("needs --reference")


@pytest.mark.parametrize(
    ("run", "verdict", "detail"),
    [
        (holds, "passed", "largest difference 0"),
        (does_not_hold, "failed", "does not hold: raise AssertionError"),
        (is_wrong, "failed", "2 must be 3"),
        (breaks, "failed", "TinkerError: the connection broke"),
        (refuses, "refused", "not here: use that"),
        (lacks, "skipped", "needs --reference"),
    ],
)
def test_a_check_has_a_verdict_and_says_why(server, run, verdict, detail):
    (outcome,) = run_checks(server, [Check("group", "name", run)])

    assert (outcome.verdict, outcome.detail) == (verdict, detail)
    assert (outcome.group, outcome.name) == ("group", "name")


def test_a_check_that_does_not_end_has_failed_and_the_next_one_runs(server, monkeypatch):
    # A check has minutes: without this the test would take as long.
    monkeypatch.setattr(suite, "_LONGEST_S", 0.05)
    may_end = threading.Event()
    checks = [Check("g", "endless", lambda _: may_end.wait(60)), Check("g", "short", holds)]

    outcomes = list(run_checks(server, checks))
    may_end.set()

    assert [each.verdict for each in outcomes] == ["failed", "passed"]
    assert outcomes[0].detail == "hangs: no end within 0.05 s"


def test_the_score_is_the_share_of_what_ran(server):
    runs = [holds, holds, refuses, is_wrong, lacks]
    checks = [Check("g", str(number), run) for number, run in enumerate(runs)]

    report = Report("url", "tinker 1", list(run_checks(server, checks)))

    assert report.score == 50
    assert report.as_dict()["score"] == 50
    assert [each["verdict"] for each in report.as_dict()["checks"]] == [
        "passed",
        "passed",
        "refused",
        "failed",
        "skipped",
    ]
