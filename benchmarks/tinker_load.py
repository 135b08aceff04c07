"""How Tinker's API holds a crowd: samples in flight beside runs that train, and what the way costs.

    python benchmarks/tinker_load.py [--samples 20000] [--parts crowd runs rates]
    python benchmarks/tinker_load.py --parts against --against URL --against-model NAME

*crowd*: one program has 2,000 samples outstanding while eight runs train and their sessions beat.
Beside it another program asks for one sample at a time, in turn through Tinker's API and straight
from the deployment: the difference is what the API adds. *runs*: 1, 4, 16 and 64 runs train at the
same time on one base, and one run with the datums of 16: it bounds what passes would gain that
several runs share. *rates*: samples/s through HTTP, and of the engine alone. *against*: the same
requests, past any client, to this platform and to another server that speaks the API. Everything is
on this machine, with the shipped model.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import tinker
from tinker import types

from hearth.inference.backend import SampleRequest
from hearth.inference.engine.engine import InferenceEngine
from hearth.local import tinker_server
from hearth.models.loading import load_model, load_tokenizer
from training.quickstart import MODEL

_RUNS = 8
_PROMPT = [20, 21, 22, 23]
_TOKENS = 8
_KEY, _OTHER_KEY = "tml-crowd", "tml-other"
_STEPS = 8
_PENDING = 408
Lines = list[tuple[str, str]]
"""What was measured, and what was found."""


class _Trainers:
    """Runs that train until the ``with`` ends."""

    def __init__(self, url: str, count: int) -> None:
        self.trained = [0] * count
        self._has_ended = threading.Event()
        self._threads = [
            threading.Thread(target=self._train, args=(url, place)) for place in range(count)
        ]

    def __enter__(self) -> _Trainers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()

    def _train(self, url: str, place: int) -> None:
        own = tinker.ServiceClient(base_url=url, api_key=_KEY)
        client = own.create_lora_training_client(base_model=str(MODEL), rank=8, seed=place)
        client = client.result()
        data = [_make_datum(32, seed) for seed in range(8)]
        while not self._has_ended.is_set():
            passed = client.forward_backward(data, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
            passed.result()
            self.trained[place] += 1


def _make_datum(length: int, seed: int = 0) -> types.Datum:
    """Random tokens: of datums that begin alike a trainer computes the beginning once."""
    tokens = np.random.default_rng(seed).integers(5, 300, length + 1)
    return types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1].tolist()),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(tokens[1:])},
    )


def _sample_all(
    url: str, samples: int, in_flight: int, platform: psutil.Process
) -> tuple[float, list[float]]:
    """Samples per second with ``in_flight`` outstanding, and the platform's MiB at each fifth."""
    memory: list[float] = []

    async def crowd() -> float:
        service = tinker.ServiceClient(base_url=url, api_key=_KEY)
        sampler = await service.create_sampling_client_async(base_model=str(MODEL))
        room = asyncio.Semaphore(in_flight)
        ended = 0

        async def sample(seed: int) -> None:
            nonlocal ended
            async with room:
                params = types.SamplingParams(max_tokens=_TOKENS, seed=seed, stop=[])
                prompt = types.ModelInput.from_ints(_PROMPT)
                answer = await sampler.sample_async(prompt, 1, params)
                assert len(answer.sequences[0].tokens) == _TOKENS, "a sample is cut"
            ended += 1
            if ended % (samples // 5) == 0:
                memory.append(platform.memory_info().rss / 2**20)

        begin_s = time.perf_counter()
        await asyncio.gather(*map(sample, range(samples)))
        return samples / (time.perf_counter() - begin_s)

    return asyncio.run(crowd()), memory


def _measure_crowd(samples: int, in_flight: int) -> Lines:
    fork = multiprocessing.get_context("spawn")
    with tinker_server() as url, ProcessPoolExecutor(1, mp_context=fork) as other:
        platform = _find_platform(url)
        quiet = other.submit(_measure_latency, url, 200).result()
        with _Trainers(url, _RUNS) as trainers:
            beside = other.submit(_measure_latency, url, 300)
            rate, memory = _sample_all(url, samples, in_flight, platform)
            trained = sum(trainers.trained)
            crowded = beside.result()
    sizes = ", ".join(f"{size:.0f}" for size in memory)
    return [
        (f"samples/s, {in_flight} outstanding, beside {_RUNS} runs", f"{rate:.0f}"),
        ("training steps of the runs meanwhile", str(trained)),
        (f"memory of the platform at each fifth of {samples} samples", f"{sizes} MiB"),
        *_describe_latency("alone", quiet),
        *_describe_latency("beside the crowd", crowded),
    ]


def _describe_latency(where: str, found: dict[str, list[float]]) -> Lines:
    lines: Lines = []
    points: dict[str, tuple[float, float]] = {}
    for name, values in found.items():
        p50, p99 = statistics.median(values), float(np.percentile(values, 99))
        points[name] = p50, p99
        lines.append((f"one token, {where}, {name} API: p50, p99", f"{p50:.1f}, {p99:.1f} ms"))
    added = [points["tinker"][place] - points["deployment"][place] for place in (0, 1)]
    lines.append((f"what the API adds, {where}: p50, p99", f"{added[0]:.1f}, {added[1]:.1f} ms"))
    return lines


def _measure_latency(url: str, count: int) -> dict[str, list[float]]:
    """Milliseconds of single samples, both ways in turn."""
    found: dict[str, list[float]] = {"tinker": [], "deployment": []}
    headers = {"x-api-key": _OTHER_KEY}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:

        def ask(path: str, body: dict[str, Any]) -> httpx.Response:
            response = client.post(path, json=body)
            assert response.status_code in (200, _PENDING), response.text
            return response

        session = ask("/api/v1/create_session", {"tags": []}).json()["session_id"]
        opening = {"session_id": session, "sampling_session_seq_id": 0, "base_model": str(MODEL)}
        opened = ask("/api/v1/create_sampling_session", opening).json()
        sampler = opened["sampling_session_id"]
        body = {"prompt": _PROMPT, "max_tokens": 1, "ignore_eos": True, "logprobs": True}
        body |= {"raw_output": True, "logprob_format": "arrays"}
        for number in range(count + 1):
            begin_s = time.perf_counter()
            sample = {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
                "sampling_params": {"max_tokens": 1, "stop": [], "seed": number},
                "sampling_session_id": sampler,
                "seq_id": number,
            }
            asked = ask("/api/v1/asample", sample).json()["request_id"]
            while ask("/api/v1/retrieve_future", {"request_id": asked}).status_code == _PENDING:
                pass
            if number == 0:  # a deployment starts with the first
                deployments = client.get("/v1/accounts/me/deployments").json()["deployments"]
                body["model"] = deployments[0]["name"]
                continue
            found["tinker"].append(1000 * (time.perf_counter() - begin_s))
            begin_s = time.perf_counter()
            ask("/inference/v1/completions", body | {"seed": number})
            found["deployment"].append(1000 * (time.perf_counter() - begin_s))
    return found


def _measure_runs() -> Lines:
    lines: Lines = []
    for count, datums in ((1, 8), (4, 8), (16, 8), (64, 8), (1, 128)):
        with tinker_server() as url:
            rate, memory = _train_together(url, count, datums)
        what = f"{count} run(s) of rank 8 at once, {datums} datums each: tokens/s, trainer's memory"
        lines.append((what, f"{rate:,.0f}, {memory:.0f} MiB"))
    return lines


def _train_together(url: str, count: int, datums: int) -> tuple[float, float]:
    """Trained tokens per second of so many runs at once, and the trainer's memory in MiB."""
    service = tinker.ServiceClient(base_url=url, api_key=_KEY)
    made = [
        service.create_lora_training_client(base_model=str(MODEL), rank=8, seed=place)
        for place in range(count)
    ]
    clients = [client.result() for client in made]
    data = [_make_datum(64, seed) for seed in range(datums)]
    begin_s = time.perf_counter()
    for _ in range(_STEPS):
        passed = [client.forward_backward(data, "cross_entropy") for client in clients]
        stepped = [client.optim_step(types.AdamParams(learning_rate=1e-4)) for client in clients]
        for result in (*passed, *stepped):
            result.result()
    rate = _STEPS * count * datums * 64 / (time.perf_counter() - begin_s)
    headers = {"x-api-key": _KEY}
    jobs = httpx.get(f"{url}/v1/accounts/me/rlorTrainerJobs", headers=headers, timeout=60)
    memory = psutil.Process(jobs.json()["rlorTrainerJobs"][0]["pid"]).memory_info().rss
    service.close("success").result()
    return rate, memory / 2**20


def _measure_rates(samples: int, in_flight: int) -> Lines:
    with tinker_server() as url:
        platform = _find_platform(url)
        _sample_all(url, 100, in_flight, platform)
        through, _ = _sample_all(url, samples, in_flight, platform)
        raw = asyncio.run(_ask_all(url, str(MODEL), samples, in_flight))
    engine = InferenceEngine(load_model(MODEL), tokenizer=load_tokenizer(MODEL))
    begin_s = time.perf_counter()
    asked = [
        engine.submit(
            SampleRequest(prompt=tuple(_PROMPT), max_tokens=_TOKENS, seed=seed, ignore_eos=True)
        )
        for seed in range(samples)
    ]
    for future in asked:
        future.result()
    alone = samples / (time.perf_counter() - begin_s)
    engine.close()
    return [
        ("samples/s, the official client over HTTP", f"{through:.0f}"),
        ("samples/s, requests past any client over HTTP", f"{raw:.0f}"),
        ("samples/s, the engine alone in one process", f"{alone:.0f}"),
    ]


async def _ask_all(url: str, model: str, samples: int, in_flight: int) -> float:
    """Samples per second of requests that no client makes, as a server of any age takes them."""
    room = asyncio.Semaphore(in_flight)
    limits = httpx.Limits(max_connections=200)
    headers = {"x-api-key": _KEY}
    async with httpx.AsyncClient(
        base_url=url, headers=headers, limits=limits, timeout=300
    ) as client:

        async def ask(path: str, **body: Any) -> httpx.Response:
            response = await client.post(f"/api/v1/{path}", json=body)
            assert response.status_code in (200, _PENDING), response.text
            return response

        session = (await ask("create_session", tags=[], sdk_version="any")).json()["session_id"]
        opened = await ask(
            "create_sampling_session",
            session_id=session,
            sampling_session_seq_id=0,
            base_model=model,
        )
        sampler = opened.json()["sampling_session_id"]

        async def sample(number: int) -> None:
            async with room:
                asked = await ask(
                    "asample",
                    num_samples=1,
                    prompt={"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
                    sampling_params={"max_tokens": _TOKENS, "seed": number, "temperature": 1.0},
                    sampling_session_id=sampler,
                    seq_id=number,
                )
                while True:
                    result = await ask("retrieve_future", request_id=asked.json()["request_id"])
                    if result.status_code == 200 and b"try_again" not in result.content:
                        break
                assert b'"error"' not in result.content, result.text

        await sample(0)
        begin_s = time.perf_counter()
        await asyncio.gather(*map(sample, range(1, samples + 1)))
        return samples / (time.perf_counter() - begin_s)


def _measure_against(url: str, model: str, samples: int, in_flight: int) -> Lines:
    with tinker_server() as own:
        rates = {
            "this platform": asyncio.run(_ask_all(own, str(MODEL), samples, in_flight)),
            url: asyncio.run(_ask_all(url, model, samples, in_flight)),
        }
    what = f"samples/s, {in_flight} outstanding, past any client"
    return [(f"{what}: {name}", f"{rate:.1f}") for name, rate in rates.items()]


def _find_platform(url: str) -> psutil.Process:
    port = int(url.rsplit(":", 1)[1])
    children = psutil.Process().children()
    return next(
        child for child in children if any(c.laddr.port == port for c in child.net_connections())
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=2_000)
    parser.add_argument("--parts", nargs="+", default=["crowd", "runs", "rates"])
    parser.add_argument("--against", help="the URL of another server")
    parser.add_argument("--against-model", default=str(MODEL), help="its name for the model")
    options = parser.parse_args(arguments)
    os.environ["HEARTH_API_KEYS"] = f"{_KEY},{_OTHER_KEY}"
    sys.stdout.write("| what | found |\n|---|---:|\n")
    parts = {
        "crowd": lambda: _measure_crowd(options.samples, options.in_flight),
        "runs": _measure_runs,
        "rates": lambda: _measure_rates(options.samples // 5, options.in_flight),
        "against": lambda: _measure_against(
            options.against, options.against_model, options.samples // 100, options.in_flight
        ),
    }
    for part in options.parts:
        for what, found in parts[part]():
            sys.stdout.write(f"| {what} | {found} |\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
