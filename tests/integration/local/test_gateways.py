"""Several gateway processes at one address: what they answer, and what survives the end of one."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from tests.integration.runs import count_steps
from tests.integration.served import ACCOUNT, KEY, Served
from tests.waiting import is_running, wait_until

from hearth.sdk import DeploymentSampler, FixedConcurrencyController
from hearth.sdk.concurrency import RequestOutcome
from training.quickstart import MODEL

NAME = "accounts/me/deployments/d"
COMPLETIONS = "/inference/v1/completions"
COUNT = 2


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("platform")
    served = Served(folder, gateways=COUNT, trainer_threads=1, deployment_threads=1)
    deployment = {"baseModel": str(MODEL)}
    ask(served, "POST", "/deployments", params={"deploymentId": "d"}, json=deployment)
    await_ready(served)
    yield served
    served.stop()
    assert served.processes() == []


class Attempts(FixedConcurrencyController):
    """Notes the number of each attempt that has ended."""

    def __init__(self, most: int) -> None:
        super().__init__(most)
        self.numbers: list[int] = []

    def release(self, outcome: RequestOutcome | None = None) -> None:
        if outcome is not None:
            self.numbers.append(outcome.attempt)
        super().release(outcome)


def ask(platform: Served, method: str, path: str, **options: object) -> httpx.Response:
    """One request on a connection of its own."""
    url = f"{platform.url}{ACCOUNT}{path}"
    return httpx.request(method, url, headers=KEY, timeout=60, **options).raise_for_status()  # type: ignore[arg-type] - of httpx


def await_ready(platform: Served) -> None:
    wait_until(lambda: platform.resources("deployments")[0]["state"] == "READY", 120)


def complete(platform: Served, deployment: str = NAME) -> httpx.Response:
    body = {"model": deployment, "prompt": [5, 6, 7], "max_tokens": 2}
    return httpx.post(f"{platform.url}{COMPLETIONS}", json=body, headers=KEY, timeout=60)


def gateways(platform: Served) -> set[int]:
    """The gateway processes."""
    return {
        pid
        for pid in platform.processes()
        if b"gateway_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    }


def read_number(platform: Served, metric: str) -> float:
    """A number of ``/metrics``; 0 where it is not there yet."""
    text = httpx.get(f"{platform.url}/metrics", headers=KEY, timeout=60).text
    found = re.search(rf"^{re.escape(metric)} (\S+)$", text, re.MULTILINE)
    return float(found[1]) if found else 0.0


def signal_one(platform: Served, number: signal.Signals = signal.SIGKILL) -> int:
    """Send a signal to one of the gateway processes."""
    victim = min(gateways(platform))
    os.kill(victim, number)
    return victim


def await_replacement(platform: Served, victim: int) -> None:
    """Wait until there are as many gateway processes as before, without the victim."""

    def is_replaced() -> bool:
        found = gateways(platform)
        return len(found) == COUNT and victim not in found

    wait_until(is_replaced, 60)


def test_completions_are_counted_once_whichever_process_answers(platform):
    metric = 'hearth_requests_total{part="deployment",status="200"}'
    before = read_number(platform, metric)

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: complete(platform), range(40)))

    assert {answer.status_code for answer in answers} == {200}
    assert read_number(platform, metric) == before + 40
    assert read_number(platform, 'hearth_requests_in_progress{part="deployment"}') == 0


def test_what_no_worker_answers_is_the_platforms_to_explain(platform):
    unknown = complete(platform, "accounts/me/deployments/other")

    assert unknown.status_code == 404
    assert "deployment must be one of ['d'], got 'other'" in unknown.text
    assert httpx.get(f"{platform.url}/readyz", timeout=60).json() == {"status": "ok"}
    line = (platform.data_dir / "audit.jsonl").read_text().splitlines()[0]
    assert '"address":"127.0.0.1"' in line
    assert '"path":"/v1/accounts/me/deployments"' in line


@pytest.mark.parametrize(
    ("number", "says"),
    [(signal.SIGKILL, "has ended with code -9"), (signal.SIGSTOP, "did not answer for 10 s")],
)
def test_requests_of_a_gateway_process_that_dies_or_hangs_are_sent_once_more(
    platform, number, says
):
    attempts = Attempts(64)
    sampler = DeploymentSampler(platform.url, NAME, "x", concurrency_controller=attempts)
    call = sampler.sample_with_prompt_tokens([5, 6, 7], n=64, max_tokens=100, ignore_eos=True)
    running = 'hearth_deployment_completions_in_progress{deployment="d"}'

    async def sample() -> list[int]:
        task = asyncio.ensure_future(asyncio.to_thread(lambda: list(call)))
        await asyncio.to_thread(wait_until, lambda: read_number(platform, running) > 0, 60)
        victims.append(await asyncio.to_thread(signal_one, platform, number))
        return [completion.completion_len for completion in await task]

    victims: list[int] = []
    assert asyncio.run(sample()) == [100] * 64
    sampler.close()

    assert sorted(set(attempts.numbers)) == [1, 2]
    assert attempts.numbers.count(1) == 64
    await_replacement(platform, victims[0])
    assert complete(platform).status_code == 200
    assert f"a gateway process {says}" in platform.log


def test_weights_are_synced_under_load_while_a_gateway_process_is_killed(
    platform, async_trial, monkeypatch, tmp_path
):
    monkeypatch.setenv("FIREWORKS_BASE_URL", platform.url)
    monkeypatch.setenv("FIREWORKS_API_KEY", "x")
    folder, victims = tmp_path / "run", []

    def kill() -> None:
        wait_until(lambda: count_steps(folder) >= 1, 120)
        victims.append(signal_one(platform))

    killer = threading.Thread(target=kill)
    killer.start()
    run = async_trial(folder="run", max_head_offpolicy_versions=1, no_signal_patience=None)
    killer.join()

    assert (run.summary.steps, run.summary.version) == (4, 4)
    assert [record["async/sample_fails"] for record in run.records()] == [0.0] * 4
    await_replacement(platform, victims[0])


def test_a_worker_that_dies_is_explained_and_answers_again(platform):
    (worker,) = platform.workers()
    os.kill(worker, signal.SIGKILL)

    seen: set[int] = set()

    def answers() -> bool:
        status = complete(platform).status_code
        seen.add(status)
        return status == 200 and worker not in platform.workers()

    wait_until(answers, 120)
    assert seen <= {200, 425, 503}


def test_gateway_processes_end_with_a_platform_that_is_killed(platform):
    before = gateways(platform)

    platform.kill()

    wait_until(lambda: not is_running(*before), 30)
    platform.come_back()
    await_ready(platform)
    assert complete(platform).status_code == 200
