import math
import random

import pytest
import tinker
import torch

from hearth.errors import ConfigError
from hearth.losses import (
    GRPO,
    OBJECTIVES,
    POLICY_LOSSES,
    TIS,
    Reinforce,
    TokenBatch,
    builtin_objective,
    policy_loss_per_token,
)
from training.utils.rl import make_policy_loss_fn

WITH_KL = {"grpo": GRPO(kl_beta=0.3), "reinforce": Reinforce(kl_beta=0.3)}
WIRE_NAMES = {
    "grpo": "ppo",
    "cispo": "cispo",
    "dapo": "dapo",
    "dro": "dro",
    "gspo": "gspo",
    "importance_sampling": "importance_sampling",
}


def tensor_data(values):
    return tinker.TensorData(data=list(values), dtype="float32", shape=[len(values)])


def datum_of(length, **fields):
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(list(range(1, length + 1))),
        loss_fn_inputs={name: tensor_data(values) for name, values in fields.items()},
    )


def make_rollout(seed=0, count=4):
    """Parallel lists as a recipe has them; ragged, with multi-turn masks."""
    rng = random.Random(seed)
    rollout = {"advantages": [], "old": [], "behavior": [], "ref": [], "mask": [], "rows": []}
    for _ in range(count):
        policy = [rng.uniform(-3, -0.1) for _ in range(rng.randint(2, 7))]
        rollout["rows"].append(torch.tensor(policy, requires_grad=True))
        for name in ("old", "behavior", "ref"):
            rollout[name].append([min(tensor + rng.gauss(0, 0.4), -0.01) for tensor in policy])
        rollout["advantages"].append(rng.gauss(0, 1))
        rollout["mask"].append([float(rng.random() < 0.6) for _ in policy])
    return rollout


def closure_of(name, rollout, tis=None, keep=slice(None)):
    return make_policy_loss_fn(
        name,
        advantages=rollout["advantages"][keep],
        behavior_logprobs=rollout["behavior"][keep],
        old_logprobs=rollout["old"][keep],
        ref_logprobs=rollout["ref"][keep],
        config=WITH_KL.get(name),
        tis=tis,
    )


def datums_of(rollout):
    return [datum_of(len(mask), weights=mask) for mask in rollout["mask"]]


