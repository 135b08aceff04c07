"""The loops of decoding against the same in torch, in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.unit.kernels.tensors import EPS, SetThreads, assert_equal, random
from torch import Tensor

from hearth.kernels.ops import AttentionShape, Kernels, StepLayer

pytestmark = pytest.mark.slow

# Enough work for a second thread, which is not woken for little.
MANY = 40


def assert_close(found: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Within a part of the largest value."""
    largest = max(1e-30, float(expected.abs().max()))
    assert float((found.double() - expected).abs().max()) <= tolerance * largest


def normed(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (16, 64), (5, 513), (MANY, 4099)])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_rows_are_normalized(loops: Kernels, shape: tuple[int, int], scale: float) -> None:
    x, y, weight = random(*shape, scale=scale), random(*shape, seed=1), random(shape[1], seed=2)
    alone, added, total = torch.empty_like(x), torch.empty_like(x), x.clone()

    loops.rms_norm(x, weight, EPS, alone)
    loops.add_rms_norm(total, y, weight, EPS, added)

    assert_close(alone, normed(x, weight))
    assert torch.equal(total, x + y)
    assert_close(added, normed(x + y, weight))


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (MANY, 4099)])
def test_a_gated_product_is_exact_over_the_whole_range_of_gates(
    loops: Kernels, shape: tuple[int, int]
) -> None:
    both = random(shape[0], 2 * shape[1], scale=30.0)
    both[0, 0], both[-1, -1] = -87.5, 1e6
    out = torch.empty(shape)

    loops.silu_mul(both, out)

    gate, up = both.double().chunk(2, dim=1)
    expected = torch.nn.functional.silu(gate) * up
    # Relative to each value: where the gate is closed, silu is its exponential.
    off = ((out - expected) / expected).abs()
    assert float(torch.where(gate > -87, off, 0.0).max()) <= 1e-6
    assert_close(out, expected)


def test_gates_of_any_size_stay_finite(loops: Kernels) -> None:
    gates = torch.tensor([-1e30, -1e4, -88.0, 0.0, 88.0, 1e4, 1e30, math.inf, math.nan])
    out = torch.empty(1, len(gates))

    loops.silu_mul(torch.cat([gates, torch.ones(len(gates))])[None], out)

    assert out[0, :3].abs().max() <= 1e-7
    assert out[0, 3:8].tolist() == [0.0, *gates[4:8].tolist()]
    assert math.isnan(out[0, 8])


