import dataclasses
import math
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.training.trial_rollouts import sample_of

from hearth.errors import ConfigError
from hearth.losses import LOGPROB_TOLERANCE
from training.samples.rollout import Rollout, RolloutRun, RolloutSample, RolloutSetup, collect_runs

WHERE = "row 7, sample 2"


def sample(**changes: Any) -> RolloutSample:
    """Two prompt tokens and two sampled ones, of different logprobs."""
    return sample_of(**({"logprobs": [0.0, 0.0, -0.25, -1.5]} | changes))


def only(returned: object) -> RolloutSample:
    """The one sample of the one trajectory."""
    (run,) = collect_runs(returned, WHERE)
    (checked,) = run.segments
    return checked


# T142: the record itself.


def test_t142_a_sample_has_the_documents_fields_and_defaults():
    fields = {field.name: field.default for field in dataclasses.fields(RolloutSample)}
    required = [name for name, default in fields.items() if default is dataclasses.MISSING]

    assert required == ["tokens", "logprobs", "loss_mask", "reward"]
    assert list(fields)[4:6] == ["finish_reason", "text"]
    assert sample() == RolloutSample([5, 6, 7, 8], [0.0, 0.0, -0.25, -1.5], [0, 0, 1, 1], 1.0)
    assert (sample().finish_reason, sample().text, sample().versions) == ("stop", "", None)


def test_t140_the_setup_has_what_the_document_lists():
    names = [field.name for field in dataclasses.fields(RolloutSetup)]

    assert names[:8] == [
        "tokenizer",
        "tokenizer_id",
        "sample_kwargs",
        "inference_base_url",
        "api_key",
        "model",
        "completions_per_prompt",
        "extras",
    ]


@pytest.mark.parametrize(
    ("mask", "prompt_len", "completion_len"),
    [([0, 0, 1, 1], 2, 2), ([0, 1, 0, 1], 1, 2), ([0, 0, 0, 1], 3, 1), ([0, 0, 0, 0], 4, 0)],
)
def test_lengths_come_from_the_mask(mask, prompt_len, completion_len):
    checked = sample(loss_mask=mask)

    assert (checked.prompt_len, checked.completion_len) == (prompt_len, completion_len)


# What a rollout function may return.


def test_none_is_no_trajectory():
    assert collect_runs(None, WHERE) == []


def test_a_sample_is_one_run_of_one_segment():
    assert collect_runs(sample(), WHERE) == [RolloutRun([sample()])]


def test_a_run_keeps_its_segments_its_name_and_its_metadata():
    run = RolloutRun([sample(), sample(tokens=[9, 9, 9, 9])], "attempt-3", {"turns": 2})

    assert collect_runs(run, WHERE) == [run]
    assert run.reward == 1.0


def test_a_rollout_has_several_runs_with_rewards_of_their_own():
    rollout = Rollout([RolloutRun([sample(reward=r)]) for r in (0.0, 0.5, 1.0)], {"game": 3})

    assert [run.reward for run in collect_runs(rollout, WHERE)] == [0.0, 0.5, 1.0]


WRONG_TYPES = [
    (1.0, r"must return RolloutSample, RolloutRun, Rollout or None, got float: 1\.0"),
    ([sample()], "must return .*, got list: "),
    ({"tokens": [1, 2]}, "must return .*, got dict: "),
    (False, "must return .*, got bool: False"),
    (Rollout([sample()]), "runs must hold RolloutRun, got RolloutSample"),  # pyright: ignore[reportArgumentType]
    (RolloutRun([[1, 2]]), "segments must hold RolloutSample, got list"),  # pyright: ignore[reportArgumentType]
]


