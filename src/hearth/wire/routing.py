"""The experts that a mixture-of-experts model chose, as text: one base64 string per token.

A string holds the ids of N layers times K experts, layer by layer, as bytes (two bytes each, the
lower first, where a layer has more than 256 experts). That is Fireworks' form. An empty string
stands for a token of which nothing is known.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hearth.errors import RequestError

FREE = -1
"""Stands for an expert where a token may go to whichever its router takes."""

Choice = NDArray[np.unsignedinteger]
"""The experts [N, K] of one token, of a ``RoutingShape``'s dtype."""


@dataclass(frozen=True)
class RoutingShape:
    """What a model's routers choose from."""

    layers: int
    """N, the layers with experts."""
    experts: int
    """Experts in a layer."""
    top_k: int
    """K, the experts that a token goes to."""

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """What holds an expert's id."""
        return np.dtype("u1" if self.experts <= 256 else "<u2")

    @property
    def bytes_per_token(self) -> int:
        """Bytes behind one string."""
        return self.layers * self.top_k * self.dtype.itemsize


def encode_routing(choices: Iterable[Choice]) -> list[str]:
    """The string of each token's choice."""
    return [base64.b64encode(choice.tobytes()).decode("ascii") for choice in choices]


def decode_routing(rows: Sequence[str], shape: RoutingShape) -> NDArray[np.int64]:
    """Expert ids [T, N, K] of T strings; ``FREE`` for an empty one.

    Raises:
        RequestError: a string is no base64 of the model's layers and experts per token, or names
            an expert that is not there, or one twice; the position is named.
    """
    unknown = bytes(shape.bytes_per_token)
    parts = [_bytes_of(row, at, shape) if row else unknown for at, row in enumerate(rows)]
    flat = np.frombuffer(b"".join(parts), shape.dtype).astype(np.int64)
    choices = flat.reshape(len(rows), shape.layers, shape.top_k)
    known = np.array([bool(row) for row in rows], np.bool_)
    _check(choices, known, shape)
    choices[~known] = FREE
    return choices


def _bytes_of(row: str, position: int, shape: RoutingShape) -> bytes:
    try:
        raw = base64.b64decode(row, validate=True)
    except (binascii.Error, ValueError) as error:
        raise RequestError(
            f"routing_matrices must be base64, got {row[:20]!r} at position {position}: {error}"
        ) from None
    if len(raw) != shape.bytes_per_token:
        raise RequestError(
            f"routing_matrices must hold {shape.bytes_per_token} bytes per position "
            f"({shape.layers} layers, {shape.top_k} experts per token), got {len(raw)} at position "
            f"{position}: they were recorded with another model"
        )
    return raw


def _check(choices: NDArray[np.int64], known: NDArray[np.bool_], shape: RoutingShape) -> None:
    missing = np.argwhere(choices >= shape.experts)
    if missing.size:
        position, layer, place = missing[0].tolist()
        raise RequestError(
            f"routing_matrices must name experts in 0..{shape.experts - 1}, got "
            f"{choices[position, layer, place]} at position {position}, layer {layer}"
        )
    ordered = np.sort(choices[known], axis=-1)
    twice = np.argwhere((ordered[..., 1:] == ordered[..., :-1]).any(axis=-1))
    if twice.size:
        row, layer = twice[0].tolist()
        position = int(np.flatnonzero(known)[row])
        raise RequestError(
            f"routing_matrices must name an expert once, got {choices[position, layer].tolist()} "
            f"at position {position}, layer {layer}"
        )
