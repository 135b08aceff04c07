"""A whole platform in this process behind a wire that writes down, delays and refuses."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

import orjson
import pytest
from tests.threads import one_thread as one_thread

from hearth.control.app import create_gateway
from hearth.control.gateway import Access
from hearth.local import EmbeddedPlatform
from hearth.sdk import (
    DeploymentConfig,
    DeploymentManager,
    TrainerJobConfig,
    TrainerJobManager,
    WaitPolicy,
    WeightSyncer,
)
from hearth.sdk.transport import RetryPolicy, mount
from training.quickstart import MODEL
from training.utils import DeployConfig, InfraConfig, ResourceCleanup
from training.utils.rl import Infra, setup_infra

JOBS = "/v1/accounts/me/rlorTrainerJobs"
DEPLOYMENTS = "/v1/accounts/me/deployments"
# What a rule waits for comes within so many seconds, or its test fails.
HAPPENS_S = 60.0


@dataclass(frozen=True)
class Seen:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    body: Any

    @property
    def line(self) -> str:
        """Method and path."""
        return f"{self.method} {self.path}"


@dataclass
class Rule:
    """What happens to requests whose ``METHOD PATH`` matches, the first ``times`` of them."""

    pattern: str
    status: int | None = None
    message: str = "refused by the test"
    delay_s: float = 0.0
    times: int = 10**9
    after: bool = False
    """Refuse only the answer: the platform has done what was asked."""
    until: tuple[str, str, int] | None = None
    """Wait until so many requests by another pattern have begun, or ended: (which, pattern, n)."""


class Wire:
    """An ASGI app before another: requests are written down, and some delayed or refused."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._rules: list[Rule] = []
        self.seen: list[Seen] = []
        self.events: list[tuple[str, str]] = []

    def rule(self, pattern: str, **what: Any) -> None:
        """Treat requests by a rule from now on."""
        self._rules.append(Rule(pattern, **what))

    def requests(self, pattern: str) -> list[Seen]:
        """What came in, by ``METHOD PATH``."""
        return [request for request in self.seen if re.search(pattern, request.line)]

    def most_in_flight(self, pattern: str) -> int:
        """How many such requests were under way at one time."""
        now = most = 0
        for kind, line in self.events:
            if re.search(pattern, line):
                now += 1 if kind == "begin" else -1
                most = max(most, now)
        return most

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        content = b""
        while True:
            message = await receive()
            content += message.get("body", b"")
            if not message.get("more_body"):
                break
        is_json = content[:1] in (b"{", b"[")
        seen = Seen(
            scope["method"],
            scope["path"],
            dict(parse_qsl(scope["query_string"].decode())),
            orjson.loads(content) if is_json else content,
        )
        self.seen.append(seen)
        self.events.append(("begin", seen.line))
        try:
            await self._treat(seen.line, scope, content, receive, send)
        finally:
            self.events.append(("end", seen.line))

    async def _treat(self, line: str, scope: Any, content: bytes, receive: Any, send: Any) -> None:
        rule = next(
            (rule for rule in self._rules if rule.times and re.search(rule.pattern, line)), None
        )
        is_given = False

        async def given() -> Any:
            nonlocal is_given
            if is_given:
                return await receive()
            is_given = True
            return {"type": "http.request", "body": content, "more_body": False}

        async def swallowed(_message: Any) -> None:
            """The answer that never arrives."""

        if rule is not None:
            rule.times -= 1
            await asyncio.sleep(rule.delay_s)
            if rule.until is not None:
                await self._happened(*rule.until)
        if rule is None or rule.status is None:
            return await self._app(scope, given, send)
        if rule.after:
            await self._app(scope, given, swallowed)
        body = orjson.dumps({"error": {"message": rule.message}})
        await send({"type": "http.response.start", "status": rule.status, "headers": []})
        await send({"type": "http.response.body", "body": body})
        return None

    async def _happened(self, kind: str, pattern: str, count: int) -> None:
        async with asyncio.timeout(HAPPENS_S):
            while (
                sum(event == kind and bool(re.search(pattern, line)) for event, line in self.events)
                < count
            ):
                await asyncio.sleep(0.002)


