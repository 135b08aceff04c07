"""What the platform's own work costs on this machine: the constants of ``scale_simulation.py``.

CPU seconds of a sample are measured at two lengths, and are a part for each sample and one for each
of its tokens:

- the recipe process, from answers to the trainer's requests: ``pipeline.py``, whose rollouts are
  there at once. Its platform is embedded, so that reading those requests is counted too;
- the recipe process, before that: a sampler that asks a scripted deployment over HTTP;
- the gateway, which stands between those two in a process of its own.

A weight sync is ``weight_sync.py``'s: a delta through a folder, on two threads.

    python benchmarks/scale_constants.py
    python benchmarks/scale_constants.py --load [--in-flight 1 64 512] [--samples 2000]

``--load`` asks for completions of a real size, so many at a time: a prompt of 1,000 tokens, 512 to
1,024 new ones with two logprobs each. The deployment is the real one over an engine that answers at
once. It prints how long samples took, the CPU of each process, and which of them is full first.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

# Idle OpenMP threads that spin take the cores from whoever works.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "0")

import httpx
import numpy as np
import orjson
import torch
import uvicorn
from weight_sync import embedded
from weight_sync import make_model as make_large_model
from weight_sync import measure as measure_syncs
from workload import make_model, processor

from hearth.control.app import create_gateway
from hearth.control.catalog import read_catalog
from hearth.control.context import Context
from hearth.control.plane import ControlPlane
from hearth.control.store import Store
from hearth.inference.backend import InferenceBackend, SampledSequence, SampleRequest, ServingState
from hearth.inference.responses import completion_response, perf_metrics
from hearth.inference.service import create_app
from hearth.launch.spec import DeploymentSpec, Endpoint, ExitReport, Watcher
from hearth.sdk import DeploymentSampler, FixedConcurrencyController
from hearth.sdk.batches import build_batch
from hearth.sync.store import FolderSnapshotStore, MemorySnapshotStore
from hearth.wire.completions import CompletionCall
from hearth.wire.fireworks import Deployment
from training.samples.datums import datum_from_tokens_weights

PROMPT_TOKENS = 4
NEW_TOKENS = (4, 900)
"""Sampled tokens of the two lengths."""
VOCAB = 151936
REQUESTS = 400
IN_FLIGHT = 64
LOAD_PROMPT_TOKENS, LOAD_NEW_TOKENS = 1000, (512, 1024)
"""Of ``--load``: the second are the least and the most."""
ROWS, PROMPTS = 384, 64
"""Of the pipeline's run."""
ROUNDS = 3
START_S = 60.0


def measure() -> dict[str, float]:
    """``scale_simulation.Constants`` of this machine, by name."""
    trained = [pipeline_s(new_tokens) for new_tokens in NEW_TOKENS]
    asked, passed = zip(*map(requests_s, NEW_TOKENS), strict=True)
    recipe_s, recipe_token_s = line([sum(pair) for pair in zip(trained, asked, strict=True)])
    gateway_s, gateway_token_s = line(passed)
    sync = sync_costs()
    return {
        "recipe_s": recipe_s,
        "recipe_token_s": recipe_token_s,
        "gateway_s": gateway_s,
        "gateway_token_s": gateway_token_s,
        "answer_bytes_per_token": per_token([len(answer(count)) for count in NEW_TOKENS]),
        "datum_bytes_per_token": per_token([len(datum(count)) for count in NEW_TOKENS]),
        **sync,
    }


def heading() -> str:
    """The machine, for a table."""
    load = os.getloadavg()[0]
    return f"{processor()}, torch {torch.__version__}, load average {load:.1f} at the start"


def line(seconds: Sequence[float]) -> tuple[float, float]:
    """Of each sample, and of each token, from the seconds at the two lengths."""
    slope = max(0.0, per_token(seconds))
    return seconds[0] - slope * (PROMPT_TOKENS + NEW_TOKENS[0]), slope


def per_token(values: Sequence[float]) -> float:
    """How much a token adds."""
    return (values[1] - values[0]) / (NEW_TOKENS[1] - NEW_TOKENS[0])


def pipeline_s(new_tokens: int) -> float:
    """CPU seconds of a sample in the recipe's and the SDK's threads."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("pipeline.py")),
        "--json",
        "--rows",
        str(ROWS),
        "--prompts",
        str(PROMPTS),
        "--new-tokens",
        str(new_tokens),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True)
    milliseconds = orjson.loads(done.stdout)["cpu_ms_per_1000"]
    return (milliseconds["recipe"] + milliseconds["SDK"]) / 1e6


def requests_s(new_tokens: int) -> tuple[float, float]:
    """CPU seconds of a completion in the process that asks for it, and in the gateway's."""
    with Platform() as platform:
        asyncio.run(sample_all(platform.sampler, IN_FLIGHT, new_tokens))
        before = platform.cpu_s()
        asyncio.run(sample_all(platform.sampler, REQUESTS, new_tokens))
        used = platform.cpu_s() - before
    return used[0] / REQUESTS, used[1] / REQUESTS


