"""How Tinker's API holds a crowd: samples in flight beside runs that train, and what the way costs.

    python benchmarks/tinker_load.py

One program has 2,000 samples outstanding while eight runs train and their sessions beat. Then
samples go one at a time, through Tinker's API and straight to the deployment: the difference is
what the API adds. Then 1, 4, 16 and 64 runs train at the same time on one base. Everything is on
this machine, with the shipped model.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import threading
import time
from typing import Any

import httpx
import numpy as np
import psutil
import tinker
from tinker import types

from hearth.local import tinker_server
from training.quickstart import MODEL

_RUNS = 8
_PROMPT = [20, 21, 22, 23]


def _measure_crowd(url: str, samples: int, in_flight: int) -> tuple[float, int]:
    """Samples per second with ``in_flight`` outstanding, and training passes meanwhile."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    trained = [0] * _RUNS
    has_ended = threading.Event()

    def train(place: int) -> None:
        own = tinker.ServiceClient(base_url=url, api_key="tml-any")
        client = own.create_lora_training_client(base_model=str(MODEL), rank=8, seed=place)
        client = client.result()
        datum = types.Datum(
            model_input=types.ModelInput.from_ints(list(range(5, 37))),
            loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.arange(6, 38))},
        )
        while not has_ended.is_set():
            passed = client.forward_backward([datum] * 8, "cross_entropy")
            client.optim_step(types.AdamParams(learning_rate=1e-4)).result()
            passed.result()
            trained[place] += 1

    threads = [threading.Thread(target=train, args=(place,)) for place in range(_RUNS)]
    for thread in threads:
        thread.start()

    async def crowd() -> float:
        sampler = await service.create_sampling_client_async(base_model=str(MODEL))
        room = asyncio.Semaphore(in_flight)

        async def one(seed: int) -> None:
            async with room:
                params = types.SamplingParams(max_tokens=8, seed=seed, stop=[])
                prompt = types.ModelInput.from_ints(_PROMPT)
                answer = await sampler.sample_async(prompt, 1, params)
                assert len(answer.sequences[0].tokens) == 8, "a sample is cut"

        begin_s = time.perf_counter()
        await asyncio.gather(*map(one, range(samples)))
        return samples / (time.perf_counter() - begin_s)

    rate = asyncio.run(crowd())
    has_ended.set()
    for thread in threads:
        thread.join()
    return rate, sum(trained)


def _measure_latency(url: str, count: int) -> dict[str, list[float]]:
    """Milliseconds of single samples, both ways in turn."""
    found: dict[str, list[float]] = {"tinker": [], "deployment": []}
    headers = {"x-api-key": "tml-any"}
    with httpx.Client(base_url=url, headers=headers, timeout=60) as client:

        def ask(path: str, body: dict[str, Any]) -> httpx.Response:
            response = client.post(path, json=body)
            response.raise_for_status()
            return response

        session = ask("/api/v1/create_session", {"tags": []}).json()["session_id"]
        opening = {"session_id": session, "sampling_session_seq_id": 0, "base_model": str(MODEL)}
        opened = ask("/api/v1/create_sampling_session", opening).json()
        sampler = opened["sampling_session_id"]
        served = client.get("/v1/accounts/me/deployments").json()["deployments"][0]["name"]
        params = {"max_tokens": 1, "stop": []}
        for number in range(count):
            begin_s = time.perf_counter()
            sample = {
                "prompt": {"chunks": [{"type": "encoded_text", "tokens": _PROMPT}]},
                "sampling_params": params | {"seed": number},
                "sampling_session_id": sampler,
                "seq_id": number,
            }
            asked = ask("/api/v1/asample", sample).json()["request_id"]
            ask("/api/v1/retrieve_future", {"request_id": asked})
            found["tinker"].append(1000 * (time.perf_counter() - begin_s))
            begin_s = time.perf_counter()
            body = {"model": served, "prompt": _PROMPT, "max_tokens": 1, "ignore_eos": True}
            body |= {"logprobs": True, "raw_output": True, "logprob_format": "arrays"}
            ask("/inference/v1/completions", body | {"seed": number})
            found["deployment"].append(1000 * (time.perf_counter() - begin_s))
    return found


def _measure_runs(url: str, count: int, steps: int = 8) -> tuple[float, float]:
    """Trained tokens per second of so many runs at once, and the trainer's memory in MiB."""
    service = tinker.ServiceClient(base_url=url, api_key="tml-any")
    made = [
        service.create_lora_training_client(base_model=str(MODEL), rank=8, seed=place)
        for place in range(count)
    ]
    clients = [client.result() for client in made]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(5, 69))),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.arange(6, 70))},
    )
    begin_s = time.perf_counter()
    for _ in range(steps):
        passed = [client.forward_backward([datum] * 8, "cross_entropy") for client in clients]
        stepped = [client.optim_step(types.AdamParams(learning_rate=1e-4)) for client in clients]
        for result in (*passed, *stepped):
            result.result()
    rate = steps * count * 8 * 64 / (time.perf_counter() - begin_s)
    headers = {"x-api-key": "tml-any"}
    jobs = httpx.get(f"{url}/v1/accounts/me/rlorTrainerJobs", headers=headers, timeout=60)
    memory = psutil.Process(jobs.json()["rlorTrainerJobs"][0]["pid"]).memory_info().rss
    service.close("success").result()
    return rate, memory / 2**20


def _find_platform(url: str) -> psutil.Process:
    port = int(url.rsplit(":", 1)[1])
    children = psutil.Process().children()
    return next(
        child for child in children if any(c.laddr.port == port for c in child.net_connections())
    )


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=20_000)
    parser.add_argument("--in-flight", type=int, default=2_000)
    options = parser.parse_args()
    with tinker_server() as url:
        platform = _find_platform(url)
        _measure_crowd(url, 200, 50)
        before = platform.memory_info().rss / 2**20
        rate, passes = _measure_crowd(url, options.samples, options.in_flight)
        after = platform.memory_info().rss / 2**20
        latency = _measure_latency(url, 500)
    several: dict[int, tuple[float, float]] = {}
    for count in (1, 4, 16, 64):
        with tinker_server() as url:
            several[count] = _measure_runs(url, count)
    lines = ["| what | found |", "|---|---:|"]
    lines.append(
        f"| samples/s, {options.in_flight} outstanding, beside {_RUNS} runs | {rate:.0f} |"
    )
    lines.append(f"| training passes of the runs meanwhile | {passes} |")
    what = f"memory of the platform before and after {options.samples} samples"
    lines.append(f"| {what} | {before:.0f}, {after:.0f} MiB |")
    for name, values in latency.items():
        values.sort()
        p50, p99 = statistics.median(values), values[int(0.99 * len(values))]
        what = f"one sample of one token, {name} API, p50 and p99"
        lines.append(f"| {what} | {p50:.1f}, {p99:.1f} ms |")
    for count, (rate, memory) in several.items():
        what = f"{count} runs of rank 8 at once: trained tokens/s, memory of their trainer"
        lines.append(f"| {what} | {rate:,.0f}, {memory:.0f} MiB |")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
