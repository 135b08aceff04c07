import sys
import threading

import pytest

from hearth.errors import ConfigError
from training.rewards import math_reward

CASES = [
    (r"thus \boxed{\frac{1}{2}}", "0.5", 1.0),
    ("<answer>1/2</answer>", r"\frac{1}{2}", 1.0),
    (r"<answer>50\%</answer>", "0.5", 1.0),
    ("<answer>1,200</answer>", "1200.0", 1.0),
    (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
    (r"\boxed{3}", "$3$", 1.0),
    (r"\boxed{3}", "x=3", 1.0),
    (r"\boxed{\{1,2\}}", r"\{2,1\}", 1.0),
    ("<answer>3</answer> no, <answer>4</answer>", "4", 1.0),
    ("<answer>10</answer>", r"\boxed{10}", 1.0),
    ("<answer>18</answer>", "<think>x</think><answer>18</answer>", 1.0),
    ("The answer is 18", "18", 1.0),
    (r"\boxed{(1,2)}", "[1,2]", 0.0),
    ("<answer>19</answer>", "18", 0.0),
    ("<answer></answer>", "18", 0.0),
    ("<answer>18", "18", 0.0),
    (r"\boxed{", "1", 0.0),
    ("((((", "1", 0.0),
    ("", "18", 0.0),
]


@pytest.mark.slow
@pytest.mark.parametrize(("completion", "truth", "reward"), CASES)
def test_answers_are_equal_when_they_are_so_mathematically(completion, truth, reward):
    assert math_reward(completion, {"ground_truth": truth}) == reward


@pytest.mark.parametrize(
    ("completion", "parsed"),
    [("The answer is 18", True), (r"\boxed{7}", True), ("I do not know", False), ("", False)],
)
def test_it_says_whether_there_is_an_expression(completion, parsed):
    assert math_reward.score(completion, {"ground_truth": "18"}).parsed is parsed


@pytest.mark.slow
def test_it_works_in_any_thread():
    found: list[list[float]] = []

    def check() -> None:
        found.append([math_reward(text, {"ground_truth": truth}) for text, truth, _ in CASES])

    threads = [threading.Thread(target=check) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert found == [[reward for _, _, reward in CASES]] * 4


def test_a_truth_that_is_no_expression_is_named():
    with pytest.raises(ConfigError, match=r"ground_truth must be an expression .* got ''"):
        math_reward("1", {"ground_truth": ""})


def test_without_math_verify_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)

    with pytest.raises(ConfigError, match=r"pip install 'hearth-rl\[math\]'"):
        math_reward("1", {"ground_truth": "1"})
