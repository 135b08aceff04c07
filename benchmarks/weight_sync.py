"""Bytes and seconds of weight syncs: base and delta, through a folder and through memory.

A randomly initialized Qwen3 of 129 M parameters in bfloat16, made in a temporary folder, is trained
with our trainer on random tokens, one optimizer step at a learning rate of 1e-6 before every delta,
and served by our inference engine. The plain way (one safetensors file written, read and copied
into the module, nothing checked) is measured in the same run. Where ``HEARTH_VLLM_PYTHON`` names an
interpreter with vLLM, the same snapshots are served by one vLLM server as well.

    python benchmarks/weight_sync.py [--rounds 5] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from hearth.inference.backend import InferenceBackend
from hearth.inference.engine.engine import InferenceEngine
from hearth.inference.vllm.backend import VllmBackend
from hearth.inference.vllm.model import read_facts
from hearth.inference.vllm.options import VllmOptions
from hearth.inference.vllm.server import ServerPlan, write_plugin
from hearth.launch.sidecars import LocalSidecars
from hearth.models.loading import base_tensors, load_base_tensors, load_model
from hearth.settings import VLLM_PYTHON_VARIABLE, vllm_python
from hearth.sync import delta
from hearth.sync.manifest import describe, fingerprints
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore, SnapshotStore
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerOptions
from hearth.wire.tensors import encode
from hearth.wire.tinker import AdamParams, DatumRecord
from training.quickstart import MODEL

LEARNING_RATE = 1e-6
TOKENS = 128


@dataclass
class Row:
    """Times of one way of syncing, one per round."""

    name: str
    num_bytes: list[int] = field(default_factory=list)
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)

    def text(self) -> str:
        total = [save + load for save, load in zip(self.save_s, self.load_s, strict=True)]
        return (
            f"| {self.name} | {self.num_bytes[0]:,} | {min(self.save_s):.3f} "
            f"| {min(self.load_s):.3f} | {min(total):.3f} | {sorted(total)[len(total) // 2]:.3f} |"
        )


def make_model(folder: Path) -> Path:
    """A Qwen3 with random weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32768,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=2,
        pad_token_id=0,
    )
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def datum(rng: np.random.Generator, count: int = TOKENS) -> DatumRecord:
    """A sequence of random tokens, all of them trained on."""
    tokens = rng.integers(3, 32768, count + 1)
    inputs = {
        "target_tokens": encode(tokens[1:], "int64"),
        "weights": encode(np.ones(count, dtype=np.float32), "float32"),
    }
    return DatumRecord.model_validate(
        {
            "model_input": {"chunks": [{"tokens": tokens[:-1].tolist()}]},
            "loss_fn_inputs": {name: value.as_dict() for name, value in inputs.items()},
        }
    )


def timed(run: Callable[[], object]) -> float:
    """Seconds that a call takes."""
    start_s = time.perf_counter()
    run()
    return time.perf_counter() - start_s


class Pair:
    """A trainer and a deployment on one store."""

    def __init__(
        self, source: Path, store: SnapshotStore, work_dir: Path, deployment: InferenceBackend
    ) -> None:
        self.store = store
        self.trainer = TrainerEngine(
            source,
            snapshots=store,
            checkpoint_dir=work_dir / "checkpoints",
            options=TrainerOptions(dtype="bfloat16"),
        )
        self.model_id = self.trainer.create_model()
        self.deployment = deployment
        self.rng = np.random.default_rng(0)

    def step(self) -> None:
        self.trainer.forward_backward(self.model_id, [datum(self.rng)])
        adam = AdamParams(learning_rate=LEARNING_RATE)
        self.trainer.optim_step(self.model_id, adam, "num_loss_tokens")

    def sync(self, row: Row, identity: str, kind: str) -> None:
        save = timed(lambda: self.trainer.save_for_sampler(self.model_id, identity, kind))  # type: ignore[arg-type]
        saved = self.store.get(identity)
        if saved.kind != kind:
            raise SystemExit(f"{identity} must be a {kind}, got a {saved.kind}")
        start_s = time.perf_counter()
        loading = self.deployment.hot_load(identity, lambda: self.store.get(identity))
        state = loading.result(timeout=600)
        load = time.perf_counter() - start_s
        if state.error is not None:
            raise SystemExit(state.error)
        row.num_bytes.append(sum(tensor.nbytes for tensor in saved.tensors.values()))
        row.save_s.append(save)
        row.load_s.append(load)

    def close(self) -> None:
        self.deployment.close()
        self.trainer.close()


def embedded(source: Path) -> InferenceBackend:
    """Hearth's own engine."""
    return InferenceEngine(load_model(source, dtype="bfloat16"))


