"""One request that samples from a deployment, sent as often as it needs and its policy allows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import httpx

from hearth.errors import TransportError
from hearth.sdk.concurrency import ConcurrencyController, RequestOutcome
from hearth.sdk.transport import TRANSIENT_STATUSES, Http, RetryPolicy, build_error
from hearth.telemetry import new_request_id
from hearth.wire.chat import ChatResponse
from hearth.wire.completions import CompletionResponse
from hearth.wire.messages import HttpRequest, HttpResponse

CompletionT = TypeVar("CompletionT", CompletionResponse, ChatResponse)

_QUEUE_METRIC = "prefill-queue-duration"
_RETRIED = TRANSIENT_STATUSES | {500}
# A deployment that boots or takes new weights answers so; this is no failure of the request.
_BOOTING = frozenset({404, 425})


@dataclass(frozen=True)
class SamplingRetryPolicy:
    """How long one sampling request is tried for.

    ``retries`` counts attempts that failed. A deployment that still boots gets the request
    again every ``boot_pause_s`` seconds for ``boot_s`` seconds; these attempts do not count.
    """

    retries: RetryPolicy = field(default_factory=lambda: RetryPolicy(attempts=7, base_s=1.0))
    boot_pause_s: float = 0.5
    boot_s: float = 50.0


@dataclass(frozen=True)
class SamplingTarget:
    """The deployment that requests go to, and what each request keeps to."""

    http: Http
    model: str
    controller: ConcurrencyController
    """Admits each attempt."""
    policy: SamplingRetryPolicy
    timeout_s: float
    """Bounds one attempt."""


class SamplingRequest(Generic[CompletionT]):
    """One request to ``path``; ``send`` or ``run`` is called once, on the SDK's loop.

    A successful response is parsed as ``kind``.
    """

    def __init__(self, target: SamplingTarget, path: str, kind: type[CompletionT]) -> None:
        self._target = target
        self._path = path
        self._kind = kind
        self._request_id = new_request_id()
        self._start_s = time.monotonic()
        self._attempt = 1
        self._booting_since_s: float | None = None
        self._has_checked_existence = False
        self.sent_at = time.time()
        """Unix time at which the last attempt was let in."""

    async def run(self, body: bytes) -> CompletionT:
        """The completion.

        Raises:
            NotFoundError: there is no such deployment.
            TransportError: all attempts failed, or one took too long; the message has the
                request's id, attempts, seconds and how many requests were in flight.
            HearthError: the class that fits any other status, after one attempt.
        """
        answer = await self.send(body)
        if not isinstance(answer, HttpResponse):
            return answer
        error = build_error(answer)
        if answer.status_code in _RETRIED:
            raise self._failure(error)
        if answer.status_code in _BOOTING:
            raise type(error)(f"{error}: {self._circumstances()}")
        raise error

    async def send(self, body: bytes) -> CompletionT | HttpResponse:
        """The completion, or the refusal of the last attempt.

        Raises:
            TransportError: the last attempt had no response, or one took too long.
            ClosedError: the platform is gone.
        """
        policy = self._target.policy
        while True:
            answer = await self._try_once(body)
            if isinstance(answer, HttpResponse) and answer.status_code in _BOOTING:
                if not await self._may_boot(answer):
                    return answer
                await asyncio.sleep(policy.boot_pause_s)
                continue
            self._booting_since_s = None
            refusal = answer if isinstance(answer, HttpResponse) else None
            if refusal is not None and refusal.status_code not in _RETRIED:
                return refusal
            if not isinstance(answer, HttpResponse | httpx.TransportError):
                return answer
            if self._attempt >= policy.retries.attempts:
                if isinstance(answer, HttpResponse):
                    return answer
                raise self._failure(answer) from answer
            await asyncio.sleep(policy.retries.delay_s(self._attempt - 1, refusal))
            self._attempt += 1

    async def _try_once(self, body: bytes) -> CompletionT | HttpResponse | httpx.TransportError:
        """The completion, the refusal, or why there is no response."""
        target = self._target
        outcome: RequestOutcome | None = None
        await target.controller.acquire()
        self.sent_at = time.time()
        try:
            headers = {"x-request-id": self._request_id, "fireworks-deployment": target.model}
            request = HttpRequest(
                "POST", self._path, body, headers=headers, timeout_s=target.timeout_s, waits=True
            )
            response = await target.http.send_once(request)
            if response.status_code in _BOOTING:
                return response
            outcome = RequestOutcome(response.status_code, self._attempt)
            if not response.is_success:
                return response
            completion = self._kind.parse(response.content)
            queue_s = _queue_s(response.headers, completion.perf_metrics or {})
            outcome = RequestOutcome(response.status_code, self._attempt, queue_s)
            return completion
        except httpx.ReadTimeout as error:
            outcome = RequestOutcome(None, self._attempt)
            raise TransportError(
                f"a completion must arrive within http_timeout={target.timeout_s:g} s, got none: "
                f"{self._circumstances()}; raise it, or lower max_tokens"
            ) from error
        except httpx.TransportError as error:
            outcome = RequestOutcome(None, self._attempt)
            return error
        finally:
            target.controller.release(outcome)

    async def _may_boot(self, refusal: HttpResponse) -> bool:
        """Whether the deployment exists and has time left to boot."""
        if self._booting_since_s is None:
            self._booting_since_s = time.monotonic()
        if time.monotonic() - self._booting_since_s >= self._target.policy.boot_s:
            return False
        return refusal.status_code != 404 or await self._check_existence()

    async def _check_existence(self) -> bool:
        """Whether the control plane knows the deployment; asks once, and a doubt counts as yes."""
        if self._has_checked_existence:
            return True
        self._has_checked_existence = True
        try:
            request = HttpRequest("GET", f"/v1/{self._target.model}")
            response = await self._target.http.send_once(request)
        except httpx.TransportError:
            return True
        return response.status_code != 404

    def _failure(self, last: Exception) -> TransportError:
        reason = str(last)
        if isinstance(last, httpx.TransportError):
            reason = f"{type(last).__name__}: {last}"
        return TransportError(
            f"a completion of {self._target.model} failed for good, last with {reason}: "
            f"{self._circumstances()}"
        )

    def _circumstances(self) -> str:
        elapsed_s = time.monotonic() - self._start_s
        return (
            f"request {self._request_id}, attempt {self._attempt}, {elapsed_s:.1f} s, "
            f"{self._target.controller.in_flight} in flight"
        )


def _queue_s(headers: Mapping[str, str], metrics: Mapping[str, str]) -> float | None:
    """How long the request queued for its prefill, where the deployment says."""
    for source in (metrics, headers):
        for name in (_QUEUE_METRIC, f"fireworks-{_QUEUE_METRIC}"):
            if name in source:
                try:
                    return float(source[name])
                except ValueError:
                    return None
    return None
