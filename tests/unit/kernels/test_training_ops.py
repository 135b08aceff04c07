"""The differentiable loops against autograd through the same in torch, in float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from tests.unit.kernels.tensors import EPS, SetThreads, assert_equal, random
from torch import Tensor

from hearth.kernels.training import (
    Linear,
    Tree,
    add_rms_norm,
    linears,
    rms_norm,
    rope,
    score,
    score_frozen,
    silu_mul,
    tree_attention,
)

Function = Callable[..., Tensor | tuple[Tensor, ...]]

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("loops")]


def run(function: Function, inputs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Values, and gradients of a fixed random sum of them in all inputs."""
    leaves = [input_.clone().requires_grad_() for input_ in inputs]
    # A loop may write into what it was given: leaves are not for that.
    found = function(*[leaf * 1.0 for leaf in leaves])
    outputs = list(found) if isinstance(found, tuple) else [found]
    total = sum(
        (output * random(*output.shape, seed=90 + place).to(output)).sum()
        for place, output in enumerate(outputs)
    )
    assert isinstance(total, Tensor)
    gradients = torch.autograd.grad(total, leaves)
    return [output.detach() for output in outputs], list(gradients)


def assert_same(
    fast: Function, plain: Function, inputs: Sequence[Tensor], tolerance: float = 1e-5
) -> None:
    """Values and gradients within a part of the largest of each."""
    found, expected = run(fast, inputs), run(plain, [input_.double() for input_ in inputs])
    for tensors, exacts in zip(found, expected, strict=True):
        for tensor, exact in zip(tensors, exacts, strict=True):
            largest = float(exact.abs().max()) or 0.1
            assert float((tensor.double() - exact).abs().max()) <= tolerance * largest


def plain_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("shape", [(1, 7), (3, 64), (37, 513)])
@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e4])
def test_norms_have_the_plain_values_and_gradients(shape: tuple[int, int], scale: float) -> None:
    x, weight = random(*shape, scale=scale), random(shape[1], seed=1)
    more = random(*shape, seed=2, scale=scale)

    assert_same(lambda a, w: rms_norm(a, w, EPS), plain_norm, [x, weight])
    assert_same(
        lambda a, b, w: add_rms_norm(a, b, w, EPS),
        lambda a, b, w: (a + b, plain_norm(a + b, w)),
        [x, more, weight],
    )


@pytest.mark.parametrize("used", [0, 1])
def test_one_output_of_two_may_be_all_that_is_used(used: int) -> None:
    assert_same(
        lambda a, b, w: add_rms_norm(a, b, w, EPS)[used],
        lambda a, b, w: (a + b, plain_norm(a + b, w) + 0 * w)[used] + 0 * w.sum(),
        [random(5, 64), random(5, 64, seed=1), random(64, seed=2)],
    )


def test_frozen_weights_get_no_gradient() -> None:
    x, weight = random(5, 64).requires_grad_(), random(64)
    heads, norm = random(5, 2, 8).requires_grad_(), random(8)
    rotations = (torch.ones(9, 8), torch.zeros(9, 8))

    rotated = rope(heads, norm, EPS, rotations, torch.arange(5))
    (rms_norm(x, weight, EPS).sum() + rotated.sum()).backward()

    assert x.grad is not None
    assert heads.grad is not None
    assert weight.grad is None
    assert norm.grad is None


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (37, 513)])
@pytest.mark.parametrize("scale", [1.0, 30.0, 300.0])
def test_the_gated_product_has_the_plain_values_and_gradients(
    shape: tuple[int, int], scale: float
) -> None:
    inputs = [random(*shape, scale=scale), random(*shape, seed=1)]

    assert_same(silu_mul, lambda gate, up: torch.nn.functional.silu(gate) * up, inputs)


