from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
from tests.unit.training.trial_rollouts import (
    rollout_number,
    rollouts_of,
    row_of,
    run_row,
    sample_of,
)
from tests.unit.virtual_time import run_virtual

from hearth.errors import ConfigError, TransportError
from hearth.sdk import DeploymentSampler, SampledCompletion
from hearth.sdk.sampling import completion_seed
from training.data.seeds import row_seed
from training.rollouts.runner import Submission
from training.rollouts.sampler import RolloutContext, RolloutSampler
from training.samples.rollout import RolloutResult, RolloutRun

ROW = row_of(13)


class Deployment:
    """Answers with completions that a test scripts; ``asked`` are the seeds of its requests, and
    ``options`` what they name beside the prompt."""

    def __init__(self, *answers: SampledCompletion) -> None:
        self.asked: list[int | None] = []
        self.options: list[dict[str, Any]] = []
        self._answers = answers

    def sample_with_prompt_tokens(
        self, _prompt: Any, *, n: int, seed: int | None, **options: Any
    ) -> Awaitable[list[SampledCompletion]]:
        self.asked.append(seed)
        self.options.append(options)
        return self._answer(n)

    sample_with_tokens = sample_with_prompt_tokens

    async def _answer(self, n: int) -> list[SampledCompletion]:
        answers = self._answers or (completion(),)
        return [answers[(len(self.asked) - 1 + i) % len(answers)] for i in range(n)]

    def sampler(self, **options: Any) -> RolloutSampler:
        return RolloutSampler(cast("DeploymentSampler", self), **options)


def completion(sampled: int = 2, **changes: Any) -> SampledCompletion:
    usual: dict[str, Any] = {
        "text": "",
        "full_tokens": [5, 6, *range(7, 7 + sampled)],
        "prompt_len": 2,
        "finish_reason": "stop",
        "inference_logprobs": [-0.5] * sampled,
        "weight_version": 7,
    }
    return SampledCompletion(**(usual | changes))


async def test_outside_of_a_rollout_nothing_is_seeded():
    deployment = Deployment()

    await deployment.sampler().sample_with_prompt_tokens([1, 2], n=2)
    await deployment.sampler().sample_with_tokens([{"role": "user", "content": "?"}], seed=3)

    assert deployment.asked == [None, 3]


def test_a_first_request_samples_what_rl_loop_samples_at_its_place():
    deployment = Deployment()
    sampler = deployment.sampler()

    async def rollout_fn(_row: Any) -> None:
        await sampler.sample_with_prompt_tokens([1, 2], n=1)

    run_row(rollout_fn, ROW, completions_per_prompt=4, seed=11)

    # The deployment's sampler samples completion 0 of each request.
    sampled = [completion_seed(seed, 0) for seed in deployment.asked if seed is not None]
    assert sampled == [completion_seed(row_seed(11, 13), i) for i in range(4)]


def test_a_seed_of_ones_own_is_kept_and_counts_for_nothing():
    deployment = Deployment()
    sampler = deployment.sampler()

    async def rollout_fn(_row: Any) -> None:
        await sampler.sample_with_prompt_tokens([1, 2], seed=77)
        await sampler.sample_with_tokens([{"role": "user", "content": "?"}])

    run_row(rollout_fn, ROW)

    first = [RolloutContext(row_seed(0, 13), i, 0).next_seed(1) for i in range(2)]
    assert sorted(map(str, deployment.asked)) == sorted(map(str, [77, 77, *first]))


@pytest.mark.parametrize("calls", [(1, 1, 1), (2, 1), (4,)], ids=str)
def test_no_two_of_thousands_of_places_sample_with_one_seed(calls):
    sampled: list[int] = []
    for row in range(400):
        for sample in range(4):
            context = RolloutContext(row_seed(0, row), sample, 0)
            for n in calls:
                seed = context.next_seed(n)
                sampled.extend(completion_seed(seed, i) for i in range(n))

    assert len(sampled) == 1600 * sum(calls)
    assert len(set(sampled)) == len(sampled)
    assert all(0 <= seed < 2**63 for seed in sampled)


def test_another_attempt_samples_with_the_same_seeds():
    deployment = Deployment()
    sampler = deployment.sampler()

    async def rollout_fn(_row: Any) -> None:
        attempts.append(rollout_number())
        await sampler.sample_with_prompt_tokens([1, 2])
        await sampler.sample_with_prompt_tokens([1, 2], n=3)
        if len(attempts) == 1:
            raise TimeoutError

    attempts: list[int] = []
    run_row(rollout_fn, ROW)

    # Sample 0 fails at the end of its first attempt, and asks again after sample 1 has asked.
    assert attempts == [0, 1, 0]
    assert deployment.asked[4:] == [
        request for request in deployment.asked[:4] if request in seeds_of_rollout(0)
    ]
    assert len(set(deployment.asked)) == 4


def seeds_of_rollout(sample: int) -> list[int]:
    context = RolloutContext(row_seed(0, 13), sample, 0)
    return [context.next_seed(1), context.next_seed(3)]


def test_a_completion_without_logprobs_is_refused():
    sampler = Deployment(completion(inference_logprobs=None)).sampler()

    async def rollout_fn(_row: Any) -> None:
        await sampler.sample_with_prompt_tokens([1, 2])

    done = run_row(rollout_fn, ROW, rollout_retries=0)

    assert isinstance(done.error, TransportError)
    assert "a completion must come with logprobs, got none" in str(done.error)


