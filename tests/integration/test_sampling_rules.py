"""What is trained is sampled from the distribution that the trainer scores, or the run ends."""

from dataclasses import replace

import pytest
from tests.integration.rollouts import make_rollouts, spread

from hearth.errors import ConfigError
from training.data.rows import load_rows
from training.examples.rl.vanilla_sampler import build_deployment_sampler
from training.quickstart import HELDOUT_ROWS
from training.rollouts.agents import build_agent_server
from training.samples.groups import completion_sample


@pytest.mark.parametrize("options", [{"top_p": 0.9}, {"top_k": 50}, {"temperature": 0.0}], ids=str)
def test_a_rollout_that_truncates_ends_the_run_before_anything_is_trained(
    async_trial, tmp_path, options
):
    (name,) = options

    with pytest.raises(ConfigError, match=f"{name} must be .* in a rollout that is") as caught:
        async_trial(make=make_rollouts(**options), folder="run", rollout_retries=5)

    assert any(note.startswith("in the rollout of row ") for note in caught.value.__notes__)
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == b""


def test_held_out_rows_may_be_sampled_greedily_beside_a_training_that_is_not(async_trial):
    held_out = load_rows(str(HELDOUT_ROWS), 3)

    def make_rollout_fn(setup):
        sampler = build_deployment_sampler(setup)

        async def rollout_fn(row):
            fields = setup.sample_kwargs | ({"temperature": 0.0} if row in held_out else {})
            (completion,) = await sampler.sample_with_tokens(row["messages"], n=1, **fields)
            return completion_sample(completion, spread(completion.text, row))

        return rollout_fn

    run = async_trial(
        make=make_rollout_fn, held_out=held_out, eval_samples_per_prompt=2, max_rows=4
    )

    assert run.summary.steps == 2
    assert [len(result.samples) for _, result in run.summary.evaluations] == [6, 6]
    for _, result in run.summary.evaluations:
        texts = [sample.text for sample in result.samples]
        assert texts[::2] == texts[1::2]  # both answers to a row are its likeliest


def test_agents_are_refused_where_the_setup_was_changed_to_truncate(async_trial):
    def make_rollout_fn(setup):
        build_agent_server(replace(setup, sample_kwargs=setup.sample_kwargs | {"top_p": 0.9}))
        raise AssertionError("it was let through")

    with pytest.raises(ConfigError, match="top_p must be 1 in a rollout that is trained"):
        async_trial(make=make_rollout_fn)