def split_layers(flat: Sequence[Tensor], scale: float) -> list[Linear]:
    """Layers of a weight, a bias, and the two matrices of an adapter each."""
    fours = zip(flat[::4], flat[1::4], flat[2::4], flat[3::4], strict=True)
    return [Linear(weight, bias, down, up, scale) for weight, bias, down, up in fours]


def plain_linears(x: Tensor, layers: Sequence[Linear]) -> tuple[Tensor, ...]:
    outputs: list[Tensor] = []
    for layer in layers:
        assert layer.down is not None
        assert layer.up is not None
        update = layer.up @ layer.down * layer.scale
        outputs.append(torch.nn.functional.linear(x, layer.weight + update, layer.bias))
    return tuple(outputs)


@pytest.mark.parametrize("sizes", [(5,), (8, 3), (64, 32, 32)])
def test_layers_of_the_same_rows_have_the_plain_values_and_gradients(sizes: Sequence[int]) -> None:
    weights = [random(size, 48, seed=size) for size in sizes]

    assert_same(
        lambda x, *ws: linears(x, *map(Linear, ws)),
        lambda x, *ws: tuple(x @ weight.T for weight in ws),
        [random(37, 48), *weights],
    )


@pytest.mark.parametrize("sizes", [(5,), (64, 32, 32)])
@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_adapted_layers_have_the_plain_values_and_gradients(
    sizes: Sequence[int], scale: float
) -> None:
    flat = [
        random(*shape, seed=size + place)
        for size in sizes
        for place, shape in enumerate([(size, 48), (size,), (3, 48), (size, 3)])
    ]

    assert_same(
        lambda x, *parts: linears(x, *split_layers(parts, scale)),
        lambda x, *parts: plain_linears(x, split_layers(parts, scale)),
        [random(37, 48), *flat],
    )