@pytest.mark.parametrize(("returned", "message"), WRONG_TYPES)
def test_another_type_is_a_type_error_that_says_what_came(returned, message):
    with pytest.raises(TypeError, match=f"^{WHERE}: .*{message}"):
        collect_runs(returned, WHERE)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (Rollout([]), r"runs must hold at least 1 run, got \[\]: return None to drop it"),
        (RolloutRun([]), r"segments must hold at least 1 sample, got \[\]: return None"),
        (
            Rollout([RolloutRun([sample()]), RolloutRun([])]),
            r"run 1: segments must hold at least 1",
        ),
    ],
)
def test_nothing_in_a_run_or_a_rollout_is_refused(returned, message):
    with pytest.raises(ConfigError, match=f"^{WHERE}.*{message}"):
        collect_runs(returned, WHERE)


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (1.0, 1.0, 1.0 + 1e-12)])
def test_segments_of_one_run_share_one_reward(rewards):
    run = RolloutRun([sample(reward=reward) for reward in rewards])

    with pytest.raises(
        ConfigError, match=f"^{WHERE}: reward must be the same in all segments of a run, got .*1.0"
    ):
        collect_runs(run, WHERE)


def test_the_place_of_a_fault_names_run_and_segment():
    bad = sample(reward=math.nan)
    rollout = Rollout([RolloutRun([sample()]), RolloutRun([sample(), sample(), bad])])

    with pytest.raises(ConfigError, match=f"^{WHERE}, run 1, segment 2: reward must be"):
        collect_runs(rollout, WHERE)


def test_a_sample_without_sampled_tokens_is_left_out():
    silent = sample(loss_mask=[0, 0, 0, 0], logprobs=[0.0] * 4)
    rollout = Rollout([RolloutRun([silent]), RolloutRun([silent, sample()], "second")])

    assert collect_runs(silent, WHERE) == []
    assert collect_runs(rollout, WHERE) == [RolloutRun([sample()], "second")]


# T144: alignment is the contract.


@pytest.mark.parametrize(
    ("field", "value", "lengths"),
    [
        ("tokens", [5, 6, 7], (3, 4, 4)),
        ("tokens", [5, 6, 7, 8, 9], (5, 4, 4)),
        ("logprobs", [-0.25, -1.5], (4, 2, 4)),
        ("logprobs", [0.0] * 5, (4, 5, 4)),
        ("loss_mask", [1, 1], (4, 4, 2)),
        ("loss_mask", [], (4, 4, 0)),
        ("tokens", [], (0, 4, 4)),
    ],
)
def test_t144_lists_of_different_lengths_are_refused_with_all_three(field, value, lengths):
    tokens, logprobs, mask = lengths

    with pytest.raises(
        ValueError,
        match=f"^{WHERE}: tokens, logprobs and loss_mask must be of one length, got "
        f"{tokens} tokens, {logprobs} logprobs and {mask} loss_mask$",
    ):
        collect_runs(sample(**{field: value}), WHERE)


@pytest.mark.parametrize("tokens", [[], [5]])
def test_fewer_than_two_tokens_have_nothing_to_predict(tokens):
    short = sample(tokens=tokens, logprobs=[0.0] * len(tokens), loss_mask=[0] * len(tokens))

    with pytest.raises(ConfigError, match=r"tokens must hold at least 2 ids, got \["):
        collect_runs(short, WHERE)


@pytest.mark.parametrize("field", ["tokens", "logprobs", "loss_mask"])
@pytest.mark.parametrize("value", [None, "5678", 3, {5: 6}], ids=repr)
def test_what_is_no_list_is_refused(field, value):
    with pytest.raises(ConfigError, match=f"^{WHERE}: {field} must be a list, got "):
        collect_runs(sample(**{field: value}), WHERE)


NO_NUMBERS = [math.nan, math.inf, -math.inf, None, "1.0", [1.0], Decimal("0.5"), 1j]
NO_NUMBERS += [np.float32("nan"), np.array([1.0, 2.0]), torch.tensor(math.inf), torch.tensor([1.0])]
REWARD = f"^{WHERE}: reward must be a finite number, got .*return None to drop"
REFUSED: list[tuple[dict[str, Any], str]] = [
    *(
        (
            {"tokens": [5, 6, wrong, 8]},
            f"tokens must be integers >= 0 and < 2\\*\\*63, got {wrong!r} at inde",
        )
        for wrong in (-1, 5.5, 7.0, "7", None, True)
    ),
    ({"loss_mask": [1, 0, 1, 1]}, "loss_mask must be 0 at index 0, got 1: nothing stands"),
    *(({"reward": wrong}, REWARD) for wrong in NO_NUMBERS),
    ({"loss_mask": [0, 0, 0, 0], "reward": math.nan}, REWARD),
    *(
        ({"parsed": wrong}, f"^{WHERE}: parsed must be True, False or None, got")
        for wrong in (0, 1.0, "no", np.array([True]))
    ),
]


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[str(case) for case, _ in REFUSED])
def test_a_value_that_breaks_its_rule_is_refused_also_where_nothing_was_sampled(changes, message):
    with pytest.raises(ConfigError, match=message):
        collect_runs(sample(**changes), WHERE)


