"""Deltas: the elements of some tensors whose bits differ from those of other tensors, lossless.

Elements are compared as integers, so that a NaN keeps its payload and -0.0 is not 0.0. An unchanged
tensor has no part. A changed tensor ``t`` has parts in the order of the flat index:

    t/values    the new elements that differ, in the tensor's own dtype
    t/gaps8     uint8: before each of them, the number of unchanged elements; 255 is an escape for
                255 of them, and the gap continues
    t/gaps16    uint16: the same with 65535
    t/bitmap    uint8: a bit per element of ``t``, 1 where it differs, the lowest bit first
    t/whole     the new tensor itself

``values`` comes with one of gaps8, gaps16 and bitmap; ``whole`` comes alone. Each tensor has its
smallest form. Where several ranks have parts of a tensor, ``t`` is ``name[START:END]``, the flat
elements of one part (``sync.pieces``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hearth.errors import EngineError
from hearth.sync.manifest import THREADS
from hearth.sync.pieces import split_name

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ESCAPES = {"gaps8": 255, "gaps16": 65535}
_GAP_TYPES: dict[str, Any] = {"gaps8": np.uint8, "gaps16": np.uint16}
_MIN_FOR_THREADS = 2**20
_SAMPLED = 1024
"""Elements that are compared first: those at the start, and as many evenly spread."""

A = TypeVar("A")
B = TypeVar("B")


def encode(old: Mapping[str, Tensor], new: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The parts that lead from ``old`` to ``new``, in the format above, on the CPU.

    A ``whole`` part is the given tensor itself if that is on the CPU.

    Raises:
        EngineError: names, dtypes or shapes differ.
    """
    if not has_same_layout(old, new):
        raise EngineError("a delta must be between tensors of the same names, dtypes and shapes")
    encoded = _in_threads(lambda name: _encode_tensor(old[name], new[name]), new, new)
    return {
        f"{name}/{part}": value
        for name, parts in zip(new, encoded, strict=True)
        for part, value in parts.items()
    }


