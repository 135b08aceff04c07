"""From what a sampler tells of experts to the datums that a trainer gets (T171)."""

import logging

import pytest
from tests.unit.training.trial_rollouts import config_of, group_from, row_of, run_row, sample_of

from hearth.errors import ConfigError
from hearth.sdk import RoutedModelInput, SampledCompletion
from training.rollouts.router_replay import find_routing, routing_options, warn_dense_policy
from training.rollouts.sampler import current_rollout
from training.samples.datums import align_routing, datum_from_tokens_weights
from training.samples.groups import RolloutStats, TrainSample, completion_sample, rollout_metrics
from training.samples.rollout import check_sample


def routing_of(datum) -> list[str] | None:
    model_input = datum.model_input
    return model_input.routing_matrices if isinstance(model_input, RoutedModelInput) else None


# Six tokens, of which the first three are the prompt's: five inputs, two of them the prompt's own.
ALIGNED = {
    "sampled ones": (["c", "d", "e"], False, ["", "", "c", "d", "e"]),
    "all": (["a", "b", "c", "d", "e"], False, ["", "", "c", "d", "e"]),
    "all, prompt too": (["a", "b", "c", "d", "e"], True, ["a", "b", "c", "d", "e"]),
    "sampled ones, prompt too": (["c", "d", "e"], True, ["", "", "c", "d", "e"]),
}


@pytest.mark.parametrize(("given", "with_prompt", "rows"), ALIGNED.values(), ids=ALIGNED.keys())
def test_experts_are_one_per_input_token_with_a_blank_prompt(given, with_prompt, rows):
    assert align_routing(given, num_tokens=6, prompt_len=3, with_prompt=with_prompt) == rows


@pytest.mark.parametrize("count", [0, 2, 4, 6, 7])
def test_any_other_number_of_experts_is_an_error(count):
    with pytest.raises(ConfigError, match=f"must be 5, one per .* or 3, one per .*, got {count}"):
        align_routing(["x"] * count, num_tokens=6, prompt_len=3)


def test_after_a_prompt_of_one_token_nothing_is_blank():
    assert align_routing(["a", "b"], num_tokens=3, prompt_len=1) == ["a", "b"]


def test_a_datum_is_cut_together_with_its_experts():
    datum = datum_from_tokens_weights([1, 2, 3, 4], [0, 1, 1, 1], 3, routing=["", "b", "c"])

    assert datum.model_input.to_ints() == [1, 2]
    assert routing_of(datum) == ["", "b"]
    with pytest.raises(ConfigError, match="routing must have one entry per input token, got 2"):
        datum_from_tokens_weights([1, 2, 3, 4], [0, 1, 1, 1], routing=["", "b"])


REPLAYED = {"none": None, "completion": ["", "c", "d"], "all": ["b", "c", "d"]}


@pytest.mark.parametrize(("replay", "rows"), REPLAYED.items())
def test_a_sample_replays_what_the_recipe_says_and_never_in_a_reference(replay, rows):
    sample = TrainSample.from_rollout(sample_of(routing_matrices=["b", "c", "d"]), 1.0, replay)

    assert routing_of(sample.datum) == rows
    assert routing_of(sample.reference_datum) is None
    assert sample.reference_datum.model_input.to_ints() == sample.datum.model_input.to_ints()
    assert sample.reference_datum.loss_fn_inputs == sample.datum.loss_fn_inputs


def test_without_experts_a_datum_is_as_ever():
    sample = TrainSample.from_rollout(sample_of(), 1.0, "all")

    assert routing_of(sample.datum) is None
    assert sample.reference_datum is sample.datum


@pytest.mark.parametrize(
    ("changes", "replay"),
    [
        ({}, "none"),
        ({"router_replay_completion_only": False}, "none"),
        ({"router_replay": True}, "completion"),
        ({"router_replay": True, "router_replay_completion_only": False}, "all"),
    ],
)
def test_a_recipe_replays_sampled_tokens_alone_unless_told_otherwise(changes, replay):
    assert config_of(**changes).replay == replay


# What a rollout gives.


@pytest.mark.parametrize("count", [2, 3])
def test_a_rollout_may_give_experts_of_all_inputs_or_from_the_first_sampled_token_on(count):
    given = sample_of(routing_matrices=["x"] * count)
    assert check_sample(given, "row 0").routing_matrices == ["x"] * count


BAD = {
    "too few": (["x"], "routing_matrices must be 3, one per token but the last, or 2, .* got 1"),
    "one per token": (["x"] * 4, "row 7, sample 1: routing_matrices must be 3, .* got 4"),
    "no text": (["x", None], "routing_matrices must be texts, got None at index 1"),
}


@pytest.mark.parametrize(("given", "message"), BAD.values(), ids=BAD.keys())
def test_experts_that_fit_no_form_are_an_error_that_names_the_rollout(given, message):
    with pytest.raises(ConfigError, match=message):
        check_sample(sample_of(routing_matrices=given), "row 7, sample 1")


