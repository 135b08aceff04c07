"""One completion, with as many attempts as it takes and is worth."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import httpx

from hearth.errors import HearthError, NotFoundError, TransportError
from hearth.sdk.answer import Answer
from hearth.sdk.concurrency import ConcurrencyController, RequestOutcome
from hearth.sdk.transport import TRANSIENT_STATUSES, Http, Retries, raise_for_status
from hearth.telemetry import new_request_id
from hearth.wire.completions import CompletionResponse

_PATH = "/inference/v1/completions"
_QUEUE_METRIC = "prefill-queue-duration"
_RETRIED = TRANSIENT_STATUSES | {500}
# A deployment that boots or takes new weights answers so; this is no failure of the request.
_BOOTING = frozenset({404, 425})


@dataclass(frozen=True)
class DrawPatience:
    """How long one completion is tried for.

    ``retries`` counts attempts that failed; a deployment that is not there yet is asked again
    every ``boot_pause_s`` seconds for ``boot_s``, beside that.
    """

    retries: Retries = field(default_factory=lambda: Retries(attempts=7, base_s=1.0))
    boot_pause_s: float = 0.5
    boot_s: float = 50.0


class Completing:
    """One completion on its way; ``run`` once, on the SDK's loop."""

    def __init__(
        self,
        http: Http,
        controller: ConcurrencyController,
        model: str,
        patience: DrawPatience,
        timeout_s: float,
    ) -> None:
        self._http = http
        self._controller = controller
        self._model = model
        self._patience = patience
        self._timeout_s = timeout_s
        self._request_id = new_request_id()
        self._begun_s = time.monotonic()
        self._attempt = 1
        self._booting_since_s: float | None = None
        self._asked_whether_it_exists = False

    async def run(self, body: bytes) -> CompletionResponse:
        """The answer. Each attempt asks the controller for room and gives it back.

        Raises:
            NotFoundError: there is no such deployment.
            TransportError: all attempts failed, or the answer took too long; the message has the
                request's id, attempts, seconds and how many were in flight.
            HearthError: the class that fits any other status, at once.
        """
        while True:
            answer = await self._attempt_once(body)
            if isinstance(answer, CompletionResponse):
                return answer
            if isinstance(answer, Answer) and answer.status_code in _BOOTING:
                await self._wait_for_boot(answer)
                continue
            self._booting_since_s = None
            response = answer if isinstance(answer, Answer) else None
            if self._attempt >= self._patience.retries.attempts:
                raise self._given_up(answer)
            await asyncio.sleep(self._patience.retries.delay_s(self._attempt - 1, response))
            self._attempt += 1

    async def _attempt_once(
        self, body: bytes
    ) -> CompletionResponse | Answer | httpx.TransportError:
        """The completion, or why there is none yet."""
        outcome: RequestOutcome | None = None
        await self._controller.acquire()
        try:
            response = await self._http.send_once(
                "POST",
                _PATH,
                body=body,
                timeout_s=self._timeout_s,
                headers={"x-request-id": self._request_id, "fireworks-deployment": self._model},
            )
            if response.status_code in _BOOTING:
                return response
            outcome = RequestOutcome(response.status_code, self._attempt)
            if response.status_code in _RETRIED:
                return response
            completion = CompletionResponse.parse(raise_for_status(response).content)
            queue_s = _queue_s(response.headers, completion.perf_metrics or {})
            outcome = RequestOutcome(response.status_code, self._attempt, queue_s)
            return completion
        except httpx.ReadTimeout as error:
            outcome = RequestOutcome(None, self._attempt)
            raise TransportError(
                f"a completion must be drawn within http_timeout={self._timeout_s:g} s, got none: "
                f"{self._circumstances()}; raise it, or lower max_tokens"
            ) from error
        except httpx.TransportError as error:
            outcome = RequestOutcome(None, self._attempt)
            return error
        finally:
            self._controller.release(outcome)

    async def _wait_for_boot(self, refusal: Answer) -> None:
        """A pause.

        Raises:
            HearthError: there is no such deployment, or it did not come in time.
        """
        if self._booting_since_s is None:
            self._booting_since_s = time.monotonic()
        is_over = time.monotonic() - self._booting_since_s >= self._patience.boot_s
        if is_over or (refusal.status_code == 404 and not await self._exists()):
            try:
                raise_for_status(refusal)
            except HearthError as error:
                raise type(error)(f"{error}: {self._circumstances()}") from None
        await asyncio.sleep(self._patience.boot_pause_s)

    async def _exists(self) -> bool:
        """Whether the control plane knows the deployment; a doubt counts as yes. Asks once."""
        if self._asked_whether_it_exists:
            return True
        self._asked_whether_it_exists = True
        try:
            raise_for_status(await self._http.send_once("GET", f"/v1/{self._model}"))
        except NotFoundError:
            return False
        except (HearthError, httpx.TransportError):
            return True
        return True

    def _given_up(self, last: Answer | httpx.TransportError) -> TransportError:
        reason = f"{type(last).__name__}: {last}"
        if isinstance(last, Answer):
            try:
                raise_for_status(last)
            except HearthError as error:
                reason = str(error)
        return TransportError(
            f"a completion of {self._model} failed for good, last with {reason}: "
            f"{self._circumstances()}"
        )

    def _circumstances(self) -> str:
        elapsed_s = time.monotonic() - self._begun_s
        return (
            f"request {self._request_id}, attempt {self._attempt}, {elapsed_s:.1f} s, "
            f"{self._controller.in_flight} in flight"
        )


def _queue_s(headers: Mapping[str, str], metrics: Mapping[str, str]) -> float | None:
    """How long the request queued for its prefill, where the deployment says."""
    names = (_QUEUE_METRIC, f"fireworks-{_QUEUE_METRIC}")
    for source in (metrics, headers):
        for name in names:
            if name in source:
                try:
                    return float(source[name])
                except ValueError:
                    return None
    return None