@pytest.mark.parametrize(
    ("name", "expected"), [("cispo", [-1.28, -1.0, -0.8]), ("cispo_mask", [0.0, -1.0, -0.6065307])]
)
def test_cispo_keeps_the_gradient_that_its_older_form_masks(name, expected):
    row = torch.tensor([-0.5, -1.0, -1.5], requires_grad=True)
    old = [[-1.0] * 3]
    loss_fn = make_policy_loss_fn(name, advantages=[1.0], behavior_logprobs=old, old_logprobs=old)

    loss, _ = loss_fn([datum_of(3, weights=[1.0] * 3)], [row])
    loss.backward()

    assert row.grad.tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("tis", [None, TIS(), TIS(level="sequence")], ids=["off", "token", "seq"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_client_closure_and_kernel_agree_on_loss_and_gradient(name, tis):
    rollout = make_rollout()
    rows = rollout["rows"]
    batch = TokenBatch.concat(
        rows,
        advantages=rollout["advantages"],
        mask=[torch.tensor(mask) for mask in rollout["mask"]],
        old_logprobs=[torch.tensor(logprobs) for logprobs in rollout["old"]],
        behavior_logprobs=[torch.tensor(logprobs) for logprobs in rollout["behavior"]],
        ref_logprobs=[torch.tensor(logprobs) for logprobs in rollout["ref"]],
    )

    loss, metrics = closure_of(name, rollout, tis)(datums_of(rollout), rows)
    output = policy_loss_per_token(name, batch, WITH_KL.get(name), tis)

    assert loss.item() == output.per_token.sum().item()
    gradients = torch.autograd.grad(loss, rows)
    expected = torch.autograd.grad(output.per_token.sum(), rows)
    assert all(map(torch.equal, gradients, expected))
    assert metrics.items() >= {key: float(metric) for key, metric in output.metrics.items()}.items()


@pytest.mark.parametrize("tis", [None, TIS(cap=1.2)], ids=["off", "token"])
@pytest.mark.parametrize("name", WIRE_NAMES)
def test_client_closure_and_trainer_builtin_agree_with_weights_folded_in(name, tis):
    rollout = make_rollout(seed=5)
    rows = rollout["rows"]
    masks = [torch.tensor(mask) for mask in rollout["mask"]]
    old = [torch.tensor(logprobs) for logprobs in rollout["old"]]
    behavior = [torch.tensor(logprobs) for logprobs in rollout["behavior"]]
    weights = [torch.ones_like(mask) for mask in masks]
    if tis is not None:
        weights = [(o - b).exp().clamp(max=tis.cap) for o, b in zip(old, behavior, strict=True)]
    inputs = [
        {"logprobs": o, "advantages": a * w * m, "weights": m}
        for o, a, w, m in zip(old, rollout["advantages"], weights, masks, strict=True)
    ]
    builtin = builtin_objective(WIRE_NAMES[name])

    theirs = builtin.evaluate(builtin.make_batch(rows, inputs)).per_token.sum()
    loss_fn = make_policy_loss_fn(
        name,
        advantages=rollout["advantages"],
        behavior_logprobs=behavior,
        old_logprobs=old,
        config=GRPO(kl_beta=0.0) if name == "grpo" else None,
        tis=tis,
    )
    ours, _ = loss_fn(datums_of(rollout), rows)

    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    pairs = zip(torch.autograd.grad(ours, rows), torch.autograd.grad(theirs, rows), strict=True)
    for mine, other in pairs:
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_sum_over_chunks_equals_the_whole(name):
    rollout = make_rollout(seed=2, count=5)
    rows, data = rollout["rows"], datums_of(rollout)
    loss, _ = closure_of(name, rollout)(data, rows)
    whole = torch.autograd.grad(loss, rows)

    total = 0.0
    for chunk in (slice(0, 2), slice(2, 3), slice(3, 5)):
        part, _ = closure_of(name, rollout, keep=chunk)(data[chunk], rows[chunk])
        total += part.item()
        for gradient, expected in zip(
            torch.autograd.grad(part, rows[chunk]), whole[chunk], strict=True
        ):
            torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-7)

    assert total == pytest.approx(loss.item(), rel=1e-5)


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_the_contract_is_a_differentiable_scalar_and_float_metrics(name):
    rollout = make_rollout(seed=3)

    loss, metrics = closure_of(name, rollout)(datums_of(rollout), rollout["rows"])

    assert loss.requires_grad
    assert loss.shape == ()
    assert all(type(value) is float for value in metrics.values())
    active = sum(map(sum, rollout["mask"]))
    assert metrics["active_tokens"] == active
    assert metrics["mean_loss"] == pytest.approx(loss.item() / active, rel=1e-5)
    assert {"mean_adv_loss", "mean_kl", "inference_diff", "inference_kld", "ppo_kl"} <= set(metrics)


@pytest.mark.parametrize("tis", [None, TIS(level="sequence")], ids=["off", "seq"])
@pytest.mark.parametrize("name", OBJECTIVES)
def test_without_active_tokens_the_loss_is_a_differentiable_zero_with_all_metrics(name, tis):
    rollout = make_rollout(seed=4)
    idle = {**rollout, "mask": [[0.0] * len(mask) for mask in rollout["mask"]]}
    _, metrics = closure_of(name, rollout, tis)(datums_of(rollout), rollout["rows"])

    loss, idle_metrics = closure_of(name, idle, tis)(datums_of(idle), idle["rows"])
    gradients = torch.autograd.grad(loss, idle["rows"])
    empty, empty_metrics = closure_of(name, idle, tis, keep=slice(0, 0))([], [])
    empty.backward()

    assert loss.item() == empty.item() == 0.0
    assert not any(gradient.any() for gradient in gradients)
    assert set(metrics) == set(idle_metrics) == set(empty_metrics)
    assert all(map(math.isfinite, [*idle_metrics.values(), *empty_metrics.values()]))


ROWS = [-1.0, -2.0, -0.5]
FAULTS = {
    "missing": (None, "datum 1: behavior_logprobs must have 3 rows, got none for 2 active"),
    "empty": ([], "datum 1: behavior_logprobs must have 3 rows, got none for 2 active"),
    "short": ([-1.0, -1.0], r"datum 1: behavior_logprobs must have 3 target-aligned .*\[2\]"),
    "long": ([-1.0] * 4, r"datum 1: behavior_logprobs must have 3 target-aligned .*\[4\]"),
    "nan": ([-1.0, math.nan, -1.0], "datum 1: behavior_logprobs at position 1 .*got nan"),
    "none": ([-1.0, None, -1.0], "datum 1: behavior_logprobs at position 1 .*got nan"),
    "inf": ([-1.0, -1.0, -math.inf], "datum 1: behavior_logprobs at position 2 .*got -inf"),
    "positive": ([-1.0, -1.0, 0.5], "datum 1: behavior_logprobs at position 2 .*got 0.5"),
    "text": (["a", "b", "c"], "datum 1: behavior_logprobs must be numbers"),
}


def run_two(behavior, advantages=(1.0, -1.0), **options):
    """Loss, metrics and gradients of two samples."""
    rows = [torch.tensor(ROWS, requires_grad=True) for _ in range(2)]
    data = [datum_of(3, weights=[0.0, 1.0, 1.0]) for _ in rows]
    loss_fn = make_policy_loss_fn(
        "importance_sampling", advantages=advantages, behavior_logprobs=behavior, **options
    )
    loss, metrics = loss_fn(data, rows)
    gradients = torch.autograd.grad(loss, rows)
    return loss, metrics, [gradient.tolist() for gradient in gradients]


@pytest.mark.parametrize(("rows", "message"), FAULTS.values(), ids=FAULTS)
def test_bad_behavior_logprobs_are_a_value_error_that_names_the_datum(rows, message):
    with pytest.raises(ValueError, match=message):
        run_two([ROWS, rows])


def test_bad_behavior_logprobs_on_masked_tokens_do_not_matter():
    loss, metrics, _ = run_two([ROWS, [math.nan, -2.0, -0.5]], tis=TIS())
    other, *_ = run_two([ROWS, [99.0, -2.0, -0.5]], tis=TIS())

    assert loss.item() == other.item()
    assert metrics["inference_diff"] == 0.0


def test_a_sample_without_active_tokens_needs_no_logprobs():
    data = [datum_of(2, weights=[1.0, 1.0]), datum_of(1, weights=[0.0])]
    rows = [torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-1.0])]
    loss_fn = make_policy_loss_fn(
        "reinforce", advantages=[1.0, 1.0], behavior_logprobs=[[-1.0, -1.0], None]
    )

    assert loss_fn(data, rows)[0].item() == -2.0


