"""Measures weight syncs of trainers with several ranks and deployments with several replicas.

Each part runs in a process of its own. *save*: a trainer of so many ranks saves bases, then deltas,
each one optimizer step after the one before. *load*: a deployment of so many replicas loads what
the most ranks have saved, while every replica samples a long completion
(``running_requests="keep"``). *sync*: a save and its load together, of a base through files and of
one that the ranks send without (``direct``). The *pause* is the longest time between two tokens of
one completion; the time of a usual token stands beside it. *Memory* is what the part's processes
have of their own and share with each other (pages of files, which the system may drop, do not
count): at rest before the syncs, and the most during one kind of sync.

    python benchmarks/weight_sync_ranks.py --shapes 0.1b --ranks 1,2,4 --replicas 1,2 --rounds 4

Where ``HEARTH_VLLM_PYTHON`` names an interpreter with vLLM, it is measured beside our own engine,
which has one replica.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from weight_sync import datum

from hearth.inference.backend import InferenceBackend, SampledToken, SampleRequest, TokenListener
from hearth.inference.engine.engine import InferenceEngine
from hearth.inference.engine.options import EngineOptions
from hearth.inference.vllm.backend import VllmBackend
from hearth.inference.vllm.model import read_facts
from hearth.inference.vllm.options import VllmOptions
from hearth.inference.vllm.server import ServerPlan, write_plugin
from hearth.launch.sidecars import LocalSidecars
from hearth.models.loading import load_model
from hearth.settings import VLLM_PYTHON_VARIABLE, vllm_python
from hearth.sync.store import FolderBuckets
from hearth.trainer.engine import TrainerEngine
from hearth.trainer.options import TrainerWorkerOptions
from hearth.trainer.ranks.start import start_ranks
from hearth.wire.tinker import AdamParams
from training.quickstart import MODEL

TOKENS = 32
COMPLETION = 200
MIB = 2**20
SHAPES: dict[str, dict[str, Any]] = {
    "0.02b": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6},
    "0.1b": {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    "0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}


@dataclass
class Part:
    """What one part measured of one kind of sync, one entry per round."""

    name: str
    kind: str
    seconds: list[float] = field(default_factory=list)
    num_bytes: list[int] = field(default_factory=list)
    pause_s: list[float] = field(default_factory=list)
    token_s: list[float] = field(default_factory=list)
    rest_mb: float = 0.0
    peak_mb: float = 0.0

    def text(self) -> str:
        """One line of the table: medians of the rounds."""
        seconds = statistics.median(self.seconds)
        pause = token = share = ""
        if self.pause_s:
            pause = f"{statistics.median(self.pause_s):.3f}"
            token = f"{statistics.median(self.token_s):.3f}"
            shares = [
                pause / whole for pause, whole in zip(self.pause_s, self.seconds, strict=True)
            ]
            share = f"{statistics.median(shares):.2f}"
        return (
            f"| {self.name} | {self.kind} | {statistics.median(self.num_bytes):,.0f} "
            f"| {seconds:.3f} | {pause} | {share} | {token} | {self.rest_mb:,.0f} "
            f"| {self.peak_mb:,.0f} |"
        )


class MemoryWatch:
    """Samples the memory of this process and of all its descendants."""

    def __init__(self) -> None:
        self.most_mb = 0.0
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_stopped.wait(0.05):
            self.most_mb = max(self.most_mb, read_memory())


def read_memory() -> float:
    """MiB of this process and its descendants, without pages of files; shared pages count once."""
    own = psutil.Process()
    total = 0
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(OSError, psutil.Error):
            text = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8")
            for line in text.splitlines():
                if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                    total += int(line.split()[1])
    return total / 1024


def make_model(folder: Path, shape: str) -> None:
    """A Qwen3 with random weights."""
    import transformers

    torch.manual_seed(0)
    fields: dict[str, Any] = {
        "vocab_size": 32768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    config = transformers.Qwen3Config(**(fields | SHAPES[shape]))
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(
        folder
    )


def measure(part: Part, run: Callable[[], int]) -> None:
    """Add one round of ``run``, which returns the bytes of the snapshot."""
    if not part.rest_mb:
        part.rest_mb = read_memory()
    with MemoryWatch() as memory:
        start_s = time.perf_counter()
        size = run()
        part.seconds.append(time.perf_counter() - start_s)
    part.num_bytes.append(size)
    part.peak_mb = max(part.peak_mb, memory.most_mb)


@contextlib.contextmanager
def open_trainer(root: Path, ranks: int) -> Iterator[TrainerEngine]:
    """A trainer of so many ranks, with a bucket of its own."""
    sidecars = LocalSidecars(root / f"sidecars-{ranks}")
    options = TrainerWorkerOptions.from_values(
        {
            "dtype": "bfloat16",
            "device": "cpu",
            "buckets": str(root / "buckets"),
            "bucket": f"ranks-{ranks}",
            "base_model": "m",
            "source": str(root / "model"),
            "checkpoint_dir": str(root / "checkpoints" / "job"),
            "ranks": ranks,
            "rank_timeout_s": 600.0,
            "offload_optimizer": False,
            "keep_snapshots": None,
            "models_dir": None,
            "allow_folders": False,
        }
    )
    made = start_ranks(sidecars, options) if ranks > 1 else None
    engine = made or TrainerEngine(**options.engine_arguments())
    try:
        yield engine
    finally:
        engine.close()
        sidecars.close()


def save(root: Path, ranks: int, rounds: int, learning_rate: float) -> list[Part]:
    """Save bases and deltas with a trainer of so many ranks."""
    with open_trainer(root, ranks) as engine:
        return save_with(engine, root / "buckets" / f"ranks-{ranks}", rounds, learning_rate)


def save_with(engine: TrainerEngine, folder: Path, rounds: int, learning_rate: float) -> list[Part]:
    """Save bases and deltas into ``folder``."""
    ranks = int(folder.name.removeprefix("ranks-"))
    model_id = engine.create_model()
    rng = np.random.default_rng(0)

    def step() -> None:
        engine.forward_backward(model_id, [datum(rng, TOKENS) for _ in range(ranks)])
        adam = AdamParams(learning_rate=learning_rate)
        engine.optim_step(model_id, adam, "num_loss_tokens")

    def save_as(identity: str, kind: Any) -> int:
        engine.save_for_sampler(model_id, identity, kind)
        return sum(file.stat().st_size for file in (folder / identity).iterdir())

    parts = [Part(f"save, {ranks} ranks", kind) for kind in ("base", "delta")]
    step()
    for number in range(rounds):
        measure(parts[0], lambda number=number: save_as(f"base-{number}", "base"))
    for number in range(rounds):
        step()
        measure(parts[1], lambda number=number: save_as(f"delta-{number}", "delta"))
    return parts


class Stream:
    """Completions of one request after the other, and when each token came."""

    def __init__(self, backend: InferenceBackend, number: int) -> None:
        self.times: list[float] = []
        self._backend = backend
        self._number = number
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def gaps(self, since_s: float) -> list[float]:
        """Seconds between tokens of one completion, those that end after ``since_s``."""
        times = list(self.times)
        return [after - before for before, after in itertools.pairwise(times) if after > since_s]

    def wait_for_tokens(self, count: int) -> None:
        """Return once so many more tokens came."""
        wanted = len(self.times) + count
        while len(self.times) < wanted:
            time.sleep(0.01)

    def stop(self) -> None:
        """Stop after the running request."""
        self._is_stopped.set()
        self._thread.join()

    def _run(self) -> None:
        listener = TokenListener(lambda _: None, self._note)
        while not self._is_stopped.is_set():
            request = SampleRequest(
                prompt=[5 + self._number, 17, 40, 41],
                max_tokens=COMPLETION,
                ignore_eos=True,
                listener=listener,
                visible_tokens=(),
            )
            self._backend.submit(request).result()

    def _note(self, _: SampledToken) -> None:
        self.times.append(time.perf_counter())


@contextlib.contextmanager
def open_backend(root: Path, engine: str, replicas: int) -> Iterator[InferenceBackend]:
    """A deployment of ``root/model``."""
    source = str(root / "model")
    if engine == "embedded":
        made = InferenceEngine(
            load_model(source, name="m", dtype="bfloat16"), options=EngineOptions(max_seq_len=512)
        )
        try:
            yield made
        finally:
            made.close()
        return
    folder = root / f"vllm-{replicas}"
    sidecars = LocalSidecars(folder / "sidecars")
    plan = ServerPlan(
        python=vllm_python(),
        source=source,
        tokenizer=str(MODEL),
        plugin_dir=write_plugin(folder / "plugin"),
        dtype="bfloat16",
        max_seq_len=512,
        max_batch_size=4,
        is_cpu=True,
        options=VllmOptions(kv_cache_mb=128),
    )
    facts = read_facts(source, name="m")
    try:
        served = VllmBackend(plan, facts, replicas=replicas, sidecars=sidecars, folder=folder)
        try:
            yield served
        finally:
            served.close()
    finally:
        sidecars.close()


def load(root: Path, engine: str, replicas: int, rounds: int) -> list[Part]:
    """Load what the most ranks have saved."""
    saved = max(int(path.name.removeprefix("ranks-")) for path in (root / "buckets").iterdir())
    store = FolderBuckets(root / "buckets").bucket(f"ranks-{saved}")
    name = f"load, {engine}, {replicas} replicas"
    parts = [Part(name, kind) for kind in ("base", "delta")]
    with open_backend(root, engine, replicas) as backend:
        streams = [Stream(backend, number) for number in range(replicas)]
        for stream in streams:
            stream.wait_for_tokens(20)
        for part in parts:
            for number in range(rounds):
                identity = f"{part.kind}-{number}"

                def sync(identity: str = identity, part: Part = part) -> int:
                    begin_s = time.perf_counter()
                    loading = backend.hot_load(
                        identity, lambda: store.get(identity), running_requests="keep"
                    )
                    state = loading.result(timeout=600)
                    if state.error is not None:
                        raise SystemExit(state.error)
                    part.seconds.append(time.perf_counter() - begin_s)
                    return sum(file.stat().st_size for file in store.folder(identity).iterdir())

                start_s = time.perf_counter()
                measure(part, sync)
                part.seconds.pop()  # with the reading of the file's size
                for stream in streams:
                    stream.wait_for_tokens(8)
                part.pause_s.append(max(max(stream.gaps(start_s)) for stream in streams))
                usual = [gap for stream in streams for gap in stream.gaps(0.0)]
                part.token_s.append(statistics.median(usual))
            if part.kind == "delta" and rounds > 1:
                # The first delta after a base has nothing yet that it could be applied to.
                for listed in (part.seconds, part.num_bytes, part.pause_s, part.token_s):
                    del listed[0]
        for stream in streams:
            stream.stop()
    return parts


def sync_directly(root: Path, ranks: int, replicas: int, rounds: int) -> list[Part]:
    """Save with a trainer and load at once, through files and without."""
    store = FolderBuckets(root / "buckets").bucket(f"ranks-{ranks}")
    name = f"sync, {ranks} ranks to {replicas} replicas"
    parts = [Part(name, kind) for kind in ("base", "direct")]
    with open_trainer(root, ranks) as engine, open_backend(root, "vllm", replicas) as backend:
        model_id = engine.create_model()
        streams = [Stream(backend, number) for number in range(replicas)]
        for stream in streams:
            stream.wait_for_tokens(20)
        for number, part in itertools.product(range(rounds), parts):
            identity = f"sync-{part.kind}-{number}"

            def sync(identity: str = identity, part: Part = part) -> int:
                kind: Any = part.kind
                engine.save_for_sampler(model_id, identity, kind)
                state = backend.hot_load(
                    identity, lambda: store.open(identity), running_requests="keep"
                ).result(timeout=600)
                if state.error is not None:
                    raise SystemExit(state.error)
                return sum(file.stat().st_size for file in store.folder(identity).iterdir())

            start_s = time.perf_counter()
            measure(part, sync)
            for stream in streams:
                stream.wait_for_tokens(8)
            part.pause_s.append(max(max(stream.gaps(start_s)) for stream in streams))
            usual = [gap for stream in streams for gap in stream.gaps(0.0)]
            part.token_s.append(statistics.median(usual))
        for stream in streams:
            stream.stop()
    return parts


def run_part(arguments: list[str]) -> list[Part]:
    """The parts that a process of its own measured."""
    command = [sys.executable, __file__, *arguments]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if ran.returncode:
        raise SystemExit(f"{arguments} failed with {ran.returncode}")
    return [Part(**part) for part in json.loads(ran.stdout.splitlines()[-1])]


def say(text: str = "") -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and write the table; with ``--part`` one part, as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="0.1b")
    parser.add_argument("--ranks", default="1,2,4")
    parser.add_argument("--replicas", default="1,2", help="of vLLM; empty measures no loading")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--folder", type=Path, default=None, help="where the files go")
    parser.add_argument("--part", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        what, *rest = options.part.split(":")
        root = options.folder
        if what == "save":
            parts = save(root, int(rest[0]), options.rounds, options.learning_rate)
        elif what == "sync":
            parts = sync_directly(root, int(rest[0]), int(rest[1]), options.rounds)
        else:
            parts = load(root, rest[0], int(rest[1]), options.rounds)
        say(json.dumps([asdict(part) for part in parts]))
        return
    common = ["--rounds", str(options.rounds), "--learning-rate", str(options.learning_rate)]
    for shape in options.shapes.split(","):
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            make_model(Path(name) / "model", shape)
            size = (Path(name) / "model" / "model.safetensors").stat().st_size
            say(
                f"\n{shape}: {size:,} bytes of weights in bfloat16, {os.cpu_count()} cores, load "
                f"average {os.getloadavg()[0]:.2f} at the start\n"
            )
            say("| part | kind | bytes | s | pause s | pause/s | token s | rest MiB | peak MiB |")
            say("|---|---|---:|---:|---:|---:|---:|---:|---:|")
            works = [f"save:{ranks}" for ranks in options.ranks.split(",") if ranks]
            if options.replicas:
                works.append("load:embedded:1")
                if os.environ.get(VLLM_PYTHON_VARIABLE):
                    counts = options.replicas.split(",")
                    works += [f"load:vllm:{count}" for count in counts]
                    both = itertools.product(options.ranks.split(","), counts)
                    works += [f"sync:{ranks}:{count}" for ranks, count in both]
            for work in works:
                for part in run_part(["--part", work, "--folder", name, *common]):
                    say(part.text())


if __name__ == "__main__":
    main()