@pytest.mark.parametrize("wrong", [2, -1, 0.5, math.nan, None, "1", [1]], ids=repr)
@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_mask_is_0_or_1_everywhere(wrong, place):
    mask: list[Any] = [0, 0, 1, 1]
    mask[place] = wrong

    with pytest.raises(ConfigError, match="loss_mask must be 0 or 1 everywhere, got ") as failure:
        collect_runs(sample(loss_mask=mask), WHERE)

    assert f"{wrong!r} at index {place}" in str(failure.value)


@pytest.mark.parametrize(
    "wrong", [math.nan, math.inf, -math.inf, 0.5, 2 * LOGPROB_TOLERANCE, None, "-1"], ids=repr
)
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_a_logprob_is_finite_and_not_positive_also_where_nothing_was_sampled(wrong, place):
    logprobs: list[Any] = [0.0, 0.0, -0.25, -1.5]
    logprobs[place] = wrong

    with pytest.raises(ConfigError, match="logprobs must be finite and <= 0, got ") as failure:
        collect_runs(sample(logprobs=logprobs), WHERE)

    assert str(failure.value).startswith(f"{WHERE}: ")
    assert f"{wrong!r} at index {place}" in str(failure.value)


def test_rounding_above_0_is_no_fault():
    assert only(sample(logprobs=[0.0, 0.0, LOGPROB_TOLERANCE, -1.5])).logprobs[2] > 0


def test_of_many_wrong_values_the_first_three_are_shown():
    logprobs = [math.nan, 1.0, math.inf, 2.0, 3.0]
    wrong = sample(tokens=[1] * 5, loss_mask=[0, 1, 1, 1, 1], logprobs=logprobs)

    with pytest.raises(
        ConfigError, match=r"nan at index 0, 1\.0 at index 1, inf at index 2 and 2 more:"
    ):
        collect_runs(wrong, WHERE)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        (True, 1.0),
        (False, 0.0),
        (3, 3.0),
        (-0.5, -0.5),
        (np.float32(0.25), 0.25),
        (np.float64(0.25), 0.25),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.75), 0.75),
        (torch.tensor(0.75), 0.75),
        (torch.tensor(True), 1.0),
        (torch.tensor(0.5, requires_grad=True), 0.5),
    ],
    ids=repr,
)
def test_any_kind_of_number_is_a_reward_and_becomes_a_float(given, value):
    reward = only(sample(reward=given)).reward

    assert (reward, type(reward)) == (value, float)


PLAIN = sample(reward=0.5)


@pytest.mark.parametrize(
    "given",
    [
        sample(tokens=(5, 6, 7, 8), logprobs=(0, 0, -0.25, -1.5), loss_mask=(0, 0, 1, 1)),
        sample(loss_mask=[False, False, True, True]),
        sample(loss_mask=[0.0, 0.0, 1.0, 1.0]),
        sample(
            tokens=np.array([5, 6, 7, 8], dtype=np.int32),
            logprobs=np.array([0.0, 0.0, -0.25, -1.5], dtype=np.float32),
            loss_mask=np.array([0, 0, 1, 1]),
        ),
        sample(
            tokens=torch.tensor([5, 6, 7, 8]),
            logprobs=torch.tensor([0.0, 0.0, -0.25, -1.5]),
            loss_mask=torch.tensor([False, False, True, True]),
        ),
        sample(
            tokens=list(np.array([5, 6, 7, 8])),
            logprobs=list(torch.tensor([0.0, 0.0, -0.25, -1.5])),
            loss_mask=list(np.array([0, 0, 1, 1], dtype=np.uint8)),
        ),
        sample(versions=[(3, 1), (4, 1)]),
    ],
    ids=["tuples", "bools", "floats", "numpy", "torch", "lists of scalars", "version tuples"],
)
def test_arrays_tensors_and_their_scalars_become_plain_lists(given):
    checked = only(dataclasses.replace(given, reward=0.5))

    assert dataclasses.replace(checked, versions=None) == PLAIN
    assert {type(value) for value in checked.tokens + checked.loss_mask} == {int}
    assert {type(value) for value in checked.logprobs} == {float}
    assert checked.versions in (None, [[3, 1], [4, 1]])


