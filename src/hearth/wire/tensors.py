"""Tensor encodings. Two forms: JSON number lists, which every client speaks, and base64 bytes,
which our own SDK uses since they are exact and cost no per-number work."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Strict

from hearth.errors import RequestError
from hearth.wire.base import Record

DType = Literal["int64", "float32", "int32"]
"""int32 is for columns of token ids, which have room in it."""
Encoding = Literal["list", "base64"]

NUMPY_DTYPES: dict[DType, str] = {"int64": "<i8", "float32": "<f4", "int32": "<i4"}
MAX_SPARSE_VALUES = 2**24
"""Values that a sparse tensor may have once it is dense: a short request must not need much
memory."""
_MAX_DIMENSIONS = 8
_MAX_SIZE = 2**31
ITEM_BYTES: dict[DType, int] = {"int64": 8, "float32": 4, "int32": 4}


class TensorRecord(Record):
    """A dense or CSR tensor of ``int64`` or ``float32``.

    Example: ``{"data": [0.0, 1.0], "dtype": "float32", "shape": [2]}``, or the same values as
    ``{"data": "AAAAAAAAgD8=", "dtype": "float32", "shape": [2]}`` (little-endian bytes in base64).
    With ``sparse_crow_indices`` the data are the non-zeros of a 2-D tensor of ``shape``.
    """

    data: list[Annotated[float, Strict()]] | list[Annotated[int, Strict()]] | str
    dtype: DType
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None

    def to_numpy(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """The dense values in their shape; without ``shape`` one dimension.

        Raises:
            RequestError: the data do not fit the shape, or are no base64.
        """
        shape = self.shape or []
        sizes = [0, *shape]
        if len(shape) > _MAX_DIMENSIONS or min(sizes) < 0 or max(sizes) > _MAX_SIZE:
            raise RequestError(
                f"shape must be at most {_MAX_DIMENSIONS} sizes in 0..{_MAX_SIZE}, got {shape[:20]}"
            )
        values = self._flat()
        if self.sparse_crow_indices is not None:
            return self._densify(values)
        if self.shape is None:
            return values
        if math.prod(self.shape) != values.size:
            raise RequestError(
                f"shape must fit the data, got shape {self.shape} for {values.size} values"
            )
        return values.reshape(self.shape)

    def _flat(self) -> NDArray[np.int64] | NDArray[np.float32]:
        dtype = np.dtype(NUMPY_DTYPES[self.dtype])
        if isinstance(self.data, str):
            try:
                raw = base64.b64decode(self.data, validate=True)
                return np.frombuffer(raw, dtype=dtype)
            except ValueError as error:
                raise RequestError(f"data must be base64 of {self.dtype}, got {error}") from None
        # All are of one type: a list is one of whole numbers, or one of floats.
        is_float = bool(self.data) and isinstance(self.data[0], float)
        if self.dtype == "int64" and is_float and not all(map(float.is_integer, self.data)):
            raise RequestError("data must be whole numbers with dtype int64, got fractions")
        try:
            return np.asarray(self.data, dtype=dtype)
        except (OverflowError, ValueError) as error:
            raise RequestError(f"data must be numbers of {self.dtype}, got {error}") from None

    def _densify(
        self, values: NDArray[np.int64] | NDArray[np.float32]
    ) -> NDArray[np.int64] | NDArray[np.float32]:
        if self.shape is None or len(self.shape) != 2 or self.sparse_col_indices is None:
            raise RequestError("a sparse tensor must have a 2-D shape and sparse_col_indices")
        rows, columns = self.shape
        try:
            crow = np.asarray(self.sparse_crow_indices, dtype=np.int64)
            col = np.asarray(self.sparse_col_indices, dtype=np.int64)
        except OverflowError as error:
            raise RequestError(f"sparse indices must be int64, got {error}") from None
        if crow.size != rows + 1 or col.size != values.size or int(crow[-1]) != values.size:
            raise RequestError(
                f"sparse indices must fit shape {self.shape}, got {crow.size} row pointers, "
                f"{col.size} columns and {values.size} values"
            )
        if rows * columns > MAX_SPARSE_VALUES:
            raise RequestError(
                f"shape must have at most {MAX_SPARSE_VALUES} values in a sparse tensor, got "
                f"{self.shape}: it becomes dense"
            )
        lengths = np.diff(crow)
        if crow[0] != 0 or (lengths < 0).any():
            raise RequestError("sparse_crow_indices must begin with 0 and never fall")
        if col.size and (col.min() < 0 or col.max() >= columns):
            raise RequestError(
                f"sparse_col_indices must be 0 to {columns - 1}, got {col.min()} to {col.max()}"
            )
        dense = np.zeros((rows, columns), dtype=values.dtype)
        dense[np.repeat(np.arange(rows), lengths), col] = values
        return cast("NDArray[np.float32]", dense)


def pack_ids(ids: Sequence[int]) -> str:
    """Base64 of little-endian int32."""
    return base64.b64encode(np.array(ids, "<i4").tobytes()).decode("ascii")


def pack_floats(values: Sequence[float | None]) -> str:
    """Base64 of little-endian float32; None is NaN."""
    return base64.b64encode(np.array(values, "<f4").tobytes()).decode("ascii")


def unpack_ids(text: str) -> list[int]:
    """The ids of ``pack_ids``.

    Raises:
        ValueError: the text is no base64 of them.
    """
    return np.frombuffer(base64.b64decode(text, validate=True), "<i4").tolist()


def unpack_floats(text: str) -> list[float | None]:
    """The values of ``pack_floats``.

    Raises:
        ValueError: the text is no base64 of them.
    """
    values = np.frombuffer(base64.b64decode(text, validate=True), "<f4")
    floats: list[float | None] = values.tolist()
    for place in np.flatnonzero(np.isnan(values)).tolist():
        floats[place] = None
    return floats


def encode(
    values: NDArray[np.generic] | Sequence[float] | Sequence[int],
    dtype: DType,
    encoding: Encoding = "list",
) -> TensorRecord:
    """A record of ``values`` as ``dtype``, in their own shape."""
    return TensorRecord.model_construct(**encode_plain(values, dtype, encoding))


def encode_plain(
    values: NDArray[np.generic] | Sequence[float] | Sequence[int],
    dtype: DType,
    encoding: Encoding = "list",
) -> dict[str, Any]:
    """The same as plain containers, for who sends it at once."""
    array = np.ascontiguousarray(values, dtype=NUMPY_DTYPES[dtype])
    data = (
        base64.b64encode(array.tobytes()).decode("ascii")
        if encoding == "base64"
        else array.ravel().tolist()
    )
    return {"data": data, "dtype": dtype, "shape": list(array.shape)}
