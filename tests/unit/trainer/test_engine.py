from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.unit.trainer.conftest import MakePolicy, Policy
from tests.unit.trainer.decoders import assert_same_gradient
from transformers import AutoModelForCausalLM

from hearth.errors import (
    ClosedError,
    ConfigError,
    ForwardOnlyError,
    NotFoundError,
    NumericsError,
    RequestError,
)
from hearth.losses import BUILTIN_LOSSES, builtin_objective
from hearth.models.lora import LoraOptions
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.passes import PassResult
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord

MakeEngine = Callable[..., TrainerEngine]
Gradient = dict[str, torch.Tensor]
Data = Sequence[DatumRecord]

STEP = AdamParams(learning_rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, grad_clip_norm=1.0)
# No objective clips at these, and each has a gradient on most tokens.
POLICY_LOSSES = [name for name in BUILTIN_LOSSES if name != "cross_entropy"]


def values(datum: DatumRecord, name: str) -> torch.Tensor:
    return torch.from_numpy(np.array(datum.loss_fn_inputs[name].to_numpy()))


def plain_logprobs(module: Any, datum: DatumRecord) -> torch.Tensor:
    """Each datum alone, unpadded, through transformers' own logits."""
    ids = torch.tensor([datum.model_input.chunks[0].tokens])
    logprobs = module(ids).logits[0].float().log_softmax(-1)
    return logprobs.gather(1, values(datum, "target_tokens").reshape(len(logprobs), -1)).squeeze(1)


def plain_gradient(module: Any, data: Data) -> Gradient:
    """Of cross-entropy, by autograd through the whole of it at once."""
    loss = torch.stack(
        [-(plain_logprobs(module, datum) * values(datum, "weights")).sum() for datum in data]
    ).sum()
    named = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def flat(result: PassResult) -> np.ndarray:
    return np.concatenate([logprob.ravel() for logprob in result.logprobs])


def weights_of(policy: Policy, folder: Path) -> Gradient:
    policy.export(folder)
    return AutoModelForCausalLM.from_pretrained(folder).state_dict()


def policy_data(policy: Policy, data: Data, seed: int = 0) -> list[Any]:
    """The same datums as policy-loss rows: old logprobs near the model's, some advantages zero."""
    rng = np.random.default_rng(seed)
    rows: list[Any] = []
    scored = policy.forward(data).logprobs
    for datum, logprobs in zip(data, scored, strict=True):
        old = np.minimum(logprobs + rng.normal(size=logprobs.size) * 0.05, 0)
        inputs = {
            "target_tokens": datum.loss_fn_inputs["target_tokens"],
            "logprobs": encode(old, "float32"),
            "advantages": encode(
                rng.normal(size=old.size) * (rng.random(old.size) < 0.7), "float32"
            ),
        }
        rows.append(datum.model_copy(update={"loss_fn_inputs": inputs}))
    return rows


