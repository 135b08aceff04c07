import math

import pytest
import torch

from hearth.errors import ConfigError
from hearth.losses import (
    GRPO,
    TIS,
    ImportanceSampling,
    Reinforce,
    TokenBatch,
    kl_penalty,
    policy_loss_per_token,
)


def off_policy_batch(old, behavior, mask=None):
    rows = [torch.tensor(old)]
    return TokenBatch.concat(
        rows,
        advantages=[1.0],
        mask=[torch.ones(len(old)) if mask is None else torch.tensor(mask)],
        old_logprobs=rows,
        behavior_logprobs=[torch.tensor(behavior)],
    )


def test_the_cap_holds_from_above_and_leaves_the_lower_tail():
    batch = off_policy_batch([-1.0, -9.0, -2.0], [-4.0, -1.0, -2.0])

    weights = TIS(cap=2.0).weights(batch)

    assert weights.tolist() == pytest.approx([2.0, math.exp(-8), 1.0], rel=1e-6)


@pytest.mark.parametrize("sign", [1, -1])
def test_log_ratios_are_held_at_20_on_either_side_and_have_no_gradient_beyond(sign):
    near, far = torch.tensor([[-1.0], [-31.0]], dtype=torch.float64)
    above, below = (near, far) if sign == 1 else (far, near)
    policy = above.clone().requires_grad_(True)
    common = {"advantages": [1.0], "mask": [torch.ones(1)]}
    to_old = TokenBatch.concat([policy], old_logprobs=[below], **common)
    to_behavior = TokenBatch.concat([policy], behavior_logprobs=[below], **common)

    losses = [
        ImportanceSampling().policy_term(to_old),
        Reinforce().policy_term(to_behavior),
        -TIS().ratios(to_behavior),
    ]

    assert [loss.item() for loss in losses] == pytest.approx([-math.exp(20 * sign)] * 3)
    for loss in losses[:2]:
        assert torch.autograd.grad(loss.sum(), policy)[0].tolist() == [0.0]


def test_the_ratio_of_samples_counts_those_of_one_token_and_none_without():
    logprobs = [torch.tensor([-1.0]), torch.tensor([-1.0, -1.0]), torch.tensor([-1.0])]
    batch = TokenBatch.concat(
        logprobs,
        advantages=[1.0] * 3,
        mask=[torch.ones(1), torch.ones(2), torch.zeros(1)],
        behavior_logprobs=[row - 0.5 for row in logprobs],
    )

    metrics = TIS(level="sequence").metrics(batch)

    assert float(metrics["tis/seq_ratio"]) == pytest.approx((math.exp(0.5) + math.e) / 2)


def test_weights_are_constant_and_masked_tokens_weigh_one():
    batch = off_policy_batch([-1.0, -9.0], [-4.0, -1.0], [0.0, 1.0])

    weights = TIS(level="sequence", cap=0.5).weights(batch)

    assert not weights.requires_grad
    assert weights.tolist() == pytest.approx([1.0, math.exp(-8)], rel=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_exponents_are_guarded_at_twenty(level):
    batch = off_policy_batch([-1.0, -1.0], [-500.0, -500.0])

    weights = TIS(cap=math.inf, level=level).weights(batch)

    assert weights.tolist() == pytest.approx([math.exp(20)] * 2, rel=1e-5)


def test_without_old_logprobs_the_weight_is_from_policy_to_behavior():
    policy = torch.tensor([-1.0, -2.0], requires_grad=True)
    batch = TokenBatch.concat(
        [policy],
        advantages=[1.0],
        mask=[torch.ones(2)],
        behavior_logprobs=[torch.tensor([-1.5, -2.5])],
    )

    assert TIS().weights(batch).tolist() == pytest.approx([math.exp(0.5)] * 2)
    assert not TIS().weights(batch).requires_grad


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"cap": -1.0}, "tis.cap must be >= 0, got -1"),
        ({"cap": math.nan}, "tis.cap must be >= 0, got nan"),
        ({"level": "word"}, "tis.level must be one of"),
        ({"sequence_mean": "median"}, "tis.sequence_mean must be one of"),
        ({"icepop_threshold": 0.5}, "tis.icepop_threshold must be >= 1"),
        ({"icepop_threshold": 2.0, "level": "sequence"}, "used at token level"),
    ],
)
def test_bad_tis_options_are_refused(options, rule):
    with pytest.raises(ConfigError, match=rule):
        TIS(**options).validate()


