"""Ranks read their parts of models and compare them with the whole: FOLDER RANKS.

Every folder inside FOLDER is a model. Rank 0 writes what differs, by model and way to load it.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from hearth.models.loading import DTYPES, LoadedModel, base_tensors, load_model
from hearth.models.parallel import ShardedModel, Sharding
from hearth.telemetry import setup_logging


def find_differences(parts: ShardedModel, whole: LoadedModel, *, is_trained: bool) -> Iterator[str]:
    """Names of what is not, bit for bit, what one process loads; all ranks ask together."""
    found, expected = base_tensors(parts.module), base_tensors(whole.module)
    if list(found) != list(expected):
        yield f"names: {sorted(found.keys() ^ expected.keys())}"
        return
    for name, tensor in expected.items():
        is_weight = isinstance(found[name], DTensor)
        wanted = tensor.float() if is_trained and is_weight else tensor
        own: Any = found[name]
        gathered = own.full_tensor() if is_weight else own
        if gathered.dtype != wanted.dtype or not torch.equal(gathered, wanted):
            yield name
        if is_weight and own.to_local().numel() > -(-own.shape[0] // dist.get_world_size()) * (
            own.numel() // max(1, own.shape[0])
        ):
            yield f"{name}: more than a part"
    yield from _compare_plain(
        dict(parts.module.named_buffers()), dict(whole.module.named_buffers())
    )
    if type(parts.module) is not type(whole.module):
        yield f"class: {type(parts.module)}"
    if parts.config.to_dict() != whole.config.to_dict():
        yield "config"
    if parts.run(lambda: _is_tied(parts.module)) != _is_tied(whole.module):
        yield "head and embedding are one weight in one of them only"
    ids = torch.arange(16)[None]
    with torch.no_grad():
        logits = parts.run(lambda: parts.module(input_ids=ids).logits)
        # Mixed precision casts what enters a layer, rotations too.
        if not is_trained and not torch.equal(logits, whole.module(input_ids=ids).logits):
            yield "logits"


def _is_tied(module: Any) -> bool:
    return module.get_input_embeddings().weight is module.get_output_embeddings().weight


def _compare_plain(found: dict[str, Tensor], expected: dict[str, Tensor]) -> Iterator[str]:
    if found.keys() != expected.keys():
        yield f"buffers: {sorted(found.keys() ^ expected.keys())}"
        return
    for name, buffer in expected.items():
        if buffer.dtype != found[name].dtype or not torch.equal(buffer, found[name]):
            yield f"buffer {name}"


def run_rank(rank: int, folder: Path, ranks: int) -> None:
    """Compare all models as one of the ranks."""
    setup_logging()
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous-{ranks}", rank=rank, world_size=ranks
    )
    mesh = init_device_mesh("cpu", (ranks,))
    differences: dict[str, list[str]] = {}
    for source in sorted(path for path in folder.iterdir() if path.is_dir()):
        for dtype, is_trained in (("float32", False), ("bfloat16", False), ("bfloat16", True)):
            sharding = Sharding(
                lambda _: mesh,
                torch.device("cpu"),
                DTYPES[dtype],
                is_trained=is_trained,
                offload=False,
            )
            parts = sharding.load(
                lambda shard, source=source, dtype=dtype: load_model(
                    source, dtype=dtype, shard=shard
                )
            )
            gc.collect()
            # Weights on pages of a file change with it, and page by page are slow to write.
            is_mapped = ".safetensors" in Path("/proc/self/maps").read_text(encoding="utf-8")
            whole = load_model(source, dtype=dtype)
            way = f"{source.name}, {dtype}, {'trained' if is_trained else 'frozen'}"
            differences[way] = list(find_differences(parts, whole, is_trained=is_trained))
            differences[way] += ["its file is still mapped"] * is_mapped
            del parts, whole
    (folder / f"rank-{rank}.json").write_text(json.dumps(differences))
    dist.destroy_process_group()


def main() -> None:
    folder, ranks = Path(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    children: list[int] = []
    for rank in range(1, ranks):
        if (child := os.fork()) == 0:
            run_rank(rank, folder, ranks)
            os._exit(0)
        children.append(child)
    run_rank(0, folder, ranks)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert not any(codes), codes


if __name__ == "__main__":
    main()