Play = Callable[[RolloutSampler], Awaitable[RolloutResult]]


def play_turns(length: int = 2, *, turns: int = 1, n: int = 1, **changes: Any) -> Play:
    """Ask once for each turn; the sample has ``length`` tokens."""

    async def play(sampler: RolloutSampler) -> RolloutResult:
        for turn in range(turns):
            ask = sampler.sample_with_tokens if turn else sampler.sample_with_prompt_tokens
            await ask([5, 6], n=n)
        return sample_of(float(rollout_number()), length=length, **changes)

    return play


async def play_two_segments(sampler: RolloutSampler) -> RolloutResult:
    await sampler.sample_with_prompt_tokens([5, 6])
    mine = float(rollout_number())
    return RolloutRun([sample_of(mine, length=2), sample_of(mine, length=2)])


VERSIONS = {
    "one turn": (play_turns(), [completion()], [[7, 2]]),
    "a turn of two": (play_turns(), [completion(versions=[[7, 1], [8, 1]])], [[7, 1], [8, 1]]),
    "two turns": (
        play_turns(4, turns=2),
        [completion(), completion(versions=[[8, 2]])],
        [[7, 2], [8, 2]],
    ),
    "an empty turn": (play_turns(4, turns=2), [completion(4), completion(0)], [[7, 4]]),
    "cut": (play_turns(1), [completion()], [[5, 1]]),
    "best of two": (play_turns(n=2), [completion()], [[5, 2]]),
    "two segments": (play_two_segments, [completion()], [[5, 2]]),
    "as the rollout says": (
        play_turns(versions=[[1, 1], [2, 1]]),
        [completion()],
        [[1, 1], [2, 1]],
    ),
    "unseen": (play_turns(turns=0), [], [[5, 2]]),
}


@pytest.mark.parametrize(("play", "answers", "versions"), VERSIONS.values(), ids=VERSIONS)
def test_a_sample_has_the_versions_that_were_seen_or_that_of_its_submission(
    play: Play, answers: list[SampledCompletion], versions: list[list[int]]
):
    async def rollout_fn(_row: Any) -> RolloutResult:
        return await play(Deployment(*answers).sampler())

    group = run_row(rollout_fn, ROW).group

    assert [sample.rollout.versions for sample in group.flat()][:2] == [versions] * 2


# The distribution that is sampled from


def rollout_with(sampler: RolloutSampler, **options: Any) -> Callable[..., Awaitable[Any]]:
    """A rollout function that asks in both ways, the second time with ``options``."""

    async def rollout_fn(_row: Any) -> RolloutResult:
        await sampler.sample_with_tokens([])
        await sampler.sample_with_prompt_tokens([5, 6], **options)
        return sample_of(float(rollout_number()))

    return rollout_fn


OTHER = [
    ({"top_p": 0.9}, r"top_p must be 1 in a rollout that is trained, got 0\.9: 1 is off, and"),
    ({"top_k": 50}, "top_k must be 0 in a rollout that is trained, got 50: 0 is off, and"),
    ({"temperature": 0.0}, r"temperature must be 0\.7 in a rollout that is trained, got 0\.0"),
    ({"temperature": 1.0}, r"temperature must be 0\.7 .* the run's \(config\.temperature\)"),
]


@pytest.mark.parametrize(("options", "message"), OTHER, ids=[str(case) for case, _ in OTHER])
def test_what_is_trained_is_sampled_from_what_the_trainer_scores_or_the_run_ends(options, message):
    deployment = Deployment()
    rollout_fn = rollout_with(deployment.sampler(temperature=0.7), **options)

    with pytest.raises(ConfigError, match=message):
        run_row(rollout_fn, ROW, rollout_retries=5)

    # At once: each of the row's two rollouts sent its first request at most, and no second one.
    assert 1 <= len(deployment.asked) <= 2


def test_options_that_hold_for_every_request_are_judged_likewise():
    rollout_fn = rollout_with(Deployment().sampler(options={"top_k": 20}))

    with pytest.raises(ConfigError, match="top_k must be 0"):
        run_row(rollout_fn, ROW)


def test_a_request_that_names_no_temperature_is_sampled_at_the_runs():
    deployment = Deployment()
    sampler = deployment.sampler(temperature=0.7)
    recipes = {"temperature": 0.7, "top_p": 1.0, "top_k": 0}

    done = run_row(rollout_with(sampler, **recipes), ROW)

    assert done.group is not None
    assert [option["temperature"] for option in deployment.options] == [0.7] * 4


def test_what_is_not_trained_may_be_sampled_from_anything():
    deployment = Deployment()
    sampler = deployment.sampler(temperature=0.7)
    greedy = {"temperature": 0.0, "top_p": 0.5, "top_k": 3}
    rollouts = rollouts_of(rollout_with(sampler, **greedy))

    held_out = Submission(ROW, version=2, weight_version=5, is_trained=False)
    done = run_virtual(lambda: rollouts.trajectories(held_out))
    run_virtual(lambda: sampler.sample_with_prompt_tokens([1, 2], **greedy))  # by no rollout at all

    assert (len(done.runs), done.failed) == (2, 0)
    assert sum(option == greedy for option in deployment.options) == 3
