import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import hearth
from hearth.cli.main import main
from hearth.cli.strangers import find_shadow, find_strangers
from hearth.cli.verbs import VERBS
from hearth.exit_codes import ExitCode


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]])
def test_the_command_lists_its_verbs_and_what_they_do_in_80_columns(arguments, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")

    assert main(arguments) == 0

    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert {line.split()[0] for line in lines if line.startswith(" ") and line[1] != " "} == {
        "verb",
        *VERBS,
    }
    assert max(map(len, lines)) <= 80


@pytest.mark.parametrize("name", VERBS)
def test_the_help_of_a_verb_is_the_first_line_of_its_function(name):
    target, _, summary = VERBS[name]
    module, function = target.split(":")

    doc = getattr(importlib.import_module(module), function).__doc__

    assert doc.splitlines()[0] == summary


def test_a_reader_that_leaves_early_ends_the_command_without_a_word():
    code = "import sys; from hearth.cli.main import main; sys.exit(main(['view', '--help']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as command:
        command.stdout.close()
        told = command.stderr.read()

    assert (command.returncode, told) == (ExitCode.DONE, "")


def test_the_page_of_the_command_has_every_verb_and_every_exit_code():
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text()

    told = {word for line in page.splitlines() for word in re.findall(r"`(\w+)[^`]*`", line)}
    codes = re.findall(r"^\| (\d+) \|", page, re.MULTILINE)

    assert set(VERBS) <= told
    assert [int(code) for code in codes] == list(ExitCode)


def test_an_unknown_verb_lists_the_known_ones(capsys):
    assert main(["dance"]) == 2

    shown = " ".join(capsys.readouterr().err.split())
    assert f"verb must be one of {sorted(VERBS)}" in shown
    assert "got 'dance'" in shown


@pytest.mark.parametrize("flag", ["-V", "--version"])
def test_the_command_knows_its_version(flag, capsys):
    assert main([flag]) == 0

    assert capsys.readouterr().out.strip() == hearth.__version__


def test_python_m_hearth_is_the_command_and_imports_no_heavy_library():
    code = (
        "import runpy, sys\n"
        "sys.argv[1:] = ['--version']\n"
        "try: runpy.run_module('hearth', run_name='__main__')\n"
        "except SystemExit as ended: print(ended.code)\n"
        "print({'torch', 'numpy', 'pydantic', 'httpx', 'tyro'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == [hearth.__version__, "0", "set()"]


def install(folder, name, *files):
    facts = folder / f"{name}-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_another_distribution_that_has_a_package_of_our_names_is_named(tmp_path):
    install(tmp_path, "hearth_rl", "hearth/__init__.py", "training/__init__.py")
    install(tmp_path, "pytraining", "bin/train", "pytraining/training/__init__.py")
    install(tmp_path, "gym", "gym.py", "training/__init__.py")
    install(tmp_path, "hearth", "hearth/__init__.py")

    gym, other = find_strangers([str(tmp_path), str(tmp_path / "none"), str(tmp_path)])

    assert "gym must not be installed beside hearth-rl, got its own package training" in gym
    assert "pip uninstall gym" in gym
    assert other.startswith("hearth must not be installed")


def test_a_training_that_is_found_before_ours_is_refused_by_its_place(tmp_path):
    assert find_shadow() == ""
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "__init__.py").touch()
    code = "import sys; from hearth.cli.main import main; sys.exit(main(['ps', '--help']))"

    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 2
    assert done.stderr.startswith("error: training must be the package beside ")
    assert f"got {tmp_path / 'training'}: uninstall or rename that one" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_verb_may_come_from_another_package(tmp_path, monkeypatch):
    install(tmp_path, "dances", "dances.py")
    facts = tmp_path / "dances-1.0.dist-info"
    (facts / "METADATA").write_text("Name: dances\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[hearth.verbs]\ndance = dances:dance\n")
    (tmp_path / "dances.py").write_text("def dance(arguments):\n    return len(arguments)\n")
    monkeypatch.syspath_prepend(tmp_path)

    assert main(["dance", "a", "b", "c"]) == 3