def test_the_mask_is_weights_then_loss_mask_then_what_follows_the_prompt():
    row = torch.tensor(ROWS, requires_grad=True)
    behavior = [ROWS]

    def active(datum, prompt_lens=None):
        loss_fn = make_policy_loss_fn(
            "cispo", advantages=[1.0], behavior_logprobs=behavior, prompt_lens=prompt_lens
        )
        (gradient,) = torch.autograd.grad(loss_fn([datum], [row])[0], row)
        return (gradient != 0).tolist()

    both = datum_of(3, weights=[0.0, 1.0, 1.0], loss_mask=[1.0, 0.0, 0.0])
    assert active(both) == [False, True, True]
    assert active(datum_of(3, loss_mask=[1.0, 0.0, 1.0])) == [True, False, True]
    assert active(datum_of(3), prompt_lens=1) == [True, True, True]
    assert active(datum_of(3), prompt_lens=2) == [False, True, True]
    assert active(datum_of(3), prompt_lens=[3]) == [False, False, True]
    assert active(datum_of(3, weights=[1.0, 1.0, 0.0]), prompt_lens=2) == [False, True, False]
    with pytest.raises(ConfigError, match=r"datum 0: loss_fn_inputs must hold a mask \(weights or"):
        active(datum_of(3))


def test_response_metrics_count_tool_tokens_between_turns():
    row = torch.tensor([-1.0] * 6, requires_grad=True)
    datum = datum_of(6, weights=[0, 0, 1, 0, 0, 1])
    options = {"advantages": [1.0], "behavior_logprobs": [[-1.0] * 6]}

    _, metrics = make_policy_loss_fn("dapo", **options)([datum], [row])
    _, with_prompt = make_policy_loss_fn("dapo", prompt_lens=2, **options)([datum], [row])

    assert (metrics["total_resp_tokens"], metrics["mask_ratio"]) == (4.0, 0.5)
    assert (with_prompt["total_resp_tokens"], with_prompt["mask_ratio"]) == (5.0, 0.4)


def test_an_advantage_may_be_rows_of_its_own():
    *_, gradients = run_two(None, advantages=[[9.0, 2.0, -3.0], 0.5])

    assert gradients == [[0.0, -2.0, 3.0], [0.0, -0.5, -0.5]]


def test_without_behavior_logprobs_reinforce_is_plain_and_tis_is_an_error():
    row = torch.tensor(ROWS, requires_grad=True)
    loss_fn = make_policy_loss_fn("reinforce", advantages=[2.0], behavior_logprobs=None)

    loss, metrics = loss_fn([datum_of(3, weights=[0.0, 1.0, 1.0])], [row])

    assert loss.item() == 5.0
    assert "inference_diff" not in metrics
    with pytest.raises(ConfigError, match="behavior_logprobs must be given for tis"):
        make_policy_loss_fn("reinforce", advantages=[2.0], behavior_logprobs=None, tis=TIS())


def test_a_penalty_without_reference_logprobs_is_refused_when_the_closure_is_made():
    with pytest.raises(ConfigError, match="ref_logprobs must be given when kl_beta > 0"):
        make_policy_loss_fn("grpo", advantages=[1.0], behavior_logprobs=[ROWS])


def test_an_unknown_policy_loss_is_a_value_error_that_lists_the_allowed_ones():
    with pytest.raises(ValueError, match=", ".join(POLICY_LOSSES)):
        make_policy_loss_fn("GRPO", advantages=[1.0], behavior_logprobs=[ROWS])


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ConfigError, match="ref_logprobs must have one entry per advantage, got 1"):
        make_policy_loss_fn("dapo", advantages=[1, 2], behavior_logprobs=None, ref_logprobs=[ROWS])
    with pytest.raises(ConfigError, match="prompt_lens must have one entry per advantage, got 3"):
        make_policy_loss_fn(
            "dapo", advantages=[1, 2], behavior_logprobs=None, prompt_lens=[1, 1, 1]
        )
    loss_fn = make_policy_loss_fn("dapo", advantages=[1, 2], behavior_logprobs=None)
    with pytest.raises(ConfigError, match=r"must get 2 datums with logprobs.*got 1 and 1"):
        loss_fn([datum_of(3)], [torch.tensor(ROWS)])