@pytest.mark.parametrize("mask", [[0, 0, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]])
def test_a_judged_sample_has_its_lists_as_arrays_too(mask):
    arrays = only(
        sample(tokens=[5, 2**40, 7, 8], logprobs=[-1, 0, -0.1, -1.5], loss_mask=mask)
    ).arrays

    assert (arrays.tokens.dtype, arrays.tokens.tolist()) == (np.int64, [5, 2**40, 7, 8])
    assert (arrays.logprobs.dtype, arrays.logprobs.tolist()) == (np.float64, [-1, 0, -0.1, -1.5])
    assert (arrays.is_sampled.dtype, arrays.is_sampled.tolist()) == (bool, list(map(bool, mask)))
    assert (arrays.prompt_len, arrays.completion_len) == (mask.index(1), sum(mask))


def test_a_rollout_function_may_count_before_its_lists_are_whole():
    unfinished = sample()
    assert (unfinished.prompt_len, unfinished.completion_len) == (2, 2)

    unfinished.loss_mask[1] = 1

    assert (unfinished.prompt_len, unfinished.completion_len) == (1, 3)
    assert only(unfinished).arrays.completion_len == 3


def test_another_sample_made_of_a_judged_one_has_arrays_of_its_own():
    changed = dataclasses.replace(only(sample()), loss_mask=[0, 0, 0, 1])

    assert (changed.prompt_len, changed.completion_len) == (3, 1)
    assert changed.arrays.is_sampled.tolist() == [False, False, False, True]


def test_what_was_returned_stays_as_it_is():
    given = sample(loss_mask=[0.0, 0.0, 1.0, 1.0])
    before = dataclasses.replace(given)

    checked = only(given)
    checked.versions = [[9, 2]]
    checked.tokens.append(3)

    assert given == before


@pytest.mark.parametrize("versions", [[[0, 2]], [[3, 1], [4, 1]], [[3, 2], [4, 0]]])
def test_versions_cover_the_sampled_tokens(versions):
    assert only(sample(versions=versions)).versions == versions


@pytest.mark.parametrize(
    "wrong",
    [[], [[0, 4]], [[0, 1]], [[3, 3], [4, -1]], [[-1, 2]], [2], [[0, 1, 1]], [[0, "2"]]],
    ids=repr,
)
def test_versions_that_do_not_add_up_are_refused(wrong):
    with pytest.raises(
        ConfigError, match=r"versions must be pairs \[weight version, tokens\] that cover the 2 sam"
    ) as failure:
        collect_runs(sample(versions=wrong), WHERE)

    assert str(failure.value).endswith(f"got {wrong}")


@pytest.mark.parametrize(
    ("given", "parsed"),
    [(None, None), (True, True), (np.False_, False), (torch.tensor(True), True)],
)
def test_whether_an_answer_was_found_is_a_truth_value_or_unknown(given, parsed):
    assert only(sample(parsed=given)).parsed is parsed


@pytest.mark.parametrize(
    ("segments", "parsed"),
    [([None, None], None), ([False, None], False), ([False, True], True), ([True, False], True)],
)
def test_a_run_is_parsed_where_one_of_its_segments_is(segments, parsed):
    assert RolloutRun([sample(parsed=segment) for segment in segments]).parsed is parsed