def test_tis_without_behavior_logprobs_is_an_error():
    rows = [torch.tensor([-1.0])]
    batch = TokenBatch.concat(rows, advantages=[1.0], mask=[torch.ones(1)])

    with pytest.raises(ConfigError, match="behavior_logprobs must be given for tis"):
        policy_loss_per_token("dapo", batch, tis=TIS())


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -0.5, 1.0), ("k2", 0.125, -0.5), ("k3", math.exp(0.5) - 1.5, 1 - math.exp(0.5))],
)
def test_kl_estimators_have_their_value_and_gradient(estimator, value, slope):
    policy = torch.tensor([-1.5], dtype=torch.float64, requires_grad=True)

    estimate = kl_penalty(policy, torch.tensor([-1.0], dtype=torch.float64), estimator)
    estimate.sum().backward()

    assert estimate.item() == pytest.approx(value)
    assert policy.grad.item() == pytest.approx(slope)


def test_k3_never_overflows_and_never_pushes_away_from_the_reference():
    policy = torch.tensor([-1000.0, -0.001], requires_grad=True)

    estimate = kl_penalty(policy, torch.tensor([-0.001, -1000.0]), "k3")
    (gradient,) = torch.autograd.grad(estimate.sum(), policy)

    assert torch.isfinite(estimate).all()
    assert gradient.tolist() == [0.0, 1.0]


@pytest.mark.parametrize("config", [GRPO(kl_beta=0.1), Reinforce(kl_beta=0.1)])
def test_a_kl_penalty_without_reference_logprobs_is_an_error_and_never_zeros(config):
    rows = [torch.tensor([-1.0])]
    batch = TokenBatch.concat(rows, advantages=[1.0], mask=[torch.ones(1)])

    with pytest.raises(ConfigError, match="ref_logprobs must be given when kl_beta > 0, got None"):
        policy_loss_per_token(type(config).__name__.lower(), batch, config)


def test_the_kl_term_alone_has_a_gradient_toward_the_reference():
    policy = torch.tensor([-1.0, -0.7], requires_grad=True)
    batch = TokenBatch.concat(
        [policy], advantages=[0.0], mask=[torch.ones(2)], ref_logprobs=[torch.tensor([-2.0, -0.5])]
    )

    loss = policy_loss_per_token("grpo", batch, GRPO(kl_beta=0.2)).per_token.sum()
    (gradient,) = torch.autograd.grad(loss, policy)

    assert gradient[0] > 0 > gradient[1]


def test_an_unknown_estimator_is_refused_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"one of \['k1', 'k2', 'k3'\], got 'k4'"):
        GRPO(kl_estimator="k4").validate()  # pyright: ignore[reportArgumentType]


def test_tis_metrics_report_weights_and_the_share_that_was_cut():
    batch = off_policy_batch([-1.0, -1.0, -1.0, -1.0], [-1.0, -3.0, -1.2, -9.0], [1, 1, 1, 0])

    token = TIS(cap=5.0).metrics(batch)
    icepop = TIS(icepop_threshold=2.0).metrics(batch)
    sequence = TIS(cap=5.0, level="sequence").metrics(batch)

    assert float(token["tis/weight_mean"]) == pytest.approx((1 + 5 + math.exp(0.2)) / 3)
    assert float(token["tis/clip_frac"]) == pytest.approx(1 / 3)
    assert float(icepop["tis/icepop_clip_frac"]) == pytest.approx(1 / 3)
    assert float(sequence["tis/seq_ratio"]) == pytest.approx(math.exp(2.2), rel=1e-6)
    assert float(sequence["tis/clip_frac"]) == 1.0
