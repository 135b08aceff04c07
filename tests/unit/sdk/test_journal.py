"""What a journal keeps, and how much of it: what a trainer's end does with it is test_stream's."""

import pytest

from hearth.sdk.journal import Journal, JournalEntry


def noted(journal: Journal, name: str, content: bytes = b"{}") -> JournalEntry:
    operation = JournalEntry(name, content)
    journal.add(operation)
    return operation


def names(journal: Journal) -> list[str]:
    return [operation.name for operation in journal.operations]


def test_the_size_is_that_of_what_is_kept():
    journal = Journal()
    scored = noted(journal, "forward", b"x" * 100)
    trained = noted(journal, "forward_backward", b"x" * 10)
    refused = noted(journal, "optim_step", b"x")
    assert journal.size == 111

    journal.record_result(scored, succeeded=True)
    journal.record_result(trained, succeeded=True)
    journal.remove(refused)

    assert journal.size == 10
    assert journal.operations == [trained]


def test_the_size_falls_with_a_checkpoint():
    journal = Journal()
    for name in ("forward_backward", "optim_step"):
        journal.record_result(noted(journal, name, b"x" * 100), succeeded=True)
    gradient = noted(journal, "forward_backward", b"x" * 30)
    saved = noted(journal, "save_weights", b'{"path": "one"}')
    journal.record_result(gradient, succeeded=True)

    journal.record_result(saved, succeeded=True)

    assert journal.checkpoint == "one"
    assert journal.operations == [gradient]
    assert journal.size == 30


@pytest.mark.parametrize("turn", ["save_weights", "load_weights"])
def test_a_checkpoint_waits_for_the_results_of_what_was_sent_before_it(turn: str):
    journal = Journal()
    trained = noted(journal, "optim_step")
    turning = noted(journal, turn, b'{"path": "one"}')
    later = noted(journal, "forward_backward")

    journal.record_result(turning, succeeded=True)
    assert journal.operations == [trained, turning, later]

    journal.record_result(trained, succeeded=True)

    assert journal.checkpoint == ("one" if turn == "save_weights" else None)
    assert names(journal) == [*(["load_weights"] if turn == "load_weights" else []), later.name]


def test_the_newer_of_two_checkpoints_takes_its_turn_once_it_can():
    journal = Journal()
    first = noted(journal, "save_weights", b'{"path": "one"}')
    trained = noted(journal, "optim_step")
    second = noted(journal, "save_weights", b'{"path": "two"}')

    journal.record_result(second, succeeded=True)
    journal.record_result(first, succeeded=True)
    assert (journal.checkpoint, journal.operations) == ("one", [trained, second])

    journal.record_result(trained, succeeded=True)

    assert (journal.checkpoint, journal.operations, journal.size) == ("two", [], 0)


def test_a_checkpoint_that_failed_is_none():
    journal = Journal()
    trained = noted(journal, "optim_step")
    journal.record_result(trained, succeeded=True)

    journal.record_result(noted(journal, "save_weights", b'{"path": "one"}'), succeeded=False)

    assert journal.checkpoint is None
    assert journal.operations == [trained]
