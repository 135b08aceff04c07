import math
from dataclasses import replace

import pytest
import torch

from hearth.errors import ConfigError, NumericsError
from hearth.losses import CISPO, GRPO, OBJECTIVES, TIS, TokenBatch, policy_loss_per_token

GARBAGE = [math.nan, math.inf, -math.inf, 7.0]
FIELDS = ["policy", "old", "behavior", "ref", "advantages"]
FAULTS = {
    "policy-nan": ("policy", math.nan, "policy_logprobs"),
    "policy-minus-inf": ("policy", -math.inf, "policy_logprobs"),
    "policy-positive": ("policy", 0.5, "policy_logprobs"),
    "old-positive": ("old", 0.01, "old_logprobs"),
    "behavior-nan": ("behavior", math.nan, "behavior_logprobs"),
    "behavior-positive": ("behavior", 3.0, "behavior_logprobs"),
    "ref-inf": ("ref", math.inf, "ref_logprobs"),
    "advantage-nan": ("advantages", math.nan, "advantages"),
    "advantage-inf": ("advantages", -math.inf, "advantages"),
}


def two_samples():
    first = {name: [-0.5, -1.0, -1.5] for name in FIELDS} | {"mask": [0.0, 1.0, 1.0]}
    second = {name: [-0.2, -0.4] for name in FIELDS} | {"mask": [1.0, 1.0]}
    return [first, second]


def config_of(name):
    return GRPO(kl_beta=0.4) if name == "grpo" else OBJECTIVES[name].options()


@pytest.mark.parametrize("garbage", GARBAGE)
@pytest.mark.parametrize("name", OBJECTIVES)
def test_what_stands_on_a_masked_token_reaches_neither_loss_nor_gradient(name, garbage, batch_of):
    clean = two_samples()
    dirty = two_samples()
    for field in FIELDS:
        dirty[0][field][0] = garbage

    results = []
    for samples in (clean, dirty):
        batch, leaf = batch_of(samples)
        per_token = policy_loss_per_token(name, batch, config_of(name), TIS()).per_token
        results.append((per_token.detach(), torch.autograd.grad(per_token.sum(), leaf)[0]))

    (loss, gradient), (dirty_loss, dirty_gradient) = results
    assert loss[0] == dirty_loss[0] == gradient[0] == dirty_gradient[0] == 0
    assert torch.equal(loss, dirty_loss)
    assert torch.equal(gradient, dirty_gradient)


@pytest.mark.parametrize(("field", "value", "name"), FAULTS.values(), ids=FAULTS)
def test_a_bad_value_on_an_active_token_is_an_error_that_names_datum_and_position(
    field, value, name, batch_of
):
    samples = two_samples()
    samples[1][field][1] = value
    batch, _ = batch_of(samples)

    why = "a probability above 1" if value > 0 else "no usable probability"
    why = "" if field == "advantages" else f": {why}; mask the token"
    with pytest.raises(NumericsError, match=f"datum 1: {name} at position 1 .*got {value:g}{why}"):
        policy_loss_per_token("grpo", batch, GRPO(kl_beta=0.1))


def test_the_error_uses_the_callers_datum_ids():
    rows = [torch.tensor([-1.0]), torch.tensor([-1.0, math.nan])]
    batch = TokenBatch.concat(rows, advantages=[1.0, 1.0], mask=[torch.ones(1), torch.ones(2)])

    with pytest.raises(NumericsError, match=r"datum 17: policy_logprobs at position 1 .*got nan"):
        replace(batch, datum_ids=[40, 17]).validate()


def test_a_logprob_of_zero_and_one_above_it_by_rounding_are_fine():
    rows = [torch.tensor([0.0, 5e-5])]
    TokenBatch.concat(rows, advantages=[1.0], mask=[torch.ones(2)]).validate()


@pytest.mark.parametrize("value", [0.5, -1.0, math.nan])
def test_a_mask_entry_that_is_neither_0_nor_1_is_an_error(value):
    rows = [torch.tensor([-1.0, -1.0])]
    batch = TokenBatch.concat(rows, advantages=[1.0], mask=[torch.tensor([1.0, value])])

    with pytest.raises(ConfigError, match="datum 0: mask at position 1 must be 0 or 1"):
        batch.validate()


def test_a_segment_id_out_of_range_is_an_error():
    ones = torch.ones(2)
    batch = TokenBatch(
        policy_logprobs=-ones,
        advantages=ones,
        mask=ones,
        segment_ids=torch.tensor([0, 2]),
        num_samples=2,
    )

    with pytest.raises(ConfigError, match=r"segment_ids at position 0 must be in \[0, 2\), got 2"):
        batch.validate()


