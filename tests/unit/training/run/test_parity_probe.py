"""Probes beside a scripted run: what they compare, when they come too late, how they end.

Two rows of two samples are trained for 5 s from 10 s on, and every 7 s from then; a snapshot is
saved 2 s after each step, and served at 20 s, 27 s ... Optimizer steps are asked for at 21 s, 28 s.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.unit.training.platform_script import Seconds
from tests.unit.training.recipes.test_async_loop import Scene, cancel_at, ended_by, play, scene_of
from tests.unit.training.trial_rollouts import rollout_number, sample_of
from tests.unit.virtual_time import now, run_virtual

from hearth.errors import ConfigError, TransportError
from training.samples.rollout import RolloutSample
from training.update.parity import ParityError

__all__ = ["play"]

DRIFT = 0.125
ROLLOUT_S = 0.5


def scene(
    *, rows: int = 10, sample: float = ROLLOUT_S, serve: float = 3.0, **options: Any
) -> Scene:
    """A run whose samples are two versions old when they are trained."""
    options = {"max_head_offpolicy_versions": 2, **options}
    return scene_of(rows=rows, seconds=Seconds(sample=sample, serve=serve), drift=DRIFT, **options)


def column(played: Scene, name: str) -> list[float | None]:
    return [record.get(f"parity/{name}") for record in played.records()]


def probed_steps(played: Scene) -> list[int]:
    """How many steps the weights had with which a probe was scored."""
    return [steps for steps, data in played.trainer.scored if len(data) == 8]


# What is compared


def test_each_version_is_compared_with_the_weights_that_the_trainer_had_when_it_was_saved(play):
    played = play(scene())

    assert [at for at, _, _ in played.sampler.asked[::8]] == [20.0, 27.0, 34.0, 41.0]
    assert probed_steps(played) == [1, 2, 3, 4]
    assert column(played, "tokens") == [8.0, 64.0, 64.0, 64.0, 64.0]
    assert column(played, "max") == [0.0] * 5
    assert column(played, "probes_skipped") == [0.0] * 5
    assert played.ended == 10.0 + 5 * 7.0 + 3.0, "nothing waits for it"


@pytest.mark.slow
def test_a_deployment_that_serves_other_weights_shows_and_ends_the_run_where_it_is_asked_to(
    play, tmp_path
):
    first = {"steps": lambda _version: 0}
    stale = play(scene(sampling=first))
    assert column(stale, "p95") == [DRIFT * step for step in range(5)]

    strict = scene(sampling=first, parity_stops=True, parity_threshold=1.5 * DRIFT)
    folder = tmp_path / "strict"
    folder.mkdir()
    assert ended_by(strict, folder, ParityError) > 20.0
    assert column(strict, "p95") == [0.0, DRIFT, 2 * DRIFT]


@pytest.mark.slow
def test_completions_are_sampled_as_the_run_samples_from_the_prompts_of_the_step_before(play):
    def asked(**options: Any) -> list[Any]:
        made = scene(rows=6, temperature=0.7, max_seq_len=100, **options)

        async def rollout_fn(_row: Any, cursor_index: int) -> RolloutSample:
            await asyncio.sleep(10.0)
            return sample_of(float(rollout_number()), tokens=[50 + cursor_index, 6, 7, 8])

        made.fn = rollout_fn
        return play(made).sampler.asked

    calls = asked()
    assert [prompt for _, prompt, _ in calls] == [[50, 6], [51, 6]] * 4 + [[52, 6], [53, 6]] * 4
    seeds = [options.pop("seed") for _, _, options in calls]
    assert len(set(seeds)) == 16
    assert [request["seed"] for _, _, request in asked()] == seeds
    assert all(
        options == {"max_tokens": 8, "temperature": 0.7, "max_seq_len": 100}
        for _, _, options in calls
    )
    assert [request["max_tokens"] for _, _, request in asked(parity_probe_tokens=20)] == [8] * 6
    assert [request["max_tokens"] for _, _, request in asked(parity_probe_tokens=3)] == [3] * 2
    assert [request["max_tokens"] for _, _, request in asked(max_completion_tokens=4)] == [4] * 32


def test_a_steps_own_samples_come_before_the_probe(play):
    made = scene()

    async def rollout_fn(_row: Any, cursor_index: int) -> RolloutSample:
        await asyncio.sleep(10.0)
        return sample_of(float(rollout_number()), versions=[[cursor_index // 2, 2]])

    made.fn = rollout_fn
    played = play(made)

    assert column(played, "tokens") == [8.0] * 5
    assert column(played, "max") == [DRIFT * step for step in range(5)]
    assert len(probed_steps(played)) == 4


@pytest.mark.parametrize(
    "options",
    [
        {"max_head_offpolicy_versions": 0},
        {"synchronous_training": True},
        {"parity_probe_tokens": 0},
    ],
    ids=str,
)
def test_nothing_is_probed_where_steps_tell_by_themselves_or_nobody_asks(play, options):
    played = play(scene(**options))

    assert played.sampler.asked == []
    assert set(column(played, "probes_skipped")) == {None}


def test_a_number_of_tokens_below_zero_is_refused():
    with pytest.raises(ConfigError, match="parity_probe_tokens must be >= 0, got -1"):
        scene(parity_probe_tokens=-1).config.validate()


# What comes too late


def test_a_probe_that_is_sampled_after_the_next_step_was_asked_for_is_thrown_away(play):
    played = play(scene(rows=8, sample=1.9))

    assert len(played.sampler.asked) == 3 * 8
    assert probed_steps(played) == []
    assert column(played, "p95") == [0.0, None, None, None]
    assert column(played, "probes_skipped") == [0.0, 1.0, 1.0, 1.0]
    assert played.ended == 10.0 + 4 * 7.0 + 3.0


@pytest.mark.parametrize(("sample", "in_time"), [(0.5, True), (1.9, False)])
def test_the_first_of_a_batchs_optimizer_steps_ends_what_can_be_compared(play, sample, in_time):
    """Served at 18 s; the first minibatch's step is asked for at 19 s."""
    sampling = {"steps": lambda version: 2 * version}
    played = play(scene(rows=8, sample=sample, serve=1.0, sampling=sampling, ppo_n_minibatches=2))

    assert probed_steps(played) == ([2, 4, 6] if in_time else [])
    assert column(played, "max") == [0.0, *([0.0 if in_time else None] * 3)]