@dataclass(frozen=True)
class Case:
    """One decoding step: rows of various lengths on a cache with room for more."""

    heads: int
    kv_heads: int
    dim: int
    qkv: Tensor
    bias: Tensor | None
    norms: tuple[Tensor, Tensor] | None
    rotations: tuple[Tensor, Tensor]
    positions: Tensor
    keys: Tensor
    values: Tensor

    def run(self, loops: Kernels) -> tuple[Tensor, Tensor, Tensor]:
        """Heads' outputs [R, A, D], and the caches afterwards."""
        keys, values = self.keys.clone(), self.values.clone()
        shape = AttentionShape(
            len(self.qkv),
            self.heads,
            self.kv_heads,
            self.dim,
            keys.stride(0),
            keys.stride(1),
            torch.get_num_threads(),
            EPS,
            self.dim**-0.5,
        )
        q_norm, k_norm = self.norms or (None, None)
        weights = {"bias": self.bias, "q_norm": q_norm, "k_norm": k_norm}
        layer = StepLayer(
            **{name: weight.data_ptr() for name, weight in weights.items() if weight is not None}
        )
        out = loops.decode_attention(
            self.qkv, layer, self.rotations, self.positions, (keys, values), shape
        )
        return out.view(len(self.qkv), self.heads, self.dim), keys, values

    def select_row(self, row: int) -> Case:
        """The same with one row alone."""
        rows = slice(row, row + 1)
        return Case(
            self.heads,
            self.kv_heads,
            self.dim,
            self.qkv[rows].clone(),
            self.bias,
            self.norms,
            self.rotations,
            self.positions[rows].clone(),
            self.keys[rows].clone(),
            self.values[rows].clone(),
        )

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """The same in float64."""
        projected = self.qkv.double() + (0 if self.bias is None else self.bias.double())
        heads = projected.view(len(self.qkv), -1, self.dim)
        q, k, v = heads.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        if self.norms is not None:
            q, k = normed(q, self.norms[0]), normed(k, self.norms[1])
        q, k = self._rotate(q), self._rotate(k)
        keys, values = self.keys.double(), self.values.double()
        out: list[Tensor] = []
        for row, at in enumerate(self.positions.tolist()):
            keys[row, :, at], values[row, :, at] = k[row], v[row]
            seen, mixed = keys[row, :, : at + 1], values[row, :, : at + 1]
            seen = seen.repeat_interleave(self.heads // self.kv_heads, 0)
            mixed = mixed.repeat_interleave(self.heads // self.kv_heads, 0)
            scores = torch.einsum("ad,akd->ak", q[row], seen) * self.dim**-0.5
            out.append(torch.einsum("ak,akd->ad", scores.softmax(-1), mixed))
        return torch.stack(out), keys, values

    def _rotate(self, x: Tensor) -> Tensor:
        cosines, sines = (table.double()[self.positions][:, None] for table in self.rotations)
        low, high = x.chunk(2, dim=-1)
        return x * cosines + torch.cat([-high, low], dim=-1) * sines


def step(
    dim: int,
    heads: int,
    kv_heads: int,
    *,
    bias: bool = False,
    norm: bool = False,
    scale: float = 1.0,
    positions: tuple[int, ...] = (0, 1, 7, 63, 64, 90, 3),
) -> Case:
    rows, room = len(positions), max(positions) + 9
    width = (heads + 2 * kv_heads) * dim
    angles = torch.rand(room, dim, generator=torch.Generator().manual_seed(5)) * 6
    return Case(
        heads,
        kv_heads,
        dim,
        random(rows, width, scale=scale),
        random(width, seed=1) if bias else None,
        (random(dim, seed=2), random(dim, seed=3)) if norm else None,
        (angles.cos(), angles.sin()),
        torch.tensor(positions),
        random(rows, kv_heads, room, dim, seed=6, scale=scale),
        random(rows, kv_heads, room, dim, seed=7),
    )


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize(
    ("bias", "norm"), [(False, False), (True, False), (False, True), (True, True)]
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize("dim", [6, 8, 32, 64, 80, 128])
def test_a_decoding_step_attends_as_written(
    loops: Kernels, dim: int, heads: int, kv_heads: int, bias: bool, norm: bool
) -> None:
    case = step(dim, heads, kv_heads, bias=bias, norm=norm)

    found, expected = case.run(loops), case.expected()

    for tensor, exact in zip(found, expected, strict=True):
        assert_close(tensor, exact)
    # Beside the new token's place nothing was written.
    untouched = torch.ones(case.keys.shape[:3], dtype=torch.bool)
    untouched[torch.arange(len(case.positions)), :, case.positions] = False
    assert torch.equal(found[1][untouched], case.keys[untouched])
    assert torch.equal(found[2][untouched], case.values[untouched])


def test_attention_takes_scores_that_no_exponential_holds(loops: Kernels) -> None:
    case = step(32, 4, 2, scale=40.0)

    out, _, _ = case.run(loops)

    assert_close(out, case.expected()[0], tolerance=1e-3)


def test_attention_over_thousands_of_keys_is_as_exact(loops: Kernels) -> None:
    case = step(8, 2, 1, positions=(5000, 2))

    out, _, _ = case.run(loops)

    expected = case.expected()[0]
    for row in range(2):
        assert_close(out[row], expected[row])


@pytest.mark.parametrize("dim", [8, 32, 80])
def test_a_rows_attention_has_the_same_bits_in_any_batch_on_any_threads(
    loops: Kernels, threads: SetThreads, dim: int
) -> None:
    case = step(dim, 6, 2, bias=True, norm=True, positions=tuple(range(0, 130, 5)))

    together = case.run(loops)[0]
    alone = [case.select_row(row).run(loops)[0] for row in range(len(together))]
    threads(2)

    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together, case.run(loops)[0])


@pytest.mark.parametrize("size", [7, 64, 4099])
def test_other_loops_give_a_row_the_same_bits_in_any_batch_on_any_threads(
    loops: Kernels, threads: SetThreads, size: int
) -> None:
    x, y, weight = random(MANY, size), random(MANY, size, seed=1), random(size, seed=2)
    both = random(MANY, 2 * size, seed=3, scale=10.0)

    def outputs(rows: slice) -> list[Tensor]:
        outs = [torch.empty_like(x[rows]) for _ in range(3)]
        loops.rms_norm(x[rows].clone(), weight, EPS, outs[0])
        loops.add_rms_norm(x[rows].clone(), y[rows].clone(), weight, EPS, outs[1])
        loops.silu_mul(both[rows].clone(), outs[2])
        return outs

    together = outputs(slice(None))
    for row in (0, 1, 17, MANY - 1):
        alone = outputs(slice(row, row + 1))
        assert_equal([output[0] for output in alone], [output[row] for output in together])
    threads(2)
    assert_equal(outputs(slice(None)), together)


def sample(
    loops: Kernels, logits: Tensor, temperature: float = 1.0, fraction: float = 0.5
) -> tuple[Tensor, Tensor, Tensor]:
    rows = len(logits)
    return loops.sample(
        logits, torch.full((rows,), temperature), torch.full((rows,), fraction, dtype=torch.float64)
    )


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("offset", [0.0, 1e4])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 1.3, 5.0])
def test_a_draw_inverts_the_cumulative_distribution(
    loops: Kernels, temperature: float, offset: float
) -> None:
    logits = random(200, 997, scale=3.0) + offset
    fractions = torch.rand(200, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    temperatures = torch.full((200,), temperature)
    tokens, logprobs, sampled_logprobs = loops.sample(logits, temperatures, fractions)

    exact = logits.double()
    picked = tokens[:, None]
    cumulative = (exact / temperature).softmax(-1).cumsum(-1)
    upper = cumulative.gather(1, picked)[:, 0]
    lower = torch.where(tokens > 0, cumulative.gather(1, (picked - 1).clamp(min=0))[:, 0], 0.0)
    assert bool((lower - 1e-6 <= fractions).all())
    assert bool((fractions <= upper + 1e-6).all())
    # So narrow a margin leaves hardly any draw undecided.
    sure = torch.searchsorted(cumulative, fractions[:, None], right=True)[:, 0]
    assert int((sure != tokens).sum()) <= 1
    assert_close(logprobs, exact.log_softmax(-1).gather(1, picked)[:, 0])
    assert_close(sampled_logprobs, (exact / temperature).log_softmax(-1).gather(1, picked)[:, 0])


LAST = math.nextafter(1.0, 0.0)


@pytest.mark.parametrize("fraction", [0.0, 0.5, LAST])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("vocab", [5, 64, 1001])
def test_a_token_without_probability_is_never_drawn(
    loops: Kernels, vocab: int, temperature: float, fraction: float
) -> None:
    logits = random(300, vocab, scale=4.0)
    impossible = torch.rand(300, vocab, generator=torch.Generator().manual_seed(1)) < 0.8
    impossible[:, 0] = impossible[:, -1] = True
    impossible[:, 2] = False
    logits[impossible] = -math.inf
    # An exponential of this is 0 in float32, at any of these temperatures.
    logits[:, 1] = -1000.0

    tokens, logprobs, sampled_logprobs = sample(loops, logits, temperature, fraction)

    own = logits.gather(1, tokens[:, None])[:, 0]
    assert bool((own > -500).all())
    assert bool(logprobs.isfinite().all() and sampled_logprobs.isfinite().all())
    if fraction == 0.0:
        counts = (logits - logits.amax(1, keepdim=True)) / temperature >= -87
        assert torch.equal(tokens, counts.float().argmax(1))


@pytest.mark.parametrize("temperature", [1e-6, 1e-12, 1e-38, 1e-44])
@pytest.mark.parametrize("fraction", [0.0, 0.5, LAST])
def test_a_tiny_temperature_takes_the_most_probable_token(
    loops: Kernels, temperature: float, fraction: float
) -> None:
    logits = random(50, 997, scale=3.0)

    tokens, logprobs, sampled_logprobs = sample(loops, logits, temperature, fraction)

    assert torch.equal(tokens, logits.argmax(1))
    assert_close(logprobs, logits.double().log_softmax(-1).amax(1))
    assert sampled_logprobs.abs().max() <= 1e-3


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("fraction", [0.0, 0.5, LAST])
def test_logits_that_are_no_distribution_give_nan_and_harm_no_other_row(
    loops: Kernels, temperature: float, fraction: float
) -> None:
    logits = random(8, 97)
    healthy = sample(loops, logits, temperature, fraction)
    logits[0, 0], logits[1, 50], logits[2, 96] = math.nan, math.nan, math.nan
    logits[3, 7] = math.inf
    logits[4] = -math.inf
    logits[5] = math.nan

    tokens, logprobs, sampled_logprobs = sample(loops, logits, temperature, fraction)

    assert bool(logprobs[:6].isnan().all() and sampled_logprobs[:6].isnan().all())
    assert bool(((tokens >= 0) & (tokens < 97)).all())
    outputs = (tokens, logprobs, sampled_logprobs)
    assert_equal([output[6:] for output in outputs], [output[6:] for output in healthy])


def test_the_only_possible_token_is_drawn_surely(loops: Kernels) -> None:
    logits = torch.full((97, 97), -math.inf)
    logits.fill_diagonal_(-3.0)

    for fraction in (0.0, 0.5, LAST):
        tokens, logprobs, sampled_logprobs = sample(loops, logits, 0.7, fraction)
        assert tokens.tolist() == list(range(97))
        assert logprobs.abs().max() == sampled_logprobs.abs().max() == 0


def test_a_draw_has_the_same_bits_in_any_batch_on_any_threads(
    loops: Kernels, threads: SetThreads
) -> None:
    logits = random(MANY, 4099, scale=3.0)
    temperatures = torch.linspace(0.5, 1.5, MANY)
    fractions = torch.linspace(0, 0.99, MANY, dtype=torch.float64)

    together = loops.sample(logits, temperatures, fractions)
    for row in (0, 1, 17, MANY - 1):
        rows = slice(row, row + 1)
        alone = loops.sample(logits[rows].clone(), temperatures[rows].clone(), fractions[rows])
        assert_equal([output[0] for output in alone], [output[row] for output in together])
    threads(2)
    assert_equal(loops.sample(logits, temperatures, fractions), together)


def test_no_room_for_work_arrays_is_an_error_and_no_crash(loops: Kernels) -> None:
    case = step(8, 2, 1, positions=(3,))
    pointers: Any = [tensor.data_ptr() for tensor in (case.qkv, *case.rotations, case.positions)]
    shape = AttentionShape(1, 2, 1, 8, 8, 8, 1, EPS, 1.0)
    case.positions[0] = 2**55

    with pytest.raises(MemoryError, match="hearth_decode_attention cannot allocate"):
        loops.library.hearth_decode_attention(
            pointers[0],
            None,
            None,
            None,
            *pointers[1:],
            case.keys.data_ptr(),
            case.values.data_ptr(),
            torch.empty(16).data_ptr(),
            shape,
        )