def test_bfloat16_weights_are_computed_with_in_float32(threads: SetThreads) -> None:
    # The first has more values than are float32 at one time.
    weights = [random(size, 2048, seed=size, scale=0.1).bfloat16() for size in (2100, 5)]
    exact, targets = [weight.double() for weight in weights], torch.arange(37)

    def adapt(own: Sequence[Tensor], parts: Sequence[Tensor]) -> list[Linear]:
        pairs = zip(own, parts[::2], parts[1::2], strict=True)
        return [Linear(weight, None, down, up, 2.0) for weight, down, up in pairs]

    def compute(x: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        return *linears(x, *adapt(weights, parts)), score_frozen(x, weights[0], targets, 0.7)

    def compute_plainly(x: Tensor, *parts: Tensor) -> tuple[Tensor, ...]:
        outputs = plain_linears(x, adapt(exact, parts))
        return *outputs, plain_score(x @ exact[0].T, targets, 0.7)

    inputs = [random(37, 2048, scale=0.1)]
    for weight in weights:
        inputs += [random(3, 2048, seed=1, scale=0.1), random(len(weight), 3, seed=2)]

    assert_same(compute, compute_plainly, inputs)
    before = run(compute, inputs)
    threads(2)
    for found, expected in zip(run(compute, inputs), before, strict=True):
        assert_equal(found, expected)


def test_layers_give_gradients_to_those_that_want_them() -> None:
    x, first, second = random(5, 8), random(3, 8).requires_grad_(), random(4, 8)
    down, up = random(2, 8, seed=1).requires_grad_(), random(4, 2, seed=2)

    outputs = linears(x, Linear(first), Linear(second, None, down, up))
    torch.cat(outputs, dim=1).sum().backward()

    assert first.grad is not None
    torch.testing.assert_close(first.grad, x.sum(0).expand(3, 8))
    assert down.grad is not None
    torch.testing.assert_close(down.grad, up.sum(0)[:, None] * x.sum(0))
    assert x.grad is None
    assert second.grad is None
    assert up.grad is None


def plain_rope(x: Tensor, rotations: tuple[Tensor, Tensor], positions: Tensor) -> Tensor:
    cosines, sines = (table.to(x)[positions][:, None] for table in rotations)
    low, high = x.chunk(2, dim=-1)
    return x * cosines + torch.cat([-high, low], dim=-1) * sines


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("dim", [2, 6, 8, 32, 64, 80, 128])
def test_rotated_heads_have_the_plain_values_and_gradients(dim: int) -> None:
    # Cosines and sines of both halves differ here, as no model's do, so that none is mistaken.
    angles = random(50, dim, seed=7)
    rotations = (angles.cos(), angles.sin())
    positions = torch.tensor([0, 49, 3, 3, 17, 20, 1])
    x, norm = random(7, 3, dim, scale=3.0), random(dim, seed=1)

    assert_same(
        lambda a: rope(a, None, EPS, rotations, positions),
        lambda a: plain_rope(a, rotations, positions),
        [x],
    )
    assert_same(
        lambda a, w: rope(a, w, EPS, rotations, positions),
        lambda a, w: plain_rope(plain_norm(a, w), rotations, positions),
        [x, norm],
    )


def make_tree(clusters: Sequence[tuple[int, Sequence[int]]]) -> Tree:
    """A tree of (tokens of the prefix, tokens of each sequence)."""
    heads: list[tuple[int, int, int, int]] = []
    sequences: list[tuple[int, int]] = []
    row = most = 0
    for prefix, lengths in clusters:
        start, first = row, len(sequences)
        row += prefix
        for length in lengths:
            sequences.append((row, length))
            row += length
        heads.append((start, prefix, first, len(sequences)))
        most = max(most, prefix + max(lengths, default=0))
    return Tree(torch.tensor(heads), torch.tensor(sequences or [(0, 0)]), most)


TREES = {
    "a prefix and sequences": [(9, [4, 1, 7])],
    "sequences alone": [(0, [5, 1])],
    "a prefix alone": [(6, [])],
    "one row": [(0, [1])],
    "clusters of all kinds": [(9, [4, 1, 7]), (0, [5]), (1, [1, 1]), (17, []), (3, [20])],
    "more queries than a tile holds": [(45, [70, 33, 1]), (0, [40])],
}


def rows_of(tree: Tree) -> int:
    clusters = tree.clusters.tolist()
    return max(
        [start + prefix for start, prefix, *_ in clusters]
        + [start + length for start, length in tree.sequences.tolist()]
    )


def visible(tree: Tree) -> Tensor:
    """Which tokens [R, R] attend to which."""
    seen = torch.zeros(rows_of(tree), rows_of(tree), dtype=torch.bool)
    for start, prefix, first, end in tree.clusters.tolist():
        seen[start : start + prefix, start : start + prefix] = True
        for at, length in tree.sequences[first:end].tolist():
            seen[at : at + length, start : start + prefix] = True
            seen[at : at + length, at : at + length] = True
    return seen.tril()


def plain_attention(q: Tensor, k: Tensor, v: Tensor, tree: Tree, scale: float) -> Tensor:
    group = q.shape[1] // k.shape[1]
    keys, values = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = torch.einsum("qad,kad->aqk", q, keys) * scale
    scores = scores.masked_fill(~visible(tree), -math.inf)
    return torch.einsum("aqk,kad->qad", scores.softmax(-1), values)


def attention_inputs(
    tree: Tree, heads: int, kv_heads: int, dim: int, scale: float = 1.0
) -> list[Tensor]:
    rows = rows_of(tree)
    return [
        random(rows, heads, dim, scale=scale),
        random(rows, kv_heads, dim, seed=1, scale=scale),
        random(rows, kv_heads, dim, seed=2),
    ]


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("dim", [2, 6, 8, 32, 64, 80, 128])
def test_attention_in_a_tree_is_masked_attention(dim: int, heads: int, kv_heads: int) -> None:
    tree = make_tree(TREES["clusters of all kinds"])

    assert_same(
        lambda q, k, v: tree_attention(q, k, v, tree, dim**-0.5),
        lambda q, k, v: plain_attention(q, k, v, tree, dim**-0.5),
        attention_inputs(tree, heads, kv_heads, dim),
    )


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_takes_any_tree(kind: str, heads: int) -> None:
    tree = make_tree(TREES[kind])

    assert_same(
        lambda q, k, v: tree_attention(q, k, v, tree, 0.3),
        lambda q, k, v: plain_attention(q, k, v, tree, 0.3),
        attention_inputs(tree, heads, 2, 32),
    )


def test_attention_takes_scores_that_no_exponential_holds() -> None:
    tree = make_tree([(9, [4, 7])])
    inputs = attention_inputs(tree, 2, 1, 32, scale=10.0)

    assert_same(
        lambda q, k, v: tree_attention(q, k, v, tree, 1.0),
        lambda q, k, v: plain_attention(q, k, v, tree, 1.0),
        inputs,
        tolerance=1e-3,
    )


@pytest.mark.parametrize("dim", [8, 32, 80])
def test_a_rows_attention_has_the_same_bits_whatever_it_is_packed_with(
    threads: SetThreads, dim: int
) -> None:
    tree = make_tree([(9, [4, 11]), (21, [5]), (0, [64])])
    q, k, v = attention_inputs(tree, 4, 2, dim)
    scale = dim**-0.5

    together = tree_attention(q, k, v, tree, scale)
    # The second sequence of the first cluster, with a copy of its prefix.
    own = torch.tensor([*range(9), *range(13, 24)])
    for alone in (make_tree([(9, [11])]), make_tree([(0, [20])]), make_tree([(20, [])])):
        found = tree_attention(q[own], k[own], v[own], alone, scale)
        assert torch.equal(found, together[own])
    threads(2)
    assert torch.equal(tree_attention(q, k, v, tree, scale), together)


def test_attentions_gradient_has_the_same_bits_on_any_number_of_threads(
    threads: SetThreads,
) -> None:
    tree = make_tree(TREES["more queries than a tile holds"])
    inputs = attention_inputs(tree, 6, 2, 32)

    def gradients(count: int) -> list[Tensor]:
        threads(count)
        return run(lambda q, k, v: tree_attention(q, k, v, tree, 0.3), inputs)[1]

    assert_equal(gradients(1), gradients(2))


@pytest.mark.parametrize("place", [3, 35])
def test_no_row_is_harmed_by_a_later_one(place: int) -> None:
    tree = make_tree([(0, [40])])
    q, k, v = attention_inputs(tree, 1, 1, 32)
    sound = tree_attention(q, k, v, tree, 0.3)
    for tensor in (q, k, v):
        tensor[place] = math.nan

    found = tree_attention(q, k, v, tree, 0.3)

    assert torch.equal(found[:place], sound[:place])
    assert found[place].isnan().all()


def test_other_loops_give_a_row_the_same_bits_in_any_batch_on_any_threads(
    threads: SetThreads,
) -> None:
    rows, size = 37, 513
    x, y, weight = random(rows, size), random(rows, size, seed=1), random(size, seed=2)
    angles = random(50, 80, seed=3)
    rotations, positions = (angles.cos(), angles.sin()), torch.arange(rows)
    heads, norm = random(rows, 3, 80, seed=4), random(80, seed=5)
    logits, targets = random(rows, 997, seed=6), torch.arange(rows)

    def outputs(at: slice) -> list[Tensor]:
        """Values, and gradients in what has rows."""
        own, more = x[at].clone().requires_grad_(), y[at].clone().requires_grad_()
        rotating, scoring = heads[at].clone().requires_grad_(), logits[at].clone().requires_grad_()
        values = [
            *add_rms_norm(own, more, weight, EPS),
            silu_mul(own, more),
            rope(rotating, norm, EPS, rotations, positions[at].clone()),
            score(scoring * 1.0, targets[at].clone(), 0.7),
        ]
        total = torch.stack([value.square().sum() for value in values]).sum()
        gradients = torch.autograd.grad(total, [own, more, rotating, scoring])
        return [*(value.detach() for value in values), *gradients]

    together = outputs(slice(None))
    for row in (0, 1, 17, rows - 1):
        alone = outputs(slice(row, row + 1))
        assert_equal([output[0] for output in alone], [output[row] for output in together])
    threads(2)
    assert_equal(outputs(slice(None)), together)


def plain_score(logits: Tensor, targets: Tensor, temperature: float) -> Tensor:
    return (logits / temperature).log_softmax(-1).gather(1, targets[:, None])[:, 0]


@pytest.mark.usefixtures("one_or_two_threads")
@pytest.mark.parametrize("vocab", [2, 7, 96, 1001])
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 5.0])
@pytest.mark.parametrize("offset", [0.0, -1e4])
def test_scores_have_the_plain_values_and_gradients(
    vocab: int, temperature: float, offset: float
) -> None:
    logits = random(33, vocab, scale=4.0) + offset
    targets = torch.arange(33) % vocab

    assert_same(
        lambda x: score(x, targets, temperature),
        lambda x: plain_score(x, targets, temperature),
        [logits],
    )


