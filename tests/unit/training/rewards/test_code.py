"""Programs as answers, judged by the tests of their row."""

import json
import pickle

import pytest

from hearth.errors import ConfigError
from training.recipes.rl_loop import Config
from training.rewards import (
    CodeReward,
    RewardEnsemble,
    check_reward,
    choose_reward,
    code_reward,
    find_code,
    tags_reward,
)
from training.sandbox import Limits, SandboxError, find_isolation

try:
    find_isolation()
except SandboxError as error:
    pytest.skip(str(error), allow_module_level=True)

ADD = "I add them.\n```python\ndef add(a, b):\n    return a + b\n```\nThat is all."
ASSERTIONS = {"tests": ["assert add(2, 2) == 4", "assert add(-1, 1) == 0"]}
PAIRS = {"tests": [{"input": "2 2\n", "output": "4\n"}, {"input": "20 22", "output": "42"}]}


def fence(code):
    return f"```python\n{code}\n```"


def test_a_program_that_passes_all_tests_is_right():
    score = code_reward.score(ADD, ASSERTIONS)

    assert (score.reward, score.parsed, score.parts) == (1.0, True, {"tests_passed": 1.0})
    assert code_reward(fence("print(sum(map(int, input().split())))  "), PAIRS) == 1.0


def test_tests_run_in_order_until_one_fails():
    tests = ["assert add(2, 2) == 4", "assert add(2, 2) == 5", "assert add(1, 1) == 2"]

    score = code_reward.score(ADD, {"tests": tests})

    assert (score.reward, score.parts) == (0.0, {"tests_passed": 1 / 3})
    pairs = [*PAIRS["tests"], {"input": "1 1", "output": "3"}, {"input": "1 1", "output": "2"}]
    by_pairs = code_reward.score(fence("print(sum(map(int, input().split())))"), {"tests": pairs})
    assert by_pairs.parts == {"tests_passed": 0.5}


def test_without_a_block_of_code_nothing_is_found():
    score = code_reward.score("def add(a, b): return a + b", ASSERTIONS)

    assert (score.reward, score.parsed, score.parts) == (0.0, False, None)


BLOCKS = {
    "the last one": ("```\nfirst\n```\n```py\nlast\n```", "last\n"),
    "an indented one": ("1. so\n   ```python3\n   x = 1\n   ```", "   x = 1\n"),
    "one without a language": ("```\nx\n```", "x\n"),
    "another language": ("```sh\nls\n```", None),
    "one that is not closed": ("```python\nx = 1", None),
    "backticks inside a line": ("use ```x``` here", None),
}


@pytest.mark.parametrize(("text", "code"), BLOCKS.values(), ids=BLOCKS.keys())
def test_code_is_the_last_closed_block(text, code):
    assert find_code(text) == code


CHEATS = {
    "leaves early": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "takes asserts away": "class AssertionError(Exception): pass\ndef add(a, b): return 5",
    "raises what ends a program": "def add(a, b): raise SystemExit",
    "prints a lot": "print('1' * 10**9)",
    "never ends": "while True: pass",
    "is no program": "def add(",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
def test_a_program_that_does_not_reach_the_end_of_a_test_fails_it(code):
    reward = CodeReward(limits=Limits(cpu_s=1, wall_s=2.0))

    assert reward.score(fence(code), ASSERTIONS).parts == {"tests_passed": 0.0}
    assert reward(fence(code), PAIRS) == 0.0


def test_output_is_compared_without_white_space_at_the_ends_of_lines():
    row = {"tests": [{"input": "", "output": "a\nb"}]}

    assert code_reward(fence("print('a  '); print('b'); print()"), row) == 1.0
    assert code_reward(fence("print(' a'); print('b')"), row) == 0.0
    assert code_reward(fence("print('a'); print('b'); exit(1)"), row) == 0.0


def test_tests_may_be_json_as_tables_have_them():
    assert code_reward(ADD, {"tests": json.dumps(ASSERTIONS["tests"])}) == 1.0


ODD_ROWS = [{}, {"tests": []}, {"tests": "no JSON"}, {"tests": [{"input": "1"}]}, {"tests": [1]}]


@pytest.mark.parametrize("row", ODD_ROWS, ids=map(str, ODD_ROWS))
def test_a_row_without_tests_is_refused_and_not_scored(row):
    with pytest.raises(ConfigError, match=r"row\.tests must be a list"):
        code_reward(ADD, row)


def test_a_run_is_refused_before_it_starts_where_rows_have_no_tests():
    config = Config(reward="training.rewards:code_reward", kl_beta=0.0)
    reward = choose_reward(config, None)

    with pytest.raises(ConfigError, match=r"rows\[1\]\.tests must be a list"):
        check_reward(config, reward, [ASSERTIONS], [{"ground_truth": "1"}])
    check_reward(config, reward, [ASSERTIONS], [PAIRS])


def test_it_can_be_combined_and_sent_to_another_process():
    both = RewardEnsemble([code_reward, tags_reward("think")], combine="minimum")

    assert both(ADD, ASSERTIONS) == 0.0
    assert both(f"<think>a</think>\n{ADD}", ASSERTIONS) == 1.0
    assert pickle.loads(pickle.dumps(code_reward)) == code_reward
