"""Updates of experts against a slow reference in float64, and what they must not do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from tests.unit.architectures import GPT_OSS, make_config
from tests.unit.tiny import make_decoder
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hearth.errors import ConfigError
from hearth.models.experts import EXPERT_WEIGHTS, AdaptedExperts, find_experts, require_adaptable


@dataclass(frozen=True)
class Call:
    """The arguments of a module of experts."""

    hidden: Tensor
    chosen: Tensor
    weights: Tensor


def make_experts(kind: str, rank: int = 3, dtype: torch.dtype = torch.float32) -> AdaptedExperts:
    """A layer's experts with an adapter that does something; the same every time."""
    module = make_decoder(GPT_OSS if kind == "gpt_oss" else make_config(kind))
    experts = list(find_experts(module).values())[-1].to(dtype).requires_grad_(False)
    adapted = AdaptedExperts(experts, rank=rank, scale=1.5, device=torch.device("cpu"))
    for weight in EXPERT_WEIGHTS:
        for matrix in getattr(adapted, weight).parameters():
            nn.init.normal_(matrix, std=0.3)
    return adapted


def make_call(dtype: torch.dtype = torch.float32) -> Call:
    """17 tokens, none of which goes to expert 2, and 9 of which go to expert 0."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(17, 64, generator=generator).to(dtype)
    chosen = torch.tensor([[0, 1], [3, 0], [1, 3]])[torch.arange(17) % 3]
    chosen[5] = torch.tensor([0, 3])
    weights = torch.rand(17, 2, generator=generator).to(dtype)
    return Call(hidden.requires_grad_(), chosen, weights.requires_grad_())


def compute_slowly(adapted: AdaptedExperts, call: Call) -> Tensor:
    """Token by token and expert by expert, with the whole weights of an expert, in float64."""
    experts: Any = adapted.base_layer

    def project(weight: str, expert: int, x: Tensor) -> Tensor:
        update: Any = getattr(adapted, weight)
        matrix = getattr(experts, weight)[expert].double()
        matrix = matrix if experts.is_transposed else matrix.T
        change = update.lora_B[expert].double() @ update.lora_A[expert].double()
        y = x @ (matrix + adapted.scale * change.T)
        return y + getattr(experts, f"{weight}_bias")[expert].double() if experts.has_bias else y

    rows: list[Tensor] = []
    for token, row in enumerate(call.hidden.double()):
        total = torch.zeros_like(row)
        for expert, weight in zip(call.chosen[token], call.weights[token], strict=True):
            inner = experts._apply_gate(project("gate_up_proj", int(expert), row[None]))
            total = total + weight.double() * project("down_proj", int(expert), inner)[0]
        rows.append(total)
    return torch.stack(rows)


def differentiate(outputs: Tensor, adapted: AdaptedExperts, call: Call) -> list[Tensor]:
    """Gradients of the inputs and of the adapter, by a loss that weighs all outputs differently."""
    inputs = [call.hidden, call.weights, *(p for p in adapted.parameters() if p.requires_grad)]
    factors = torch.linspace(-1, 1, outputs.numel(), dtype=torch.float64).view_as(outputs)
    return list(torch.autograd.grad((outputs.double() * factors).sum(), inputs))


@torch.no_grad()
def measure_error(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference, as a share of the norm."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("kind", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_outputs_and_gradients_are_those_of_whole_weights_in_float64(kind: str, rank: int) -> None:
    adapted, call = make_experts(kind, rank), make_call()

    found = adapted(call.hidden, call.chosen, call.weights)
    expected = compute_slowly(adapted, call)

    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    gradients = differentiate(found, adapted, call)
    references = differentiate(expected, adapted, call)
    assert len(gradients) == 2 + 4
    for gradient, reference in zip(gradients, references, strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-4)
    assert all(not bool(gradient[2].any()) for gradient in gradients[2:])


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_in_bfloat16_numbers_are_close_and_the_adapters_gradients_float32(kind: str) -> None:
    adapted, call = make_experts(kind, dtype=torch.bfloat16), make_call(torch.bfloat16)

    found = adapted(call.hidden, call.chosen, call.weights)
    expected = compute_slowly(adapted, call)

    assert found.dtype == torch.bfloat16
    assert measure_error(found, expected) < 0.02
    references = differentiate(expected, adapted, call)
    for gradient, reference in zip(differentiate(found, adapted, call), references, strict=True):
        assert measure_error(gradient, reference) < 0.03
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_without_the_update_the_bits_are_those_of_transformers(kind: str) -> None:
    adapted, call = make_experts(kind), make_call()
    plain = adapted.base_layer(call.hidden, call.chosen, call.weights)
    changed = adapted(call.hidden, call.chosen, call.weights)

    adapted.enable_adapters(False)

    assert torch.equal(adapted(call.hidden, call.chosen, call.weights), plain)
    assert measure_error(changed, plain) > 0.1


class NewTensors(TorchDispatchMode):
    """Notes the elements of the largest tensor that is made inside the ``with``."""

    def __init__(self, *existing: Tensor) -> None:
        super().__init__()
        self.largest = 0
        self._existing = {tensor.untyped_storage().data_ptr() for tensor in existing}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else (made,):
            is_new = isinstance(tensor, Tensor) and (
                tensor.untyped_storage().data_ptr() not in self._existing
            )
            self.largest = max(self.largest, tensor.numel() if is_new else 0)
        return made


def test_no_tensor_of_the_experts_size_is_made() -> None:
    adapted, call = make_experts("qwen3_moe"), make_call()

    with NewTensors(*adapted.parameters()) as made:
        outputs = adapted(call.hidden, call.chosen, call.weights)
        differentiate(outputs, adapted, call)

    weights = [getattr(adapted.base_layer, weight) for weight in EXPERT_WEIGHTS]
    # The largest are those of 34 pairs; half of the smaller weight is larger.
    assert 0 < made.largest < min(weight.numel() for weight in weights) / 2
    assert [weight.grad for weight in weights] == [None, None]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_merged_weight_has_the_update(kind: str) -> None:
    adapted, call = make_experts(kind), make_call()
    expected = adapted(call.hidden, call.chosen, call.weights)
    experts: Any = adapted.base_layer

    for weight in EXPERT_WEIGHTS:
        setattr(experts, weight, nn.Parameter(adapted.merge(weight, getattr(experts, weight))))

    found = experts(call.hidden, call.chosen, call.weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_experts_that_are_computed_in_a_way_of_their_own_are_refused() -> None:
    config = transformers.Llama4TextConfig(
        hidden_size=64,
        intermediate_size=32,
        intermediate_size_mlp=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        num_local_experts=2,
        vocab_size=96,
        pad_token_id=0,
    )
    ((name, experts),) = find_experts(make_decoder(config)).items()

    with pytest.raises(ConfigError, match=r"lora must leave out mlp .* 'model.layers.0.feed_forw"):
        require_adaptable(experts, name)
