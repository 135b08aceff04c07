"""Many samples in flight beside runs that train: none is lost, and none fails."""

from __future__ import annotations

import asyncio
import threading
import time

import numpy as np
import tinker
from tinker import types

from hearth.conformance.suite import Check, Server, train

_RUNS = 4
_TOKENS = 8


def _check_crowd(server: Server) -> str:
    has_ended = threading.Event()
    trained, failures = [0] * _RUNS, list[BaseException]()

    def keep_training(place: int) -> None:
        try:
            client = server.begin(seed=place)
            # At least once: a crowd may be gone in a moment.
            while not (has_ended.is_set() and trained[place]):
                train(client, place, steps=1)
                trained[place] += 1
        except BaseException as error:  # noqa: BLE001 - raised again by the check
            failures.append(error)

    threads = [threading.Thread(target=keep_training, args=(place,)) for place in range(_RUNS)]
    for thread in threads:
        thread.start()
    try:
        latencies_s = asyncio.run(_sample_all(server.sampler(), server.outstanding))
    finally:
        has_ended.set()
        for thread in threads:
            thread.join()
    if failures:
        raise failures[0]
    median, p99 = np.percentile(latencies_s, (50, 99))
    return f"{sum(trained)} training steps beside; p50 {median:.2f} s, p99 {p99:.2f} s"


async def _sample_all(sampler: tinker.SamplingClient, count: int) -> list[float]:
    """Seconds of each of so many samples that are all in flight at one time."""
    prompt = types.ModelInput.from_ints([20, 21, 22, 23])

    async def sample(seed: int) -> float:
        begin_s = time.perf_counter()
        params = types.SamplingParams(max_tokens=_TOKENS, seed=seed, stop=[])
        answer = await sampler.sample_async(prompt, 1, params)
        assert len(answer.sequences[0].tokens) == _TOKENS, "a sample is cut"
        return time.perf_counter() - begin_s

    return list(await asyncio.gather(*map(sample, range(count))))


CHECKS = [Check("load", "samples in flight beside training", _check_crowd)]
