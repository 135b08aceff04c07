"""Every route of a platform and every record that goes in or out, from its OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import hearth
from hearth.wire.openapi import describe_platform

GROUPS = {
    "The control plane": ("/v1/accounts", "/v1/models", "/healthz", "/openapi.json"),
    "A trainer": ("/training/",),
    "Tinker's clients": ("/api/v1/",),
    "A deployment": ("/v1/", "/inference/", "/hot_load/", "/tokenize"),
}
"""Paths by what they begin with; the first group that fits has them."""
Schema = Mapping[str, Any]


def describe_http() -> str:
    """The routes of each part, then the records."""
    document = describe_platform(hearth.__version__)
    grouped: dict[str, list[str]] = {title: [] for title in GROUPS}
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            grouped[_find_group(path)].append(_describe_route(method, path, operation))
    lines: list[str] = []
    for title, routes in grouped.items():
        lines += [f"## {title}\n", "| route | body | answer |", "|---|---|---|", *routes, ""]
    lines.append("## Records\n")
    for name, schema in sorted(document["components"]["schemas"].items()):
        lines += _describe_record(name, schema)
    return "\n".join(lines)


def _find_group(path: str) -> str:
    return next(
        (title for title, prefixes in GROUPS.items() if path.startswith(prefixes)),
        "The control plane",
    )


def _describe_route(method: str, path: str, operation: Schema) -> str:
    body = operation.get("requestBody", {}).get("content", {}).get("application/json", {})
    answer = operation["responses"]["200"]["content"]["application/json"]
    shown = [_show_type(part.get("schema", {})) for part in (body, answer)]
    query = [part["name"] for part in operation["parameters"] if part["in"] == "query"]
    asked = f" ?{' '.join(query)}" if query else ""
    return f"| {method.upper()} `{path}`{asked} | {shown[0]} | {shown[1]} |"


def _describe_record(name: str, schema: Schema) -> Iterator[str]:
    yield f"(record-{name.lower()})="
    yield f"### {name}\n"
    if text := schema.get("description"):
        yield f"{text}\n"
    if values := schema.get("enum"):
        yield ", ".join(f"`{value}`" for value in values) + "\n"
    fields = schema.get("properties", {})
    if not fields:
        return
    yield "| field | type | default |"
    yield "|---|---|---|"
    required = schema.get("required", [])
    for field, kind in fields.items():
        default = "required" if field in required else f"`{kind.get('default')!r}`"
        yield f"| `{field}` | {_show_type(kind)} | {default} |"
    yield ""


def _show_type(schema: Schema) -> str:
    """A type in words, with links to records."""
    if "$ref" in schema:
        name = schema["$ref"].rsplit("/", 1)[-1]
        return f"[{name}](#record-{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            return " or ".join(dict.fromkeys(_show_type(part) for part in schema[several]))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']!r}`"
    kind = schema.get("type", "")
    if kind == "array":
        return f"list of {_show_type(schema.get('items', {}))}"
    values = schema.get("additionalProperties")
    if kind == "object" and isinstance(values, Mapping):
        return f"object of {_show_type(values)}"
    return kind
