"""Deltas are lossless to the bit, hold what changed and nothing else, and say when they misfit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.tiny import checksum

from hearth.errors import EngineError
from hearth.sync import delta

DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.int64, torch.uint8, torch.bool]


def random_bits(size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, size * dtype.itemsize, dtype=np.uint8)
    if dtype == torch.bool:
        raw &= 1
    return torch.from_numpy(raw).view(dtype)


def changed(old: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
    """``old`` with other bits at the flat positions ``where``, whatever its dtype."""
    new = old.clone()
    raw = new.view(-1).view(torch.uint8).view(-1, old.dtype.itemsize)
    raw[where, 0] ^= 1
    return new


def parts_of(encoded: dict[str, torch.Tensor]) -> set[str]:
    return {key.rpartition("/")[2] for key in encoded}


def num_bytes(encoded: dict[str, torch.Tensor]) -> int:
    return sum(part.nbytes for part in encoded.values())


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 3000),
    density=st.sampled_from([0.0, 0.001, 0.01, 0.1, 0.3, 0.6, 1.0]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**20),
)
def test_applying_a_delta_gives_the_exact_bits(
    size: int, density: float, dtype: torch.dtype, seed: int
) -> None:
    old = random_bits(size, dtype, seed)
    mask = np.random.default_rng(seed).random(size) < density
    new = changed(old, torch.from_numpy(np.flatnonzero(mask)))
    before = checksum(old)

    encoded = delta.encode({"w": old}, {"w": new})
    found = {"w": old} | delta.apply(encoded, {"w": old})

    assert checksum(found["w"]) == checksum(new)
    assert checksum(old) == before
    assert bool(encoded) == bool(mask.any())
    # Never more than the tensor itself.
    assert num_bytes(encoded) <= new.nbytes


def test_bits_count_and_not_values() -> None:
    patterns = [0x7FC0, 0x7FC1, 0x0000, -0x8000, 0x3F80, 0x7F80]
    old = torch.tensor(patterns, dtype=torch.int16).view(torch.bfloat16)
    swapped = [patterns[1], patterns[0], patterns[3], patterns[2], 0x3F80, 0x7F80]
    new = torch.tensor(swapped, dtype=torch.int16).view(torch.bfloat16)

    same = delta.encode({"w": old}, {"w": old.clone()})
    encoded = delta.encode({"w": old.repeat(50)}, {"w": torch.cat([new, old.repeat(49)])})

    assert same == {}
    assert encoded["w/values"].numel() == 4
    applied = delta.apply(encoded, {"w": old.repeat(50)})["w"]
    assert applied[:6].view(torch.int16).tolist() == swapped


def test_a_delta_has_only_the_elements_that_changed() -> None:
    old = {"a": random_bits(40_000, torch.bfloat16, 1), "b": random_bits(500, torch.bfloat16, 2)}
    where = torch.arange(0, 40_000, 100)
    new = {"a": changed(old["a"], where), "b": old["b"].clone()}

    encoded = delta.encode(old, new)

    assert set(encoded) == {"a/gaps8", "a/values"}
    assert torch.equal(encoded["a/values"].view(torch.int16), new["a"][where].view(torch.int16))
    # Two bytes of value and one of position for each of 400 elements; 80 000 bytes dense.
    assert num_bytes(encoded) == 400 * 3
    assert delta.list_changed(encoded) == {"a"}


@pytest.mark.parametrize(
    ("stride", "part"),
    [(1, "whole"), (2, "bitmap"), (20, "gaps8"), (200, "gaps8"), (5_000, "gaps16")],
)
def test_the_smallest_form_is_taken(stride: int, part: str) -> None:
    old = random_bits(200_000, torch.bfloat16, 3)
    new = changed(old, torch.arange(0, old.numel(), stride))

    encoded = delta.encode({"w": old}, {"w": new})

    assert parts_of(encoded) - {"values"} == {part}
    assert checksum(delta.apply(encoded, {"w": old})["w"]) == checksum(new)


@pytest.mark.parametrize("gap", [253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 131071])
def test_gaps_at_the_edge_of_their_type_come_back(gap: int) -> None:
    old = torch.zeros(400_000, dtype=torch.int64)
    where = torch.arange(gap, old.numel(), gap + 1)
    new = changed(old, where)

    encoded = delta.encode({"w": old}, {"w": new})

    assert torch.equal(delta.apply(encoded, {"w": old})["w"], new)
    assert parts_of(encoded) < {"gaps8", "gaps16", "values"}


def test_shapes_of_every_kind_come_back() -> None:
    old = {
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 7),
        "matrix": torch.zeros(30, 40),
        "transposed": torch.arange(1200.0).reshape(40, 30).T,
    }
    new = {name: tensor.clone() for name, tensor in old.items()}
    new["scalar"] = torch.tensor(-0.0)
    new["matrix"][29, 39] = 1
    new["transposed"] = torch.arange(1200.0).reshape(40, 30).T.contiguous()
    new["transposed"][7, 0] = -1

    found = delta.apply(delta.encode(old, new), old)

    assert found.keys() == {"scalar", "matrix", "transposed"}
    assert all(torch.equal(found[name], new[name]) for name in found)
    assert found["matrix"].shape == (30, 40)


def test_threads_give_what_one_thread_gives() -> None:
    old = {f"w{i}": random_bits(300_000, torch.bfloat16, i) for i in range(5)}
    new = {
        name: changed(tensor, torch.arange(0, tensor.numel(), 90)) for name, tensor in old.items()
    }

    together = delta.encode(old, new)

    for name in old:
        alone = delta.encode({name: old[name]}, {name: new[name]})
        assert {key: checksum(part) for key, part in alone.items()} == {
            key: checksum(part) for key, part in together.items() if key.startswith(f"{name}/")
        }
    assert all(
        checksum(tensor) == checksum(new[name])
        for name, tensor in delta.apply(together, old).items()
    )


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"w/values": torch.zeros(2), "w/gaps8": torch.tensor([0], dtype=torch.uint8)}, "got 2"),
        (
            {"w/values": torch.zeros(1), "w/gaps8": torch.tensor([9], dtype=torch.uint8)},
            "up to element 9",
        ),
        (
            {"w/values": torch.zeros(1).half(), "w/gaps8": torch.tensor([1], dtype=torch.uint8)},
            "got 1 torch.float16",
        ),
        ({"w/whole": torch.zeros(5)}, r"got torch.float32 \[5\]"),
        ({"w/values": torch.zeros(1)}, r"got the parts \['values'\]"),
        ({"w/zip": torch.zeros(1), "w/values": torch.zeros(1)}, "got the parts"),
        ({"other/whole": torch.zeros(4)}, "got 'other'"),
    ],
    ids=["count", "range", "dtype", "shape", "no index", "unknown part", "unknown tensor"],
)
def test_a_delta_that_does_not_fit_is_refused_by_name(
    parts: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(EngineError, match=message):
        delta.apply(parts, {"w": torch.zeros(4)})


@pytest.mark.parametrize(
    "new",
    [{"w": torch.zeros(5)}, {"w": torch.zeros(4).half()}, {"v": torch.zeros(4)}],
    ids=["shape", "dtype", "name"],
)
def test_there_is_no_delta_between_different_models(new: dict[str, torch.Tensor]) -> None:
    with pytest.raises(EngineError, match="same names, dtypes and shapes"):
        delta.encode({"w": torch.zeros(4)}, new)
