from __future__ import annotations

import math
import sys

import pytest
import torch
from torch import nn

from hearth.errors import ConfigError, EngineError, NumericsError
from hearth.losses import GradientCounts
from hearth.trainer.optim import Optimizer
from hearth.wire.tinker import AdamParams

ADAM = AdamParams(learning_rate=0.1, beta1=0.9, beta2=0.99, eps=1e-8)


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    return {
        "w": nn.Parameter(torch.tensor([1.0, -2.0], dtype=dtype)),
        "b": nn.Parameter(torch.tensor([0.5], dtype=dtype)),
    }


def make_optimizer(dtype: torch.dtype = torch.float32) -> tuple[dict[str, nn.Parameter], Optimizer]:
    given = parameters(dtype)
    return given, Optimizer(given)


def backward(given: dict[str, nn.Parameter], *gradient: float) -> None:
    values = torch.cat([parameter.float() for parameter in given.values()])
    (values * torch.tensor(gradient)).sum().backward()


def accumulate(
    given: dict[str, nn.Parameter], optimizer: Optimizer, *gradient: float, tokens: int = 1
) -> None:
    """A backward pass of one sequence."""
    backward(given, *gradient)
    optimizer.record_pass(GradientCounts(tokens, 1))


def test_a_step_is_adamw_with_decoupled_decay() -> None:
    given, optimizer = make_optimizer()
    weights, first, second = [1.0, -2.0, 0.5], [0.0] * 3, [0.0] * 3
    for step, gradient in enumerate([(3.0, -0.1, 0.0), (-1.0, 0.2, 4.0)], start=1):
        adam = ADAM.model_copy(update={"learning_rate": 0.1 / step, "weight_decay": 0.2})
        accumulate(given, optimizer, *gradient, tokens=3)
        optimizer.step(adam)
        for index, slope in enumerate(gradient):
            first[index] = 0.9 * first[index] + 0.1 * slope
            second[index] = 0.99 * second[index] + 0.01 * slope**2
            mean, scale = first[index] / (1 - 0.9**step), second[index] / (1 - 0.99**step)
            weights[index] *= 1 - adam.learning_rate * 0.2
            weights[index] -= adam.learning_rate * mean / (math.sqrt(scale) + 1e-8)

    found = torch.cat([parameter.detach() for parameter in given.values()])
    torch.testing.assert_close(found, torch.tensor(weights), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("mode", "denominator"), [("none", 1), ("num_loss_tokens", 8), ("num_sequences", 2)]
)
def test_the_gradient_is_divided_first_and_clipped_then(mode: str, denominator: int) -> None:
    given, optimizer = make_optimizer()
    accumulate(given, optimizer, 3.0, 4.0, 0.0, tokens=5)
    accumulate(given, optimizer, 3.0, 4.0, 0.0, tokens=3)

    adam = ADAM.model_copy(update={"grad_clip_norm": 2.0})
    metrics = optimizer.step(adam, mode)  # pyright: ignore[reportArgumentType]

    norm = 10 / denominator
    assert metrics["denominator"] == denominator
    assert metrics["grad_norm"] == pytest.approx(norm)
    assert metrics["grad_norm_post_clip"] == pytest.approx(min(norm, 2.0))
    assert (metrics["num_loss_tokens"], metrics["num_sequences"]) == (8, 2)
    # After one step the first moment is 0.1 of the gradient that was applied.
    moment = optimizer.state_tensors()["exp_avg/w"]
    applied = torch.tensor([0.6, 0.8]) * min(norm, 2.0)
    torch.testing.assert_close(moment, 0.1 * applied)


def test_clipping_is_off_at_zero() -> None:
    given, optimizer = make_optimizer()
    accumulate(given, optimizer, 300.0, 400.0, 0.0)

    assert optimizer.step(ADAM)["grad_norm_post_clip"] == pytest.approx(500)


def test_without_a_gradient_nothing_happens_and_the_metrics_say_so() -> None:
    given, optimizer = make_optimizer()
    before = torch.cat([parameter.detach().clone() for parameter in given.values()])

    metrics = optimizer.step(ADAM.model_copy(update={"weight_decay": 0.5}), "num_loss_tokens")

    assert (metrics["skipped"], metrics["denominator"], metrics["grad_norm"]) == (1, 1, 0)
    assert torch.equal(torch.cat([parameter.detach() for parameter in given.values()]), before)
    assert optimizer.state_tensors() == {}


def test_a_gradient_of_zeros_is_a_gradient() -> None:
    given, optimizer = make_optimizer()
    accumulate(given, optimizer, 1.0, 1.0, 1.0)
    optimizer.step(ADAM)
    before = given["w"].detach().clone()

    optimizer.record_pass(GradientCounts())
    metrics = optimizer.step(ADAM)

    assert metrics["skipped"] == 0
    assert bool((given["w"] < before).all())


