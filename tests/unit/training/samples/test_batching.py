"""How many of a step's groups go through forward and backward at a time."""

import pytest
from tests.unit.training.trial_rollouts import config_of

from training.recipes import rl_loop
from training.samples.batching import count_due_groups


@pytest.mark.parametrize(
    ("fields", "ready", "places", "is_last", "due"),
    [
        ({}, 0, 4, True, 0),
        ({}, 2, 4, False, 0),
        ({}, 2, 4, True, 2),
        ({}, 3, 5, False, 3),
        ({}, 4, 5, False, 3),
        ({}, 1, 1, False, 1),
        ({"max_samples_per_fwd_bwd": 1}, 2, 4, False, 1),
        ({"min_samples_per_fwd_bwd": 1}, 1, 4, False, 1),
        ({"min_samples_per_fwd_bwd": 4}, 1, 4, False, 0),
        ({"min_samples_per_fwd_bwd": 4}, 2, 4, False, 2),
        ({"min_samples_per_fwd_bwd": 4}, 1, 1, False, 1),
        ({"ppo_n_minibatches": 2}, 3, 4, False, 0),
        ({"ppo_n_minibatches": 2}, 4, 4, False, 4),
        ({"ppo_n_minibatches": 2}, 3, 4, True, 3),
        ({"ppo_n_minibatches": 2, "min_samples_per_fwd_bwd": 2}, 3, 4, False, 0),
    ],
)
def test_a_piece_of_groups_of_two_is_due_when_it_is_full_large_enough_or_the_last(
    fields, ready, places, is_last, due
):
    options = {"completions_per_prompt": 2, "max_samples_per_fwd_bwd": 6, **fields}
    config = rl_loop.Config(**options)

    assert count_due_groups(config, ready=ready, places=places, is_last=is_last) == due


@pytest.mark.parametrize(("ready", "is_last", "due"), [(3, False, 0), (4, False, 3), (2, True, 2)])
def test_on_policy_the_async_recipe_waits_for_the_whole_step(ready, is_last, due):
    config = config_of(max_samples_per_fwd_bwd=6)

    assert count_due_groups(config, ready=ready, places=4, is_last=is_last) == due
