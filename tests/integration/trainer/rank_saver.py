"""Two ranks save their shards into one folder and load them back; run by ``test_dcp``."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

from hearth.trainer.dcp import FileEntry, load_into, save_tensors

WEIGHT = torch.arange(20.0).reshape(5, 4)


def run(rank: int, folder: Path) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    tensors = {
        "weight": distribute_tensor(WEIGHT, mesh, [Shard(0)]),
        "step": distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]),
    }
    own = save_tensors(folder / "data", tensors)
    parts: list[dict[str, FileEntry]] = [{}, {}]
    dist.all_gather_object(parts, own)

    shards = {"weight": distribute_tensor(torch.zeros(5, 4), mesh, [Shard(0)])}
    load_into(folder / "data", shards)

    assert torch.equal(shards["weight"].full_tensor(), WEIGHT)
    if rank == 0:
        (folder / "entries.json").write_text(json.dumps(parts[0] | parts[1]))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    other = os.fork()
    run(int(other == 0), Path(sys.argv[1]))
    if other:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
