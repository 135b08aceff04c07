import math

import pytest
import torch

from hearth.errors import ConfigError, NumericsError
from hearth.losses import (
    BUILTIN_LOSSES,
    CISPO,
    DAPO,
    DRO,
    GRPO,
    GSPO,
    ImportanceSampling,
    Reinforce,
    builtin_objective,
    policy_loss_per_token,
)

BOUNDS = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.3}
CASES = {
    "ppo": (BOUNDS, "grpo", GRPO(kl_beta=0.0, eps_clip=0.1, eps_clip_high=0.3)),
    "dapo": (
        BOUNDS | {"eps_clip_c": 3.0},
        "dapo",
        DAPO(eps_clip=0.1, eps_clip_high=0.3, eps_clip_c=3.0),
    ),
    "cispo": (BOUNDS, "cispo", CISPO(eps_low=0.1, eps_high=0.3)),
    "gspo": (
        BOUNDS | {"seq_ratio_log_cap": 2.0},
        "gspo",
        GSPO(clip_ratio_low=0.1, clip_ratio_high=0.3, seq_ratio_log_cap=2.0),
    ),
    "dro": ({"beta": 0.4}, "dro", DRO(beta=0.4)),
    "importance_sampling": (
        {"ratio_log_cap": 0.3},
        "importance_sampling",
        ImportanceSampling(ratio_log_cap=0.3),
    ),
    "reinforce": ({"ratio_log_cap": 0.3}, "reinforce", Reinforce(ratio_log_cap=0.3)),
}


def test_the_wire_names_are_known():
    assert set(BUILTIN_LOSSES) == {*CASES, "cross_entropy"}


