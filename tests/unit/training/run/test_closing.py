"""What a finished run says of itself."""

import pytest

from training.run.closing import list_changes


def step(reward, name="rollout/raw_reward"):
    return {"type": "train", "step": 1, name: reward}


def heldout(reward, accuracy):
    return {"type": "eval", "step": 1, "eval/reward": reward, "eval/accuracy": accuracy}


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([], []),
        ([step(0.25), step(0.5), step(0.75)], ["reward 0.250 -> 0.750 (first and last step)"]),
        (
            [step(number / 40) for number in range(20)],
            ["reward 0.013 -> 0.463 (means of the first and last 2 steps)"],
        ),
        ([step(0.5, "rollout/reward")], ["reward 0.500 -> 0.500 (first and last step)"]),
        ([heldout(0.5, 0.5), heldout(0.75, 0.75)], ["held-out accuracy 0.500 -> 0.750"]),
        ([heldout(0.0, 0.0), heldout(0.25, 0.0)], ["held-out reward 0.000 -> 0.250"]),
        ([heldout(0.5, 0.5)], ["held-out accuracy 0.500 -> 0.500 (one evaluation)"]),
    ],
)
def test_the_first_and_the_last_records_say_what_became_of_a_measure(records, said):
    assert [f"{change.name} {change}" for change in list_changes(records)] == said
