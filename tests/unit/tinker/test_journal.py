"""What a run writes down is what it reads after a restart, whatever was cut off."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.errors import StorageError
from hearth.tinker.journal import Incarnation, RunJournal


def test_a_journal_reads_what_was_written(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path / "run")
    journal.log(model_id="old", checkpoint=None, first=1)
    journal.log(sent=1, number=1)
    journal.log(model_id="new", checkpoint=None, first=1)
    journal.log(sent=1, number=1)
    journal.log(sent=3, number=2)
    for number in (1, 2, 10):
        journal.write_operation(number, {"kind": "forward"}, b'{"a":"\n"}')
    journal.write_result(2, b"Jdone")

    history = RunJournal(tmp_path / "run").read()

    assert history.incarnation == Incarnation("new", None, 1)
    assert history.numbers == {1: 1, 3: 2}
    assert [(kept.number, kept.result) for kept in history.operations] == [
        (1, None),
        (2, b"Jdone"),
        (10, None),
    ]
    assert journal.read_operation(10) == ({"kind": "forward"}, b'{"a":"\n"}')


def test_a_line_that_was_cut_off_was_never_written(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.log(model_id="m", checkpoint="c", first=4)
    journal.log(sent=4, number=2)
    log = tmp_path / "log"
    log.write_bytes(log.read_bytes() + b'{"sent":5,"num')

    assert journal.read().numbers == {4: 2}


def test_operations_before_a_checkpoint_go_and_recent_results_stay(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    for number in range(1, 601):
        journal.write_operation(number, {"seq_id": number}, b"{}")
        journal.write_result(number, b"J{}")

    journal.log(start=601, checkpoint="own")
    journal.prune(601)

    history = journal.read()
    assert [kept.number for kept in history.operations] == list(range(345, 601))
    assert all(kept.result == b"J{}" for kept in history.operations)
    assert journal.read_operation(600) == ({"seq_id": 600}, b"")
    assert (history.start, history.checkpoint) == (601, "own")


def test_a_journal_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file in the folder's place")

    with pytest.raises(StorageError, match="must be writable"):
        RunJournal(tmp_path / "run").write_operation(1, {}, b"{}")


def test_nothing_is_read_where_nothing_was_written(tmp_path: Path) -> None:
    history = RunJournal(tmp_path / "none").read()

    assert history.incarnation is None
    assert history.operations == []
