import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from tests.unit.training.trial_rollouts import group_from

from hearth.errors import ConfigError
from hearth.losses import (
    CISPO,
    DAPO,
    DRO,
    GRPO,
    GSPO,
    POLICY_LOSSES,
    TIS,
    CISPOMask,
    ImportanceSampling,
    Reinforce,
    builtin_objective,
)
from training.config.objective import objective_options, tis_options
from training.data.rows import IndexedRow
from training.data.seeds import row_seed
from training.recipes.rl_loop import Config
from training.samples.groups import PromptGroup, entropy_estimate
from training.samples.rollout import RolloutSample
from training.update.builtin_loss import BuiltinLoss, refuse_pipelined_trainer
from training.update.policy_losses import StepBatch, make_policy_loss_fn, policy_loss
from training.utils import DAPOConfig, TISConfig


def group() -> PromptGroup:
    rows = ([1, 2, 3, 4, 5], [1, 2, 3, 7], [1, 2, 3, 9, 9, 9])
    sampled = [
        RolloutSample(
            tokens=list(row),
            logprobs=[0.0, 0.0, 0.0, *[-0.5 - 0.1 * i for i in range(len(row) - 3)]],
            loss_mask=[0, 0, 0, *[1] * (len(row) - 3)],
            reward=reward,
        )
        for row, reward in zip(rows, (1.0, 0.0, 0.0), strict=True)
    ]
    return group_from(IndexedRow(0, 0, {}), [[sample] for sample in sampled])


