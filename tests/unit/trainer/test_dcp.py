from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hearth.errors import EngineError, StorageError
from hearth.trainer import dcp
from hearth.trainer.dcp import load_into, load_tensors, save_tensors

TENSORS = {
    "weights/a.weight": torch.arange(6, dtype=torch.float32).reshape(2, 3) / 7,
    "weights/b": torch.tensor([1.5, -0.0, 3e38], dtype=torch.bfloat16),
    "optimizer/step/a.weight": torch.tensor(3.0),
    "optimizer/exp_avg/a.weight": torch.full((2, 3), 1e-42),
    "count": torch.tensor(7, dtype=torch.int64),
    "empty": torch.zeros(0, 4),
    "turned": torch.arange(6.0).reshape(2, 3).t(),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_comes_back_with_its_bits(tmp_path: Path) -> None:
    entries = save_tensors(tmp_path / "data", TENSORS)

    found = load_tensors(tmp_path / "data", entries)

    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert bits(found[name]) == bits(tensor)


def test_a_file_is_hashed_as_it_is_written(tmp_path: Path) -> None:
    entries = save_tensors(tmp_path / "data", TENSORS)

    assert sorted(entries) == sorted(path.name for path in (tmp_path / "data").iterdir())
    for name, file in entries.items():
        assert (tmp_path / "data" / name).stat().st_size == file["bytes"]
    dcp.verify_files(tmp_path / "data", entries)


def test_large_states_go_into_several_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A file holds 512 MiB: without this the test would write more than a gigabyte.
    monkeypatch.setattr(dcp, "_FILE_BYTES", 48)

    entries = save_tensors(tmp_path / "data", TENSORS)

    parts = [name for name in entries if name.endswith(".safetensors")]
    assert len(parts) == 3
    sizes = [
        sum(bits(tensor).__len__() for tensor in load_file(tmp_path / "data" / name).values())
        for name in parts
    ]
    assert max(sizes) <= 48
    found = load_tensors(tmp_path / "data", entries)
    assert all(bits(found[name]) == bits(tensor) for name, tensor in TENSORS.items())


def test_given_tensors_are_filled_in_place(tmp_path: Path) -> None:
    save_tensors(tmp_path / "data", TENSORS)
    own = torch.zeros(2, 3)

    load_into(tmp_path / "data", {"weights/a.weight": own})

    assert torch.equal(own, TENSORS["weights/a.weight"])
    with pytest.raises(EngineError, match="data must hold the tensors to load, got"):
        load_into(tmp_path / "data", {"absent": own})


def test_a_disk_that_refuses_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(StorageError, match="file/data must be writable, got Not a directory: look"):
        save_tensors(tmp_path / "file" / "data", TENSORS)
