"""Checkpoints that ranks write and read together, each rank its own parts of the tensors.

The folder is as that of one process (``hearth.trainer.checkpoint``), with more files in it. Any
number of ranks can read it. All ranks must see the same folder.
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from hearth.trainer.checkpoint import DATA, CheckpointFolder, TrainerState, write_manifest
from hearth.trainer.dcp import describe_tensors, load_into, save_tensors
from hearth.trainer.ranks.group import RankGroup
from hearth.trainer.residents import Resident, find_trainable


def write_shared_checkpoint(
    group: RankGroup, folder: CheckpointFolder, name: str, state: TrainerState, *, overwrite: bool
) -> None:
    """``CheckpointFolder.write`` of all ranks; an error on one rank is raised on all."""
    with contextlib.ExitStack() as stack:
        draft = group.run_on_first(
            lambda: stack.enter_context(folder.draft(name, state.facts, overwrite=overwrite))
        )
        parts = group.gather(save_tensors(draft / DATA, state.tensors()))

        def finish() -> None:
            files = {file: entry for part in parts for file, entry in part.items()}
            write_manifest(draft, state, files)
            stack.close()

        group.run_on_first(finish)


def read_shared_checkpoint(
    group: RankGroup, folder: CheckpointFolder, name: str, base_model: str, model: Resident
) -> TrainerState:
    """``CheckpointFolder.read`` of all ranks; an error on one rank is raised on all.

    Of tensors that the model has in parts it returns this rank's part.
    """
    data, facts, rng = group.run_on_first(
        lambda: folder.verify(name, base_model=base_model, lora=model.lora)
    )
    weights = {f"weights/{name}": tensor for name, tensor in model.tensors().items()}
    parameters = find_trainable(model.loaded)
    tensors: dict[str, Tensor] = {}
    for key, stored in describe_tensors(data).items():
        name = key.split("/", 2)[-1]  # optimizer/exp_avg/NAME
        tensors[key] = _make_target(stored, weights.get(key, parameters.get(name)))
    load_into(data, tensors)
    return TrainerState.from_tensors(facts, tensors, rng)


def _make_target(stored: Tensor, own: Tensor | None) -> Tensor:
    """An empty tensor to load into: sharded as the model's own, or whole on the CPU."""
    if own is None or own.shape != stored.shape:
        return torch.empty_like(stored, device="cpu")
    return torch.empty_like(own.detach(), dtype=stored.dtype)
