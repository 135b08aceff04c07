"""Checkpoints that ranks write and read together, each its own parts of the tensors.

The folder is that of one process (``hearth.trainer.checkpoint``), with more files in it, and any
number of ranks reads what any other number wrote. All ranks see the same folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import torch
from torch import Tensor

from hearth.models.lora import LoraOptions
from hearth.trainer.checkpoint import DATA, CheckpointFolder, TrainerState, state_of, write_manifest
from hearth.trainer.dcp import described, load_into, save_tensors
from hearth.trainer.ranks.group import RankGroup


def write_together(
    group: RankGroup, folder: CheckpointFolder, name: str, state: TrainerState, *, overwrite: bool
) -> None:
    """``CheckpointFolder.write`` of ranks; all raise what one of them does."""
    with contextlib.ExitStack() as stack:
        draft = group.on_first(
            lambda: stack.enter_context(folder.draft(name, state.facts, overwrite=overwrite))
        )
        parts = group.collect(save_tensors(draft / DATA, state.tensors()))

        def finish() -> None:
            files = {file: entry for part in parts for file, entry in part.items()}
            write_manifest(draft, state, files)
            stack.close()

        group.on_first(finish)


def read_together(
    group: RankGroup,
    folder: CheckpointFolder,
    name: str,
    *,
    base_model: str,
    lora: LoraOptions | None,
    weights: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
) -> TrainerState:
    """``CheckpointFolder.read`` of ranks, all of which raise what one does.

    Of a tensor that the model has in parts it is this rank's part: ``weights`` are the model's own
    tensors, ``parameters`` those that its optimizer has moments of.
    """
    data, facts, rng = group.on_first(
        lambda: folder.verified(name, base_model=base_model, lora=lora)
    )
    own = {f"weights/{name}": one for name, one in weights.items()}
    tensors: dict[str, Tensor] = {}
    for key, stored in described(data).items():
        name = key.split("/", 2)[-1]  # optimizer/exp_avg/NAME
        tensors[key] = _room(stored, own.get(key, parameters.get(name)))
    load_into(data, tensors)
    return state_of(facts, tensors, rng)


def _room(stored: Tensor, own: Tensor | None) -> Tensor:
    """Where a stored tensor goes: parts as the model's own, or all of it on the CPU."""
    if own is None or own.shape != stored.shape:
        return torch.empty_like(stored, device="cpu")
    return torch.empty_like(own.detach(), dtype=stored.dtype)
