import pickle
import re

import pytest

from hearth.errors import ConfigError
from training.rewards import (
    Score,
    answer_reward,
    exact_match,
    pattern_reward,
    soft_overlong_reward,
    tags_reward,
)


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


@pytest.mark.parametrize(
    ("reward", "completion", "score"),
    [
        (answer_reward, "<answer>18</answer>", Score(1.0, parsed=True)),
        (answer_reward, r"\boxed{19}", Score(0.0, parsed=True)),
        (answer_reward, "18", Score(0.0, parsed=False)),
        (pattern_reward("<b>.*</b>"), "<b>18</b>", Score(1.0, parsed=True)),
        (pattern_reward("<b>.*</b>"), "18", Score(0.0, parsed=False)),
        (tags_reward("a", "b"), "<a>1</a><b>2</b>", Score(1.0, parsed=True)),
        (tags_reward("a", "b"), "<a>1</a>", Score(0.5, parsed=False)),
    ],
)
def test_a_reward_that_looks_for_something_says_whether_it_was_there(reward, completion, score):
    assert reward.score(completion, {"ground_truth": "18"}) == score
    assert reward(completion, {"ground_truth": "18"}) == score.reward


@pytest.mark.parametrize(
    ("completion", "truth", "reward"),
    [("paris", "paris", 1.0), (" 18\n", 18, 1.0), ("18.0", "18", 0.0), ("", "18", 0.0)],
)
def test_an_exact_match_is_of_the_whole_text(completion, truth, reward):
    assert exact_match(completion, {"ground_truth": truth}) == reward


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a\nb</think><answer>4</answer>", 1.0),
        ("\n <think>a</think><answer>4</answer>\n", 1.0),
        ("<think>a</think><answer>4</answer> indeed", 0.0),
        ("<answer>4</answer>", 0.0),
    ],
)
def test_a_pattern_must_match_from_end_to_end(completion, reward):
    form = pattern_reward("<think>.*</think><answer>.*</answer>")

    assert form(completion, {}) == reward


def test_a_compiled_pattern_keeps_its_flags():
    form = pattern_reward(re.compile("yes", re.IGNORECASE))

    assert (form("YES", {}), form("yes!", {})) == (1.0, 0.0)
    with pytest.raises(ConfigError, match=r"pattern must be a regular expression, got '\('"):
        pattern_reward("(")


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("<think>a</think><answer>4</answer>", 1.0),
        ("so: <think>a</think> and <answer>4</answer>.", 1.0),
        ("<think>a</think>", 0.5),
        ("<answer>4</answer>", 0.5),
        ("<answer>4</answer><think>a</think>", 0.5),
        ("<think>a<answer>4</answer></think>", 0.5),
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0.5),
        ("</think>a<think><answer>4</answer>", 0.5),
        ("<think>a</think><answer>4", 0.5),
        ("4", 0.0),
    ],
)
def test_tags_count_in_their_order_and_once_each(completion, reward):
    assert tags_reward("think", "answer")(completion, {}) == reward


@pytest.mark.parametrize("names", [(), ("<think>",), ("think", "")])
def test_tags_that_are_no_names_are_refused(names):
    with pytest.raises(ConfigError, match="names must be tags' plain names"):
        tags_reward(*names)


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (6, 0.0), (7, -0.25), (8, -0.5), (10, -1.0), (11, -1.0), (1000, -1.0)],
)
def test_the_overlong_penalty_falls_evenly_over_its_buffer(length, penalty):
    assert soft_overlong_reward(10, buffer=4)("a" * length, {}) == penalty


def test_lengths_are_counted_as_the_caller_says():
    reward = soft_overlong_reward(4, buffer=2, length_of=lambda text: len(text.split()))

    assert [reward(" ".join(["word"] * count), {}) for count in (2, 3, 4)] == [0.0, -0.5, -1.0]


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_outside_of_the_length_is_refused(buffer):
    with pytest.raises(ConfigError, match=rf"between 1 and max_length \(10\), got {buffer}"):
        soft_overlong_reward(10, buffer=buffer)


def test_rewards_can_be_sent_to_another_process():
    rewards = [pattern_reward("4+"), tags_reward("think"), soft_overlong_reward(2, buffer=2)]

    sent = [pickle.loads(pickle.dumps(reward)) for reward in rewards]

    assert (
        [message("44", {}) for message in sent]
        == [reward("44", {}) for reward in rewards]
        == [1.0, 0.0, -1.0]
    )