def completion(prompt, completion_ids, *routing: str, is_dense=False) -> SampledCompletion:
    """A completion whose experts are its tokens as texts, or ``routing``; or that has none."""
    matrices = list(routing) or [f"{token}" for token in completion_ids]
    return SampledCompletion(
        text="",
        full_tokens=[*prompt, *completion_ids],
        prompt_len=len(prompt),
        finish_reason="stop",
        inference_logprobs=[-0.5] * len(completion_ids),
        routing_matrices=None if is_dense else matrices,
    )


def test_a_completions_experts_go_with_its_sample():
    sample = completion_sample(completion([5, 6], [7, 8]), 1.0)
    assert routing_of(TrainSample.from_rollout(sample, 1.0, "completion").datum) == ["", "7", "8"]


def say(*parts: list[int]) -> tuple[list[int], list[int]]:
    """Tokens and mask of a rollout whose parts are by turns read and sampled."""
    tokens = [token for part in parts for token in part]
    return tokens, [place % 2 for place, part in enumerate(parts) for _ in part]


ONE, ONE_TURN = completion([1, 2], [3, 4]), say([1, 2], [3, 4])
SECOND, CHOSEN = completion([1, 2, 3, 4, 9], [5, 6]), completion([1, 2], [7, 8])
ROUTED = completion([1, 2], [3, 4], "p", "3", "4")
# Tokens and mask, completions and the rows that come of them.
SEEN = {
    "one turn": (ONE_TURN, [ONE], ["", "3", "4"]),
    "cut short": (say([1, 2], [3]), [ONE], ["", "3"]),
    "two turns": (say([1, 2], [3, 4], [9], [5, 6]), [ONE, SECOND], ["", "3", "4", "", "5", "6"]),
    "a turn right after another": (
        say([1, 2], [3, 4, 5]),
        [ONE, completion([1, 2, 3, 4], [5])],
        ["", "3", "4", "5"],
    ),
    "the chosen one of two": (say([1, 2], [7, 8]), [ONE, CHOSEN], ["", "7", "8"]),
    "with a prompt of its own": (ONE_TURN, [ROUTED], ["p", "3", "4"]),
    "another prompt": (say([9, 2], [3, 4]), [ONE], None),
    "other tokens": (say([1, 2], [3, 5]), [ONE], None),
    "one turn that nobody saw": (say([1, 2], [3, 4], [9], [5]), [ONE], ["", "3", "4", "", ""]),
    "a dense model": (ONE_TURN, [completion([1, 2], [3, 4], is_dense=True)], None),
    "nothing sampled": (say([1, 2], [3]), [completion([1, 2], [])], None),
    "nothing seen": (ONE_TURN, [], None),
}


@pytest.mark.parametrize(("said", "seen", "rows"), SEEN.values(), ids=SEEN.keys())
def test_experts_are_found_where_the_same_tokens_were_sampled_after_the_same_prompt(
    said, seen, rows
):
    assert find_routing(*said, seen) == rows


@pytest.mark.parametrize("given", [None, ["a", "b"]])
def test_a_rollout_that_says_nothing_of_experts_replays_what_its_sampler_saw(given):
    async def rollout_fn(_row):
        running = current_rollout.get()
        running.seen.append(completion([5, 6], [7, 8]))
        return sample_of(float(running.sample), routing_matrices=given)

    running = run_row(rollout_fn, row_of(0), router_replay=True)

    rows = ["", "7", "8"] if given is None else ["", "a", "b"]
    assert [routing_of(datum) for datum in running.group.data] == [rows, rows]


def test_the_share_of_replayed_samples_is_a_metric_where_there_are_any():
    def ratio(*given):
        samples = [[sample_of(float(place), routing_matrices=r)] for place, r in enumerate(given)]
        metrics = rollout_metrics(RolloutStats(), [group_from(row_of(0), samples)])
        return metrics.get("rollout/router_replay_ratio")

    assert ratio(None, None) is None
    assert ratio(["b", "c", "d"], None, None, None) == 0.25


# What a sampler is asked for.


OPTIONS = {
    ("none", True): {},
    ("completion", True): {"include_routing_matrix": True},
    ("all", True): {"include_routing_matrix": True, "include_prompt_routing": True},
    ("completion", False): {},
    ("all", False): {},
}


@pytest.mark.parametrize(("case", "options"), OPTIONS.items())
def test_experts_are_asked_for_where_they_can_be_replayed(case, options, caplog):
    replay, has_experts = case
    assert routing_options(replay, has_experts=has_experts) == options

    with caplog.at_level(logging.WARNING):
        warn_dense_policy(replay, "some-model", has_experts=has_experts)
    expected = [
        "router_replay does nothing: some-model has no experts that can be recorded and replayed"
    ]
    assert [record.getMessage() for record in caplog.records] == expected * (not has_experts)