def apply(
    parts: Mapping[str, Tensor], old: Mapping[str, Tensor], into: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """The changed tensors, new and on the device of the ``old`` ones, which stay as they are.

    ``into`` has tensors of the old ones' layout that become the new ones; its contiguous memory is
    used in place of new memory.

    Raises:
        EngineError: the parts do not fit the old tensors; the first one is named.
    """
    by_name: dict[str, _Pieces] = {}
    for key, value in parts.items():
        key, _, part = key.rpartition("/")
        name, span = split_name(key)
        by_name.setdefault(name, {}).setdefault(span, {})[part] = value
    for name in by_name:
        if name not in old:
            raise EngineError(f"a delta must be of existing tensors, got {name!r}")
    targets = into or {}
    fresh = _in_threads(
        lambda name: _apply_to_tensor(name, by_name[name], old[name], targets.get(name)),
        by_name,
        old,
    )
    return dict(zip(by_name, fresh, strict=True))


def list_encoded(parts: Mapping[str, Tensor]) -> set[str]:
    """Names of the tensors, or pieces of tensors, of which ``encode`` has made parts."""
    return {key.rpartition("/")[0] for key in parts}


def list_changed(parts: Mapping[str, Tensor]) -> set[str]:
    """Names of the whole tensors that a delta changes."""
    return {split_name(key.rpartition("/")[0])[0] for key in parts}


def has_same_layout(tensors: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes and shapes are equal, as a delta needs."""
    return tensors.keys() == other.keys() and all(
        tensor.dtype == other[name].dtype and tensor.shape == other[name].shape
        for name, tensor in tensors.items()
    )


def is_same(tensors: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Whether names, dtypes, shapes and all bits are equal."""
    return has_same_layout(tensors, other) and all(
        tensor is other[name] or torch.equal(_bits(tensor), _bits(other[name]).to(tensor.device))
        for name, tensor in tensors.items()
    )


def _encode_tensor(old: Tensor, new: Tensor) -> dict[str, Tensor]:
    bits, old_bits = _bits(new), _bits(old).to(new.device)
    # Of float32 weights an optimizer step changes nearly all: some tell, and no part is smaller.
    spread = slice(None, None, max(1, bits.numel() // _SAMPLED))
    samples = (slice(_SAMPLED), spread)
    if bits.numel() and all(_differs(old_bits[some], bits[some]).all() for some in samples):
        return {"whole": new.detach().cpu().contiguous()}
    mask = _differs(old_bits, bits)
    count, size = int(np.count_nonzero(mask)), bits.element_size()
    if count == 0:
        return {}
    bitmap_bytes = (mask.size + 7) // 8
    # Gaps need at least a byte per element.
    if count * size + min(count, bitmap_bytes) >= mask.size * size:
        return {"whole": new.detach().cpu().contiguous()}
    where = np.flatnonzero(mask)
    index = _tensor(where).to(bits.device)
    values = bits[index].cpu().view(new.dtype)
    if count >= bitmap_bytes:
        packed = np.packbits(mask, bitorder="little")
        return {"bitmap": _tensor(packed), "values": values}
    gaps = np.diff(where, prepend=-1) - 1
    sizes = {part: _gap_bytes(gaps, part) for part in _ESCAPES}
    part = min(sizes, key=sizes.__getitem__)
    return {part: _tensor(_encode_gaps(gaps, part)), "values": values}


_Pieces = dict["tuple[int, int] | None", dict[str, Tensor]]
"""The parts of a tensor by the flat elements of which they are; None is all of them."""


def _apply_to_tensor(name: str, pieces: _Pieces, old: Tensor, target: Tensor | None) -> Tensor:
    whole = pieces.get(None, {}).get("whole")
    if whole is not None and len(pieces) == len(pieces[None]) == 1:
        if (whole.dtype, whole.shape) != (old.dtype, old.shape):
            raise _mismatch_error(name, f"{whole.dtype} {list(whole.shape)}", old)
        return whole.to(old.device) if target is None else target.copy_(whole)
    if target is None:
        new = old.detach().clone(memory_format=torch.contiguous_format)
    else:
        new = target.copy_(old)
    flat = new.view(-1)
    for span, parts in pieces.items():
        start, end = span or (0, flat.numel())
        if end > flat.numel():
            raise _mismatch_error(name, f"elements {start} to {end}", old)
        _apply_to_elements(name, parts, flat[start:end])
    return new


def _apply_to_elements(name: str, parts: Mapping[str, Tensor], flat: Tensor) -> None:
    """Change elements, which are contiguous and have one dimension."""
    if set(parts) == {"whole"}:
        whole = parts["whole"]
        if (whole.dtype, whole.shape) != (flat.dtype, flat.shape):
            raise _mismatch_error(name, f"{whole.dtype} {list(whole.shape)}", flat)
        flat.copy_(whole)
        return
    values = parts.get("values")
    index_part = next((part for part in parts if part != "values"), "")
    if values is None or len(parts) != 2 or index_part not in ("bitmap", *_ESCAPES):
        raise _mismatch_error(name, f"the parts {sorted(parts)}", flat)
    stored = parts[index_part].numpy()
    if index_part == "bitmap":
        where = np.flatnonzero(np.unpackbits(stored, bitorder="little"))
    else:
        where = _decode_gaps(stored, index_part)
    last = int(where[-1]) if where.size else -1
    if values.dtype != flat.dtype or values.numel() != where.size or last >= flat.numel():
        raise _mismatch_error(name, f"{values.numel()} {values.dtype} up to element {last}", flat)
    # Not _bits: for a tensor without dimensions that could be a copy.
    bits = flat.view(_INTEGERS[flat.element_size()])
    bits[_tensor(where).to(flat.device)] = _bits(values).to(flat.device)


def _mismatch_error(name: str, found: str, old: Tensor) -> EngineError:
    return EngineError(
        f"delta of tensor {name!r} must fit {old.dtype} {list(old.shape)}, got {found}"
    )


def _bits(tensor: Tensor) -> Tensor:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_INTEGERS[tensor.element_size()])


def _differs(old: Tensor, new: Tensor) -> NDArray[np.bool_]:
    if new.device.type != "cpu":
        return (old != new).cpu().numpy()
    # numpy's comparison takes a third of the time of torch's on one thread.
    return np.not_equal(old.numpy(), new.numpy())


# A strict type checker knows torch's own annotation only in part.
def _tensor(array: NDArray[Any]) -> Tensor:
    return torch.from_numpy(array)  # pyright: ignore[reportUnknownMemberType]


def _gap_bytes(gaps: NDArray[np.int64], part: str) -> int:
    escape = _ESCAPES[part]
    return (gaps.size + int((gaps // escape).sum())) * np.dtype(_GAP_TYPES[part]).itemsize


def _encode_gaps(gaps: NDArray[np.int64], part: str) -> NDArray[Any]:
    escape = _ESCAPES[part]
    escapes = gaps // escape
    ends = np.cumsum(escapes + 1)
    encoded = np.full(int(ends[-1]), escape, dtype=_GAP_TYPES[part])
    encoded[ends - 1] = gaps - escapes * escape
    return encoded


def _decode_gaps(stored: NDArray[Any], part: str) -> NDArray[np.int64]:
    is_element = stored != _ESCAPES[part]
    # An escape advances by its value, a gap by its value and the element behind it.
    ends = np.cumsum(stored.astype(np.int64) + is_element)
    return ends[is_element] - 1


def _in_threads(
    run: Callable[[str], B], names: Iterable[str], tensors: Mapping[str, Tensor]
) -> list[B]:
    """``run`` of every name, in threads if there is enough work."""
    if sum(tensor.numel() for tensor in tensors.values()) < _MIN_FOR_THREADS:
        return [run(name) for name in names]
    with ThreadPoolExecutor(THREADS) as pool:
        return list(pool.map(run, names))
