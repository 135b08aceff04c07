"""A forward pass that is kept for the backward pass of a custom loss."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinker
import torch
from tests.unit.trainer.conftest import MakePolicy, Policy
from tests.unit.trainer.decoders import assert_same_gradient

from hearth.errors import ForwardOnlyError, NumericsError
from hearth.local import EmbeddedPlatform
from hearth.models.lora import LoraOptions
from hearth.sdk import FiretitanServiceClient, TrainerJobConfig, TrainerJobManager
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.packing import PackedBatch, PaddedBatch
from hearth.trainer.passes import KeptGraph
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord
from training.quickstart import MODEL

pytestmark = pytest.mark.slow

Data = list[DatumRecord]
LORA = LoraOptions(rank=4, alpha=8.0, seed=1)
STEP = AdamParams(learning_rate=1e-2)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The data, by their indices, of every forward pass through the layers."""
    seen: list[tuple[int, ...]] = []
    states = TargetScorer.states

    def watched(self: TargetScorer, batch: PaddedBatch | PackedBatch) -> torch.Tensor:
        seen.append(tuple(sorted(example.index for example in batch.examples)))
        return states(self, batch)

    # Counts passes through the layers, which no result shows; the pass itself runs.
    monkeypatch.setattr(TargetScorer, "states", watched)
    return seen


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[KeptGraph]]:
    """Every graph that was kept, for as long as it lives."""
    made: list[weakref.ref[KeptGraph]] = []
    init = KeptGraph.__init__

    def watched(self: KeptGraph, *args: Any) -> None:
        init(self, *args)
        made.append(weakref.ref(self))

    # Sees whether a graph's memory is freed, which no result shows; the graph is a real one.
    monkeypatch.setattr(KeptGraph, "__init__", watched)
    return made


def are_free(graphs: list[weakref.ref[KeptGraph]]) -> bool:
    gc.collect()
    return bool(graphs) and all(graph() is None for graph in graphs)


def bare(data: Data) -> Data:
    """As a client scores them: with targets alone."""
    return [
        DatumRecord(
            model_input=datum.model_input,
            loss_fn_inputs={"target_tokens": datum.loss_fn_inputs["target_tokens"]},
        )
        for datum in data
    ]


def train_after_forward(
    policy: Policy,
    data: Data,
    kept: Data,
    passes: list[tuple[int, ...]],
    between: Callable[[], None] = lambda: None,
) -> list[tuple[int, ...]]:
    """The passes of training on ``data`` after one on ``kept``; its gradient is as without that."""
    policy.forward_backward(data)
    expected = policy.read_gradient()
    policy.forward(bare(kept), graph="a")
    between()
    passes.clear()
    policy.forward_backward(data, graph="a")
    assert_same_gradient(policy.read_gradient(), expected, 1e-6)
    return passes


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
@pytest.mark.parametrize("config", [None, {"temperature": 0.7}], ids=["plain", "tempered"])
def test_the_gradient_of_two_calls_costs_one_forward_pass(
    make_policy: MakePolicy,
    data: Data,
    passes: Any,
    graphs: Any,
    lora: LoraOptions | None,
    config: Any,
) -> None:
    policy = make_policy(lora)
    expected_result = policy.forward_backward(data, config=config)
    expected = policy.read_gradient()
    passes.clear()

    scored = policy.forward(bare(data), config=config, graph="a")
    assert passes == [tuple(range(len(data)))]
    result = policy.forward_backward(data, config=config, graph="a")

    assert len(passes) == 1
    assert_same_gradient(policy.read_gradient(), expected, 1e-6)
    assert result.metrics == pytest.approx(expected_result.metrics, rel=1e-6)
    for logprobs, other in zip(result.logprobs, scored.logprobs, strict=True):
        assert np.array_equal(logprobs, other)
    assert are_free(graphs)


@pytest.mark.parametrize("family", ["gemma", "gpt2"])
def test_padded_rows_are_kept_as_well(
    make_policy: MakePolicy, model_of: Any, data: Data, passes: Any, family: str
) -> None:
    policy = make_policy(source=model_of(family))

    assert train_after_forward(policy, data, data, passes) == []