class Platform:
    """A gateway and a deployment whose engine answers at once, each in a process of its own."""

    names = ("SDK", "gateway", "deployment")

    def __init__(self, in_flight: int = IN_FLIGHT) -> None:
        self._folder = tempfile.TemporaryDirectory()
        model = make_model(Path(self._folder.name) / "model", "nano")
        port, path = free_port(), str(Path(self._folder.name) / "deployment")
        parts = [["--gateway", path, str(port), str(model)], ["--deployment", path]]
        self._processes = [subprocess.Popen([sys.executable, __file__, *part]) for part in parts]
        self._url = f"http://127.0.0.1:{port}"
        self.sampler = DeploymentSampler(
            self._url,
            "accounts/me/deployments/d",
            "x",
            concurrency_controller=FixedConcurrencyController(in_flight),
        )

    def __enter__(self) -> Platform:
        wait_for(f"{self._url}/healthz")
        return self

    def __exit__(self, *_: object) -> None:
        self.sampler.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        self._folder.cleanup()

    def cpu_s(self) -> np.ndarray:
        """CPU seconds so far, by ``names``."""
        return np.array([time.process_time(), *(cpu_s(process.pid) for process in self._processes)])


def load_table(in_flight: Sequence[int], samples: int) -> str:
    """What so many completions at a time cost."""
    lines = [
        "| in flight | samples/s | p50 ms | p99 ms | "
        + " | ".join(f"{name}, ms of CPU a sample" for name in Platform.names)
        + " | full first |",
        "|" + "---:|" * (4 + len(Platform.names)) + "---|",
    ]
    for most in in_flight:
        with Platform(most) as platform:
            asyncio.run(load(platform.sampler, max(8, samples // 10)))
            before, begin_s = platform.cpu_s(), time.perf_counter()
            seconds = asyncio.run(load(platform.sampler, samples))
            taken_s = time.perf_counter() - begin_s
            used = platform.cpu_s() - before
        each = 1000 * used / samples
        fullest = int(each.argmax())
        lines.append(
            f"| {most} | {samples / taken_s:.0f} | {1000 * statistics.median(seconds):.1f} "
            f"| {1000 * float(np.percentile(seconds, 99)):.1f} | "
            + " | ".join(f"{part:.2f}" for part in each)
            + f" | {Platform.names[fullest]}, at {1000 / each[fullest]:.0f} samples/s |"
        )
    return "\n".join(lines)


async def load(sampler: DeploymentSampler, samples: int) -> list[float]:
    """The seconds that each of so many completions took."""
    chance = random.Random(0)

    async def sample(number: int) -> float:
        prompt = [number, *TOKENS[1:LOAD_PROMPT_TOKENS]]
        new_tokens = chance.randint(*LOAD_NEW_TOKENS)
        (found,) = await sampler.sample_with_prompt_tokens(prompt, max_tokens=new_tokens)
        assert found.completion_len == len(found.raw_logprobs or ()) == new_tokens
        return found.sample_s

    return await asyncio.gather(*map(sample, range(samples)))


async def sample_all(sampler: DeploymentSampler, count: int, new_tokens: int) -> None:
    """Ask for so many completions."""
    prompt = list(range(PROMPT_TOKENS))
    found = await sampler.sample_with_prompt_tokens(prompt, n=count, max_tokens=new_tokens)
    assert {sample.completion_len for sample in found} == {new_tokens}


def cpu_s(pid: int) -> float:
    """CPU seconds of a process so far."""
    # After the name, which may hold blanks, the 12th and 13th fields.
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def wait_for(url: str) -> None:
    """Return when somebody answers."""
    end_s = time.monotonic() + START_S
    while True:
        try:
            httpx.get(url).raise_for_status()
            return
        except httpx.TransportError:
            if time.monotonic() > end_s:
                raise
            time.sleep(0.1)


def answer(new_tokens: int) -> bytes:
    """A completion's answer, as deployments give it to samplers."""
    prompt = list(range(PROMPT_TOKENS))
    call = CompletionCall(
        model="m",
        prompt=prompt,
        max_tokens=new_tokens,
        logprobs=True,
        logprob_format="arrays",
        encoding="base64",
        raw_output=True,
        perf_metrics_in_response=True,
    )
    sequence = sample_sequence(new_tokens)
    return completion_response(
        call,
        [prompt],
        [sequence],
        model_name="m",
        tokenizer=None,
        metrics=perf_metrics([prompt], [sequence], 1.0),
    ).dump()


def sample_sequence(new_tokens: int) -> SampledSequence:
    """What an engine answers with."""
    return SampledSequence(
        token_ids=TOKENS[:new_tokens],
        logprobs=LOGPROBS[:new_tokens],
        sampling_logprobs=LOGPROBS[new_tokens : 2 * new_tokens],
        prompt_logprobs=None,
        text="word " * new_tokens,
        finish_reason="stop",
        weight_version=1,
        snapshot_identity="step-1",
        versions=[[1, new_tokens]],
        seed=1,
        queue_s=0.0,
        generation_s=1.0,
        cached_prompt_tokens=0,
        num_concurrent=1,
    )


TOKENS: list[int] = np.random.default_rng(0).integers(0, VOCAB, 4096).tolist()
LOGPROBS: list[float] = (
    -np.random.default_rng(0).exponential(size=8192).astype(np.float32)
).tolist()


def datum(new_tokens: int) -> bytes:
    """A sample on its way to the trainer."""
    chance = random.Random(new_tokens)
    tokens = [chance.randrange(VOCAB) for _ in range(PROMPT_TOKENS + new_tokens)]
    weights = [0.0] * PROMPT_TOKENS + [1.0] * new_tokens
    batch = build_batch([datum_from_tokens_weights(tokens, weights)], as_columns=False)
    return orjson.dumps(batch.body["data"][0])


def sync_costs() -> dict[str, float]:
    """Of a delta through a folder, for each byte of the whole weights."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        source = make_large_model(root / "model")
        store = FolderSnapshotStore(root / "snapshots", keep=4)
        base, delta = measure_syncs(source, store, root, ROUNDS, "folder", embedded(source))
    whole = base.num_bytes[0]
    return {
        "save_s_per_byte": min(delta.save_s) / whole,
        "load_s_per_byte": min(delta.load_s) / whole,
        "delta_share": delta.num_bytes[0] / whole,
    }


class InstantBackend(InferenceBackend):
    """Has sampled already, as many tokens as it is asked for."""

    def __init__(self) -> None:
        super().__init__(None, 2**20)

    def submit(self, request: SampleRequest) -> Future[SampledSequence]:
        """The completion, at once."""
        future: Future[SampledSequence] = Future()
        future.set_result(sample_sequence(request.max_tokens))
        return future

    def hot_load(self, identity: str, fetch: Callable[[], Any], **_: Any) -> Future[ServingState]:
        """Never asked."""
        raise NotImplementedError

    def close(self) -> None:
        """Nothing is open."""


class Scripted:
    """A launcher whose one deployment listens at a socket, and a worker of it."""

    placement = "process"
    pid = None

    def __init__(self, path: str) -> None:
        self.endpoint = Endpoint(socket=path)

    def start(self, spec: DeploymentSpec, watcher: Watcher) -> Scripted:
        """The worker, which is there already."""
        self.spec = spec
        watcher.ready(self)  # type: ignore[arg-type] - the rest is not asked for
        return self

    def record(self) -> dict[str, Any]:
        """Nothing finds it again."""
        return {}

    def adopt(self, record: dict[str, Any], watcher: Watcher) -> ExitReport:
        """Never asked."""
        return ExitReport(reason="gone")

    def stop(self, grace_s: float = 0.0) -> None:
        """It ends with its process."""


def serve_gateway(path: str, port: int, model: str) -> None:
    """A platform on a port whose deployment ``d`` is at a socket."""
    launcher: Any = Scripted(path)
    context = Context(launcher=launcher, catalog=read_catalog(), data_dir=Path(path).parent)
    plane = ControlPlane(Store(), context)
    plane.deployments.create("d", Deployment(base_model=model))
    uvicorn.run(
        create_gateway(plane), host="127.0.0.1", port=port, access_log=False, log_level="warning"
    )


def command() -> None:
    """Measure, or be one of the processes that are measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--deployment", help=argparse.SUPPRESS)
    parser.add_argument("--gateway", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--load", action="store_true", help="completions of a real size")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 64, 512])
    parser.add_argument("--samples", type=int, default=2000)
    asked = parser.parse_args()
    if asked.deployment:
        app = create_app(InstantBackend(), model_name="d", snapshots=MemorySnapshotStore())
        uvicorn.run(app, uds=asked.deployment, access_log=False, log_level="warning")
    elif asked.gateway:
        path, port, model = asked.gateway
        serve_gateway(path, int(port), model)
    elif asked.load:
        sys.stdout.write(f"{heading()}\n{load_table(asked.in_flight, asked.samples)}\n")
    else:
        sys.stdout.write(orjson.dumps(measure(), option=orjson.OPT_INDENT_2).decode() + "\n")


if __name__ == "__main__":
    command()