def test_impossible_tokens_have_no_gradient() -> None:
    logits = random(2, 9)
    logits[0, 3] = logits[0, 8] = -math.inf
    leaf = logits.clone().requires_grad_()

    found = score(leaf * 1.0, torch.tensor([1, 3]))
    found.sum().backward()

    assert leaf.grad is not None
    assert leaf.grad[0, [3, 8]].abs().max() <= 1e-37
    expected = plain_score(logits.double(), torch.tensor([1, 3]), 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_numbers_that_are_none_stay_visible(value: float) -> None:
    logits, x = random(3, 9), random(3, 8)
    logits[1, 4] = x[1, 4] = value
    tree = make_tree([(0, [2]), (0, [1])])
    heads = x.view(3, 1, 8).clone()

    scored = score(logits, torch.zeros(3, dtype=torch.int64))
    normed = rms_norm(x, torch.ones(8), EPS)
    attended = tree_attention(random(3, 1, 8), random(3, 1, 8), heads, tree, 1.0)

    # Of the row itself, and of no other.
    for found in (scored[:, None], normed, attended.flatten(1)):
        assert found.isfinite().all(dim=1).tolist() == [True, False, True]


def test_a_loss_twice_through_the_same_rows_is_refused() -> None:
    x = random(3, 8).requires_grad_()
    (once,) = torch.autograd.grad(
        rms_norm(x, torch.ones(8), EPS).square().sum(), x, create_graph=True
    )

    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


def test_no_room_for_work_arrays_is_an_error_and_no_crash() -> None:
    tree = make_tree([(2, [1])])
    endless = Tree(tree.clusters, tree.sequences, 2**50)
    q, k, v = attention_inputs(tree, 1, 1, 8)

    with pytest.raises(MemoryError, match="hearth_tree_forward cannot allocate"):
        tree_attention(q, k, v, endless, 1.0)


def test_a_norms_gradient_has_the_same_bits_on_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1003, 4, 32, generator=generator)
    weight, rotations = torch.randn(32, generator=generator), torch.randn(2, 1003, 32)
    grad = torch.randn(1003, 4, 32, generator=generator)
    positions = torch.arange(1003)

    def gradients(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        head_weight, weight_of_all = (weight.clone().requires_grad_() for _ in range(2))
        rope(x, head_weight, EPS, (rotations[0], rotations[1]), positions).backward(grad)
        rms_norm(x.flatten(0, 1), weight_of_all, EPS).backward(grad.flatten(0, 1))
        torch.set_num_threads(1)
        return [leaf.grad for leaf in (head_weight, weight_of_all) if leaf.grad is not None]

    alone = gradients(1)

    assert len(alone) == 2
    assert_equal(alone, gradients(2))