class Stage:
    """A platform with its managers, and ``setup_infra`` with what every loop gives it."""

    def __init__(self, folder: Path) -> None:
        self.platform = EmbeddedPlatform(work_dir=folder)
        self.url = self.platform.base_url
        self.wire = Wire(create_gateway(self.platform.plane, Access(is_local=False)))
        mount(self.url, self.wire)
        options: dict[str, Any] = {
            "retries": RetryPolicy(attempts=2, base_s=0.001, longest_s=0.002),
            "wait_policy": WaitPolicy(settle_s=0.2),
        }
        self.trainers = TrainerJobManager("key", base_url=self.url, **options)
        self.deployments = DeploymentManager("key", base_url=self.url, **options)

    def cleanup(self) -> ResourceCleanup:
        return ResourceCleanup(self.trainers, self.deployments)

    def setup(self, **options: Any) -> Infra:
        """``setup_infra`` on the shipped model."""
        usual: dict[str, Any] = {
            "rlor_mgr": self.trainers,
            "deploy_mgr": self.deployments,
            "base_model": str(MODEL),
            "infra_cfg": InfraConfig(),
            "deploy_cfg": self.serving(),
            "max_seq_len": 128,
            "needs_inference": False,
            "api_key": "key",
        }
        return setup_infra(**(usual | options))

    @contextlib.contextmanager
    def provision(self, **options: Any) -> Iterator[Infra]:
        """``setup``; what it started is taken down at the end."""
        with self.cleanup() as cleanup:
            yield self.setup(cleanup=cleanup, **options)

    def create_job(self, job_id: str, **options: Any) -> None:
        """A job of the shipped model that runs."""
        config = TrainerJobConfig(base_model=str(MODEL), job_id=job_id, **options)
        self.trainers.create_and_wait(config)

    def create_deployment(self, deployment_id: str = "serving", **options: Any) -> None:
        usual: dict[str, Any] = {"deployment_id": deployment_id, "base_model": str(MODEL)}
        self.deployments.create_or_get(DeploymentConfig(**usual | options))

    def sync_weights(self, infra: Infra) -> WeightSyncer:
        """The syncer of the policy and the deployment ``serving``."""
        return WeightSyncer(infra.policy_client, self.deployments, "serving", str(MODEL))

    def serving(self, deployment_id: str | None = "serving", **options: Any) -> DeployConfig:
        return DeployConfig(deployment_id=deployment_id, tokenizer_model=str(MODEL), **options)

    def states(self) -> dict[str, str]:
        """The state of every trainer job."""
        return {
            (job.name or "").rsplit("/", 1)[-1]: job.state or "" for job in self.trainers.list()
        }

    def replicas(self) -> dict[str, int]:
        """How many replicas every deployment may have."""
        return {found.deployment_id: found.max_replica_count for found in self.deployments.list()}

    def creates(self) -> list[str]:
        """What was asked for, in order: roles by their names."""
        found = self.wire.requests(f"POST ({JOBS}|{DEPLOYMENTS})$")
        ids = ("rlorTrainerJobId", "deploymentId")
        return [
            request.body.get("displayName")
            or next(request.query[id] for id in ids if id in request.query)
            for request in found
        ]


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    made = Stage(tmp_path)
    yield made
    made.platform.close()


@pytest.fixture
def datums() -> Callable[[int], list[Any]]:
    """Some sequences with targets, of different lengths."""
    import tinker

    def make(count: int = 2) -> list[tinker.Datum]:
        found = []
        for index in range(count):
            tokens = [5 + index, 17, 40, 41, 9, 12][: 4 + index % 3]
            weights = tinker.TensorData(data=[1.0] * (len(tokens) - 1), dtype="float32")
            targets = tinker.TensorData(data=tokens[1:], dtype="int64")
            inputs = {"target_tokens": targets, "weights": weights}
            text = tinker.ModelInput.from_ints(tokens[:-1])
            found.append(tinker.Datum(model_input=text, loss_fn_inputs=inputs))
        return found

    return make
