"""The control plane as the managers use it: accounts, pages of records, and waiting for a state.

A wait holds one request open until the server sees the resource change. A server that does not
know ``waitForState`` answers at once; then the request is repeated at growing intervals.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import orjson

from hearth.errors import ConfigError, NotFoundError
from hearth.sdk.background import start
from hearth.sdk.transport import TRANSIENT_STATUSES, Http, RetryPolicy
from hearth.settings import read_api_key, read_url
from hearth.wire.base import Record
from hearth.wire.fireworks import AccountPage
from hearth.wire.messages import HttpRequest

RecordT = TypeVar("RecordT", bound=Record)
T = TypeVar("T")

PAGE_SIZE = "200"
_RETRIES = RetryPolicy(attempts=8, statuses=TRANSIENT_STATUSES | {500})
# A held request may be answered a little before its time.
_HELD = 0.8


@dataclass(frozen=True)
class WaitPolicy:
    """How waits poll, in seconds.

    ``hold_s`` is how long the server may hold a request; where it does not, requests are
    ``first_s`` apart, growing to ``longest_s``. ``settle_s`` is how long a resource may still show
    the state that it is just leaving, such as a cancelled job that is resumed.
    """

    hold_s: float = 25.0
    first_s: float = 0.2
    longest_s: float = 5.0
    settle_s: float = 30.0

    def pauses_s(self) -> Iterator[float]:
        """The pauses between requests, without end."""
        pause_s = self.first_s
        while True:
            yield pause_s
            pause_s = min(pause_s * 2, self.longest_s)


def resolve_platform(api_key: str | None, base_url: str | None) -> tuple[str, str]:
    """Key and URL, from ``HEARTH_API_KEY`` and ``HEARTH_URL`` where None.

    Raises:
        ConfigError: the key or the URL is in neither place.
    """
    url = base_url or read_url()
    if not url:
        raise ConfigError(
            "base_url must be given or HEARTH_URL set, got neither: it is the URL that "
            "`hearth serve` prints"
        )
    key = api_key or read_api_key()
    if not key:
        raise ConfigError(
            "api_key must be given or HEARTH_API_KEY set, got neither (any text will do for a "
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
        key, url = resolve_platform(api_key, base_url)
        self._key = key
        self._retries = retries or _RETRIES
        self.http = self.connect(url)
        self.wait_policy = wait_policy or WaitPolicy()
        self._account_id = account_id or None

    def connect(self, url: str) -> Http:
        """A client of another host of the same platform."""
        return Http(url, self._key, retries=self._retries)

    async def account_id(self) -> str:
        """The account, requested on first use.

        Raises:
            ConfigError: the key has none or several.
        """
        if self._account_id is None:
            request = HttpRequest("GET", "/v1/accounts", params={"pageSize": "2"})
            answer = await self.http.request(request)
            names = [account.name for account in AccountPage.parse(answer.content).accounts]
            if len(names) != 1:
                raise ConfigError(
                    f"account_id must be given, got none, and the key has {len(names)} accounts "
                    f"{names}"
                )
            self._account_id = names[0].removeprefix("accounts/")
        return self._account_id

    async def resolve_name(self, collection: str, resource_id: str) -> str:
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
        """A resource by its full name; waits for an unreachable platform."""
        request = HttpRequest("GET", f"/v1/{name}", params=params, timeout_s=timeout_s, waits=True)
        return kind.parse((await self.http.request(request)).content)

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
        """A request that changes something; the answer's body.

        What begins something waits for an unreachable platform; what ends something does not, so
        that a run without its platform can end.
        """
        content = None if body is None else orjson.dumps(body)
        begins = method == "POST" and not name.endswith(":cancel")
        request = HttpRequest(
            method, f"/v1/{name}", content, params=params, timeout_s=timeout_s, waits=begins
        )
        return (await self.http.request(request)).content

    async def delete(self, name: str, params: Mapping[str, str] | None = None) -> None:
        """Delete a resource; one that is already gone is no error."""
        with contextlib.suppress(NotFoundError):
            await self.send("DELETE", name, params=params)

    async def list_records(
        self,
        name: str,
        kind: type[RecordT],
        records_of: Callable[[RecordT], list[T]],
        params: Mapping[str, str] | None = None,
    ) -> list[T]:
        """The records of all pages."""
        records: list[T] = []
        query = {"pageSize": PAGE_SIZE, **(params or {})}
        while True:
            page = await self.get(name, kind, query)
            records.extend(records_of(page))
            query["pageToken"] = str(getattr(page, "next_page_token", ""))
            if not query["pageToken"]:
                return records


class ResourceManager:
    """What the managers of trainer jobs and deployments have in common."""

    collection: ClassVar[str]
    """What a full name has before the resource's id."""

    def __init__(self, control: ControlPlaneClient) -> None:
        self._control = control
        self.base_url = control.http.base_url

    @property
    def account_id(self) -> str:
        """The account that owns the resources."""
        return start(self._control.account_id()).result()

    def close(self) -> None:
        """Close the connections."""
        start(self._control.http.close()).result()

    def _full_name(self, resource_id: str, collection: str | None = None) -> str:
        """The full name of a resource of this kind or of another; a full name stays as it is."""
        collection = collection or self.collection
        return start(self._control.resolve_name(collection, resource_id)).result()


class Watch(Generic[RecordT]):
    """One resource, fetched again and again; ``states`` are all that its kind has."""

    def __init__(
        self, control: ControlPlaneClient, name: str, kind: type[RecordT], states: Sequence[str]
    ) -> None:
        self._control = control
        self._name = name
        self._kind = kind
        self._states = tuple(states)
        self._wait_policy = control.wait_policy
        self._pauses_s = self._wait_policy.pauses_s()
        self._server_holds = True

    async def fetch(self) -> RecordT:
        """The resource as it is now.

        Raises:
            NotFoundError: there is none.
        """
        return await self._control.get(self._name, self._kind)

    async def wait_for_change(self, state: str | None, left_s: float) -> RecordT:
        """The resource once it has left ``state``, or as it is after a while (``left_s`` at most).

        Raises:
            NotFoundError: it was deleted.
        """
        if not self._server_holds:
            return await self.fetch_later(left_s)
        hold_s = max(0.0, min(self._wait_policy.hold_s, left_s))
        others = ",".join(other for other in self._states if other != state)
        start_s = time.monotonic()
        answer = await self._control.get(
            self._name,
            self._kind,
            {"waitForState": others, "timeoutS": f"{hold_s:.3f}"},
            timeout_s=hold_s + 10,
        )
        has_changed = getattr(answer, "state", None) != state
        self._server_holds = has_changed or time.monotonic() - start_s >= hold_s * _HELD
        if has_changed:
            self._pauses_s = self._wait_policy.pauses_s()
        return answer

    async def fetch_later(self, left_s: float) -> RecordT:
        """The resource after a pause; pauses double."""
        await asyncio.sleep(max(0.0, min(next(self._pauses_s), left_s)))
        return await self.fetch()
