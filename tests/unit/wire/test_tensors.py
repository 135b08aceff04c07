import numpy as np
import pytest
from pydantic import ValidationError

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


SPARSE = {
    "data": [5, 7],
    "shape": [2, 3],
    "sparse_crow_indices": [0, 1, 2],
    "sparse_col_indices": [2, 0],
}


@pytest.mark.parametrize("data", [[True, False], ["1"], [None], {"0": 1}], ids=str)
def test_what_is_no_number_is_refused(data):
    with pytest.raises(ValidationError):
        TensorRecord.model_validate({"data": data, "dtype": "int64"})


def test_whole_floats_are_whole_numbers():
    assert TensorRecord(data=[1.0, 2.0], dtype="int64").to_numpy().tolist() == [1, 2]


def test_csr_tensors_become_dense():
    record = TensorRecord(dtype="int64", **SPARSE)

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
            "sparse_col_indices must be 0 to 0, got 4 to 4",
        ),
        ({**SPARSE, "sparse_col_indices": [0, 2**63]}, "sparse indices must be int64"),
        ({"data": [], "shape": [2**62, 0]}, "shape must be at most 8 sizes in 0..2147483648"),
        ({**SPARSE, "sparse_col_indices": [-1, 0]}, "must be 0 to 2, got -1 to 0"),
        ({**SPARSE, "sparse_crow_indices": [0, 3, 2]}, "must begin with 0 and never fall"),
        ({**SPARSE, "sparse_crow_indices": [1, 1, 2]}, "must begin with 0 and never fall"),
        ({**SPARSE, "shape": [-1, 3]}, "shape must be at most 8 sizes in 0..2147483648"),
        ({**SPARSE, "shape": [2, 2**30]}, "shape must have at most 16777216 values"),
        ({"data": [1, 2], "shape": [-2, -1]}, "shape must be at most 8 sizes in 0..2147483648"),
        ({"data": [1], "shape": [1] * 70}, "shape must be at most 8 sizes in 0..2147483648"),
        ({"data": [1.5, 2]}, "data must be whole numbers"),
        ({"data": [1, float("nan")]}, "data must be whole numbers"),
    ],
    ids=str,
)
def test_a_tensor_that_does_not_fit_itself_is_refused(fields, message):
    with pytest.raises(RequestError, match=message):
        TensorRecord(dtype="int64", **fields).to_numpy()
