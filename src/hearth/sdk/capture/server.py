"""The HTTP server that stands between OpenAI clients and a deployment.

It runs on a thread and an event loop of its own, on a loopback port; what it asks of the deployment
goes through the SDK's loop like every other request.
"""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from hearth.errors import ClosedError
from hearth.sdk.background import start
from hearth.sdk.capture.answers import build_answer, read_turn
from hearth.sdk.capture.app import CHAT_PATH, create_app
from hearth.sdk.capture.policy import SamplingPolicy
from hearth.sdk.capture.requests import AnswerForm, build_body
from hearth.sdk.capture.session import CaptureSession
from hearth.sdk.sampling import DeploymentSampler
from hearth.sdk.sampling_requests import SamplingRequest
from hearth.wire.chat import ChatResponse
from hearth.wire.http_server import HttpServer

_LAST_S = 5
"""How long a server that ends waits for its answers to be sent."""


class CaptureServer:
    """Answers OpenAI's chat completions with a deployment, and keeps the completions by session.

    Clients reach it from this machine only, each session with a key of its own. Their requests go
    the way of ``sampler``: to its deployment, whatever model they name, under its concurrency
    controller, time limit and retry policy. A stream is sent when its answer is whole. ``sampling``
    are ``temperature``, ``top_p``, ``top_k`` (by default 1, 1 and 0) and ``max_completion_tokens``:
    see ``SamplingPolicy``. A body over ``max_body_bytes`` is refused.

    Raises:
        ConfigError: a value in ``sampling`` breaks its rule.
    """

    def __init__(
        self,
        sampler: DeploymentSampler,
        *,
        sampling: Mapping[str, Any] | None = None,
        max_body_bytes: int = 2**25,
    ) -> None:
        policy = self._policy = SamplingPolicy(sampling)
        self._target = sampler.target
        self._sessions: dict[str, CaptureSession] = {}
        self._is_closed = False
        app = create_app(sampler.target, policy, self._sessions, max_body_bytes=max_body_bytes)
        listener = socket.create_server(("127.0.0.1", 0))
        self._origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self._server = HttpServer(
            app, drain_s=_LAST_S, log_config=None, log_level="warning", lifespan="off"
        )
        self._thread = threading.Thread(
            target=self._server.run,
            kwargs={"sockets": [listener]},
            name="hearth-capture",
            daemon=True,
        )
        self._thread.start()

    def __enter__(self) -> CaptureServer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def session(self, *, seed: int | None = None) -> CaptureSession:
        """A new session; with ``seed`` its request number k is sampled the same every time.

        Raises:
            ClosedError: the server was closed.
        """
        if self._is_closed:
            raise ClosedError("capture server must be open, got a closed one: open another")
        name = secrets.token_hex(8)
        session = CaptureSession(
            name,
            f"{self._origin}/sessions/{name}/v1",
            seed=seed,
            on_close=lambda: self._sessions.pop(name, None),
        )
        self._sessions[name] = session
        return session

    async def complete(
        self,
        session: CaptureSession,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """The next message of a session, in OpenAI's form with its ``finish_reason`` beside.

        It is what a client of the session would get, and captured as that; no HTTP is between.

        Raises:
            RequestError: the deployment refuses the conversation, as one that outgrows the context.
            ClosedError: the session has ended.
            HearthError: the deployment does not answer.
        """
        fields = self._policy.apply({"messages": messages, **({"tools": tools} if tools else {})})
        seed = session.next_seed()
        body = build_body(fields, AnswerForm(), model=self._target.model, seed=seed)
        sampling = start(SamplingRequest(self._target, CHAT_PATH, ChatResponse).run(body))
        with session.track(sampling):
            answer = await sampling
        session.keep(read_turn(answer, seed))
        (choice,) = build_answer(answer, AnswerForm())["choices"]
        said = {name: value for name, value in choice["message"].items() if value is not None}
        return {**said, "finish_reason": choice["finish_reason"]}

    def close(self) -> None:
        """End all sessions and the server; the sampler stays open. Not for the SDK's loop."""
        self._is_closed = True
        for session in list(self._sessions.values()):
            session.close()
        self._server.should_exit = True
        self._thread.join()
