"""What a check is, the server that it is pointed at, and how checks are run and counted."""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import tinker
from numpy.typing import NDArray
from tinker import types

Verdict = Literal["passed", "refused", "failed", "skipped"]
RANK, SEED = 4, 1
REFUSALS = (tinker.BadRequestError, tinker.NotFoundError, NotImplementedError, RuntimeError)
"""How the client says that the server refuses, or that it has switched something off."""
_LONGEST_S = 180.0


class SkipError(Exception):
    """A check needs something that was not given."""


@dataclass(eq=False)
class Server:
    """The server under test. Each check makes runs and samplers of its own."""

    url: str
    key: str
    base_model: str
    other_key: str | None = None
    """A key of somebody else, who must see nothing of the first."""
    reference: Path | None = None
    """A folder with the weights of ``base_model``."""
    outstanding: int = 200
    """Samples that the load check has in flight."""
    services: list[tinker.ServiceClient] = field(default_factory=list)

    @cached_property
    def service(self) -> tinker.ServiceClient:
        """A client of the first key."""
        return self.connect(self.key)

    def connect(self, key: str) -> tinker.ServiceClient:
        """A client of a key; ``close`` ends its session."""
        service = tinker.ServiceClient(base_url=self.url, api_key=key)
        self.services.append(service)
        return service

    def begin(self, **options: Any) -> tinker.TrainingClient:
        """A new run."""
        given = {"base_model": self.base_model, "rank": RANK, "seed": SEED} | options
        return get(self.service.create_lora_training_client(**given))

    def sampler(self, path: str | None = None) -> tinker.SamplingClient:
        """A sampling client of saved weights, or of the base model."""
        base_model = None if path else self.base_model
        return get(self.service.create_sampling_client(model_path=path, base_model=base_model))

    def post(
        self, path: str, *, key: str | None = None, timeout_s: float = 60.0, **body: Any
    ) -> httpx.Response:
        """A request past the client, for what it never does by itself."""
        headers = {"x-api-key": key or self.key}
        url = f"{self.url}/api/v1/{path}"
        return httpx.post(url, json=body, headers=headers, timeout=timeout_s)

    def close(self) -> None:
        """End all sessions."""
        for service in self.services:
            if hasattr(service, "close"):
                get(service.close("success"))


@dataclass(frozen=True)
class Check:
    """One statement about a server; ``run`` raises where it does not hold."""

    group: str
    name: str
    run: Callable[[Server], object]
    """Returns what was measured, if anything."""


@dataclass(frozen=True)
class CheckOutcome:
    """What became of a check."""

    group: str
    name: str
    verdict: Verdict
    detail: str
    seconds: float


@dataclass(frozen=True)
class Report:
    """All outcomes."""

    url: str
    client: str
    """The version of the client."""
    outcomes: Sequence[CheckOutcome]

    def count(self, verdict: Verdict, group: str | None = None) -> int:
        """How many checks ended so."""
        outcomes = [each for each in self.outcomes if group in (None, each.group)]
        return sum(each.verdict == verdict for each in outcomes)

    @property
    def score(self) -> float:
        """The share of passed checks among those that ran, in percent."""
        ran = len(self.outcomes) - self.count("skipped")
        return 100 * self.count("passed") / ran if ran else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For a JSON file."""
        return {
            "url": self.url,
            "client": self.client,
            "score": round(self.score, 2),
            "checks": [asdict(each) for each in self.outcomes],
        }


def get(value: Any) -> Any:
    """A result, whether it is in a future or not."""
    return value.result(_LONGEST_S) if hasattr(value, "result") else value


def run_checks(server: Server, checks: Sequence[Check]) -> Iterator[CheckOutcome]:
    """Run checks one after the other. One that takes longer than three minutes hangs."""
    # The client's own variables, which a few of its methods read.
    os.environ["TINKER_BASE_URL"], os.environ["TINKER_API_KEY"] = server.url, server.key
    os.environ.setdefault("TINKER_PROJECT_ID", "any")
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    for check in checks:
        yield _run(server, check)


def _run(server: Server, check: Check) -> CheckOutcome:
    found: list[tuple[Verdict, str]] = []

    def work() -> None:
        try:
            detail = check.run(server)
            found.append(("passed", "" if detail is None else str(detail)))
        except SkipError as error:
            found.append(("skipped", str(error)))
        except AssertionError as error:
            found.append(("failed", str(error) or _find_line(error)))
        except REFUSALS as error:
            found.append(("refused", str(error)))
        except Exception as error:  # noqa: BLE001 - the report says which
            found.append(("failed", f"{type(error).__name__}: {error}"))

    begin_s = time.monotonic()
    thread = threading.Thread(target=work, name=check.name, daemon=True)
    thread.start()
    thread.join(_LONGEST_S)
    verdict, detail = found[0] if found else ("failed", f"hangs: no end within {_LONGEST_S:g} s")
    seconds = round(time.monotonic() - begin_s, 3)
    return CheckOutcome(check.group, check.name, verdict, " ".join(detail.split())[:400], seconds)


def _find_line(error: AssertionError) -> str:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"does not hold: {frame.line}"


def make_data(seed: int, count: int = 3, **inputs: Callable[..., Any]) -> list[types.Datum]:
    """Random datums of 4 to 19 tokens; ``inputs`` make further fields from ``(rng, length)``."""
    rng = np.random.default_rng(seed)
    data: list[types.Datum] = []
    for _ in range(count):
        length = int(rng.integers(4, 20))
        tokens = rng.integers(5, 300, length + 1)
        fields = {"target_tokens": types.TensorData.from_numpy(tokens[1:])}
        for name, make in inputs.items():
            values = np.asarray(make(rng, length), dtype=np.float32)
            fields[name] = types.TensorData.from_numpy(values)
        prompt = types.ModelInput.from_ints(tokens[:-1].tolist())
        data.append(types.Datum(model_input=prompt, loss_fn_inputs=fields))
    return data


def read_field(datum: types.Datum, name: str) -> NDArray[np.float64]:
    """A field of a datum."""
    return np.asarray(datum.loss_fn_inputs[name].tolist(), dtype=np.float64)


def read_logprobs(result: types.ForwardBackwardOutput) -> list[NDArray[np.float64]]:
    """Logprobs of each datum."""
    return [np.asarray(each["logprobs"].tolist(), np.float64) for each in result.loss_fn_outputs]


def score(client: tinker.TrainingClient, data: list[types.Datum]) -> NDArray[np.float64]:
    """Logprobs of all targets under a run's weights."""
    return np.concatenate(read_logprobs(get(client.forward(data, "cross_entropy"))))


def train(
    client: tinker.TrainingClient, seed: int, steps: int = 2, rate: float = 3e-3
) -> NDArray[np.float64]:
    """Train some steps of random data; returns the logprobs that were seen."""
    seen: list[NDArray[np.float64]] = []
    for step in range(steps):
        passed = client.forward_backward(make_data(1000 * seed + step), "cross_entropy")
        stepped = client.optim_step(types.AdamParams(learning_rate=rate))
        seen += read_logprobs(get(passed))
        get(stepped)
    return np.concatenate(seen)


def difference(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """The largest absolute difference; infinite where shapes differ."""
    if first.shape != second.shape:
        return float("inf")
    return float(np.abs(first - second).max(initial=0.0))
