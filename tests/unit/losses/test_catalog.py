import math
from dataclasses import fields
from itertools import pairwise

import pytest
import torch

from hearth.errors import ConfigError
from hearth.losses import (
    CISPO,
    DAPO,
    DRO,
    GRPO,
    GSPO,
    OBJECTIVES,
    POLICY_LOSSES,
    ImportanceSampling,
    Reinforce,
    TokenBatch,
    policy_loss_per_token,
)


def one_sample(policy, old, advantage, **rows):
    return TokenBatch.concat(
        [torch.tensor(policy, requires_grad=True)],
        advantages=[advantage],
        mask=[torch.ones(len(policy))],
        old_logprobs=[torch.tensor(old)],
        **{name: [torch.tensor(row)] for name, row in rows.items()},
    )


def test_the_policy_losses_are_the_documented_seven():
    assert list(POLICY_LOSSES) == [
        "grpo",
        "importance_sampling",
        "reinforce",
        "dapo",
        "dro",
        "gspo",
        "cispo",
    ]
    assert set(OBJECTIVES) - set(POLICY_LOSSES) == {"cispo_mask", "cross_entropy"}
    assert [name for name, loss in POLICY_LOSSES.items() if loss.has_kl] == ["grpo", "reinforce"]


def test_an_unknown_policy_loss_is_a_value_error_that_lists_the_allowed_ones():
    batch = one_sample([-1.0], [-1.0], 1.0)
    with pytest.raises(ValueError, match="grpo, importance_sampling, reinforce, dapo, dro, gspo"):
        policy_loss_per_token("ppo2", batch)


def test_a_config_of_another_objective_is_refused():
    batch = one_sample([-1.0], [-1.0], 1.0)
    with pytest.raises(ConfigError, match="config must be DAPO for 'dapo', got GRPO"):
        policy_loss_per_token("dapo", batch, GRPO(kl_beta=0.0))


def test_all_objectives_differ_on_one_fixture():
    batch = one_sample(
        [-0.4, -1.0, -1.6], [-1.0, -1.1, -1.0], -1.3, behavior_logprobs=[-0.8, -1.2, -1.0]
    )
    losses = sorted(
        float(
            policy_loss_per_token(name, batch, GRPO(kl_beta=0.0) if name == "grpo" else None)
            .per_token.detach()
            .sum()
        )
        for name in OBJECTIVES
        if name != "dapo"
    )
    assert all(b - a > 1e-4 for a, b in pairwise(losses))


def test_dapo_clips_above_1_28_where_grpo_clips_above_1_2():
    def moves(name, config, ratio):
        batch = one_sample([math.log(ratio) - 1], [-1.0], 1.0)
        loss = policy_loss_per_token(name, batch, config).per_token.sum()
        return bool(torch.autograd.grad(loss, batch.policy_logprobs)[0].any())

    assert moves("dapo", DAPO(), 1.25)
    assert not moves("dapo", DAPO(), 1.30)
    assert not moves("grpo", GRPO(kl_beta=0.0), 1.25)


def test_importance_sampling_bounds_the_ratio_when_asked_to():
    batch = one_sample([-0.1, -5.0], [-3.0, -0.1], 1.0)
    config = ImportanceSampling(ratio_min=0.5, ratio_max=3.0)

    output = policy_loss_per_token("importance_sampling", batch, config)

    assert output.per_token.tolist() == [-3.0, -0.5]
    assert float(output.metrics["is_clip_frac"]) == 1.0


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (GRPO(kl_beta=-0.1), "GRPO.kl_beta must be finite and >= 0, got -0.1"),
        (GRPO(eps_clip_high=math.nan), "GRPO.eps_clip_high must be finite"),
        (DAPO(eps_clip_c=1.0), "DAPO.eps_clip_c must be > 1, got 1.0"),
        (GSPO(clip_ratio_low=-1), "GSPO.clip_ratio_low must be finite and >= 0"),
        (DRO(beta=math.inf), "DRO.beta must be finite"),
        (CISPO(ratio_log_cap=-1), "CISPO.ratio_log_cap must be"),
        (Reinforce(ratio_log_cap=-1), "Reinforce.ratio_log_cap must be"),
        (ImportanceSampling(ratio_max=0.5), "ratio_max must be finite and >= 1"),
        (ImportanceSampling(ratio_min=1.5), "ratio_min must be <= 1"),
    ],
)
def test_bad_options_are_refused_by_name(options, rule):
    with pytest.raises(ConfigError, match=rule):
        options.validate()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (loss.options, field.name)
        for loss in OBJECTIVES.values()
        for field in fields(loss.options)
        if field.name not in ("kl_estimator", "gated")
    ],
)
def test_every_number_of_an_objective_has_a_lower_bound(kind, name):
    kind().validate()
    with pytest.raises(ConfigError, match=rf"{name} must be .*, got -1"):
        kind(**{name: -1.0}).validate()


