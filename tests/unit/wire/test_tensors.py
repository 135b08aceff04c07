import numpy as np
import pytest

from hearth.errors import RequestError
from hearth.wire.tensors import TensorRecord, encode


@pytest.mark.parametrize("encoding", ["list", "base64"])
@pytest.mark.parametrize(
    ("values", "dtype"),
    [([[1, 2], [-3, 2**40]], "int64"), ([0.1, -1e-30, 3.4e38], "float32"), ([], "float32")],
    ids=["int64-2d", "float32", "empty"],
)
def test_a_tensor_survives_the_wire_bit_for_bit(values, dtype, encoding):
    array = np.array(values, dtype=dtype)

    back = TensorRecord.parse(encode(array, dtype, encoding).dump()).to_numpy()

    assert back.dtype == array.dtype
    assert back.tobytes() == array.tobytes()
    assert back.shape == array.shape


def test_base64_carries_nan_and_infinity():
    array = np.array([np.nan, np.inf, -np.inf], dtype=np.float32)

    back = TensorRecord.parse(encode(array, "float32", "base64").dump()).to_numpy()

    assert back.tobytes() == array.tobytes()


def test_csr_tensors_become_dense():
    record = TensorRecord(
        data=[5, 7],
        dtype="int64",
        shape=[2, 3],
        sparse_crow_indices=[0, 1, 2],
        sparse_col_indices=[2, 0],
    )

    assert record.to_numpy().tolist() == [[0, 0, 5], [7, 0, 0]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": [1, 2], "shape": [3]}, "shape must fit the data"),
        ({"data": "no base64!"}, "data must be base64"),
        ({"data": [1], "shape": [1], "sparse_crow_indices": [0, 1]}, "2-D shape"),
        (
            {
                "data": [1],
                "shape": [1, 1],
                "sparse_crow_indices": [0, 1],
                "sparse_col_indices": [4],
            },
            "sparse_col_indices must lie in the shape",
        ),
    ],
    ids=["shape", "base64", "sparse-1d", "sparse-column"],
)
def test_a_tensor_that_does_not_fit_itself_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        TensorRecord(dtype="int64", **fields).to_numpy()
