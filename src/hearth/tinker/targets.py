"""Logprobs of tokens that a client names at positions of a prompt.

Each is scored as the last token of a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hearth.errors import RequestError
from hearth.tinker.protobuf import TargetLogprobs

MOST_TARGETS = 1024
"""Tokens that one request may have scored: each is a request of its own to a deployment."""
_NOTHING = -1
"""In the place of a token: nothing is asked there."""


@dataclass(frozen=True)
class Targets:
    """A request's tokens, in the layout in which they came: dense, or as CSR."""

    tokens: NDArray[np.int64]
    """[cells]; dense ones row by row."""
    rows: NDArray[np.int64]
    """[cells]: a token of row ``i`` is scored behind ``i + 1`` tokens of the prompt."""
    shape: tuple[int, int]
    sparse: tuple[NDArray[np.int64], NDArray[np.int64]] | None
    """CSR's row offsets and columns."""

    @property
    def asked(self) -> NDArray[np.bool_]:
        """Which cells ask for anything."""
        return self.tokens != _NOTHING


def read_targets(tensor: Mapping[str, Any], prompt: Sequence[int]) -> Targets:
    """The tokens of a request's ``target_prompt_logprobs``.

    Raises:
        RequestError: it is no int64 tensor [len(prompt) - 1, K], or names too many tokens.
    """
    height, width = len(prompt) - 1, _read_width(tensor, len(prompt) - 1)
    try:
        tokens = np.asarray(tensor["data"], dtype=np.int64).reshape(-1)
        sparse = None
        if tensor.get("sparse_crow_indices") is not None:
            offsets, columns = (
                np.asarray(tensor[f"sparse_{name}_indices"], dtype=np.int64).reshape(-1)
                for name in ("crow", "col")
            )
            sparse = offsets, columns
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise RequestError(f"target_prompt_logprobs must be a tensor, got {error}") from None
    if not _is_whole(tokens, sparse, height, width):
        raise RequestError(
            f"target_prompt_logprobs must hold the cells of its shape, got {tokens.size} tokens"
        )
    counts = width if sparse is None else np.diff(sparse[0])
    rows = np.repeat(np.arange(height), counts)
    targets = Targets(tokens, rows, (height, width), sparse)
    if (count := int(targets.asked.sum())) > MOST_TARGETS:
        raise RequestError(
            f"target_prompt_logprobs must name at most {MOST_TARGETS} tokens, got {count}: score "
            "whole sequences with compute_logprobs, or with forward"
        )
    return targets


def _read_width(tensor: Mapping[str, Any], height: int) -> int:
    match tensor:
        case {"dtype": "int64", "shape": [int(rows), int(width)]} if rows == height and width >= 1:
            return width
        case _:
            pass
    found = f"{str(tensor.get('dtype'))[:20]} of {str(tensor.get('shape'))[:80]}"
    raise RequestError(
        f"target_prompt_logprobs must be an int64 tensor of shape [{height}, K], got {found}: "
        "one row per token but the first"
    )


def _is_whole(
    tokens: NDArray[np.int64],
    sparse: tuple[NDArray[np.int64], NDArray[np.int64]] | None,
    height: int,
    width: int,
) -> bool:
    """Whether there is a token for every cell that a dense or sparse tensor has."""
    if sparse is None:
        return tokens.size == height * width
    offsets, columns = sparse
    is_grid = offsets.size == height + 1 and columns.size == tokens.size
    is_rising = is_grid and offsets[0] == 0 and bool(np.all(np.diff(offsets) >= 0))
    return (
        is_rising
        and offsets[-1] == tokens.size
        and bool(np.all((columns >= 0) & (columns < width)))
    )


def build_scoring(targets: Targets, prompt: Sequence[int], identity: str | None) -> bytes | None:
    """A deployment's request for the scores; None where nothing is asked."""
    cells = zip(targets.rows.tolist(), targets.tokens.tolist(), strict=True)
    ends = [[*prompt[: row + 1], token] for row, token in cells if token != _NOTHING]
    if not ends:
        return None
    body: dict[str, Any] = {
        "prompt": ends,
        "max_tokens": 1,
        "echo_last": 1,
        "logprobs": True,
        "raw_output": True,
        "logprob_format": "arrays",
        "ignore_eos": True,
    }
    return orjson.dumps(body if identity is None else body | {"adapter": identity})


def read_scores(targets: Targets, answer: Mapping[str, Any] | None) -> TargetLogprobs:
    """The scores in the layout of the request; NaN where nothing was asked."""
    values = np.full(targets.tokens.size, np.nan, dtype=np.float32)
    if answer is not None:
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        values[targets.asked] = [choice["raw_output"]["logprobs"][0] for choice in choices]
    return TargetLogprobs(values, targets.shape, targets.sparse)