@contextlib.contextmanager
def on_vllm(source: Path, work_dir: Path) -> Iterator[InferenceBackend]:
    """One vLLM server on the CPU, with the shipped tokenizer: nothing is sampled but probes."""
    sidecars = LocalSidecars(work_dir / "sidecars")
    state = work_dir / "vllm"
    plan = ServerPlan(
        python=vllm_python(),
        source=str(source),
        tokenizer=str(MODEL),
        plugin_dir=write_plugin(state / "plugin"),
        dtype="bfloat16",
        max_seq_len=256,
        max_batch_size=8,
        is_cpu=True,
        options=VllmOptions(kv_cache_mb=256),
    )
    facts = read_facts(str(source), name=str(source))
    try:
        yield VllmBackend(plan, facts, replicas=1, sidecars=sidecars, folder=state)
    finally:
        sidecars.close()


def measure(
    source: Path,
    store: SnapshotStore,
    work_dir: Path,
    rounds: int,
    way: str,
    deployment: InferenceBackend,
) -> list[Row]:
    """Rows of a base and of a delta; every delta is one optimizer step after its base."""
    pair = Pair(source, store, work_dir, deployment)
    rows = [Row(f"base, {way}"), Row(f"delta, {way}")]
    try:
        for number in range(rounds):
            pair.sync(rows[0], f"base-{number}", "base")
            pair.step()
            pair.sync(rows[1], f"delta-{number}", "delta")
    finally:
        pair.close()
    return rows


def measure_plain(source: Path, work_dir: Path, rounds: int) -> Row:
    """One file with everything, written, read and copied over a module's weights."""
    row = Row("plain safetensors file")
    trained, served = load_model(source, dtype="bfloat16"), load_model(source, dtype="bfloat16")
    tensors = {name: tensor.detach() for name, tensor in base_tensors(trained.module).items()}
    for number in range(rounds):
        path = work_dir / f"plain-{number}.safetensors"

        def save(path: Path = path) -> None:
            save_file(tensors, path)
            with path.open("rb") as file:
                os.fsync(file.fileno())

        row.save_s.append(timed(save))
        row.load_s.append(
            timed(lambda path=path: load_base_tensors(served.module, load_file(path)))
        )
        row.num_bytes.append(path.stat().st_size)
        path.unlink()
    return row


def parts_of_a_delta(source: Path, rounds: int) -> tuple[str, list[tuple[str, float]]]:
    """Seconds of each thing that is done to a delta, and how many elements changed."""
    pair = Pair(source, MemorySnapshotStore(), source, embedded(source))
    trainer = pair.trainer
    trainer.save_for_sampler(pair.model_id, "old")
    pair.step()
    trainer.save_for_sampler(pair.model_id, "new", "delta")
    old, new = pair.store.get("old").tensors, pair.store.get("new").whole
    pair.close()
    assert new is not None
    encoded = delta.encode(old, new)
    fresh = delta.apply(encoded, old)
    changed = sum(
        int((old[name].view(torch.int16) != tensor.view(torch.int16)).sum())
        for name, tensor in new.items()
    )
    total = sum(tensor.numel() for tensor in new.values())
    names = len(delta.list_changed(encoded))
    each = sum(part.nbytes for part in encoded.values()) / changed
    summary = (
        f"{changed:,} of {total:,} elements changed ({changed / total:.2%}), in {names} of "
        f"{len(new)} tensors; {each:.2f} bytes each"
    )
    works: list[tuple[str, Callable[[], object]]] = [
        ("compare and encode", lambda: delta.encode(old, new)),
        ("fingerprints of the changed tensors (each side)", lambda: fingerprints(fresh)),
        ("their blake2b, for scale", lambda: describe(fresh)),
        ("apply to the old tensors", lambda: delta.apply(encoded, old)),
        ("copy of all tensors, for scale", lambda: [tensor.clone() for tensor in new.values()]),
    ]
    return summary, [(name, min(timed(work) for _ in range(rounds))) for name, work in works]


def cpu_name() -> str:
    """The processor as Linux names it."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def say(text: str = "") -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the files go")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        root = Path(name)
        source = make_model(root / "model")
        say(
            f"{cpu_name()}, {os.cpu_count()} cores, torch {torch.__version__}, "
            f"{torch.get_num_threads()} threads, load average {os.getloadavg()[0]:.2f} at the start"
        )
        summary, parts = parts_of_a_delta(source, options.rounds)
        rows = [measure_plain(source, root, options.rounds)]
        folder = FolderSnapshotStore(root / "snapshots", keep=4)
        rows += measure(source, folder, root, options.rounds, "folder", embedded(source))
        memory = MemorySnapshotStore()
        rows += measure(source, memory, root, options.rounds, "memory", embedded(source))
        if os.environ.get(VLLM_PYTHON_VARIABLE):
            other = FolderSnapshotStore(root / "snapshots-vllm", keep=4)
            with on_vllm(source, root / "served") as server:
                rows += measure(source, other, root, options.rounds, "folder, vLLM", server)
    say(f"\n{summary}\n")
    say("| sync | bytes | save s | hot-load s | sum s | median sum s |")
    say("|---|---:|---:|---:|---:|---:|")
    for row in rows:
        say(row.text())
    say("\n| part of a delta | s |\n|---|---:|")
    for name, seconds in parts:
        say(f"| {name} | {seconds:.3f} |")


if __name__ == "__main__":
    main()