def test_a_graph_is_used_up(policy: Policy, data: Data, passes: Any) -> None:
    policy.forward(bare(data), graph="a")
    policy.forward_backward(data, graph="a")
    once = policy.read_gradient()
    policy.forward(bare(data), graph="a")
    passes.clear()

    policy.forward_backward(data, graph="a")
    policy.forward_backward(data, graph="a")

    assert len(passes) == 1
    assert_same_gradient(
        policy.read_gradient(), {name: 2 * value for name, value in once.items()}, 1e-6
    )


def test_gradients_of_kept_and_computed_passes_add_up(policy: Policy, random_data: Any) -> None:
    first, second = random_data(seed=1), random_data(seed=2)
    policy.forward_backward(first)
    policy.forward_backward(second)
    expected = policy.read_gradient()

    policy.forward(bare(first), graph="a")
    policy.forward_backward(second)
    policy.forward_backward(first, graph="a")

    assert_same_gradient(policy.read_gradient(), expected, 1e-6)


def step(policy: Policy) -> None:
    policy.optim_step(STEP)


def load(policy: Policy) -> None:
    policy.load_state("start", with_optimizer=True)


def create(policy: Policy) -> None:
    policy.engine.create_model(is_frozen=True)


def unload(policy: Policy) -> None:
    policy.engine.unload(policy.engine.create_model(is_frozen=True))


@pytest.mark.parametrize("between", [step, load, create, unload])
@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_what_may_change_the_weights_forgets_the_graph(
    make_policy: MakePolicy,
    random_data: Any,
    passes: Any,
    graphs: Any,
    between: Callable[[Policy], None],
    lora: LoraOptions | None,
) -> None:
    data, other = random_data(seed=1), random_data(seed=2)
    policy = make_policy(lora)
    policy.forward_backward(other)
    step(policy)
    policy.save_state("start")
    policy.forward_backward(other)

    policy.forward(bare(data), graph="a")
    between(policy)
    assert are_free(graphs)
    passes.clear()
    policy.forward_backward(data, graph="a")
    assert passes != []

    # With the weights of now.
    found = policy.forward(data)
    computed = policy.forward_backward(data)
    for logprobs, expected in zip(computed.logprobs, found.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, expected, rtol=0, atol=1e-6)
    assert sum(float(tensor.abs().sum()) for tensor in policy.read_gradient().values()) > 0


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_a_reference_pass_and_a_snapshot_in_between_leave_the_graph(
    make_policy: MakePolicy, data: Data, passes: Any, lora: LoraOptions | None
) -> None:
    policy = make_policy(lora)
    frozen = policy.engine.create_model(is_frozen=True)

    def between() -> None:
        # A frozen model keeps none, whatever it is asked for.
        policy.engine.forward(frozen, bare(data), graph="b")
        policy.save_for_sampler("snapshot")
        policy.save_state("kept")

    assert train_after_forward(policy, data, data, passes, between) == []


def shifted(data: Data) -> Data:
    changed = [datum.model_copy(deep=True) for datum in data]
    tokens = changed[3].model_input.chunks[0].tokens
    assert tokens is not None
    tokens[0] = (tokens[0] + 1) % 96
    return changed


def retargeted(data: Data) -> Data:
    changed = [datum.model_copy(deep=True) for datum in data]
    targets = np.array(changed[3].loss_fn_inputs["target_tokens"].to_numpy())
    targets[-1] = (targets[-1] + 1) % 96
    changed[3].loss_fn_inputs["target_tokens"] = encode(targets, "int64")
    return changed


def turned(data: Data) -> Data:
    return data[::-1]


def fewer(data: Data) -> Data:
    return data[:-1]


def the_same(data: Data) -> Data:
    return data