@pytest.mark.parametrize("name", [loss for loss in POLICY_LOSSES if loss != "reinforce"])
@pytest.mark.parametrize("tis", [None, TIS(cap=1.1)], ids=["plain", "tis"])
def test_the_built_in_call_has_the_closures_loss_and_gradient(name, tis):
    config = Config(policy_loss=name, kl_beta=0.0, dapo=DAPOConfig(eps_clip_c=3.0))
    objective = objective_options(config)
    samples = group().flat()
    # Completions with ratios to the old policy from 0.55 to 1.49, inside and outside of every clip.
    values = torch.tensor([-1.2, -0.65, -0.2, -0.68, -1.1])
    policy = [
        values.roll(place)[: len(sample.behavior_logprobs)].requires_grad_(True)
        for place, sample in enumerate(samples)
    ]
    for sample in samples:
        sample.old_logprobs = [-0.6] * len(sample.behavior_logprobs)

    loss_fn, data, loss_config = BuiltinLoss(name, objective, tis).request(samples)
    builtin = builtin_objective(loss_fn, loss_config)
    inputs = [
        {key: value.to_torch() for key, value in datum.loss_fn_inputs.items()} for datum in data
    ]
    in_trainer = builtin.evaluate(builtin.make_batch(policy, inputs)).per_token.sum()
    closure = make_policy_loss_fn(
        name,
        advantages=[s.advantage for s in samples],
        tis=tis,
        config=objective,
        behavior_logprobs=[s.behavior_logprobs for s in samples],
        old_logprobs=[s.old_logprobs for s in samples],
    )
    in_client, _ = closure([s.datum for s in samples], policy)

    assert float(in_trainer.detach()) == pytest.approx(
        float(in_client.detach()), rel=1e-5, abs=1e-6
    )
    gradients = [torch.autograd.grad(loss, policy) for loss in (in_trainer, in_client)]
    for theirs, ours in zip(*gradients, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
        assert ours.any()


def test_the_built_in_loss_is_that_of_the_config_and_its_ratio_to_whom_the_batch_says():
    config = Config(policy_loss="dapo", loss_path="builtin", kl_beta=0.0, tis_enabled=True)
    samples = group().flat()
    for sample in samples:
        sample.old_logprobs = [-0.6] * len(sample.behavior_logprobs)

    to_old, to_sampler = (
        policy_loss(config, StepBatch(samples, 0.0, ratio_to_sampler=is_to_sampler))
        for is_to_sampler in (False, True)
    )

    assert to_old == BuiltinLoss("dapo", objective_options(config), TIS())
    assert to_sampler == dataclasses.replace(to_old, ratio_to_sampler=True)
    for loss, field in ((to_old, "old_logprobs"), (to_sampler, "behavior_logprobs")):
        _, data, _ = loss.request(samples)
        for sample, datum in zip(samples, data, strict=True):
            expected = pytest.approx(getattr(sample, field))
            assert list(datum.loss_fn_inputs["logprobs"].data) == expected


@pytest.mark.parametrize(
    ("loss_path", "stages", "is_refused"),
    [("builtin", 2, True), ("builtin", 1, False), ("builtin", None, False), ("client", 2, False)],
)
def test_a_model_in_stages_is_refused_for_built_in_losses_alone(loss_path, stages, is_refused):
    shape = stages and SimpleNamespace(
        training_shape_version="tiny/versions/1", pipeline_parallelism=stages
    )
    rule = r"loss_path must be 'client' on tiny/versions/1, got 'builtin': .* not 2"
    expected = pytest.raises(ConfigError, match=rule) if is_refused else nullcontext()

    with expected:
        refuse_pipelined_trainer(Config(loss_path=loss_path, kl_beta=0.0), shape)


@pytest.mark.parametrize(
    ("name", "changes", "options"),
    [
        (
            "grpo",
            {
                "kl_beta": 0.5,
                "kl_estimator": "k2",
                "eps_clip": 0.1,
                "eps_clip_high": 0.3,
                "ratio_log_cap": 5.0,
            },
            GRPO(
                kl_beta=0.5, kl_estimator="k2", eps_clip=0.1, eps_clip_high=0.3, ratio_log_cap=5.0
            ),
        ),
        (
            "importance_sampling",
            {"ratio_min": 0.5, "ratio_max": 3.0, "ratio_log_cap": 5.0},
            ImportanceSampling(ratio_min=0.5, ratio_max=3.0, ratio_log_cap=5.0),
        ),
        (
            "reinforce",
            {"kl_beta": 0.5, "kl_estimator": "k1", "ratio_log_cap": 5.0},
            Reinforce(kl_beta=0.5, kl_estimator="k1", ratio_log_cap=5.0),
        ),
        ("dapo", {"dapo": DAPO(eps_clip_high=0.5), "eps_clip": 0.1}, DAPO(eps_clip_high=0.5)),
        ("dro", {"dro": DRO(beta=0.2)}, DRO(beta=0.2)),
        ("gspo", {"gspo": GSPO(clip_ratio_low=0.1)}, GSPO(clip_ratio_low=0.1)),
        ("cispo", {"cispo": CISPO(eps_low=1.0)}, CISPO(eps_low=1.0)),
        (
            "cispo_mask",
            {"cispo": CISPO(eps_low=0.1, eps_high=0.4, ratio_log_cap=5.0)},
            CISPOMask(eps_low=0.1, eps_high=0.4, ratio_log_cap=5.0),
        ),
    ],
)
def test_options_come_from_their_own_part_of_the_config(name, changes, options):
    assert objective_options(Config(policy_loss=name, **changes)) == options


def test_tis_has_its_own_part_of_the_config():
    assert tis_options(Config()) is None
    on = tis_options(Config(tis_enabled=True, tis=TISConfig(cap=3.0, level="sequence")))
    assert on == TIS(cap=3.0, level="sequence")


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_kl_beta_changes_the_losses_that_have_a_kl_and_no_other(name):
    none, some = (objective_options(Config(policy_loss=name, kl_beta=beta)) for beta in (0.0, 0.5))

    assert (none != some) is POLICY_LOSSES[name].has_kl
    assert POLICY_LOSSES[name].has_kl is (name in ("grpo", "reinforce"))


def test_entropy_is_estimated_over_sampled_tokens_only():
    sampled = [-0.5, -0.6, -0.5, -0.5, -0.6, -0.7]

    assert entropy_estimate([group()]) == pytest.approx(-sum(sampled) / len(sampled))


def test_row_seeds_repeat_and_differ():
    seeds = [row_seed(seed, index) for seed in range(20) for index in range(200)]

    assert seeds == [row_seed(seed, index) for seed in range(20) for index in range(200)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
