"""What a run writes down is what it reads after a restart, whatever was cut off."""

from __future__ import annotations

import random
import resource
from collections.abc import Callable
from pathlib import Path

import pytest

from hearth.errors import EngineError, StorageError
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


def test_a_line_behind_one_that_was_cut_off_is_read(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.log(model_id="m", checkpoint="c", first=4)
    journal.log(sent=4, number=2)
    log = tmp_path / "log"
    whole = log.read_bytes()
    for cut in range(1, 20):
        log.write_bytes(whole[:-cut])
        journal.log(sent=5, number=2)

        assert journal.read().numbers == {5: 2}


def test_a_log_that_may_not_grow_stays_whole(tmp_path: Path) -> None:
    journal = RunJournal(tmp_path)
    journal.log(model_id="m", checkpoint="c", first=4)
    whole = (tmp_path / "log").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 9, hard))
    try:
        with pytest.raises(StorageError, match="log must be writable, got File too large"):
            journal.log(sent=4, number=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert (tmp_path / "log").read_bytes() == whole


def read_or_refuse(read: Callable[[], object]) -> tuple[object, str]:
    """What is read, or the error instead."""
    try:
        return read(), ""
    except EngineError as error:
        return None, str(error)


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_file_is_an_error_that_names_it_and_never_another_history(
    tmp_path: Path, damage: str
) -> None:
    journal, chance = RunJournal(tmp_path), random.Random(1)
    journal.write_operation(1, {"kind": "forward"}, b'{"rate":17}')
    journal.write_result(1, b'J{"loss":1.5}')
    journal.log(model_id="m", checkpoint="c", first=4)
    journal.log(sent=4, number=2)

    def read() -> object:
        return journal.read(), journal.read_operation(1)

    right = read()
    for file in (tmp_path / "ops" / "1", tmp_path / "results" / "1", tmp_path / "log"):
        whole = file.read_bytes()
        for _ in range(80):
            place = chance.randrange(len(whole) - (file.name == "log"))
            odd = whole[place] ^ 1 << chance.randrange(8)
            rest = whole[place + 1 :] if damage == "flipped" else b""
            file.write_bytes(whole[:place] + (bytes([odd]) + rest if rest else b""))
            if damage == "cut" and file.name == "log":
                assert journal.read().incarnation in (None, Incarnation("m", "c", 4))
                continue
            read_again, refusal = read_or_refuse(read)
            assert read_again == right or f"{file} must " in refusal
        file.write_bytes(whole)


@pytest.mark.slow
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
