import inspect
import math

import pytest
import tinker
import torch

from hearth.errors import ConfigError
from training.utils.rl import make_grpo_loss_fn, make_offpolicy_grpo_loss_fn


def datum_of(weights):
    data = tinker.TensorData(data=weights, dtype="float32", shape=[len(weights)])
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1] * len(weights)),
        loss_fn_inputs={"weights": data},
    )


def leaves(*rows):
    return [torch.tensor(row, requires_grad=True) for row in rows]


def test_signatures_and_defaults_are_the_documents():
    def parameters(function):
        given = inspect.signature(function).parameters.values()
        return [
            (value.name, value.default) for value in given if value.default is not value.empty
        ], [value.name for value in given if value.default is value.empty]

    assert parameters(make_grpo_loss_fn) == (
        [("kl_beta", 0.001), ("eps", 1e-8)],
        ["rewards", "ref_logprobs_list"],
    )
    assert parameters(make_offpolicy_grpo_loss_fn) == (
        [("kl_beta", 0.001), ("clip_rho", 10.0)],
        ["rewards", "ref_logprobs_list", "behavior_logprobs_list"],
    )


def test_the_metrics_are_grpo_loss_and_mean_kl():
    rows = leaves([-1.0, -2.0], [-1.0, -1.0])
    loss_fn = make_grpo_loss_fn([1.0, 0.0], [[-1.5, -2.0], [-1.0, -1.5]])

    loss, metrics = loss_fn([datum_of([1.0, 1.0])] * 2, rows)

    assert metrics == {"grpo_loss": loss.item(), "mean_kl": 0.5}


def test_lengths_are_cut_to_the_shortest():
    rows = leaves([-1.0, -2.0, -3.0], [-1.0, -1.0])
    loss_fn = make_grpo_loss_fn([1.0, 0.0], [[-1.0, -2.0], [-1.0, -1.0, -9.0]], kl_beta=0.1)

    loss, _ = loss_fn([datum_of([0.0, 1.0, 1.0]), datum_of([1.0, 1.0])], rows)
    gradients = torch.autograd.grad(loss, rows)

    score = 1 / math.sqrt(2)
    assert gradients[0].tolist() == pytest.approx([0.0, (0.1 - score) / 2, 0.0])
    assert gradients[1].tolist() == pytest.approx([(0.1 + score) / 2] * 2)


@pytest.mark.parametrize("reward", [0.3, 2.0])
def test_equal_rewards_leave_only_the_kl(reward):
    rows = leaves([-1.0, -2.0], [-1.0, -1.0], [-0.5, -0.5])
    loss_fn = make_grpo_loss_fn([reward] * 3, [[-1.0, -2.0]] * 3, kl_beta=0.3)

    gradients = torch.autograd.grad(loss_fn([datum_of([0.0, 1.0])] * 3, rows)[0], rows)

    for gradient in gradients:
        assert gradient.tolist() == pytest.approx([0.0, 0.1])


def test_a_tiny_spread_counts_as_one():
    rows = leaves([-1.0], [-1.0])
    loss_fn = make_grpo_loss_fn([0.0, 2e-9], [[-1.0]] * 2, kl_beta=0.0)

    gradients = torch.autograd.grad(loss_fn([datum_of([1.0])] * 2, rows)[0], rows)

    assert gradients[0].item() == pytest.approx(0.5e-9, rel=1e-5)


def test_rho_is_capped_and_a_capped_rho_has_no_gradient_of_its_own():
    rows = leaves([-0.5], [-1.0])
    loss_fn = make_offpolicy_grpo_loss_fn(
        [1.0, 0.0], [[-0.5], [-1.0]], [[-5.0], [-1.0]], kl_beta=0.0
    )

    loss, metrics = loss_fn([datum_of([1.0])] * 2, rows)
    gradients = torch.autograd.grad(loss, rows)

    score = 1 / math.sqrt(2)
    assert metrics["mean_rho"] == 5.5
    assert loss.item() == pytest.approx((10 * 0.5 * score - score) / 2, rel=1e-6)
    assert gradients[0].item() == pytest.approx(-10 * score / 2, rel=1e-6)


def test_a_sample_without_response_tokens_adds_nothing():
    rows = leaves([-1.0, -2.0], [-1.0, -2.0])
    behavior = [[-1.5, -2.5], [math.nan, math.nan]]
    loss_fn = make_offpolicy_grpo_loss_fn([1.0, 0.0], [[-1.0, -2.0]] * 2, behavior)

    loss, metrics = loss_fn([datum_of([0.0, 1.0]), datum_of([0.0, 0.0])], rows)
    gradients = torch.autograd.grad(loss, rows)

    # The other sample's alone: half of rho times its advantage times its response's -2.
    assert loss.item() == pytest.approx(math.exp(0.5) / math.sqrt(2), rel=1e-6)
    assert gradients[1].tolist() == [0.0, 0.0]
    assert metrics["mean_rho"] == pytest.approx(math.exp(0.5))


@pytest.mark.parametrize(
    ("rewards", "references", "rule"),
    [
        ([1.0], [[-1.0]], "at least 2 values, got 1"),
        ([1.0, math.nan], [[-1.0]] * 2, r"rewards\[1\] must be finite, got nan"),
        ([1.0, 0.0], [[-1.0]], "ref_logprobs_list must have one entry per reward, got 1 for 2"),
    ],
)
def test_bad_rewards_and_references_are_refused(rewards, references, rule):
    with pytest.raises(ConfigError, match=rule):
        make_grpo_loss_fn(rewards, references)
    with pytest.raises(ConfigError, match=rule):
        make_offpolicy_grpo_loss_fn(rewards, references, references)


def test_behavior_logprobs_are_one_list_per_reward():
    rule = "behavior_logprobs_list must have one entry per reward, got 1 for 2"
    with pytest.raises(ConfigError, match=rule):
        make_offpolicy_grpo_loss_fn([1.0, 0.0], [[-1.0]] * 2, [[-1.0]])