@pytest.mark.parametrize(
    ("other", "options"),
    [
        (shifted, {}),
        (retargeted, {}),
        (turned, {}),
        (fewer, {}),
        (the_same, {"config": {"temperature": 0.7}}),
        (the_same, {"graph": "b"}),
        (the_same, {"graph": None}),
    ],
    ids=["a token", "a target", "the order", "one less", "the temperature", "the name", "no name"],
)
def test_a_graph_of_something_else_is_not_taken(
    policy: Policy, data: Data, passes: Any, other: Callable[[Data], Data], options: dict[str, Any]
) -> None:
    plain = {name: value for name, value in options.items() if name != "graph"}
    policy.forward_backward(other(data), **plain)
    expected = policy.read_gradient()

    policy.forward(bare(data), graph="a")
    passes.clear()
    policy.forward_backward(other(data), **{"graph": "a"} | options)

    assert len(passes) == 1
    assert_same_gradient(policy.read_gradient(), expected, 1e-6)


def test_data_that_came_to_a_kept_pass_are_computed_beside_it(
    policy: Policy, data: Data, passes: Any
) -> None:
    computed = train_after_forward(policy, data, data[:-2], passes)

    assert computed == [(len(data) - 2, len(data) - 1)]


def test_another_models_graph_is_not_taken(engine: TrainerEngine, data: Data, passes: Any) -> None:
    first = engine.create_model(owner="me")
    engine.forward(first, bare(data), graph="a")
    second = engine.create_model(owner="me")
    passes.clear()

    engine.forward_backward(second, data, graph="a")

    assert len(passes) == 1


def test_of_a_pass_beyond_the_budget_a_part_is_kept(
    make_policy: MakePolicy, random_data: Any, passes: Any
) -> None:
    data = random_data(count=20)
    whole, policy = make_policy(), make_policy(micro_batch_tokens=160)
    whole.forward_backward(data)
    expected = whole.read_gradient()
    passes.clear()

    policy.forward(bare(data), graph="a")
    forward, passes[:] = list(passes), []
    policy.forward_backward(data, graph="a")

    assert len(forward) > 3
    # One micro-batch's tokens, and the rest once more.
    computed = {index for batch in passes for index in batch}
    assert computed == set(range(20)) - set(forward[0])
    assert_same_gradient(policy.read_gradient(), expected, tolerance=1e-5)