def test_weight_syncs_that_take_longer_than_a_step_leave_nothing_to_compare(play):
    played = play(scene(serve=9.0))

    assert probed_steps(played) == []
    assert column(played, "tokens")[1:] == [None] * 4
    assert played.sampler.asked == []


# How they end


def test_a_probe_that_fails_is_one_warning_and_the_run_goes_on(play, caplog):
    played = play(scene(sampling={"error": TransportError("the deployment hung up")}))

    assert played.run.step == 5
    assert column(played, "p95") == [0.0, None, None, None, None]
    assert column(played, "probes_skipped") == [0.0, 1.0, 1.0, 1.0, 1.0]
    (said,) = [message for message in caplog.messages if "parity probe" in message]
    assert "weight version 1 failed" in said
    assert "TransportError: the deployment hung up" in said


def test_a_probe_that_hangs_is_given_up_for_the_next_one_and_at_the_end(play):
    played = play(scene(sample=1000.0))

    assert played.ended == 10.0 + 5 * 7.0 + 3.0
    assert len(played.sampler.asked) == 4 * 8
    assert column(played, "probes_skipped") == [0.0, 0.0, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("at", [20.25, 20.75, 21.5])
def test_a_run_that_is_cancelled_takes_its_probe_with_it(tmp_path: Path, at: float):
    """While it samples, while it waits for the trainer, and when it would come too late."""
    made = scene(sample=0.5 if at < 21 else 5.0)

    async def main() -> None:
        await cancel_at(made, tmp_path, at)
        assert len(made.sampler.asked) == 8
        assert now() == at

    run_virtual(main)


@pytest.mark.slow
def test_a_publication_that_fails_leaves_no_probe_waiting(tmp_path: Path):
    made = scene(rows=20, sample=1.5)
    made.publication_fails = 6

    ended_by(made, tmp_path, ConnectionError)

    assert len(made.sampler.asked) == 5 * 8