def test_a_gradient_of_zeros_may_be_dropped_and_nothing_else_changes() -> None:
    given = parameters()
    optimizer = Optimizer(given)
    backward(given, 1.0, 1.0, 1.0)
    optimizer.record_pass(GradientCounts(1, 1))
    optimizer.step(ADAM, skip_zero_gradient=True)
    before = given["w"].detach().clone()
    state = {name: value.clone() for name, value in optimizer.state_tensors().items()}
    decay = ADAM.model_copy(update={"weight_decay": 0.5})

    optimizer.record_pass(GradientCounts(4, 1))
    assert optimizer.step(decay, "num_loss_tokens", skip_zero_gradient=True)["skipped"] == 1

    assert torch.equal(given["w"].detach(), before)
    assert all(torch.equal(state[name], value) for name, value in optimizer.state_tensors().items())
    # Its tokens do not divide the next gradient.
    backward(given, 1.0, 1.0, 1.0)
    optimizer.record_pass(GradientCounts(1, 1))
    assert optimizer.step(decay, "num_loss_tokens", skip_zero_gradient=True)["denominator"] == 1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_refused_and_dropped(bad: float) -> None:
    given, optimizer = make_optimizer()
    before = given["w"].detach().clone()
    accumulate(given, optimizer, 1.0, bad, 1.0, tokens=3)

    with pytest.raises(NumericsError, match="gradient must be finite"):
        optimizer.step(ADAM)

    assert torch.equal(given["w"].detach(), before)
    assert optimizer.step(ADAM)["skipped"] == 1


@pytest.mark.slow
def test_bfloat16_parameters_learn_what_bfloat16_cannot_add() -> None:
    given, optimizer = make_optimizer(torch.bfloat16)
    for _ in range(100):
        accumulate(given, optimizer, 1.0, 1.0, 1.0)
        optimizer.step(ADAM.model_copy(update={"learning_rate": 1e-3}))

    # Each single step of 1e-3 is below half of bfloat16's spacing at 1 and 2.
    expected = torch.tensor([0.9, -2.1]).bfloat16()
    assert given["w"].dtype == torch.bfloat16
    torch.testing.assert_close(given["w"].detach(), expected, rtol=0, atol=0.008)


def test_bfloat16_gradients_add_up_in_float32() -> None:
    given, optimizer = make_optimizer(torch.bfloat16)
    backward(given, 256.0, 0.0, 0.0)
    for _ in range(8):
        backward(given, 0.5, 0.0, 0.0)
    optimizer.record_pass(GradientCounts(1, 1))

    assert optimizer.step(ADAM)["grad_norm"] == 260.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_restored_state_continues_bit_for_bit(dtype: torch.dtype) -> None:
    (first, original), (second, other) = make_optimizer(dtype), make_optimizer(dtype)
    for gradient in ((1.0, 2.0, 3.0), (0.3, -1.0, 2.0)):
        accumulate(first, original, *gradient)
        original.step(ADAM)

    with torch.no_grad():
        for name, parameter in second.items():
            parameter.copy_(first[name])
    other.load_state_tensors(
        {name: value.clone() for name, value in original.state_tensors().items()}
    )
    for given, optimizer in ((first, original), (second, other)):
        accumulate(given, optimizer, 0.7, 0.1, -2.0)
        optimizer.step(ADAM)

    mine, theirs = original.state_tensors(), other.state_tensors()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_state_of_other_parameters_is_refused() -> None:
    optimizer = Optimizer(parameters())

    with pytest.raises(EngineError, match="must fit the model's parameters, got 'exp_avg/v'"):
        optimizer.load_state_tensors({"exp_avg/v": torch.zeros(2)})
    with pytest.raises(EngineError, match=r"'exp_avg/w' \[3\]"):
        optimizer.load_state_tensors({"exp_avg/w": torch.zeros(3)})


def make_matrices() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "wide": nn.Parameter(torch.randn(3, 7, generator=generator)),
        "tall": nn.Parameter(torch.randn(7, 3, generator=generator)),
        "norm": nn.Parameter(torch.ones(7)),
    }


def run_matrices(
    given: dict[str, nn.Parameter], optimizer: Optimizer, steps: int, first: int = 0
) -> None:
    for step in range(first, first + steps):
        inputs = torch.randn(5, 7, generator=torch.Generator().manual_seed(100 + step))
        outputs = (inputs * given["norm"]) @ given["tall"] @ given["wide"]
        outputs.pow(2).sum().backward()
        optimizer.record_pass(GradientCounts(5, 1))
        optimizer.step(ADAM.model_copy(update={"learning_rate": 0.02, "weight_decay": 0.1}))