@pytest.mark.parametrize("mask_field", ["weights", "loss_mask"])
@pytest.mark.parametrize("loss_fn", CASES)
def test_a_builtin_loss_is_its_objective_over_the_datums_fields(
    loss_fn, mask_field, random_samples, batch_of
):
    config, name, objective = CASES[loss_fn]
    samples = [{**sample, "behavior": sample["old"]} for sample in random_samples(11)]
    batch, leaf = batch_of(samples)
    rows = list(leaf.split([len(sample["mask"]) for sample in samples]))
    inputs = [
        {
            "target_tokens": torch.zeros(len(sample["mask"]), dtype=torch.int64),
            "logprobs": torch.tensor(sample["old"], dtype=torch.float64),
            "advantages": torch.tensor(sample["advantages"], dtype=torch.float64),
            mask_field: torch.tensor(sample["mask"]),
        }
        for sample in samples
    ]

    builtin = builtin_objective(loss_fn, config)
    per_token = builtin.evaluate(builtin.make_batch(rows, inputs)).per_token
    expected = policy_loss_per_token(name, batch, objective).per_token

    torch.testing.assert_close(per_token, expected, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(
        torch.autograd.grad(per_token.sum(), leaf),
        torch.autograd.grad(expected.sum(), leaf),
        rtol=1e-12,
        atol=1e-14,
    )


def test_without_a_mask_field_tokens_of_advantage_zero_are_inactive():
    builtin = builtin_objective("dro")
    rows = [torch.tensor([math.nan, -1.0], requires_grad=True)]
    inputs = [{"logprobs": torch.tensor([9.0, -2.0]), "advantages": torch.tensor([0.0, 1.0])}]

    per_token = builtin.evaluate(builtin.make_batch(rows, inputs)).per_token

    assert per_token.tolist() == pytest.approx([0.0, 1.0 + 0.025])


def test_cross_entropy_is_a_raw_sum_with_negative_and_fractional_weights():
    builtin = builtin_objective("cross_entropy")
    row = torch.tensor([-1.0, -2.0, -4.0], requires_grad=True)

    batch = builtin.make_batch([row], [{"weights": torch.tensor([0.5, 0.0, -0.25])}])
    loss = builtin.evaluate(batch).per_token.sum()
    loss.backward()

    assert loss.item() == 0.5 - 1.0
    assert row.grad.tolist() == [-0.5, 0.0, 0.25]


def test_cross_entropy_weights_carry_the_gradient_of_any_loss():
    row = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    (gradient,) = torch.autograd.grad((row.exp() * torch.tensor([1.0, -3.0, 2.0])).sum(), row)
    builtin = builtin_objective("cross_entropy")

    batch = builtin.make_batch([row], [{"weights": -gradient}])
    (surrogate,) = torch.autograd.grad(builtin.evaluate(batch).per_token.sum(), row)

    assert torch.equal(surrogate, gradient)


def test_cross_entropy_without_weights_scores_and_counts_nothing():
    builtin = builtin_objective("cross_entropy")
    batch = builtin.make_batch([torch.tensor([-1.0])], [{"target_tokens": torch.tensor([3])}])
    assert builtin.evaluate(batch).per_token.tolist() == [0.0]


def test_several_targets_per_position_are_flattened():
    builtin = builtin_objective("cross_entropy")
    row = torch.tensor([[-1.0, -2.0], [-3.0, -4.0]])
    batch = builtin.make_batch([row], [{"weights": torch.tensor([[1.0, 0.5], [0.0, 2.0]])}])
    assert builtin.evaluate(batch).per_token.tolist() == [1.0, 1.0, 0.0, 8.0]


def test_plain_reinforce_needs_no_logprobs():
    builtin = builtin_objective("reinforce")
    batch = builtin.make_batch([torch.tensor([-3.0])], [{"advantages": torch.tensor([2.0])}])
    assert builtin.evaluate(batch).per_token.tolist() == [6.0]


@pytest.mark.parametrize(
    ("inputs", "rule"),
    [
        ({"advantages": torch.ones(2)}, r"datum 5: loss_fn_inputs of ppo must hold \['logprobs'"),
        (
            {"advantages": torch.ones(2), "logprobs": -torch.ones(2), "rewards": torch.ones(2)},
            "datum 5: loss_fn_inputs of ppo .*'rewards'",
        ),
        (
            {
                "advantages": torch.ones(2),
                "logprobs": -torch.ones(2),
                "clip_low_threshold": torch.ones(2),
            },
            "datum 5: loss_fn_inputs of ppo .*'clip_low_threshold'",
        ),
        (
            {"advantages": torch.ones(1), "logprobs": -torch.ones(2)},
            "datum 5: advantages must have 2 entries as target_tokens, got 1",
        ),
    ],
)
def test_bad_datum_fields_are_refused_by_datum(inputs, rule):
    with pytest.raises(ConfigError, match=rule):
        builtin_objective("ppo").make_batch([-torch.ones(2)], [inputs], datum_ids=[5])


def test_logprobs_in_some_datums_only_are_refused():
    row = -torch.ones(1)
    inputs = [{"advantages": row, "logprobs": row}, {"advantages": row}]
    with pytest.raises(ConfigError, match="datum 1: logprobs must be given in all datums or in"):
        builtin_objective("reinforce").make_batch([row, row], inputs)


def test_a_bad_logprob_names_the_datum_of_the_request():
    builtin = builtin_objective("importance_sampling")
    inputs = {"advantages": torch.ones(2), "logprobs": torch.tensor([-1.0, 0.7])}
    with pytest.raises(NumericsError, match="datum 31: old_logprobs at position 1"):
        builtin.evaluate(builtin.make_batch([-torch.ones(2)], [inputs], datum_ids=[31]))


@pytest.mark.parametrize(
    ("loss_fn", "config", "rule"),
    [
        ("sapo", {}, "loss_fn must be one of cross_entropy, importance_sampling, ppo"),
        # What Fireworks' client can send, and nobody here computes.
        ("dppo", {}, "loss_fn must be one of"),
        ("cross_entropy", {"top_k": 5}, r"known keys \(none\), got 'top_k'"),
        ("reinforce", {"score_centering": 1.0}, "got 'score_centering'"),
        ("ppo", {"weighting": 1.0}, "got 'weighting'"),
        ("ppo", {"clip": 0.2}, r"known keys \(clip_low_threshold, clip_high_threshold"),
        ("cross_entropy", {"beta": 1.0}, r"known keys \(none\), got 'beta'"),
        ("dro", {"beta": math.nan}, "loss_fn_config.beta must be a finite number, got nan"),
        ("dro", {"beta": "0.1"}, "loss_fn_config.beta must be a finite number, got '0.1'"),
        ("dro", {"beta": True}, "loss_fn_config.beta must be a finite number, got True"),
        ("ppo", {"clip_high_threshold": 0.2}, "eps_clip_high must be finite and >= 0, got -0.8"),
    ],
)
def test_bad_loss_configs_are_refused_with_the_known_names(loss_fn, config, rule):
    with pytest.raises(ConfigError, match=rule):
        builtin_objective(loss_fn, config)
