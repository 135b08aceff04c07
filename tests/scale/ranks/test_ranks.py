"""A trainer of several ranks has the numbers of one process: real processes, gloo on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.scale.ranks.trainers import (
    OneProcess,
    RankTrainer,
    RefusedError,
    assert_close,
    checkpoint_tensors,
    gradient,
    random_data,
)

from hearth.models.lora import LoraOptions
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumColumns

UNEVEN = (70, 3, 41, 17, 60, 9, 33, 50, 21)
"""Lengths that make more micro-batches on one rank than on another."""
LORA = {
    "rank": 3,
    "alpha": 6.0,
    "seed": 5,
    "train_attn": True,
    "train_mlp": True,
    "train_unembed": False,
}
ADAM = AdamParams(learning_rate=1e-3, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.01)


@contextmanager
def policies(trainer: RankTrainer, single: OneProcess, *, lora: bool) -> Iterator[tuple[str, str]]:
    """The same new policy in both; those of the ranks are unloaded afterwards."""
    theirs = create_policy(trainer, lora=lora)
    try:
        yield theirs, create_policy(single, lora=lora)
    finally:
        trainer.unload(theirs)


def create_policy(run: RankTrainer | OneProcess, *, lora: bool) -> str:
    if isinstance(run, RankTrainer):
        return run.create_model(lora=LORA if lora else None)
    return run.create_model(LoraOptions(**LORA) if lora else None)


def assert_same_logprobs(found: Any, expected: Any) -> None:
    assert [row.shape for row in found[0]] == [row.shape for row in expected[0]]
    for row, other in zip(found[0], expected[0], strict=True):
        np.testing.assert_allclose(row, other, atol=1e-5, rtol=0)
    assert found[1] == pytest.approx(expected[1], rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("lengths", [UNEVEN, (40,)], ids=["uneven", "ranks with nothing"])
def test_losses_logprobs_and_gradients_are_those_of_one_process(
    trainer, single, lora, lengths, checkpoints
):
    data = random_data(lengths)
    with policies(trainer, single, lora=lora) as (theirs, own):
        found = trainer.forward_backward(theirs, data)
        expected = single.forward_backward(own, data)

        assert_same_logprobs(found, expected)
        assert_close(gradient(trainer, theirs, checkpoints), gradient(single, own, checkpoints))


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_steps_over_several_requests_leave_the_weights_of_one_process(
    trainer, single, lora, checkpoints
):
    """Accumulated, divided by counts of all ranks, clipped by the norm of all parts."""
    weights: dict[str, dict[str, torch.Tensor]] = {}
    metrics: dict[str, list[dict[str, float]]] = {}
    with policies(trainer, single, lora=lora) as ids:
        for name, run, model in (("ranks", trainer, ids[0]), ("one", single, ids[1])):
            metrics[name] = []
            for step in range(3):
                run.forward_backward(model, random_data(UNEVEN, seed=step))
                run.forward_backward(model, random_data((5, 30), seed=10 + step))
                metrics[name].append(run.optim_step(model, ADAM, "num_loss_tokens"))
            run.save_state(model, name)
            weights[name] = checkpoint_tensors(checkpoints, name)

    assert all(step["grad_norm"] > step["grad_norm_post_clip"] == 0.01 for step in metrics["one"])
    for found, expected in zip(metrics["ranks"], metrics["one"], strict=True):
        assert found == pytest.approx(expected, rel=1e-4)
        assert found["num_loss_tokens"] == expected["num_loss_tokens"]
        assert found["num_sequences"] == 11
    assert_close(weights["ranks"], weights["one"])


def test_a_request_that_is_scored_only_comes_back_in_datum_order(trainer, single):
    data = random_data(UNEVEN, seed=3)
    with policies(trainer, single, lora=False) as (theirs, own):
        config = {"temperature": 0.7}
        assert_same_logprobs(
            trainer.forward(theirs, data, config=config),
            single.forward(own, data, "cross_entropy", config),
        )


def test_examples_without_a_trained_token_are_scored_and_not_counted(trainer, single, checkpoints):
    data = random_data(UNEVEN, seed=4)
    blank = random_data((12, 44), seed=5)
    for datum in blank:
        datum.loss_fn_inputs["weights"].data = [0.0] * len(datum.model_input.chunks[0].tokens or ())
    mixed = [data[0], blank[0], *data[1:], blank[1]]
    with policies(trainer, single, lora=False) as (theirs, own):
        assert_same_logprobs(
            trainer.forward_backward(theirs, mixed), single.forward_backward(own, mixed)
        )
        found = trainer.optim_step(theirs, AdamParams(learning_rate=0.0), "num_sequences")
        expected = single.optim_step(own, AdamParams(learning_rate=0.0), "num_sequences")

    assert found == pytest.approx(expected, rel=1e-4)
    assert found["num_sequences"] == len(data)


def test_columns_are_divided_as_datums_are(trainer, single, checkpoints):
    data = random_data(UNEVEN, seed=6)
    tokens = [datum.model_input.chunks[0].tokens or [] for datum in data]
    inputs = {
        name: encode(
            np.concatenate([datum.loss_fn_inputs[name].to_numpy() for datum in data]), dtype
        )
        for name, dtype in (("target_tokens", "int64"), ("weights", "float32"))
    }
    columns = DatumColumns(
        lengths=encode(list(map(len, tokens)), "int64"),
        tokens=encode(np.concatenate(tokens), "int64"),
        loss_fn_inputs=inputs,
    )
    with policies(trainer, single, lora=False) as (theirs, own):
        asked = {"model_id": theirs, "forward_backward_input": {"columns": columns.as_dict()}}
        found = trainer.ask("forward_backward", **asked)
        _, expected = single.forward_backward(own, data)

        assert found["metrics"] == pytest.approx(expected, rel=1e-5)
        assert_close(gradient(trainer, theirs, checkpoints), gradient(single, own, checkpoints))


def test_a_frozen_model_beside_an_adapter_stays_the_base(trainer, single):
    data = random_data((30, 20, 10))
    with policies(trainer, single, lora=True) as (theirs, own):
        reference, other = trainer.create_model(is_frozen=True), single.create_model(is_frozen=True)
        base = single.forward(other, data)
        for run, model in ((trainer, theirs), (single, own)):
            run.forward_backward(model, data)
            run.optim_step(model, ADAM, "none")

        assert_same_logprobs(trainer.forward(reference, data), base)
        assert_same_logprobs(trainer.forward(theirs, data), single.forward(own, data))
        trainer.unload(reference)


def test_a_frozen_model_beside_a_full_policy_has_weights_of_its_own(trainer, single):
    data = random_data((30, 20, 10))
    reference, other = trainer.create_model(is_frozen=True), single.create_model(is_frozen=True)
    with policies(trainer, single, lora=False) as (theirs, _):
        trainer.forward_backward(theirs, data)
        trainer.optim_step(theirs, ADAM, "none")

        assert_same_logprobs(trainer.forward(reference, data), single.forward(other, data))
    trainer.unload(reference)


def train(run: Any, model: str, seed: int) -> None:
    run.forward_backward(model, random_data(UNEVEN, seed=seed))
    run.optim_step(model, ADAM, "num_loss_tokens")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("writers", "readers"), [(1, 2), (2, 4), (4, 1), (4, 2)], ids=lambda count: str(count)
)
def test_any_number_of_ranks_goes_on_from_the_checkpoint_of_another(
    groups, make_single, checkpoints, writers, readers, lora
):
    first, second = (make_single() if count == 1 else groups(count) for count in (writers, readers))
    own = create_policy(first, lora=lora)
    train(first, own, 1)
    first.save_state(own, "half-way")
    train(first, own, 2)
    first.save_state(own, "there")
    expected = checkpoint_tensors(checkpoints, "there")
    first.unload(own)

    theirs = create_policy(second, lora=lora)
    second.load_state(theirs, "half-way")
    train(second, theirs, 2)
    second.save_state(theirs, "there-too")
    second.unload(theirs)

    assert_close(checkpoint_tensors(checkpoints, "there-too"), expected)


def test_snapshots_and_deltas_are_the_whole_weights(trainer, checkpoints, ranks):
    model = trainer.create_model()
    base = trainer.published(model, "first")
    train(trainer, model, 1)
    delta = trainer.published(model, "second", "delta")
    with pytest.raises(RefusedError, match="identity must be new"):
        trainer.published(model, "first")
    sent = trainer.published(model, "third", "direct")
    trainer.save_state(model, "published")
    trainer.unload(model)

    saved = {
        name.removeprefix("weights/"): tensor
        for name, tensor in checkpoint_tensors(checkpoints, "published").items()
        if name.startswith("weights/")
    }
    assert delta.keys() == saved.keys() == base.keys()
    assert all(torch.equal(delta[name], tensor) for name, tensor in saved.items())
    assert all(torch.equal(sent[name], tensor) for name, tensor in saved.items())
    assert any(not torch.equal(base[name], tensor) for name, tensor in saved.items())
    for name, kind in (("first", "base"), ("second", "delta")):
        files = {path.name for path in trainer.snapshots.folder(name).glob("*.safetensors")}
        assert files == {f"weights-{rank}.safetensors" for rank in range(ranks)}
        assert trainer.snapshots.open(name).kind == kind


def test_an_adapter_is_published_alone_or_merged(trainer, single):
    with policies(trainer, single, lora=True) as (theirs, own):
        for run, model in ((trainer, theirs), (single, own)):
            train(run, model, 1)
        single.save_for_sampler(own, "adapter")
        single.save_for_sampler(own, "merged", "merged_base")
        kept = single.engine._snapshots

        assert_close(trainer.published(theirs, "adapter"), dict(kept.get("adapter").tensors))
        assert_close(
            trainer.published(theirs, "merged", "merged_base"), dict(kept.get("merged").tensors)
        )


def test_a_refused_request_changes_nothing_and_the_ranks_go_on(trainer, single, checkpoints):
    data = random_data((20, 30))
    with policies(trainer, single, lora=False) as (theirs, own):
        trainer.forward_backward(theirs, data)
        with pytest.raises(RefusedError, match="datum 0: model_input must have 1 to 256 tokens"):
            trainer.forward_backward(theirs, random_data((300,)))
        with pytest.raises(RefusedError, match="must name one of"):
            trainer.load_state(theirs, "nowhere")
        with pytest.raises(RefusedError, match="at most one policy"):
            trainer.create_model()
        single.forward_backward(own, data)

        assert_close(gradient(trainer, theirs, checkpoints), gradient(single, own, checkpoints))


def test_weights_that_have_diverged_are_named_and_their_gradient_dropped(trainer):
    model = trainer.create_model()
    train(trainer, model, 1)
    trainer.forward_backward(model, random_data((20,)))
    trainer.optim_step(model, AdamParams(learning_rate=1e38), "none")
    with pytest.raises(RefusedError, match="logprob of target 0 must be finite"):
        trainer.forward_backward(model, random_data((20, 30)))

    metrics = trainer.optim_step(model, ADAM, "none")

    assert metrics["skipped"] == 1.0
    trainer.unload(model)


def test_ranks_listen_at_the_loopback_address_and_nowhere_else(trainer, ranks):
    pids = [trainer.worker.pid, *(trainer.pid(rank) for rank in range(1, ranks))]
    listening = [
        connection.laddr.ip
        for pid in pids
        for connection in psutil.Process(pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]

    assert listening
    assert set(listening) <= {"127.0.0.1", "::1"}