def test_what_is_not_kept_is_scored_without_a_graph(
    make_policy: MakePolicy, random_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    modes: list[bool] = []
    states = TargetScorer.states

    def watched(self: TargetScorer, batch: PaddedBatch | PackedBatch) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return states(self, batch)

    # Counts passes through the layers, which no result shows; the pass itself runs.
    monkeypatch.setattr(TargetScorer, "states", watched)
    policy = make_policy(micro_batch_tokens=160)

    policy.forward(bare(random_data(count=20)), graph="a")

    assert modes == [True] + [False] * (len(modes) - 1)
    assert len(modes) > 3


def test_a_pass_above_the_budget_is_not_kept_and_trains_all_the_same(
    make_policy: MakePolicy, random_data: Any, passes: Any
) -> None:
    data, policy = random_data(count=3), make_policy(micro_batch_tokens=1)

    computed = train_after_forward(policy, data, data, passes)

    assert sorted(computed) == [(0,), (1,), (2,)]


def test_only_the_last_pass_is_kept(policy: Policy, data: Data, passes: Any, graphs: Any) -> None:
    policy.forward(bare(data), graph="a")
    policy.forward(bare(data), graph="b")

    gc.collect()
    assert [graph() is None for graph in graphs] == [True, False]
    passes.clear()
    policy.forward_backward(data, graph="b")
    assert passes == []


def test_diverged_weights_are_found_and_leave_no_graph(
    policy: Policy, data: Data, graphs: Any
) -> None:
    weights: Any = policy.engine._residents.get(policy.model_id).loaded.module
    with torch.no_grad():
        before = weights.model.norm.weight.clone()
        weights.model.norm.weight.fill_(torch.nan)
    with pytest.raises(NumericsError, match="logprob of target 0 must be finite"):
        policy.forward(bare(data), graph="a")
    with pytest.raises(NumericsError, match="must be finite"):
        policy.forward_backward(data, graph="a")
    gc.collect()
    assert all(graph() is None for graph in graphs)

    with torch.no_grad():
        weights.model.norm.weight.copy_(before)
    policy.forward(bare(data), graph="a")
    assert policy.forward_backward(data, graph="a").metrics["loss:sum"] != 0


def test_a_bad_loss_input_leaves_the_graph_for_the_next_call(
    policy: Policy, data: Data, passes: Any
) -> None:
    policy.forward_backward(data)
    expected = policy.read_gradient()
    policy.forward(bare(data), graph="a")
    broken = [datum.model_copy(deep=True) for datum in data]
    length = broken[0].loss_fn_inputs["weights"].to_numpy().size
    broken[0].loss_fn_inputs["weights"] = encode(np.full(length, np.nan), "float32")
    passes.clear()

    with pytest.raises(NumericsError):
        policy.forward_backward(broken, graph="a")
    policy.forward_backward(data, graph="a")

    assert passes == []
    assert_same_gradient(policy.read_gradient(), expected, 1e-6)


def test_models_that_are_not_trained_keep_nothing(
    make_policy: MakePolicy, data: Data, graphs: Any
) -> None:
    policy = make_policy(forward_only=True)

    named, plain = policy.forward(bare(data), graph="a"), policy.forward(bare(data))

    assert graphs == []
    for logprobs, other in zip(named.logprobs, plain.logprobs, strict=True):
        assert np.array_equal(logprobs, other)
    with pytest.raises(ForwardOnlyError):
        policy.forward_backward(data, graph="a")


def test_a_closed_trainer_holds_no_graph(policy: Policy, data: Data, graphs: Any) -> None:
    policy.forward(bare(data), graph="a")

    policy.engine.close()

    assert are_free(graphs)


@pytest.fixture
def training_client(tmp_path: Path) -> Iterator[Any]:
    """A training client of the shipped model on an embedded platform."""
    platform = EmbeddedPlatform(work_dir=tmp_path)
    trainers = TrainerJobManager("key", base_url=platform.base_url)
    trainers.create(
        TrainerJobConfig(base_model=str(MODEL), job_id="policy", max_context_length=128)
    )
    endpoint = trainers.wait_for_ready("policy")
    service = FiretitanServiceClient(endpoint.base_url, "key", max_chunk_datums=4)
    yield service.create_training_client(str(MODEL))
    service.close()
    trainers.close()
    platform.close()


def sampled(count: int) -> list[tinker.Datum]:
    rng = np.random.default_rng(0)
    data: list[tinker.Datum] = []
    for _ in range(count):
        tokens = [5, 17, 40, *rng.integers(4, 60, int(rng.integers(2, 20))).tolist()]
        targets = tinker.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1])
        data.append(
            tinker.Datum(
                model_input=tinker.ModelInput.from_ints(tokens[:-1]),
                loss_fn_inputs={"target_tokens": targets},
            )
        )
    return data


def squares(data: Any, logprobs: list[torch.Tensor]) -> tuple[torch.Tensor, dict[str, float]]:
    """Nothing that a trainer has built in."""
    loss = torch.stack([logprob.square().sum() for logprob in logprobs]).sum()
    return loss, {"mine": 1.0}


# Only of the last part of a request there is a graph.
@pytest.mark.parametrize(("count", "expected"), [(4, 1), (7, 3)])
def test_a_custom_loss_of_the_sdk_costs_one_forward_pass(
    training_client: Any, passes: Any, count: int, expected: int
) -> None:
    data = sampled(count)
    adam = tinker.AdamParams(learning_rate=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)

    def measured() -> tuple[dict[str, float], float]:
        metrics = training_client.forward_backward_custom(data, squares).result().metrics
        return metrics, training_client.optim_step(adam).result().metrics["grad_norm"]

    assert training_client.keeps_graphs
    kept = measured()
    assert len(passes) == expected
    training_client.keeps_graphs = False
    passes.clear()
    plain = measured()

    assert len(passes) == (2 if count == 4 else 4)
    assert kept[0] == pytest.approx(plain[0], rel=1e-6)
    assert kept[1] == pytest.approx(plain[1], rel=1e-6)
    assert kept[1] > 0
