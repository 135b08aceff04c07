"""A scripted platform: answers by method and path, in this process, and writes down what it saw."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import orjson
import pytest

from hearth.sdk import TrainerJobManager, WaitPolicy
from hearth.sdk.transport import TRANSIENT_STATUSES, RetryPolicy, mount

_ports = itertools.count(1)


@dataclass(frozen=True)
class Seen:
    """One request."""

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    body: Any


@dataclass(frozen=True)
class Answer:
    """One response, given after ``delay_s``."""

    body: Any = field(default_factory=dict)
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    delay_s: float = 0.0


Handler = Callable[[Seen], Awaitable[Answer]]


class Peer:
    """Answers each route with its script's entries in turn, the last one for ever."""

    def __init__(self) -> None:
        self.url = f"http://scripted-{next(_ports)}.test"
        self.seen: list[Seen] = []
        self.in_flight = 0
        self.most_in_flight = 0
        self._scripts: dict[tuple[str, str], list[Answer] | Handler] = {}
        self.on("GET", "/v1/accounts", Answer({"accounts": [{"name": "accounts/me"}]}))
        mount(self.url, self)

    def on(self, method: str, path: str, *answers: Answer) -> None:
        """Script a route."""
        self._scripts[method, path] = list(answers)

    def handle(self, method: str, path: str, handler: Handler) -> None:
        """Script a route by a function."""
        self._scripts[method, path] = handler

    def requests(self, method: str, path: str) -> list[Seen]:
        """What came in on a route."""
        return [
            request for request in self.seen if (request.method, request.path) == (method, path)
        ]

    @property
    def log(self) -> list[str]:
        """Method and last part of the path of each request."""
        return [f"{request.method} {request.path.rsplit('/', 1)[-1]}" for request in self.seen]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        body = message.get("body", b"")
        seen = Seen(
            method=scope["method"],
            path=scope["path"],
            query=dict(parse_qsl(scope["query_string"].decode())),
            headers={name.decode(): value.decode() for name, value in scope["headers"]},
            body=orjson.loads(body) if body else None,
        )
        self.seen.append(seen)
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            answer = await self._answer(seen)
            await asyncio.sleep(answer.delay_s)
        finally:
            self.in_flight -= 1
        headers = [(name.encode(), value.encode()) for name, value in answer.headers.items()]
        await send({"type": "http.response.start", "status": answer.status, "headers": headers})
        await send({"type": "http.response.body", "body": orjson.dumps(answer.body)})

    async def _answer(self, seen: Seen) -> Answer:
        script = self._scripts.get((seen.method, seen.path))
        if script is None:
            return Answer({"error": {"message": f"no {seen.path}"}}, status=404)
        if not isinstance(script, list):
            return await script(seen)
        return script.pop(0) if len(script) > 1 else script[0]


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def answer() -> type[Answer]:
    return Answer


QUICK_RETRIES = RetryPolicy(
    attempts=4, base_s=0.001, longest_s=0.002, statuses=TRANSIENT_STATUSES | {500}
)
QUICK_WAITS = WaitPolicy(hold_s=0.2, first_s=0.002, longest_s=0.01, settle_s=0.05)


@pytest.fixture
def quick() -> dict[str, Any]:
    """Keywords that make a manager impatient."""
    return {"retries": QUICK_RETRIES, "wait_policy": QUICK_WAITS}


@pytest.fixture
def manager(peer, quick) -> TrainerJobManager:
    return TrainerJobManager(api_key="key", account_id="", base_url=peer.url, **quick)


def response(*choices: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """The body of a deployment's answer."""
    usage = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4}
    body = {"id": "c", "created": 0, "model": "m", "choices": list(choices), "usage": usage}
    return body | {"weight_version": 3} | extra


def completion(tokens: Sequence[int] = (5, 6), text: str = "hi", **extra: Any) -> dict[str, Any]:
    """The body of one completion."""
    raw = {
        "completion_token_ids": list(tokens),
        "logprobs": [-0.5] * len(tokens),
        "sampling_logprobs": [-0.25] * len(tokens),
    }
    choice = {"index": 0, "text": text, "finish_reason": "stop", "raw_output": raw}
    return response(choice, **extra)


@pytest.fixture
def completion_body() -> Callable[..., dict[str, Any]]:
    return completion


@pytest.fixture
def job():
    """A job's record in a state."""

    def make(state: str, message: str | None = None, **options):
        config = {"baseModel": "accounts/fireworks/models/tiny", "maxContextLength": 512}
        body = {
            "name": "accounts/me/rlorTrainerJobs/policy",
            "trainingConfig": config,
            "state": f"JOB_STATE_{state}",
            "statusMessage": message,
        }
        return Answer(body, **options)

    return make
