"""A deployment that is full is waited for as long as it takes, one that is gone for a while."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from tests.unit.virtual_time import now, run_virtual

from hearth.errors import BusyError
from hearth.tinker.bases import Base, BaseLostError
from hearth.wire.http import error_response, json_response


class Peer:
    """A deployment behind a gateway: it answers ``status`` so many times, and then a sample."""

    def __init__(self, status: int, times: int) -> None:
        self.status, self.left = status, times
        # What the platform says of it: it is there.
        live = SimpleNamespace(endpoint=lambda _: "here")
        self.plane: Any = SimpleNamespace(
            jobs=SimpleNamespace(live=live), deployments=SimpleNamespace(live=live)
        )

    def worker_app(self, _resources: Any, _id: str) -> Any:
        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            await Request(scope, receive).body()
            response: Response = json_response({"choices": []})
            if self.left:
                self.left -= 1
                response = error_response(BusyError("full"))
                response.status_code = self.status
            await response(scope, receive, send)

        return answer


def complete(peer: Peer) -> tuple[dict[str, Any], float]:
    async def run() -> tuple[dict[str, Any], float]:
        gateway: Any = peer
        base = Base("model", peer.plane, gateway)
        return await base.complete(b"{}", "alice"), now()

    return run_virtual(run)


def test_a_full_deployment_is_waited_for_as_long_as_it_takes() -> None:
    answer, waited_s = complete(Peer(429, 500))

    assert answer == {"choices": []}
    assert waited_s == pytest.approx(0.25 + 0.5 + 1 + 2 + 4 + 8 * 495)


def test_a_deployment_that_does_not_answer_is_given_up_after_eight_tries() -> None:
    answer, _ = complete(Peer(503, 7))
    assert answer == {"choices": []}

    peer = Peer(503, 100)
    with pytest.raises(BaseLostError):
        complete(peer)
    assert peer.left == 92
