"""What the recipe decides about a captured request, and what it leaves alone."""

import pytest

from hearth.errors import ConfigError
from hearth.sdk.capture.policy import SamplingPolicy, request_seed

NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}


def test_what_the_recipe_does_not_name_is_neutral():
    assert SamplingPolicy(None).apply({}) == NEUTRAL
    assert SamplingPolicy({"temperature": 0.7}).apply({}) == NEUTRAL | {"temperature": 0.7}


def test_the_recipes_distribution_wins_always():
    policy = SamplingPolicy({"temperature": 0.7, "top_k": 20})

    sampled = policy.apply({"temperature": 0, "top_p": 0.9, "top_k": -1, "stop": ["x"]})

    assert sampled == {"temperature": 0.7, "top_p": 1.0, "top_k": 20, "stop": ["x"]}


OVERRIDDEN = {
    "nothing": ({}, ""),
    "the same": ({"temperature": 0.7, "top_p": 1, "top_k": 0}, ""),
    "one": ({"temperature": 0.2}, "temperature=0.2 instead of 0.7"),
    "two": (
        {"temperature": 1, "top_p": 0.9},
        "temperature=1 instead of 0.7, top_p=0.9 instead of 1.0",
    ),
}


@pytest.mark.parametrize(("asked", "words"), OVERRIDDEN.values(), ids=OVERRIDDEN.keys())
def test_only_another_value_is_told(asked, words):
    assert SamplingPolicy({"temperature": 0.7}).describe_overrides(asked) == words


LIMITS = {
    "none": ({}, {"max_completion_tokens": 16}),
    "lower": ({"max_completion_tokens": 8}, {"max_completion_tokens": 8}),
    "higher": ({"max_completion_tokens": 99}, {"max_completion_tokens": 16}),
    "older name": ({"max_tokens": 99}, {"max_tokens": 16}),
    "both names": (
        {"max_tokens": 20, "max_completion_tokens": 8},
        {"max_tokens": 16, "max_completion_tokens": 8},
    ),
    "no number": ({"max_tokens": "many"}, {"max_tokens": "many"}),
}


@pytest.mark.parametrize(("asked", "limits"), LIMITS.values(), ids=LIMITS.keys())
def test_the_smaller_limit_holds(asked, limits):
    assert SamplingPolicy({"max_completion_tokens": 16}).apply(asked) == NEUTRAL | limits
    assert SamplingPolicy({}).apply(asked) == NEUTRAL | asked


WRONG = {"temperature": -0.1, "top_p": 0, "top_k": 1.5, "max_completion_tokens": 0}


@pytest.mark.parametrize(("name", "value"), WRONG.items(), ids=WRONG.keys())
def test_a_value_that_breaks_its_rule_is_refused(name, value):
    for wrong in (value, True, "1", float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=rf"sampling\.{name} must be"):
            SamplingPolicy({name: wrong})


def test_other_names_are_refused():
    with pytest.raises(ConfigError, match=r"sampling must have names of .*, got \['max_tokens'\]"):
        SamplingPolicy({"max_tokens": 5, "top_k": 3})


def test_seeds_differ_by_session_and_request_and_fit_the_wire():
    seeds = {request_seed(seed, number) for seed in range(20) for number in range(20)}

    assert len(seeds) == 400
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert request_seed(3, 1) == 6429919509248852041
