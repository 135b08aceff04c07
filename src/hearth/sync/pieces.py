"""Pieces of tensors, of which several ranks have one each: their names, places and checksums.

A piece is a range of a tensor's flat elements under the name ``name[START:END]``. A tensor under
its own name is the piece that has all of them.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

import torch
from torch import Tensor

from hearth.errors import EngineError
from hearth.sync.manifest import LEAF, THREADS, TensorEntry, combine_leaves

_PIECE = re.compile(r"(.+)\[(\d+):(\d+)\]")
_POLYNOMIAL = 0xEDB88320
_ONE = 1 << 31

Span = tuple[int, int, int]
"""Of a tensor's bytes: where it begins, how long it is, its CRC-32."""


def name_piece(name: str, start: int, end: int) -> str:
    """The name of a tensor's flat elements from ``start`` to before ``end``."""
    return f"{name}[{start}:{end}]"


def split_name(key: str) -> tuple[str, tuple[int, int] | None]:
    """The tensor of a name, and the range of a piece; None for a whole tensor."""
    found = _PIECE.fullmatch(key)
    return (key, None) if found is None else (found[1], (int(found[2]), int(found[3])))


def place_pieces(
    entries: Mapping[str, TensorEntry],
    names: Iterable[str],
    into: Mapping[str, Tensor] | None = None,
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Whole tensors of ``entries``, and in their memory the pieces of ``names``, by their names.

    ``into`` are tensors of that layout to use, and none is made.

    Raises:
        EngineError: the pieces are not exactly the tensors.
    """
    if into is None:
        into = {
            name: torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
            for name, entry in entries.items()
        }
    ends: dict[str, int] = dict.fromkeys(into, 0)
    pieces: dict[str, Tensor] = {}
    split = [(key, *split_name(key)) for key in names]
    for key, name, span in sorted(split, key=lambda piece: (piece[1], piece[2] or (0, 0))):
        whole = into.get(name)
        start, end = span or (0, 0 if whole is None else whole.numel())
        if whole is None or ends[name] != start or end > whole.numel():
            raise EngineError(f"pieces must cover each tensor once, got {key!r} in its place")
        ends[name] = end
        pieces[key] = whole if span is None else whole.view(-1)[start:end]
    missing = [name for name, tensor in into.items() if ends[name] != tensor.numel()]
    if missing:
        raise EngineError(f"pieces must cover each tensor once, got too few of {missing[:3]}")
    return dict(into), pieces


def sum_piece(piece: Tensor, start: int) -> list[Span]:
    """CRC-32 of a piece's bytes that begin at ``start`` bytes of its tensor, one per leaf of it."""
    data = piece.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    spans: list[Span] = []
    place = 0
    while place < len(data):
        length = min(len(data) - place, LEAF - (start + place) % LEAF)
        spans.append((start + place, length, zlib.crc32(data[place : place + length])))
        place += length
    return spans


def sum_pieces(pieces: Mapping[str, Tensor]) -> dict[str, list[Span]]:
    """``sum_piece`` of every piece, by the name of its tensor."""

    def sum_named(key: str) -> tuple[str, list[Span]]:
        name, span = split_name(key)
        assert span is not None, "it is a piece's name"
        return name, sum_piece(pieces[key], span[0] * pieces[key].element_size())

    with ThreadPoolExecutor(THREADS) as pool:
        return dict(pool.map(sum_named, pieces))


def join_sums(dtype: str, shape: list[int], spans: Iterable[Span]) -> TensorEntry:
    """The entry of a whole tensor as ``manifest.fingerprints`` has it, from sums of its pieces."""
    leaves: dict[int, int] = {}
    for start, length, crc in sorted(spans):
        leaf = start // LEAF
        leaves[leaf] = crc if leaf not in leaves else combine_crc32(leaves[leaf], crc, length)
    sums = [crc.to_bytes(4, "big") for _, crc in sorted(leaves.items())] or [bytes(4)]
    return TensorEntry(dtype=dtype, shape=shape, checksum=f"crc32:{combine_leaves(sums).hex()}")


def combine_crc32(first: int, second: int, length: int) -> int:
    """The CRC-32 of two texts one after the other; ``length`` is that of the second, in bytes."""
    return _multiply(_shift(length), first) ^ second


@lru_cache(maxsize=4096)
def _shift(length: int) -> int:
    """x to the power of 8 ``length``, modulo the polynomial."""
    power, square, bits = _ONE, 1 << 30, 8 * length
    while bits:
        if bits & 1:
            power = _multiply(square, power)
        square = _multiply(square, square)
        bits >>= 1
    return power


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials over GF(2), lowest power in the highest bit."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product
