import pytest
import torch

from hearth.errors import ConfigError
from hearth.losses import (
    GRPO,
    REDUCTIONS,
    GradientCounts,
    TokenBatch,
    count_gradients,
    policy_loss_per_token,
    reduce_loss,
)

# Three samples; tokens with a gradient: two of the first, none of the second (A = 0), and one of
# the third, whose other active token is clipped.
GRADIENTS = torch.tensor([0.0, -2.0, 0.5, 0.0, 0.0, 1.0, 0.0])
SEGMENTS = torch.tensor([0, 0, 0, 1, 1, 2, 2])


@pytest.mark.parametrize(
    ("mode", "count"), [("num_loss_tokens", 3), ("num_sequences", 2), ("none", 1)]
)
def test_denominators_count_what_has_a_gradient_not_the_mask(mode, count):
    assert count_gradients(GRADIENTS, SEGMENTS).denominator(mode) == count


def test_counts_of_batches_add_up_before_they_divide():
    parts = [
        count_gradients(GRADIENTS[:3], SEGMENTS[:3]),
        count_gradients(GRADIENTS[3:], SEGMENTS[3:]),
    ]

    total = sum(parts, GradientCounts())

    assert total == GradientCounts(tokens=3, sequences=2)
    assert total.denominator("none") == 1


def test_a_denominator_is_never_zero():
    nothing = count_gradients(torch.zeros(2), torch.zeros(2, dtype=torch.int64))
    assert nothing == GradientCounts(0, 0)
    assert [nothing.denominator(mode) for mode in ("num_loss_tokens", "num_sequences")] == [1, 1]


def test_unknown_names_are_value_errors_that_list_the_known_ones():
    batch = TokenBatch.concat([torch.tensor([-1.0])], advantages=[1.0], mask=[torch.ones(1)])
    with pytest.raises(ValueError, match="num_loss_tokens, num_sequences, none, got 'mean'"):
        count_gradients(GRADIENTS, SEGMENTS).denominator("mean")
    with pytest.raises(ValueError, match=r"sum, none, num_loss_tokens.*got 'average'"):
        reduce_loss(torch.ones(1), batch, "average")


@pytest.mark.parametrize(
    ("reduction", "value"),
    [
        ("sum", -6.0),
        ("none", -6.0),
        ("num_loss_tokens", -6.0 / 3),
        ("num_sequences", -6.0 / 2),
        ("token_mean", -6.0 / 4),
        ("sample_mean", -6.0 / 3),
        ("sequence_mean", (-4.0 / 2 - 2.0) / 3),
    ],
)
def test_reductions_divide_as_their_name_says(reduction, value):
    rows = [
        torch.full((3,), -1.0, requires_grad=True),
        torch.full((1,), -1.0, requires_grad=True),
        torch.full((1,), -1.0, requires_grad=True),
    ]
    mask = [torch.tensor([0.0, 1.0, 1.0]), torch.ones(1), torch.ones(1)]
    batch = TokenBatch.concat(rows, advantages=[2.0, 2.0, 0.0], mask=mask)

    per_token = policy_loss_per_token("grpo", batch, GRPO(kl_beta=0.0)).per_token

    assert reduce_loss(per_token, batch, reduction).item() == pytest.approx(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_one_token_of_one_sample_is_its_own_loss_in_its_own_precision(reduction, dtype):
    row = torch.tensor([-1.0], dtype=dtype, requires_grad=True)
    batch = TokenBatch.concat([row], advantages=[2.0], mask=[torch.ones(1)])

    loss = reduce_loss(policy_loss_per_token("reinforce", batch).per_token, batch, reduction)
    loss.backward()

    assert (loss.item(), row.grad.item()) == (2.0, -2.0)
    assert loss.dtype == dtype


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_padding_does_not_change_a_reduction(reduction):
    losses = []
    for pad in (0, 3):
        row = torch.cat([torch.tensor([-1.0, -2.0]), torch.full((pad,), torch.nan)])
        mask = torch.cat([torch.ones(2), torch.zeros(pad)])
        row.requires_grad_(True)
        batch = TokenBatch.concat([row], advantages=[1.5], mask=[mask])
        per_token = policy_loss_per_token("cispo", batch).per_token
        losses.append(reduce_loss(per_token, batch, reduction).item())

    assert losses[0] == losses[1]


def test_counting_by_gradient_needs_a_gradient():
    batch = TokenBatch.concat([torch.tensor([-1.0])], advantages=[1.0], mask=[torch.ones(1)])
    with pytest.raises(ConfigError, match="policy_logprobs must require a gradient"):
        reduce_loss(torch.ones(1), batch, "num_loss_tokens")
