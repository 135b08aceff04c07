"""Who is answered: whoever shows the key, at a loopback name, from the viewer's own pages."""

from __future__ import annotations

import re
import secrets
from dataclasses import dataclass, field
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import MutableHeaders
from starlette.responses import RedirectResponse, Response

from hearth.errors import AuthError, ForbiddenError, HearthError, RequestError
from hearth.settings import is_loopback
from hearth.wire.asgi import App, Message, Receive, Scope, Send
from hearth.wire.http import error_response

_HOST = re.compile(r"(\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(:\d+)?")
_PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; font-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
_HEADERS = {
    "content-security-policy": _PAGE_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "x-frame-options": "DENY",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}
"""On every response that does not say otherwise."""
_MAX_BODY = 2**16


@dataclass(frozen=True)
class KeyedApp:
    """An app that is answered only with the key, and only here.

    ``/?key=KEY`` sets a cookie and leads to the page without the key in its address. Programs send
    ``Authorization: Bearer KEY``.
    """

    app: App
    key: str = field(repr=False)
    cookie: str = "hearth-view"
    """The cookie's name; two viewers of one machine need two, since cookies know no ports."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer as the app does, or 401 or 403, with headers that forbid what a page may not."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(raw=message.setdefault("headers", []))
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            answer = self._check(scope)
        except HearthError as error:
            answer = error_response(error)
        await (answer or self.app)(scope, receive, send_guarded)

    def _check(self, scope: Scope) -> Response | None:
        """What to answer in the app's place, if anything."""
        headers: dict[str, str] = {}
        for name, value in scope["headers"]:
            if name in (b"host", b"origin", b"authorization") and name.decode() in headers:
                raise RequestError(f"{name.decode()} must be sent once, got several")
            headers[name.decode("latin-1")] = value.decode("latin-1")
        _check_source(headers)
        if scope["method"] not in ("GET", "HEAD"):
            _check_body(headers)
        query = parse_qsl(scope.get("query_string", b"").decode("latin-1"), keep_blank_values=True)
        shown = [value for name, value in query if name == "key"]
        if shown and scope["path"] == "/":
            self._compare(shown[0])
            return self._welcome([pair for pair in query if pair[0] != "key"])
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer if scheme.lower() == "bearer" else self._read_cookie(headers)
        self._compare(given)
        return None

    def _compare(self, given: str) -> None:
        if not secrets.compare_digest(given.encode(), self.key.encode()):
            shown = "a wrong one" if given else "none"
            raise AuthError(
                f"key must be this viewer's, got {shown}: open the address that hearth view "
                "has printed"
            )

    def _read_cookie(self, headers: dict[str, str]) -> str:
        try:
            found = SimpleCookie(headers.get("cookie", "")).get(self.cookie)
        except CookieError:
            return ""
        return found.value if found is not None else ""

    def _welcome(self, query: list[tuple[str, str]]) -> Response:
        response = RedirectResponse("/" + (f"?{urlencode(query)}" if query else ""), 303)
        response.set_cookie(self.cookie, self.key, httponly=True, samesite="strict", path="/")
        return response


def _check_source(headers: dict[str, str]) -> None:
    """Refuse names of other machines (DNS rebinding) and pages of other places.

    A page at another port of this machine is another origin too, though cookies do not know that.
    """
    host = headers.get("host", "").lower()
    known = _HOST.fullmatch(host)
    if known is None or not is_loopback(known["v6"] or known["name"]):
        raise ForbiddenError(f"host must be a name of this machine, got {host[:80]!r}")
    origin = headers.get("origin")
    if origin is not None and origin.lower() not in (f"http://{host}", f"https://{host}"):
        raise ForbiddenError(f"origin must be this viewer's own page, got {origin[:80]!r}")


def _check_body(headers: dict[str, str]) -> None:
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise RequestError(f"content-type must be application/json, got {kind[:80]!r}")
    length = headers.get("content-length", "")
    if not length.isdecimal() or int(length) > _MAX_BODY:
        raise RequestError(f"content-length must be at most {_MAX_BODY}, got {length[:20]!r}")