@pytest.mark.parametrize(
    ("name", "share"),
    [("cispo", {"cispo_clip_frac": 2 / 3}), ("cispo_mask", {"cispo_mask_frac": 1 / 3})],
)
def test_cispo_says_how_many_weights_are_beyond_its_bounds_and_their_mean(name, share):
    batch = one_sample([-0.4, -1.0, -1.6], [-1.0, -1.0, -1.0], 1.0)

    metrics = policy_loss_per_token(name, batch).metrics

    mean = {"ppo_ratio_mean": (math.exp(0.6) + 1 + math.exp(-0.6)) / 3}
    found = {key: float(metrics[key]) for key in share | mean}
    assert found == pytest.approx(share | mean)


@pytest.mark.parametrize(
    ("name", "metric", "above", "below"),
    [
        ("grpo", "ppo_clip_frac", 2, 3),
        ("dapo", "dapo_clip_frac", 1, 3),
        ("cispo_mask", "cispo_mask_frac", 1, 3),
        ("cispo", "cispo_clip_frac", 4, 4),
    ],
)
def test_a_clip_counts_where_it_holds_a_gradient_above_and_below(name, metric, above, below):
    # Beyond DAPO's upper bound, beyond GRPO's alone, on policy, three below both.
    policy = [math.log(ratio) - 1 for ratio in (1.3, 1.25, 1.0, 0.75, 0.7, 0.5)]
    config = GRPO(kl_beta=0.0) if name == "grpo" else None

    for advantage, count in ((1.0, above), (-1.0, below), (0.0, 4 if name == "cispo" else 0)):
        batch = one_sample(policy, [-1.0] * 6, advantage)
        found = policy_loss_per_token(name, batch, config).metrics[metric]
        assert float(found) == pytest.approx(count / 6)


def test_shared_metrics_have_their_documented_values():
    batch = one_sample(
        [-1.0, -2.0], [-1.5, -2.0], 2.0, behavior_logprobs=[-1.0, -1.5], ref_logprobs=[-1.2, -2.2]
    )

    output = policy_loss_per_token("grpo", batch, GRPO(kl_beta=0.5))
    metrics = {name: float(value) for name, value in output.metrics.items()}

    k3 = math.exp(-0.2) + 0.2 - 1
    assert metrics == pytest.approx(
        {
            "active_tokens": 2.0,
            "mean_adv_loss": (-1.2 * 2 - 2) / 2,
            "mean_kl_penalty": 0.5 * k3,
            "mean_loss": (-1.2 * 2 - 2) / 2 + 0.5 * k3,
            "mean_kl": 0.2,
            "ref_kl": k3,
            "inference_diff": 0.25,
            "inference_kld": (math.exp(-0.5) + 0.5 - 1) / 2,
            "ppo_kl": (math.exp(0.5) - 0.5 - 1) / 2,
            "ppo_clip_frac": 0.5,
            "ppo_ratio_mean": (math.exp(0.5) + 1) / 2,
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("name", "metric", "value"),
    [
        ("dapo", "dapo_clip_frac", 1 / 3),
        ("gspo", "gspo_clip_frac", 0.0),
        ("cispo", "cispo_clip_frac", 2 / 3),
        ("cispo_mask", "cispo_mask_frac", 1 / 3),
        ("dro", "dro_quad_penalty", 0.05 * 0.5 * 0.5 / 3),
        ("importance_sampling", "is_ratio_mean", (math.exp(0.5) + 1 + math.exp(-0.5)) / 3),
        ("reinforce", "is_ratio_mean", (math.exp(0.5) + 1 + math.exp(-0.5)) / 3),
        ("gspo", "ppo_ratio_mean", 1.0),
    ],
)
def test_each_objective_reports_its_own_metric(name, metric, value):
    row = [-1.0, -1.0, -1.0]
    batch = one_sample([-0.5, -1.0, -1.5], row, 1.0, behavior_logprobs=row)

    metrics = policy_loss_per_token(name, batch).metrics

    assert float(metrics[metric]) == pytest.approx(value, rel=1e-6, abs=1e-9)
    assert not metrics[metric].requires_grad
