"""The routes of an app, to compare with the published description."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.routing import Route


def list_routes(app: Starlette, prefix: str = "") -> set[str]:
    """``METHOD path`` of each route, ``prefix`` left out."""
    routes = [route for route in app.routes if isinstance(route, Route)]
    return {
        f"{method} {route.path.removeprefix(prefix).replace(':path}', '}')}"
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
    }