@pytest.mark.slow
def test_logprobs_are_the_models_own(policy: Policy, qwen_folder: Path, data: Data) -> None:
    result = policy.forward(data)

    module = AutoModelForCausalLM.from_pretrained(qwen_folder).eval()
    with torch.no_grad():
        expected = [plain_logprobs(module, datum).numpy() for datum in data]
    for found, wanted in zip(result.logprobs, expected, strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.slow
def test_results_do_not_depend_on_the_micro_batching(
    make_policy: MakePolicy, random_data: Any
) -> None:
    data = random_data(count=24)
    runs = []
    for budget in (1, 100, 10**6):
        policy = make_policy(micro_batch_tokens=budget)
        scored = policy.forward(data)
        trained = policy.forward_backward(data)
        runs.append((scored, trained, policy.read_gradient()))

    for scored, trained, found in runs:
        assert np.array_equal(flat(scored), flat(runs[0][0]))
        assert np.array_equal(flat(trained), flat(runs[0][0]))
        assert trained.metrics == scored.metrics == runs[0][0].metrics
        assert_same_gradient(found, runs[0][2], tolerance=1e-6)


def test_results_do_not_depend_on_the_datums_order(policy: Policy, data: Data) -> None:
    forwards = policy.forward(data).logprobs
    backwards = policy.forward(data[::-1]).logprobs

    assert all(np.array_equal(*pair) for pair in zip(forwards, backwards[::-1], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [("qwen", {}), ("qwen", {"logit_budget": 1}), ("gpt2", {}), ("gemma", {})],
    ids=["qwen", "chunks of logits", "gpt2", "gemma"],
)
def test_the_gradient_is_that_of_plain_autograd(
    make_policy: MakePolicy, model_of: Any, data: Data, family: str, options: dict[str, Any]
) -> None:
    policy = make_policy(source=model_of(family), **options)
    policy.forward_backward(data)

    module = AutoModelForCausalLM.from_pretrained(model_of(family)).eval()
    assert_same_gradient(policy.read_gradient(), plain_gradient(module, data))


@pytest.mark.slow
@pytest.mark.parametrize("train_unembed", [False, True])
def test_the_adapters_gradient_is_that_of_plain_autograd(
    make_policy: MakePolicy, qwen_folder: Path, data: Data, train_unembed: bool
) -> None:
    from hearth.models.loading import load_model
    from hearth.models.lora import attach_lora

    options = LoraOptions(rank=4, alpha=8, seed=5, train_unembed=train_unembed)
    policy = make_policy(options)
    policy.forward_backward(data)

    loaded = load_model(qwen_folder)
    attach_lora(loaded, options)
    expected = plain_gradient(loaded.module, data)
    assert all(".lora_" in name for name in expected)
    assert_same_gradient(policy.read_gradient(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("loss_fn", POLICY_LOSSES)
def test_a_builtin_loss_and_the_clients_two_passes_give_one_gradient(
    loss_fn: str, policy: Policy, data: Data
) -> None:
    data = policy_data(policy, data)
    builtin = policy.forward_backward(data, loss_fn)
    expected = policy.read_gradient()

    scored = policy.forward([_bare(datum) for datum in data])
    rows = [torch.from_numpy(logprob).requires_grad_() for logprob in scored.logprobs]
    inputs = [{name: values(datum, name) for name in ("logprobs", "advantages")} for datum in data]
    objective = builtin_objective(loss_fn)
    loss = objective.evaluate(objective.make_batch(rows, inputs)).per_token.sum()
    loss.backward()
    weighted = [
        _bare(datum, weights=encode(-row.grad.numpy(), "float32"))  # pyright: ignore[reportOptionalMemberAccess]
        for datum, row in zip(data, rows, strict=True)
    ]
    policy.forward_backward(weighted, "cross_entropy")

    assert builtin.metrics["loss:sum"] == pytest.approx(float(loss.detach()), rel=1e-5)
    assert_same_gradient(policy.read_gradient(), expected, tolerance=1e-6)


def _bare(datum: DatumRecord, **inputs: Any) -> DatumRecord:
    kept = {"target_tokens": datum.loss_fn_inputs["target_tokens"], **inputs}
    return datum.model_copy(update={"loss_fn_inputs": kept})


@pytest.mark.slow
def test_gradients_add_up_over_calls(policy: Policy, data: Data) -> None:
    policy.forward_backward(data)
    whole = policy.read_gradient()

    policy.forward_backward(data[:5])
    policy.forward_backward(data[5:])

    assert_same_gradient(policy.read_gradient(), whole, tolerance=1e-6)


def test_the_loss_is_a_raw_sum_with_negative_and_fractional_weights(
    policy: Policy, datum: Any
) -> None:
    data = [datum([5, 6, 7], weights=[-2.0, 0.25]), datum([8, 9], weights=[1.0])]

    result = policy.forward_backward(data)

    (first, second), third = result.logprobs[0], result.logprobs[1][0]
    assert result.metrics["loss:sum"] == pytest.approx(2 * first - 0.25 * second - third, rel=1e-6)
    assert all(name.count(":") == 1 for name in result.metrics)


def test_normalization_counts_tokens_and_sequences_with_a_gradient(
    policy: Policy, datum: Any
) -> None:
    rows = [[0.5, 0.0, -1.0], [0.0, 0.0, 0.0], [0.0, 2.0, 0.0]]
    denominators = {}
    for mode in ("num_loss_tokens", "num_sequences", "none"):
        for weights in rows:
            policy.forward_backward([datum([5, 6, 7, 8], weights=weights)])
        denominators[mode] = policy.optim_step(STEP, mode)["denominator"]

    assert denominators == {"num_loss_tokens": 3, "num_sequences": 2, "none": 1}


def test_a_token_that_the_clip_silences_is_not_counted(policy: Policy, datum: Any) -> None:
    logprobs = policy.forward([datum([5, 6, 7, 8])]).logprobs[0]
    # Ratios 1, e and 1/e: with a positive advantage only the second stands beyond its bound.
    old = logprobs - np.array([0.0, 1.0, -0.5])
    data = [datum([5, 6, 7, 8], logprobs=np.minimum(old, 0), advantages=[1.0, 1.0, 1.0])]
    policy.forward_backward(data, "ppo")

    metrics = policy.optim_step(STEP, "num_loss_tokens")

    assert metrics["num_loss_tokens"] == 2


def test_a_step_normalizes_the_accumulated_gradient(policy: Policy, data: Data) -> None:
    tokens = sum(int((values(datum, "weights") != 0).sum()) for datum in data)
    still = AdamParams(learning_rate=0.0)
    norms = {}
    for mode in ("none", "num_loss_tokens", "num_sequences"):
        policy.forward_backward(data)
        norms[mode] = policy.optim_step(still, mode)["grad_norm"]

    assert norms["num_loss_tokens"] == pytest.approx(norms["none"] / tokens, rel=1e-6)
    assert norms["num_sequences"] == pytest.approx(norms["none"] / len(data), rel=1e-6)


def test_temperature_divides_the_logits(policy: Policy, qwen_folder: Path, data: Data) -> None:
    datum = data[0]
    result = policy.forward([datum], "cross_entropy", {"temperature": 0.5})

    module = AutoModelForCausalLM.from_pretrained(qwen_folder).eval()
    with torch.no_grad():
        logits = module(torch.tensor([datum.model_input.chunks[0].tokens])).logits[0] / 0.5
    expected = logits.log_softmax(-1).gather(1, values(datum, "target_tokens")[:, None]).squeeze(1)
    np.testing.assert_allclose(result.logprobs[0], expected.numpy(), rtol=0, atol=2e-5)


@pytest.mark.slow
def test_several_targets_per_token_train_together(policy: Policy, datum: Any) -> None:
    pair = datum([5, 6, 7], targets=[[6, 9], [7, 1]], weights=[[0.25, 0.75], [0.0, 1.0]])
    other = datum([5, 6], weights=[1.0])
    result = policy.forward_backward([pair, other])
    found = policy.read_gradient()
    for targets, weights in (([6, 7], [0.25, 0.0]), ([9, 1], [0.75, 1.0])):
        policy.forward_backward([datum([5, 6, 7], targets=targets, weights=weights)])
    policy.forward_backward([other])

    assert [logprob.shape for logprob in result.logprobs] == [(2, 2), (1,)]
    assert_same_gradient(found, policy.read_gradient(), tolerance=1e-6)


def test_untrained_samples_are_scored_all_the_same(policy: Policy, datum: Any) -> None:
    idle = [datum([5, 6, 7], weights=[0.0, 0.0]), datum([7, 8])]
    scored = policy.forward(idle)

    trained = policy.forward_backward(idle)

    assert np.array_equal(flat(trained), flat(scored))
    metrics = policy.optim_step(STEP, "num_loss_tokens")
    assert (metrics["grad_norm"], metrics["num_loss_tokens"], metrics["skipped"]) == (0, 0, 0)


def test_a_step_without_a_gradient_changes_nothing(policy: Policy, tmp_path: Path) -> None:
    before = weights_of(policy, tmp_path / "before")

    metrics = policy.optim_step(AdamParams(learning_rate=1.0, weight_decay=0.5))

    assert (metrics["skipped"], metrics["step"]) == (1, 0)
    after = weights_of(policy, tmp_path / "after")
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=8, alpha=16)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_lowers_the_loss(
    make_policy: MakePolicy, datum: Any, dtype: str, lora: LoraOptions | None
) -> None:
    policy = make_policy(lora, dtype=dtype)
    data = [datum([5, 6, 7, 8, 9], weights=[1.0] * 4), datum([9, 8, 7], weights=[1.0] * 2)]
    losses = []
    for _ in range(12):
        losses.append(policy.forward_backward(data).metrics["loss:sum"])
        policy.optim_step(STEP, "num_loss_tokens")

    assert losses[-1] < 0.5 * losses[0]
    assert policy.forward(data).logprobs[0].dtype == np.float32


@pytest.mark.slow
def test_bfloat16_scores_near_float32(make_policy: MakePolicy, data: Data) -> None:
    exact, rounded = make_policy(), make_policy(dtype="bfloat16")

    difference = flat(exact.forward(data)) - flat(rounded.forward(data))

    assert 0 < float(np.abs(difference).max()) < 0.1


@pytest.mark.slow
def test_a_bad_request_leaves_the_accumulated_gradient(
    policy: Policy, data: Data, datum: Any
) -> None:
    policy.forward_backward(data)
    expected = policy.read_gradient()

    policy.forward_backward(data)
    bad = datum([5, 6, 7], weights=[1.0, math.nan])
    with pytest.raises(NumericsError, match="datum 12: advantages at position 1"):
        policy.forward_backward([*data, bad])

    assert_same_gradient(policy.read_gradient(), expected, tolerance=0)


def test_diverged_weights_are_found_by_either_pass(policy: Policy, data: Data) -> None:
    policy.forward_backward(data)
    policy.optim_step(AdamParams(learning_rate=3e38))

    with pytest.raises(NumericsError, match=r"datum \d+: the model's logprob .* must be finite"):
        policy.forward_backward(data)
    with pytest.raises(NumericsError, match="must be finite"):
        policy.forward(data)


@pytest.mark.slow
def test_a_failure_half_way_drops_the_accumulated_gradient(
    make_policy: MakePolicy, model_of: Any, datum: Any, tmp_path: Path
) -> None:
    module = AutoModelForCausalLM.from_pretrained(model_of("phi"))
    with torch.no_grad():
        module.get_input_embeddings().weight[95] = math.nan
    module.save_pretrained(tmp_path / "broken")
    policy = make_policy(source=tmp_path / "broken", micro_batch_tokens=1)
    good, bad = datum([5, 6, 7], weights=[1.0, 1.0]), datum([95, 6], weights=[1.0])
    policy.forward_backward([good])

    with pytest.raises(NumericsError, match="datum 1: the model's logprob of target 0"):
        policy.forward_backward([good, bad])

    assert policy.optim_step(STEP)["skipped"] == 1


def test_a_positive_old_logprob_names_its_datum(policy: Policy, datum: Any) -> None:
    good = datum([5, 6], logprobs=[-1.0], advantages=[1.0])
    bad = datum([5, 6], logprobs=[0.5], advantages=[1.0])

    with pytest.raises(NumericsError, match="datum 1: old_logprobs at position 0"):
        policy.forward_backward([good, bad], "ppo")


@pytest.mark.parametrize(
    ("loss_fn", "config", "message"),
    [
        ("sft", None, "loss_fn must be one of cross_entropy"),
        ("ppo", {"clip": 1.0}, "must use known keys"),
        ("cross_entropy", {"temperature": 0.0}, "temperature must be finite and > 0, got 0.0"),
        ("cross_entropy", {"temperature": "hot"}, "temperature must be finite"),
        ("ppo", None, r"datum 0: loss_fn_inputs of ppo must hold \['logprobs', 'advantages'\]"),
    ],
)
@pytest.mark.slow
def test_a_bad_loss_is_refused(
    policy: Policy, datum: Any, loss_fn: str, config: Any, message: str
) -> None:
    with pytest.raises((ConfigError, RequestError), match=message):
        policy.forward_backward([datum([5, 6])], loss_fn, config)


def test_a_frozen_model_only_runs_forward(engine: TrainerEngine, data: Data) -> None:
    frozen = engine.create_model(is_frozen=True)

    engine.forward(frozen, data)

    for refused in (
        lambda: engine.forward_backward(frozen, data),
        lambda: engine.optim_step(frozen, STEP),
        lambda: engine.save_state(frozen, "s"),
        lambda: engine.load_state(frozen, "s", with_optimizer=True),
        lambda: engine.load_adapter(frozen, "s"),
    ):
        with pytest.raises(ForwardOnlyError, match="must run on a trainable model"):
            refused()


def test_a_forward_only_trainer_refuses_training(make_policy: MakePolicy, datum: Any) -> None:
    policy = make_policy(forward_only=True)

    with pytest.raises(ForwardOnlyError, match="forward_backward must run on a trainable model"):
        policy.forward_backward([datum([5, 6], weights=[1.0])])


@pytest.mark.slow
def test_a_forward_only_trainers_adapter_is_untrained_and_scores_as_a_new_policys(
    make_engine: MakeEngine, data: Data
) -> None:
    engine, lora = make_engine(forward_only=True), LoraOptions(rank=4)
    base, adapted = engine.create_model(), engine.create_model(lora)
    trainer = make_engine(folder="policy")
    policy = trainer.create_model(lora)

    assert [engine.facts(model_id).lora_rank for model_id in (base, adapted)] == [0, 4]
    expected = flat(trainer.forward(policy, data))
    assert np.array_equal(flat(engine.forward(adapted, data)), expected)
    assert np.array_equal(flat(engine.forward(base, data)), expected)
    for refused in (
        lambda: engine.forward_backward(adapted, data),
        lambda: engine.load_adapter(adapted, "s"),
    ):
        with pytest.raises(ForwardOnlyError, match="must run on a trainable model"):
            refused()


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("policy_first", [True, False])
def test_the_frozen_reference_stays_the_base_while_the_policy_learns(
    engine: TrainerEngine, data: Data, lora: LoraOptions | None, policy_first: bool
) -> None:
    if policy_first:
        policy, frozen = engine.create_model(lora), engine.create_model(is_frozen=True)
    else:
        frozen, policy = engine.create_model(is_frozen=True), engine.create_model(lora)
    before = flat(engine.forward(frozen, data))
    assert np.array_equal(flat(engine.forward(policy, data)), before)

    engine.forward_backward(policy, data)
    engine.forward(frozen, data)
    engine.optim_step(policy, STEP)

    assert np.array_equal(flat(engine.forward(frozen, data)), before)
    assert float(np.abs(flat(engine.forward(policy, data)) - before).max()) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["full", "lora"])
def test_after_unloading_a_new_policy_starts_from_the_base(
    engine: TrainerEngine, data: Data, lora: LoraOptions | None
) -> None:
    first = engine.create_model(lora, owner="first")
    before = flat(engine.forward(first, data))
    engine.forward_backward(first, data)
    engine.optim_step(first, STEP)

    with pytest.raises(RequestError, match="at most one policy"):
        engine.create_model()
    engine.unload(first)
    second = engine.create_model()

    assert np.array_equal(flat(engine.forward(second, data)), before)
    with pytest.raises(NotFoundError, match=f"a model of this trainer, got '{first}'"):
        engine.forward(first, data)


@pytest.mark.slow
def test_a_client_without_a_name_takes_over_and_saves_over_what_another_left(
    engine: TrainerEngine, data: Data
) -> None:
    left = engine.create_model()
    engine.save_state(left, "last")
    engine.forward_backward(left, data)
    engine.optim_step(left, STEP)
    trained = flat(engine.forward(left, data))
    engine.save_state(left, "last")

    taken = engine.create_model()

    with pytest.raises(NotFoundError, match=f"got '{left}'"):
        engine.forward(left, data)
    engine.load_state(taken, "last", with_optimizer=True)
    assert np.array_equal(flat(engine.forward(taken, data)), trained)


@pytest.mark.slow
def test_model_ids_do_not_look_like_serverless_runs(engine: TrainerEngine) -> None:
    ids = [engine.create_model(), engine.create_model(is_frozen=True)]

    assert len(set(ids)) == 2
    assert not any(token.startswith("run-") for token in ids)


@pytest.mark.slow
def test_an_export_is_the_trained_model(
    make_policy: MakePolicy, data: Data, tmp_path: Path
) -> None:
    policy = make_policy(LoraOptions(rank=4))
    policy.forward_backward(data)
    policy.optim_step(STEP)
    policy.export(tmp_path / "out")

    module = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        expected = np.concatenate([plain_logprobs(module, datum).numpy() for datum in data])
    np.testing.assert_allclose(flat(policy.forward(data)), expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_len": 257}, r"max_seq_len must be in \[1, 256\]"),
        ({"max_seq_len": 0}, r"max_seq_len must be in \[1, 256\]"),
        ({"micro_batch_tokens": 0}, "micro_batch_tokens must be >= 1, got 0"),
        ({"recompute_above": 0}, "recompute_above must be >= 1, got 0"),
        ({"dtype": "int8"}, "dtype must be one of"),
    ],
)
def test_impossible_options_are_refused(
    make_engine: MakeEngine, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_engine(**options)


@pytest.mark.slow
def test_sequences_up_to_the_models_last_position_are_scored(
    make_policy: MakePolicy, model_of: Any, datum: Any
) -> None:
    policy = make_policy(source=model_of("gpt2"))
    tokens = [int(token) for token in np.arange(101) % 90]

    assert policy.forward([datum(tokens)]).logprobs[0].size == 100
    with pytest.raises(RequestError, match="1 to 100 tokens, got 101"):
        policy.forward([datum([*tokens, 1])])


def test_a_closed_trainer_says_so(policy: Policy, datum: Any) -> None:
    stopped: list[str] = []
    policy.engine.call_on_close(lambda: stopped.append("queue"))
    policy.engine.close()

    with pytest.raises(ClosedError, match="'tiny' must be running"):
        policy.forward([datum([5, 6])])
    assert stopped == ["queue"]
