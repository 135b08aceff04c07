"""One chat request on its way to the deployment, with as many attempts as it takes and is worth."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

import httpx

from hearth.errors import TransportError
from hearth.sdk.answer import Answer
from hearth.sdk.attempts import DrawPatience
from hearth.sdk.transport import TRANSIENT_STATUSES, Http
from hearth.telemetry import new_request_id

_PATH = "/inference/v1/chat/completions"
_RETRIED = TRANSIENT_STATUSES | {500}
# A deployment that boots or takes new weights answers so; this is no failure of the request.
_BOOTING = frozenset({404, 425})


@dataclass(frozen=True)
class Deployment:
    """Where requests go, and how patiently; ``timeout_s`` bounds one attempt."""

    http: Http
    model: str
    patience: DrawPatience
    timeout_s: float


class Forwarding:
    """``run`` once, on the SDK's loop."""

    def __init__(self, deployment: Deployment) -> None:
        self._http = deployment.http
        self._model = deployment.model
        self._patience = deployment.patience
        self._timeout_s = deployment.timeout_s
        self._request_id = new_request_id()
        self._attempt = 1
        self._booting_since_s: float | None = None
        self._asked_whether_it_exists = False

    async def run(self, body: bytes) -> Answer:
        """The deployment's last word: the answer, or the refusal that outlasted all patience.

        Raises:
            TransportError: there was none, or it took longer than the time for one attempt.
            ClosedError: the platform is gone.
        """
        while True:
            answer = await self._attempt_once(body)
            response = answer if isinstance(answer, Answer) else None
            if response is not None and response.status_code in _BOOTING:
                if await self._has_booted_in_vain(response):
                    return response
                await asyncio.sleep(self._patience.boot_pause_s)
                continue
            self._booting_since_s = None
            if response is not None and response.status_code not in _RETRIED:
                return response
            if self._attempt >= self._patience.retries.attempts:
                return self._last(answer)
            await asyncio.sleep(self._patience.retries.delay_s(self._attempt - 1, response))
            self._attempt += 1

    async def _attempt_once(self, body: bytes) -> Answer | httpx.TransportError:
        """What the deployment answers, or why it did not."""
        headers = {"x-request-id": self._request_id, "fireworks-deployment": self._model}
        try:
            return await self._http.send_once(
                "POST", _PATH, body=body, headers=headers, timeout_s=self._timeout_s
            )
        except httpx.ReadTimeout as error:
            raise TransportError(
                f"an answer must be drawn within http_timeout_s={self._timeout_s:g} s, got none "
                f"(request {self._request_id}): raise it, or lower max_completion_tokens"
            ) from error
        except httpx.TransportError as error:
            return error

    async def _has_booted_in_vain(self, refusal: Answer) -> bool:
        """Whether there is no such deployment, or it has not come in time."""
        if self._booting_since_s is None:
            self._booting_since_s = time.monotonic()
        if time.monotonic() - self._booting_since_s >= self._patience.boot_s:
            return True
        return refusal.status_code == 404 and not await self._exists()

    async def _exists(self) -> bool:
        """Whether the control plane knows the deployment; a doubt counts as yes. Asks once."""
        if self._asked_whether_it_exists:
            return True
        self._asked_whether_it_exists = True
        try:
            known = await self._http.send_once("GET", f"/v1/{self._model}")
        except httpx.TransportError:
            return True
        return known.status_code != 404

    def _last(self, answer: Answer | httpx.TransportError) -> Answer:
        if isinstance(answer, Answer):
            return answer
        raise TransportError(
            f"deployment {self._model} must answer, got {type(answer).__name__}: {answer} after "
            f"{self._attempt} attempts (request {self._request_id})"
        ) from answer