def test_muon_moves_every_direction_of_a_matrix_alike_and_as_far_as_adamw_would() -> None:
    given = make_matrices()
    optimizer = Optimizer(given, ["wide", "tall"])
    before = {name: parameter.detach().clone() for name, parameter in given.items()}

    run_matrices(given, optimizer, 1)

    for name in ("wide", "tall"):
        change = given[name].detach() - before[name] * (1 - 0.02 * 0.1)
        strengths = torch.linalg.svdvals(change)
        # Newton's iteration leaves singular values of 1 within about a third.
        torch.testing.assert_close(strengths / strengths.mean(), torch.ones(3), atol=0.35, rtol=0.0)
        assert change.pow(2).mean().sqrt() == pytest.approx(0.2 * 0.02, rel=0.35)
    # The norm is AdamW's: its first step is the learning rate.
    moved = (given["norm"].detach() - before["norm"] * (1 - 0.02 * 0.1)).abs()
    torch.testing.assert_close(moved, torch.full((7,), 0.02), rtol=1e-3, atol=0.0)


def test_muon_goes_on_from_its_state_to_the_bit() -> None:
    given, again = make_matrices(), make_matrices()
    whole = Optimizer(given, ["wide", "tall"])
    run_matrices(given, whole, 2)
    saved = {name: value.clone() for name, value in whole.state_tensors().items()}
    assert saved.keys() == {
        "momentum_buffer/wide",
        "momentum_buffer/tall",
        "step/norm",
        "exp_avg/norm",
        "exp_avg_sq/norm",
    }
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(given[name])
    resumed = Optimizer(again, ["wide", "tall"])
    resumed.load_state_tensors(saved)

    run_matrices(given, whole, 2, first=2)
    run_matrices(again, resumed, 2, first=2)

    assert all(torch.equal(given[name], again[name]) for name in given)


@pytest.mark.parametrize(("writer", "reader"), [((), ("wide",)), (("wide",), ())])
def test_the_state_of_another_optimizer_is_refused(writer: tuple[str], reader: tuple[str]) -> None:
    given = make_matrices()
    optimizer = Optimizer(given, writer)
    run_matrices(given, optimizer, 1)

    with pytest.raises(EngineError, match="go on with the optimizer that has written"):
        Optimizer(make_matrices(), reader).load_state_tensors(optimizer.state_tensors())


def make_blocks() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": nn.Parameter(torch.randn(96, 100, generator=generator)),
        "small": nn.Parameter(torch.ones(100)),
    }


def run_blocks(
    given: dict[str, nn.Parameter], optimizer: Optimizer, steps: int, first: int = 0
) -> None:
    for step in range(first, first + steps):
        inputs = torch.randn(8, 96, generator=torch.Generator().manual_seed(100 + step))
        ((inputs @ given["large"].float()) * given["small"]).pow(2).mean().backward()
        optimizer.record_pass(GradientCounts(8, 1))
        optimizer.step(ADAM.model_copy(update={"learning_rate": 0.01, "weight_decay": 0.1}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moments_of_eight_bits_train_as_those_of_32_do(dtype: torch.dtype) -> None:
    pytest.importorskip("bitsandbytes")
    given, expected = (
        {name: nn.Parameter(value.to(dtype)) for name, value in make_blocks().items()}
        for _ in range(2)
    )
    before = given["large"].detach().clone()
    optimizer = Optimizer(given, is_8bit=True)

    run_blocks(given, optimizer, 10)
    run_blocks(expected, Optimizer(expected), 10)

    moved = (expected["large"] - before).detach().float().abs().mean()
    apart = (expected["large"] - given["large"]).detach().float().abs().mean()
    assert 0 < apart < 0.05 * moved
    state = optimizer.state_tensors()
    assert state["state1/large"].dtype == state["state2/large"].dtype == torch.uint8
    kept = sum(value.nbytes for name, value in state.items() if name.endswith("/large"))
    kept -= state["step/large"].nbytes
    masters = 4 * 9600 if dtype == torch.bfloat16 else 0
    # Two bytes a number, and two scales a block of 256.
    assert kept == 2 * 9600 + 8 * math.ceil(9600 / 256) + masters


def test_moments_of_eight_bits_go_on_from_their_state_to_the_bit() -> None:
    pytest.importorskip("bitsandbytes")
    given, again = make_blocks(), make_blocks()
    whole = Optimizer(given, is_8bit=True)
    run_blocks(given, whole, 2)
    saved = {name: value.clone() for name, value in whole.state_tensors().items()}
    with torch.no_grad():
        for name, parameter in again.items():
            parameter.copy_(given[name])
    resumed = Optimizer(again, is_8bit=True)
    resumed.load_state_tensors(saved)

    run_blocks(given, whole, 2, first=2)
    run_blocks(again, resumed, 2, first=2)

    assert all(torch.equal(given[name], again[name]) for name in given)
    with pytest.raises(EngineError, match=r"must have \['exp_avg', .*, got 'state1/large'"):
        Optimizer(make_blocks()).load_state_tensors({"state1/large": saved["state1/large"]})


def test_moments_of_eight_bits_need_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)

    with pytest.raises(ConfigError, match=r"pip install 'hearth-rl\[bitsandbytes\]'"):
        Optimizer(make_blocks(), is_8bit=True)
