"""``hearth chat``: a model in this process answers, one message or several."""

import io

import pytest

from hearth.cli.models import chat
from training.quickstart import MODEL


def test_a_model_answers_each_message_of_the_conversation(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 3 + 4?\nWhat is 2 + 5?\n\n"))

    assert chat([str(MODEL), "--temperature", "0", "--max-tokens", "8"]) == 0

    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2
    assert told.err == f"loading {MODEL}\n"


@pytest.mark.parametrize(
    ("target", "message"),
    [("/nowhere/at/all", "base_model must be"), ("nothing", "no platform answers at")],
)
def test_what_cannot_be_talked_with_is_refused(target, message, capsys, monkeypatch):
    monkeypatch.setenv("FIREWORKS_BASE_URL", "http://127.0.0.1:9")

    assert chat([target, "-m", "hello"]) in (1, 2)

    assert message in capsys.readouterr().err
