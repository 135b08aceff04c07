import pytest

from training.rewards import answer_reward


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [
        ("<answer>18</answer>", "18", 1.0),
        ("<answer> 1,200 </answer>", "1200.0", 1.0),
        ("<answer>$5</answer>", "5", 1.0),
        ("so <answer>3</answer> no, <answer>4</answer>", "4", 1.0),
        (r"thus \boxed{-7}", "-7", 1.0),
        ("reasons\n#### 72", "72", 1.0),
        ("<answer>18</answer>", "<think>x</think><answer>18</answer>", 1.0),
        ("<answer>paris</answer>", "paris", 1.0),
        ("<answer>19</answer>", "18", 0.0),
        ("18", "18", 0.0),
        ("<answer>18", "18", 0.0),
        ("<answer>nan</answer>", "18", 0.0),
        ("<answer></answer>", "18", 0.0),
        ("", "18", 0.0),
    ],
)
def test_an_answer_is_worth_one_when_marked_and_equal(completion, truth, reward):
    assert answer_reward(completion, {"ground_truth": truth}) == reward
