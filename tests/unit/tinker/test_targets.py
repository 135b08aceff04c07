"""Named tokens of a prompt are each scored as the end of what is before, and come back in place."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pytest
from tinker.proto.response_conv import deserialize_sample_response

from hearth.errors import RequestError
from hearth.tinker.protobuf import Sample, write_sample
from hearth.tinker.targets import MOST_TARGETS, build_scoring, read_scores, read_targets

PROMPT = [5, 6, 7]
DENSE = {"data": [6, -1, 9, 7], "dtype": "int64", "shape": [2, 2]}
SPARSE = {
    "data": [9, 7],
    "dtype": "int64",
    "shape": [2, 3],
    "sparse_crow_indices": [0, 0, 2],
    "sparse_col_indices": [0, 2],
}


def answer(*scores: float) -> dict[str, Any]:
    # A deployment may name its choices in any order; the last logprob is of what it sampled.
    return {
        "choices": [
            {"index": place, "raw_output": {"logprobs": [score, -8.0]}}
            for place, score in reversed(list(enumerate(scores)))
        ]
    }


def deserialize(scores: Any) -> Any:
    body = write_sample(Sample(sequences=[], target_logprobs=scores))
    return deserialize_sample_response(body).target_prompt_logprobs


def test_dense_targets_are_scored_where_they_stand() -> None:
    targets = read_targets(DENSE, PROMPT)
    body = build_scoring(targets, PROMPT, "snapshot")
    assert body is not None
    asked = orjson.loads(body)

    assert asked["prompt"] == [[5, 6], [5, 6, 9], [5, 6, 7]]
    assert (asked["echo_last"], asked["adapter"]) == (1, "snapshot")
    found = deserialize(read_scores(targets, answer(-1.0, -2.0, -3.0))).to_numpy()
    np.testing.assert_array_equal(found, [[-1.0, np.nan], [-2.0, -3.0]])


def test_sparse_targets_stay_sparse() -> None:
    targets = read_targets(SPARSE, PROMPT)
    body = build_scoring(targets, PROMPT, None)
    assert body is not None
    asked = orjson.loads(body)

    assert asked["prompt"] == [[5, 6, 9], [5, 6, 7]]
    assert "adapter" not in asked
    found = deserialize(read_scores(targets, answer(-1.0, -2.0)))
    assert found.sparse_crow_indices == [0, 0, 2]
    assert found.to_torch()[1].tolist() == [-1.0, 0.0, -2.0]


def test_where_nothing_is_named_nothing_is_asked() -> None:
    targets = read_targets({**DENSE, "data": [-1] * 4}, PROMPT)

    assert build_scoring(targets, PROMPT, None) is None
    assert np.isnan(deserialize(read_scores(targets, None)).to_numpy()).all()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "float32"}, "must be an int64 tensor of shape"),
        ({"shape": [4]}, "must be an int64 tensor of shape"),
        ({"shape": [3, 2]}, "one row per token but the first"),
        ({"shape": [2, 10**12]}, "must hold the cells of its shape, got 4 tokens"),
        ({"data": [1, 2, 3]}, "must hold the cells of its shape, got 3 tokens"),
        ({"data": ["a"] * 4}, "must be a tensor"),
        ({"sparse_crow_indices": [0, 4, 10**12]}, "must be a tensor, got 'sparse_col_indices'"),
        (
            {"sparse_crow_indices": [0, 4, 10**12], "sparse_col_indices": [0] * 4},
            "must hold the cells of its shape",
        ),
        (
            {"sparse_crow_indices": [0, 4, 4], "sparse_col_indices": [0, 1, 2, 3]},
            "must hold the cells of its shape",
        ),
        (
            {"data": [1] * 2 * MOST_TARGETS, "shape": [2, MOST_TARGETS]},
            f"must name at most {MOST_TARGETS} tokens, got {2 * MOST_TARGETS}",
        ),
    ],
)
def test_what_is_no_such_tensor_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_targets(DENSE | changes, PROMPT)
