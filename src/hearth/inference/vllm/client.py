"""Calls of one vLLM server: completions, weights, adapters, versions. Knows no other server.

Endpoints are vLLM's public ones: ``/inference/v1/generate``, its RL endpoints and its run-time
loading of adapters.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx
import orjson

from hearth.errors import EngineError, RequestError
from hearth.inference.vllm.plugin.entry import UNCHANGED
from hearth.inference.vllm.server import BASE_NAME
from hearth.wire.asgi import TOKEN_HEADER
from hearth.wire.connections import KeptConnections

_BROKEN_LOGPROB = -9999.0
"""What vLLM returns in place of a logprob that is not a number."""
_CONNECT_S = 10.0
_FIRST_LOOK_S = 0.01
_LONGEST_LOOK_S = 0.2
_UNLIMITED = httpx.Timeout(None, connect=_CONNECT_S)
_JSON = {"content-type": "application/json"}
_GENERATE = "/inference/v1/generate"
_ADAPTER = "adapter"

PauseMode = Literal["wait", "keep", "abort"]


class LostError(Exception):
    """The server did not answer, or closed the connection: it has died, or is about to."""


class UnchangedError(EngineError):
    """An update was refused before it changed the served weights."""


@dataclass(frozen=True)
class GeneratedToken:
    """A sampled token; logprobs are of the distribution that was sampled."""

    token_id: int
    logprob: float
    top: Mapping[int, float] = field(default_factory=lambda: {})
    """Logprobs of the sampled one and the most probable ones."""


@dataclass
class GeneratedPart:
    """A whole completion, or the next part of a streamed one."""

    tokens: list[GeneratedToken] = field(default_factory=lambda: [])
    finish_reason: str | None = None
    labels: list[tuple[str, int]] = field(default_factory=lambda: [])
    """Version labels with the number of tokens of each, in order; known at the end."""
    prompt: list[dict[int, float] | None] | None = None
    """Logprobs listed for each prompt token, including its own; the first None."""
    cached_tokens: int = 0


class VllmClient:
    """One server at ``url``, which requires ``token``. Used on one event loop; ``close`` it.

    Completions have no timeout; any other call fails with ``LostError`` after ``timeout_s``.
    """

    def __init__(self, url: str, token: str, timeout_s: float) -> None:
        self._timeout = httpx.Timeout(timeout_s, connect=_CONNECT_S)
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={TOKEN_HEADER.decode(): token},
            timeout=_UNLIMITED,
            trust_env=False,
            transport=KeptConnections(),
        )
        self.identity: str | None = None
        """Snapshot of its whole weights; None is the model's own."""
        self._has_adapter = False

    async def close(self) -> None:
        """Close its connections."""
        await self._http.aclose()

    async def is_healthy(self) -> bool:
        """Whether it answers."""
        try:
            return (await self._http.get("/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def generate(self, body: Mapping[str, Any]) -> GeneratedPart:
        """A whole completion.

        Raises:
            RequestError: the server refuses the request.
            EngineError: the server failed.
            LostError: the server does not answer.
        """
        answer = await self._post(_GENERATE, self._on_weights(body), timeout=_UNLIMITED)
        choice = answer["choices"][0]
        part = _read_part(choice)
        part.prompt = _read_prompt_logprobs(answer.get("prompt_logprobs"))
        details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
        part.cached_tokens = int(details.get("cached_tokens") or 0)
        return part

    async def stream(self, body: Mapping[str, Any]) -> AsyncGenerator[GeneratedPart]:
        """A completion in parts; the last has a finish reason. Errors are those of ``generate``."""
        content = orjson.dumps({**self._on_weights(body), "stream": True})
        try:
            async with self._http.stream(
                "POST", _GENERATE, content=content, headers=_JSON
            ) as response:
                if response.status_code != 200:
                    raise _refusal(response.status_code, await response.aread())
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    event = orjson.loads(line[6:])
                    if "error" in event:
                        raise _refusal(int(event["error"].get("code") or 500), line[6:].encode())
                    for choice in event["choices"]:
                        yield _read_part(choice)
        except httpx.HTTPError as error:
            raise LostError(str(error) or type(error).__name__) from error

    async def pause(self, mode: PauseMode) -> None:
        """Run nothing until ``resume``, and drop all cached keys and values."""
        await self._post(f"/pause?mode={mode}&clear_cache=true", {})

    async def resume(self) -> None:
        """Run again."""
        await self._post("/resume", {})

    async def prepare(self, root: str, identity: str) -> None:
        """Have a snapshot's weights read and verified while the server samples.

        ``load`` then has only to swap them in.

        Raises:
            UnchangedError: the snapshot cannot be used.
            LostError: it was not read in time.
        """
        body = {"method": "prepare_snapshot", "args": [root, identity]}
        end_s = time.monotonic() + (self._timeout.read or math.inf)
        pause_s = _FIRST_LOOK_S
        while time.monotonic() < end_s:
            workers = (await self._post("/collective_rpc", body))["results"]
            if all(worker["is_ready"] or worker["error"] for worker in workers):
                errors = [worker["error"] for worker in workers if worker["error"]]
                if errors:
                    raise UnchangedError(errors[0])
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
        raise LostError(f"it did not read {identity} within {self._timeout.read:g} s")

    async def load(self, root: str, identity: str | None) -> None:
        """Load a snapshot's weights from ``root``; None loads the model's original weights.

        A snapshot that was not prepared is read first. An adapter that was loaded is removed.

        Raises:
            UnchangedError: it failed, and the old weights are still served.
            EngineError: it failed, and it is unknown which weights are served.
        """
        await self._post("/start_weight_update", {})
        info = {"root": root, "identity": identity}
        await self._post("/update_weights", {"update_info": info})
        await self._post("/finish_weight_update", {})
        self.identity = identity

    async def load_adapter(self, folder: str) -> None:
        """Serve the adapter of a folder; it replaces an earlier one.

        Raises:
            UnchangedError: vLLM refuses it, and serves the same as before.
        """
        body = {"lora_name": _ADAPTER, "lora_path": folder, "load_inplace": True}
        try:
            await self._post("/v1/load_lora_adapter", body)
        except (RequestError, EngineError) as error:
            raise UnchangedError(str(error)) from error
        self._has_adapter = True

    async def drop_adapter(self) -> None:
        """Serve without an adapter."""
        if self._has_adapter:
            await self._post("/v1/unload_lora_adapter", {"lora_name": _ADAPTER})
            self._has_adapter = False

    async def label(self, label: str) -> None:
        """Set the label of the served weights, and read it back.

        Raises:
            EngineError: the server returns another one.
        """
        await self._post("/update_weight_version", {"new_version": label})
        actual = (await self._request("GET", "/weight_info"))["weight_version"]
        if actual != label:
            raise EngineError(f"weight version must be {label!r} once set, got {actual!r}")

    def _on_weights(self, body: Mapping[str, Any]) -> dict[str, Any]:
        return {**body, "model": _ADAPTER if self._has_adapter else BASE_NAME}

    async def _post(
        self, path: str, body: Mapping[str, Any], *, timeout: httpx.Timeout | None = None
    ) -> Any:
        content = orjson.dumps(body)
        return await self._request("POST", path, content=content, headers=_JSON, timeout=timeout)

    async def _request(
        self, method: str, path: str, *, timeout: httpx.Timeout | None = None, **options: Any
    ) -> Any:
        try:
            response = await self._http.request(
                method, path, timeout=timeout or self._timeout, **options
            )
        except httpx.HTTPError as error:
            raise LostError(str(error) or type(error).__name__) from error
        if response.status_code != 200:
            raise _refusal(response.status_code, response.content)
        is_json = response.headers.get("content-type", "").startswith("application/json")
        return orjson.loads(response.content) if is_json else None


def _read_part(choice: Mapping[str, Any]) -> GeneratedPart:
    content = ((choice.get("logprobs") or {}).get("content")) or []
    tokens = [
        GeneratedToken(
            token["token_id"],
            _check_logprob(token["logprob"]),
            {top["token_id"]: top["logprob"] for top in token["top_logprobs"]},
        )
        for token in content
    ]
    spans = choice.get("weight_versions") or []
    return GeneratedPart(
        tokens,
        choice.get("finish_reason"),
        [(span["version"], span["end"] - span["start"]) for span in spans],
    )


def _check_logprob(logprob: float) -> float:
    """A sampled token's logprob.

    Raises:
        EngineError: it is not a number.
    """
    if logprob <= _BROKEN_LOGPROB:
        raise EngineError(
            "logits must be numbers, got NaN: the served weights are broken, or overflow in this "
            "dtype"
        )
    return logprob


def _read_prompt_logprobs(
    positions: Sequence[Mapping[str, Any] | None] | None,
) -> list[dict[int, float] | None] | None:
    if positions is None:
        return None
    return [
        None if listed is None else {int(token): fact["logprob"] for token, fact in listed.items()}
        for listed in positions
    ]


def _refusal(status: int, body: bytes) -> Exception:
    """The error that an answer other than 200 means."""
    try:
        message = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = body[:400].decode(errors="replace")
    if UNCHANGED in message:
        return UnchangedError(message.partition(f"{UNCHANGED}: ")[2] or message)
    if status in (400, 422):
        return RequestError(f"request must be one that vLLM accepts, got its refusal: {message}")
    if status == 503 or "EngineCore" in message or "Engine loop" in message:
        return LostError(message)
    return EngineError(f"vLLM's server must answer, got {status}: {message}")
