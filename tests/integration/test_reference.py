"""When a run has a reference: whichever recipe it is."""

import pytest
from tests.integration.rollouts import spread


@pytest.mark.parametrize(("kl_beta", "is_there"), [(0.0, False), (0.001, True)])
@pytest.mark.parametrize("recipe", ["rl_loop", "async_rl_loop"])
def test_both_recipes_have_a_reference_where_kl_beta_is_above_0_and_only_there(
    trial, async_trial, recipe, kl_beta, is_there
):
    common = {"kl_beta": kl_beta, "max_rows": 2}

    run = trial(reward_fn=spread, **common) if recipe == "rl_loop" else async_trial(**common)

    (record,) = run.records()
    assert (run.summary.reference_job_id is not None) is is_there
    assert ("train/ref_kl" in record) is is_there
