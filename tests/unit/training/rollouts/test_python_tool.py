"""The tool with which a policy runs Python."""

import pytest

from training.rollouts.python_tool import PYTHON_SCHEMA, PythonTool
from training.sandbox import Limits, SandboxError, find_isolation

try:
    find_isolation()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

RESULTS = {
    "what it prints": ("print(6 * 7)", "42"),
    "nothing": ("x = 1", "[no output]"),
    "an exit code": ("exit(3)", "[exit code 3]"),
    "a loop": ("print('so', flush=True)\nwhile True: pass", "so\n[ended: it took too long]"),
    "both streams": ("import sys; print('a'); print('b', file=sys.stderr)", "a\nb"),
}


@pytest.mark.parametrize(("code", "text"), RESULTS.values(), ids=RESULTS.keys())
def test_a_call_returns_what_the_policy_can_read(code, text):
    tool = PythonTool(limits=Limits(cpu_s=1, wall_s=3.0))

    assert tool({"code": code}) == text


def test_an_error_is_told_with_its_line():
    text = PythonTool()({"code": "x = 1\nprint(y)"})

    assert 'File "program.py", line 2' in text
    assert "NameError: name 'y' is not defined" in text


def test_a_long_output_keeps_its_beginning_and_its_end():
    text = PythonTool(max_characters=20)({"code": "print('a' * 500 + 'b' * 500)"})

    assert text == "a" * 10 + "\n[...]\n" + "b" * 10


def test_a_call_without_code_says_so_to_the_policy():
    with pytest.raises(ValueError, match=r"arguments must hold the code, got \{'program': 1\}"):
        PythonTool()({"program": 1})


def test_the_schema_names_the_argument():
    parameters = PYTHON_SCHEMA["function"]["parameters"]

    assert parameters["required"] == list(parameters["properties"]) == ["code"]
