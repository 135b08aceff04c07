import hearth
from hearth.cli.main import main


def test_the_command_lists_its_verbs(capsys):
    assert main([]) == 0

    shown = capsys.readouterr().out
    assert "quickstart" in shown
    assert "train" in shown


def test_an_unknown_verb_lists_the_known_ones(capsys):
    assert main(["dance"]) == 2

    shown = " ".join(capsys.readouterr().err.split())
    verbs = [
        "conformance",
        "logs",
        "plan",
        "ps",
        "quickstart",
        "rescore",
        "serve",
        "stop",
        "train",
        "view",
    ]
    assert f"verb must be one of {verbs}" in shown
    assert "got 'dance'" in shown


def test_the_command_knows_its_version(capsys):
    assert main(["--version"]) == 0

    assert capsys.readouterr().out.strip() == hearth.__version__