def test_a_field_of_another_length_is_an_error_that_names_datum_and_field():
    rows = [torch.tensor([-1.0]), torch.tensor([-1.0, -1.0])]
    mask = [torch.ones(1), torch.ones(2)]

    with pytest.raises(ConfigError, match="datum 1: old_logprobs must have 2 target-aligned"):
        TokenBatch.concat(rows, advantages=[1.0, 1.0], mask=mask, old_logprobs=[rows[0], rows[0]])
    with pytest.raises(ConfigError, match="mask must have one entry per sample, got 1"):
        TokenBatch.concat(rows, advantages=[1.0, 1.0], mask=mask[:1])
    with pytest.raises(ConfigError, match="advantages must have one entry per sample, got 1"):
        TokenBatch.concat(rows, advantages=[1.0], mask=mask)


def test_flat_fields_of_different_shapes_are_an_error():
    ones = torch.ones(2)
    with pytest.raises(ConfigError, match=r"mask must have shape \[2\] as policy_logprobs"):
        TokenBatch(
            policy_logprobs=-ones,
            advantages=ones,
            mask=torch.ones(3),
            segment_ids=torch.zeros(2),
            num_samples=1,
        )


def test_segment_sums_and_means_are_over_active_tokens_and_survive_empty_samples():
    rows = [torch.tensor([-1.0, -2.0, -4.0]), torch.zeros(0), torch.tensor([-8.0])]
    mask = [torch.tensor([1.0, 0.0, 1.0]), torch.zeros(0), torch.zeros(1)]
    batch = TokenBatch.concat(rows, advantages=[1.0, 1.0, 1.0], mask=mask)

    assert batch.segment_sum(batch.policy_logprobs).tolist() == [-5.0, 0.0, 0.0]
    assert batch.segment_mean(batch.policy_logprobs).tolist() == [-2.5, 0.0, 0.0]
    assert batch.at_tokens(torch.tensor([3.0, 5.0, 7.0])).tolist() == [3.0, 3.0, 3.0, 7.0]


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_batch_without_active_tokens_has_loss_zero_and_finite_metrics(name, batch_of):
    samples = [{**sample, "mask": [0.0] * len(sample["mask"])} for sample in two_samples()]
    batch, leaf = batch_of(samples)

    output = policy_loss_per_token(name, batch, config_of(name), TIS(level="sequence"))
    (gradient,) = torch.autograd.grad(output.per_token.sum(), leaf)

    assert not output.per_token.any()
    assert not gradient.any()
    assert all(math.isfinite(float(value)) for value in output.metrics.values())


def test_half_precision_logprobs_are_computed_in_float32():
    rows = [torch.tensor([-1.0, -2.0], dtype=torch.bfloat16, requires_grad=True)]
    batch = TokenBatch.concat(rows, advantages=[1.0], mask=[torch.ones(2)])

    per_token = policy_loss_per_token("cispo", batch, CISPO()).per_token

    assert per_token.dtype == torch.float32
    assert per_token.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("samples", [[0, 1, 2, 3], [2, 0], [3, 1, 2], [1]])
def test_some_samples_of_a_batch_are_the_batch_of_those_samples(samples):
    lengths = [3, 0, 4, 2]
    generator = torch.Generator().manual_seed(1)

    def rows():
        return [torch.randn(length, generator=generator) for length in lengths]

    fields = {name: rows() for name in ("advantages", "old_logprobs")}
    fields["mask"] = [(row > 0).float() for row in rows()]
    scored = rows()
    names = [10, 11, 12, 13]

    def concat(policy, chosen):
        batch = TokenBatch.concat(
            policy, **{name: [given[sample] for sample in chosen] for name, given in fields.items()}
        )
        return replace(batch, datum_ids=[names[sample] for sample in chosen])

    blank = concat([torch.zeros(length) for length in lengths], range(4))
    logprobs = torch.cat([scored[sample] for sample in samples])
    selected = blank.select_samples(samples, logprobs)

    wanted = concat([scored[sample] for sample in samples], samples)
    assert selected.num_samples == wanted.num_samples
    assert list(selected.datum_ids) == list(wanted.datum_ids)
    for name in ("policy_logprobs", "mask", "segment_ids", *fields):
        torch.testing.assert_close(getattr(selected, name), getattr(wanted, name), rtol=0, atol=0)


def test_logprobs_of_other_samples_are_refused():
    blank = TokenBatch.concat([torch.zeros(3)], advantages=[1.0], mask=[torch.ones(3)])
    with pytest.raises(ConfigError, match="must have shape"):
        blank.select_samples([0], torch.zeros(2))
