"""The control plane as the managers use it: whose account, pages, and waiting for a state.

A wait holds one request open until the server sees the resource change. A server that does not
know ``waitForState`` answers at once; then the question is asked again at growing intervals.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import orjson

from hearth.errors import ConfigError, NotFoundError
from hearth.sdk.background import start
from hearth.sdk.transport import TRANSIENT_STATUSES, Http, RetryPolicy
from hearth.wire.base import Record
from hearth.wire.fireworks import AccountPage

RecordT = TypeVar("RecordT", bound=Record)
T = TypeVar("T")

PAGE_SIZE = "200"
_RETRIES = RetryPolicy(attempts=8, statuses=TRANSIENT_STATUSES | {500})
# A held request may be answered a little before its time.
_HELD = 0.8


@dataclass(frozen=True)
class WaitPolicy:
    """How waits ask, in seconds.

    ``hold_s`` is how long the server may hold a question; where it does not, questions are
    ``first_s`` apart, growing to ``longest_s``. ``settle_s`` is how long a resource may still show
    the state that it is just leaving, such as a cancelled job that is resumed.
    """

    hold_s: float = 25.0
    first_s: float = 0.2
    longest_s: float = 5.0
    settle_s: float = 30.0


def platform_of(api_key: str | None, base_url: str | None) -> tuple[str, str]:
    """Key and URL, from ``FIREWORKS_API_KEY`` and ``FIREWORKS_BASE_URL`` where None.

    Raises:
        ConfigError: neither says.
    """
    url = base_url or os.environ.get("FIREWORKS_BASE_URL", "")
    if not url:
        raise ConfigError(
            "base_url must be given or FIREWORKS_BASE_URL set, got neither: it is the URL that "
            "`hearth serve` prints"
        )
    key = api_key or os.environ.get("FIREWORKS_API_KEY", "")
    if not key:
        raise ConfigError(
            "api_key must be given or FIREWORKS_API_KEY set, got neither (any text will do for a "
            "platform on this machine)"
        )
    return key, url


class ControlPlaneClient:
    """Requests about resources, for one account; its coroutines run on the SDK's loop only."""

    def __init__(
        self,
        api_key: str | None,
        base_url: str | None,
        account_id: str | None,
        retries: RetryPolicy | None,
        wait_policy: WaitPolicy | None,
    ) -> None:
        key, url = platform_of(api_key, base_url)
        self._key = key
        self._retries = retries or _RETRIES
        self.http = self.client_of(url)
        self.wait_policy = wait_policy or WaitPolicy()
        self._account_id = account_id or None

    def client_of(self, url: str) -> Http:
        """A client of another host of the same platform."""
        return Http(url, self._key, retries=self._retries)

    async def account_id(self) -> str:
        """The account, asked for on first use.

        Raises:
            ConfigError: the key has none or several.
        """
        if self._account_id is None:
            answer = await self.http.request("GET", "/v1/accounts", params={"pageSize": "2"})
            names = [account.name for account in AccountPage.parse(answer.content).accounts]
            if len(names) != 1:
                raise ConfigError(
                    f"account_id must be given, got none, and the key has {len(names)} accounts "
                    f"{names}"
                )
            self._account_id = names[0].removeprefix("accounts/")
        return self._account_id

    async def name_of(self, collection: str, resource_id: str) -> str:
        """The full name of a resource; a full name stays as it is."""
        if resource_id.startswith("accounts/"):
            return resource_id
        return f"accounts/{await self.account_id()}/{collection}/{resource_id}"

    async def get(
        self,
        name: str,
        kind: type[RecordT],
        params: Mapping[str, str] | None = None,
        timeout_s: float = 30.0,
    ) -> RecordT:
        """A resource by its full name."""
        answer = await self.http.request("GET", f"/v1/{name}", params=params, timeout_s=timeout_s)
        return kind.parse(answer.content)

    async def find(self, name: str, kind: type[RecordT]) -> RecordT | None:
        """A resource by its full name; None where it does not exist."""
        try:
            return await self.get(name, kind)
        except NotFoundError:
            return None

    async def send(
        self,
        method: str,
        name: str,
        body: Mapping[str, object] | None = None,
        params: Mapping[str, str] | None = None,
        timeout_s: float = 60.0,
    ) -> bytes:
        """A request that changes something; the answer's body."""
        content = None if body is None else orjson.dumps(body)
        answer = await self.http.request(
            method, f"/v1/{name}", body=content, params=params, timeout_s=timeout_s
        )
        return answer.content

    async def delete(self, name: str, params: Mapping[str, str] | None = None) -> None:
        """Delete a resource; one that is already gone is as deleted as can be."""
        with contextlib.suppress(NotFoundError):
            await self.send("DELETE", name, params=params)

    async def pages(
        self,
        name: str,
        kind: type[RecordT],
        rows_of: Callable[[RecordT], list[T]],
        params: Mapping[str, str] | None = None,
    ) -> list[T]:
        """The rows of all pages."""
        rows: list[T] = []
        token = ""
        while True:
            asked = {"pageSize": PAGE_SIZE, **(params or {})}
            page = await self.get(name, kind, {**asked, "pageToken": token} if token else asked)
            rows.extend(rows_of(page))
            token = str(getattr(page, "next_page_token", ""))
            if not token:
                return rows

    def close(self) -> None:
        """Close the connections; called from any thread but the SDK's."""
        start(self.http.close()).result()


class Watch(Generic[RecordT]):
    """One resource, looked at until somebody is content with it.

    ``states`` are all that its kind has.
    """

    def __init__(
        self, control: ControlPlaneClient, name: str, kind: type[RecordT], states: Sequence[str]
    ) -> None:
        self._control = control
        self._name = name
        self._kind = kind
        self._states = tuple(states)
        self._wait_policy = control.wait_policy
        self._pause_s = self._wait_policy.first_s
        self._server_holds = True

    async def look(self) -> RecordT:
        """The resource as it is now.

        Raises:
            NotFoundError: there is none.
        """
        return await self._control.get(self._name, self._kind)

    async def change(self, state: str | None, left_s: float) -> RecordT:
        """The resource once it has left ``state``, or as it is after a while (``left_s`` at most).

        Raises:
            NotFoundError: there is none any more.
        """
        if not self._server_holds:
            return await self.later(left_s)
        hold_s = max(0.0, min(self._wait_policy.hold_s, left_s))
        others = ",".join(one for one in self._states if one != state)
        asked_s = time.monotonic()
        answer = await self._control.get(
            self._name,
            self._kind,
            {"waitForState": others, "timeoutS": f"{hold_s:.3f}"},
            timeout_s=hold_s + 10,
        )
        moved = getattr(answer, "state", None) != state
        self._server_holds = moved or time.monotonic() - asked_s >= hold_s * _HELD
        if moved:
            self._pause_s = self._wait_policy.first_s
        return answer

    async def later(self, left_s: float) -> RecordT:
        """The resource after a pause; pauses double."""
        await asyncio.sleep(max(0.0, min(self._pause_s, left_s)))
        self._pause_s = min(self._pause_s * 2, self._wait_policy.longest_s)
        return await self.look()
