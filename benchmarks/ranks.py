"""Measures the ranks of one trainer on this machine: real processes, gloo on the CPU.

*gradients*: a request of several micro-batches, with gradients added up whole on each rank and
reduced once, and with gradients in parts, reduced in each micro-batch. Seconds are of requests, in
turn, the median; *memory* is the most that a rank holds more than before its first request, which
is without gradients.

    python benchmarks/ranks.py gradients --shape 0.1b --ranks 2 --micro-batches 4 --rounds 5

*start*: the most memory that all ranks together take, over what they took before: while they read a
model to be trained; while a trainer starts and makes a policy, which runs a few tokens through the
model to see how it is built; and, once it has started, in a forward pass of as many tokens. In any
pass the layers that run are whole on every rank: on a GPU in its memory, here in the host's. A
start that takes no more than the pass takes nothing beside it. Before, ranks have loaded a model of
some hundred thousand parameters, so that libraries do not count. Nor do pages of files, which the
system may drop.

    python benchmarks/ranks.py start --shape 0.6b --ranks 4
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hearth.models.loading import DTYPES, load_model
from hearth.models.parallel import Sharding, return_freed_memory
from hearth.telemetry import setup_logging
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.engine import RankEngine
from hearth.trainer.ranks.group import Rendezvous
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord

MIB = 2**20
TOKENS = 64
"""Of a sample, and of a micro-batch."""
START_TOKENS = 16
"""Of a sample in the pass after a start: as many as the start runs through the model."""
SHAPES: dict[str, dict[str, Any]] = {
    "least": {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1},
    "0.01b": {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 8},
    "0.1b": {"hidden_size": 768, "intermediate_size": 2304, "num_hidden_layers": 12},
    "0.6b": {
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "head_dim": 128,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
    },
}


def write_model(folder: Path, shape: str) -> Path:
    """A random Qwen3 in bfloat16."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = SHAPES[shape]
    given = {
        "vocab_size": 8192,
        "num_attention_heads": sizes["hidden_size"] // 64,
        "num_key_value_heads": sizes["hidden_size"] // 128,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    }
    config = Qwen3Config(**given | sizes)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


def make_data(samples: int, length: int = TOKENS) -> list[DatumRecord]:
    """Random samples of as many tokens each."""
    rng = np.random.default_rng(0)
    data: list[DatumRecord] = []
    for _ in range(samples):
        tokens = rng.integers(0, 8192, length + 1)
        inputs = {
            "target_tokens": encode(tokens[1:], "int64").as_dict(),
            "weights": encode(np.ones(length, np.float32), "float32").as_dict(),
        }
        chunks = [{"tokens": tokens[:-1].tolist()}]
        body = {"model_input": {"chunks": chunks}, "loss_fn_inputs": inputs}
        data.append(DatumRecord.model_validate(body))
    return data


class Watch(threading.Thread):
    """The most that some processes hold, in bytes; a page that they share counts once.

    Pages of files, which the system may drop, do not count.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        super().__init__(daemon=True)
        self._files = [Path(f"/proc/{pid}/smaps_rollup") for pid in pids]
        self._is_done = threading.Event()
        self.peak = 0

    def look(self) -> int:
        """Bytes now."""
        lines = [line for file in self._files for line in file.read_text().splitlines()]
        held = [line for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:"))]
        return sum(int(line.split()[1]) * 1024 for line in held)

    def run(self) -> None:
        """Look until it is stopped."""
        while not self._is_done.wait(0.02):
            self.peak = max(self.peak, self.look())

    def stop(self) -> int:
        """The most bytes so far."""
        self._is_done.set()
        self.join()
        return self.peak


def join(rank: int, given: argparse.Namespace) -> Any:
    """The group of all ranks."""
    rendezvous = Rendezvous("127.0.0.1", given.port, given.ranks, 300.0)
    return rendezvous.join(rank, torch.device("cpu"))


def make_options(given: argparse.Namespace, model: str = "model") -> TrainerWorkerOptions:
    """The options of a trainer of a model in the folder."""
    folder = Path(given.folder)
    return TrainerWorkerOptions(
        buckets=str(folder / "buckets"),
        bucket="bucket",
        base_model="random",
        source=str(folder / model),
        checkpoint_dir=str(folder / "checkpoints"),
        ranks=given.ranks,
        rank_timeout_s=300.0,
        offload_optimizer=False,
        keep_snapshots=None,
        models_dir=None,
        allow_folders=True,
        dtype=given.dtype,
        micro_batch_tokens=TOKENS,
    )


def run_gradients(rank: int, given: argparse.Namespace) -> None:
    """One rank; rank 0 writes the seconds of each request, and the memory of one rank."""
    group = join(rank, given)
    engine = RankEngine(make_options(given), group, sys.exit, memory=given.memory)
    if rank != 0:
        engine.follow()
        return
    model = engine.create_model()
    data = make_data(given.ranks * given.micro_batches)
    watch = Watch([os.getpid()])
    before, seconds = watch.look(), list[float]()
    watch.start()
    for _ in range(given.rounds):
        start_s = time.perf_counter()
        engine.forward_backward(model, data)
        seconds.append(time.perf_counter() - start_s)
        engine.optim_step(model, AdamParams(learning_rate=1e-6))
    found = {"seconds": seconds, "memory": watch.stop() - before}
    Path(given.folder, "result.json").write_text(json.dumps(found))
    engine.close()


def run_start(rank: int, given: argparse.Namespace) -> None:
    """One rank: joins, starts its engine when it is told to, and ends when it is told to."""
    folder, group = Path(given.folder), join(rank, given)
    RankEngine(make_options(given, "least"), group, sys.exit)
    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # imports a lot
    gc.collect()
    (folder / f"joined-{rank}").touch()
    wait_for(folder / "go")
    dtype = DTYPES[given.dtype]
    sharding = Sharding(lambda _: group.mesh, group.device, dtype, is_trained=True, offload=False)
    with return_freed_memory():
        loaded = sharding.load(
            lambda shard: load_model(folder / "model", dtype=given.dtype, shard=shard)
        )
    (folder / f"read-{rank}").touch()
    wait_for(folder / "go-on")
    del loaded
    gc.collect()
    engine = RankEngine(make_options(given), group, sys.exit)
    if rank != 0:
        engine.follow()
        return
    model = engine.create_model()
    (folder / "started").touch()
    wait_for(folder / "run")
    engine.forward(model, make_data(given.ranks, START_TOKENS))
    (folder / "ran").touch()
    wait_for(folder / "end")
    engine.close()


def watch_start(pids: Sequence[int], given: argparse.Namespace) -> None:
    """Look after the ranks of ``run_start``, and write what they took."""
    folder, watch = Path(given.folder), Watch(pids)
    for rank in range(given.ranks):
        wait_for(folder / f"joined-{rank}")
    before = watch.look()
    watch.start()
    (folder / "go").touch()
    for rank in range(given.ranks):
        wait_for(folder / f"read-{rank}")
    found = {"read": watch.stop() - before}
    watch, start_s = Watch(pids), time.perf_counter()
    watch.start()
    (folder / "go-on").touch()
    wait_for(folder / "started")
    found |= {"seconds": time.perf_counter() - start_s, "peak": watch.stop() - before}
    found["kept"] = watch.look() - before
    watch = Watch(pids)
    watch.start()
    (folder / "run").touch()
    wait_for(folder / "ran")
    found["pass"] = watch.stop() - before
    (folder / "result.json").write_text(json.dumps(found))
    (folder / "end").touch()


def wait_for(path: Path) -> None:
    """Return when a file is there."""
    while not path.exists():
        time.sleep(0.01)


def run_ranks(given: argparse.Namespace) -> None:
    """Be the ranks, as processes of their own."""
    setup_logging()
    torch.set_num_threads(1)
    run = run_gradients if given.part == "gradients" else run_start
    pids: list[int] = []
    for rank in range(given.ranks):
        if (pid := os.fork()) == 0:
            run(rank, given)
            os._exit(0)
        pids.append(pid)
    if given.part == "start":
        watch_start(pids, given)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        sys.exit(f"ranks must end with code 0, got {codes}")


def measure(folder: Path, given: argparse.Namespace, memory: int = 0) -> Any:
    """Run the ranks under a process of their own; what they wrote."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, __file__, given.part, "--folder", str(folder), "--port", str(port)]
    for name in ("ranks", "micro_batches", "rounds", "dtype"):
        command += [f"--{name.replace('_', '-')}", str(getattr(given, name))]
    subprocess.run([*command, "--memory", str(memory)], check=True)
    return json.loads((folder / "result.json").read_text())


def compare_gradients(folder: Path, given: argparse.Namespace) -> list[str]:
    """Both ways to add up gradients, as a table."""
    rows = ["| gradients | seconds of a request | least | memory of a rank, MiB |"]
    rows += ["|---|---:|---:|---:|"]
    for name, memory in (("whole", 2**50), ("in parts", 0)):
        found = measure(folder, given, memory)
        middle, least = statistics.median(found["seconds"]), min(found["seconds"])
        rows.append(f"| {name} | {middle:.2f} | {least:.2f} | {found['memory'] / MIB:.0f} |")
    return rows


def describe_start(folder: Path, given: argparse.Namespace) -> list[str]:
    """The memory of a start, as a table."""
    write_model(folder / "least", "least")
    found = measure(folder, given)
    stored = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
    weights = 2 * stored  # bfloat16 in the files, float32 in the parts
    if given.json:
        return [json.dumps(found | {"weights": weights})]
    names = ("read", "kept", "peak", "pass")
    columns = [f"{found[name] / MIB:.0f} ({found[name] / weights:.2f})" for name in names]
    return [
        "| ranks | dtype | float32 weights, MiB | most while read (times the weights) | kept "
        "| most in the start | most in a pass | s |",
        "|---:|---|---:|---:|---:|---:|---:|---:|",
        f"| {given.ranks} | {given.dtype} | {weights / MIB:.0f} | {' | '.join(columns)} "
        f"| {found['seconds']:.1f} |",
    ]


def main() -> None:
    """Print the table of a part, or be the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=["gradients", "start"])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.1b")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    for name in ("--port", "--memory"):
        parser.add_argument(name, type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.folder is not None:
        run_ranks(given)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", given.shape)
        part = compare_gradients if given.part == "gradients" else describe_start
        rows = part(folder, given)
    if not given.json:
        rows.append(f"\nload average {os.getloadavg()[0]:.1f}")
    sys.stdout.write("\n".join([*rows, ""]))


if __name__ == "__main__":
    main()
