"""Programs as answers: right where they pass the tests of their row, in a sandbox."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hearth.errors import ConfigError
from training.rewards.score import Score, ScoringReward
from training.sandbox import CodeResult, Isolation, Limits, run_code

_BLOCK = re.compile(
    r"^[ \t]*```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE
)


@dataclass(frozen=True)
class CodeReward(ScoringReward):
    """1.0 when the last block of code passes all of the row's ``tests``, else 0.0.

    A block stands between lines of three backticks; the first may say ``python``. A test is a text
    of Python that runs after the block and must not fail (``"assert add(2, 2) == 4"``), or
    ``{"input": "2 2\\n", "output": "4\\n"}``: what the program gets at its standard input, and what
    it must print, white space at the ends of lines aside. ``tests`` is a list of them, or JSON of
    one. Each runs by itself, in the order given, until one fails; ``parts`` has the share passed.

    Tests of input and output are out of the program's reach. One that is Python runs in the
    program's process: leaving early passes none, but a program made to cheat it can.

    Raises:
        ConfigError: a row has no tests, or this machine has no sandbox.
    """

    limits: Limits = field(default_factory=Limits)
    """Of each test."""
    isolation: Isolation | None = None
    """As ``run_code`` has it."""

    def score(self, completion: str, row: Mapping[str, Any]) -> Score:
        """The reward, whether there is a block, and the share of tests up to the first failure."""
        tests = _read_tests(row, "row")
        program = find_code(completion)
        if program is None:
            return Score(0.0, parsed=False)
        passed = 0
        while passed < len(tests) and self._passes(program, tests[passed]):
            passed += 1
        return Score(
            float(passed == len(tests)), parsed=True, parts={"tests_passed": passed / len(tests)}
        )

    def _passes(self, program: str, test: str | Mapping[str, str]) -> bool:
        if isinstance(test, str):
            mark = secrets.token_hex(16)
            result = self._run(f"{program}\n{test}\nprint('\\n{mark}')")
            return result.is_success and mark in result.stdout.splitlines()
        result = self._run(program, test["input"])
        return result.is_success and _lines(result.stdout) == _lines(test["output"])

    def _run(self, program: str, stdin: str = "") -> CodeResult:
        return run_code(program, stdin, limits=self.limits, isolation=self.isolation)


code_reward = CodeReward()
"""``code_reward(completion, row)`` is 1.0 when the last block of code passes the row's ``tests``,
else 0.0, with the limits of ``Limits()``."""


def find_code(completion: str) -> str | None:
    """The last block of code of a text; None where there is none."""
    found = _BLOCK.findall(completion)
    return found[-1] if found else None


def check_tests(reward_fn: object, rows: Sequence[Mapping[str, Any]]) -> None:
    """Look for what ``code_reward`` needs: tests in each row, and a sandbox.

    Raises:
        ConfigError: there is none.
    """
    if not isinstance(reward_fn, CodeReward):
        return
    for place, row in enumerate(rows):
        _read_tests(row, f"rows[{place}]")
    run_code("", isolation=reward_fn.isolation)


def _read_tests(row: Mapping[str, Any], where: str) -> Sequence[str | Mapping[str, str]]:
    tests = row.get("tests")
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except ValueError:
            tests = None
    if isinstance(tests, Sequence) and tests and all(map(_is_test, tests)):
        return tests
    raise ConfigError(
        f"{where}.tests must be a list of texts of Python or of {{'input': ..., 'output': ...}}, "
        f"or JSON of one, got {str(row.get('tests'))[:80]!r}"
    )


def _is_test(test: Any) -> bool:
    if isinstance(test, Mapping):
        return all(isinstance(test.get(name), str) for name in ("input", "output"))
    return isinstance(test, str)


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
