"""Activation checkpointing: the same gradients out of less memory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hearth.losses import builtin_objective
from hearth.models.loading import LoadedModel, load_model
from hearth.models.lora import LoraOptions, attach_lora
from hearth.models.packed import PackedDecoder
from hearth.models.recompute import recomputing
from hearth.trainer.datums import read_datums
from hearth.trainer.logprobs import TargetScorer
from hearth.trainer.options import TrainerOptions
from hearth.trainer.packing import Limits

pytestmark = pytest.mark.slow

VOCAB_SIZE = 96
LIMITS = Limits(VOCAB_SIZE, 256, 256)


@pytest.fixture
def read(model_of: Callable[[str], Path]) -> Callable[..., LoadedModel]:
    def make(kind: str, lora: LoraOptions | None = None) -> LoadedModel:
        loaded = load_model(model_of(kind))
        if lora is not None:
            attach_lora(loaded, lora)
        return loaded

    return make


def kept_bytes(loaded: LoadedModel, data: Any, **options: Any) -> int:
    """Bytes that a forward pass keeps for its backward pass, the weights left out."""
    scorer = TargetScorer(loaded, TrainerOptions(**options))
    examples = read_datums(data, builtin_objective("cross_entropy"), LIMITS)
    (batch,) = scorer.batches(examples, 4096, LIMITS)
    weights = {parameter.data_ptr() for parameter in loaded.module.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.data_ptr() not in weights:
            kept[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        scorer.states(batch)
    return sum(kept.values())


@pytest.fixture(params=["loops in C", "module"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "module":
        # HEARTH_KERNELS=0 turns the loops in C off for a whole process; here both ways run in one.
        monkeypatch.setattr(PackedDecoder, "from_model", lambda _: None)
    return request.param


@pytest.mark.parametrize("kind", ["qwen", "gemma", "gpt2"])
@pytest.mark.parametrize("lora", [None, LoraOptions(rank=4)], ids=["all parameters", "adapter"])
def test_gradients_have_the_same_bits(
    make_policy: Any, model_of: Any, random_data: Any, way: str, kind: str, lora: LoraOptions | None
) -> None:
    found: dict[int | None, Any] = {}
    data = random_data(longest=90)

    for limit in (None, 1):
        policy = make_policy(lora, source=model_of(kind), recompute_above=limit)
        result = policy.forward_backward(data)
        found[limit] = (result, policy.read_gradient())

    (result, kept), (other, computed_again) = found[None], found[1]
    assert all((a == b).all() for a, b in zip(result.logprobs, other.logprobs, strict=True))
    assert kept.keys() == computed_again.keys()
    assert any(bool(gradient.any()) for gradient in kept.values())
    for name, gradient in kept.items():
        assert torch.equal(gradient, computed_again[name]), name


def test_a_long_pass_keeps_what_enters_its_layers_and_a_short_one_everything(
    read: Any, random_data: Any, way: str
) -> None:
    data = random_data(longest=90)
    loaded = read("qwen")

    everything = kept_bytes(loaded, data)
    inputs = kept_bytes(loaded, data, recompute_above=1)
    short = kept_bytes(loaded, data, recompute_above=4096)

    assert short == everything
    assert inputs < everything / 3


def test_without_a_gradient_nothing_is_computed_twice(read: Any, random_data: Any) -> None:
    loaded = read("gemma")
    scorer = TargetScorer(loaded, TrainerOptions(recompute_above=1))
    examples = read_datums(random_data(), builtin_objective("cross_entropy"), LIMITS)
    calls: list[int] = []
    layer = loaded.module.base_model.layers[0].mlp  # type: ignore[index,union-attr]
    layer.register_forward_hook(lambda *_: calls.append(1))
    (batch,) = scorer.batches(examples, 4096, LIMITS)

    with torch.no_grad():
        scorer.states(batch)
    assert len(calls) == 1
    scorer.states(batch).sum().backward()
    assert len(calls) == 3


def test_layers_are_as_before_afterwards(read: Any) -> None:
    module = read("qwen").module
    before = [dict(vars(module)) for module in module.modules()]

    with recomputing(module):
        assert [dict(vars(module)) for module in module.modules()] != before

    assert [dict(vars(module)) for module in module.modules()] == before
