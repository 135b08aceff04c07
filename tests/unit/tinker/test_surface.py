"""Every method, route and field of the installed client is in docs/tinker_surface.md as it is, and
every recipe of tinker-cookbook in docs/tinker_cookbook.md."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from starlette.routing import Route
from tests.clients import cookbook_table, surface_table

from hearth.control.app import create_gateway
from hearth.control.gateway import TINKER_PREFIX
from hearth.local import EmbeddedPlatform
from hearth.tinker.app import REFUSED, create_app
from hearth.tinker.front import Front
from hearth.wire.openapi import TINKER_ROUTES

DOCS = Path(__file__).parents[3] / "docs"
DOCUMENT = DOCS / "tinker_surface.md"


@pytest.fixture
def routes(tmp_path: Path) -> Iterator[list[Route]]:
    with EmbeddedPlatform(work_dir=tmp_path) as platform:
        app = create_app(Front(platform.plane, create_gateway(platform.plane)))
        yield [route for route in app.routes if isinstance(route, Route)]


def test_the_document_is_what_the_installed_client_has(routes: list[Route]) -> None:
    table = surface_table.write_table(routes)

    assert table == DOCUMENT.read_text(encoding="utf-8"), (
        "run python -m tests.clients.surface_table > docs/tinker_surface.md"
    )
    assert table.count("| answered |") + table.count("| refused: ") > 110


def test_the_page_of_recipes_is_what_the_program_runs_and_checks() -> None:
    assert cookbook_table.write_table() == (DOCS / "tinker_cookbook.md").read_text(
        encoding="utf-8"
    ), "run python -m tests.clients.cookbook_table > docs/tinker_cookbook.md"


def test_every_route_of_the_client_is_answered_or_refused(routes: list[Route]) -> None:
    found = surface_table.find_routes()

    missing = [each for each in found if not surface_table.explain_route(*each, routes)]
    assert len(found) > 40
    assert missing == []


def test_every_answered_route_is_in_the_description_of_the_platform(routes: list[Route]) -> None:
    answered = {
        f"{method} /{route.path.removeprefix(TINKER_PREFIX)}"
        for route in routes
        for method in (route.methods or set()) - {"HEAD"}
        if route.path.startswith(TINKER_PREFIX)
    }

    assert answered - {f"{method} /{path}" for method, path in REFUSED} == TINKER_ROUTES.keys()


def test_every_field_of_a_request_is_honored_or_in_the_table() -> None:
    messages = surface_table.find_messages()
    known = surface_table.MESSAGES

    assert messages.keys() == {*known, *surface_table.UNREAD, *surface_table.REFUSED_MESSAGES}
    unknown = [
        (name, field)
        for name, record in known.items()
        for field in messages[name].model_fields
        if field not in record.model_fields
        and field != "type"
        and (name, field) not in surface_table.FIELDS
    ]
    assert unknown == []
    for name, field in surface_table.FIELDS:
        assert field in messages[name].model_fields, f"{name} has no {field}"
