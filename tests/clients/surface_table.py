"""The table of Tinker's surface: every method, route and field of the installed client.

python -m tests.clients.surface_table > docs/tinker_surface.md
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import tinker
from pydantic import BaseModel
from starlette.routing import Match, Route
from tests.clients.versions import REFUSES

from hearth.conformance.surface import find_methods
from hearth.tinker.app import REFUSED
from hearth.wire import tinker_requests as requests
from hearth.wire.tinker import AdamParams

_PREFIX = "/api/v1/"
_CALL = re.compile(r'\b_?(get|post|put|delete|patch)\(\s*(?:path=)?f?"/api/v1/([^"]*)"')
_STRING = re.compile(r'f?"/api/v1/([^"*]*)"')
MESSAGES: Mapping[str, type[BaseModel]] = {
    "AdamParams": AdamParams,
    "CreateModelRequest": requests.CreateModelRequest,
    "CreateSamplingSessionRequest": requests.CreateSampler,
    "CreateSessionRequest": requests.CreateSessionRequest,
    "FutureRetrieveRequest": requests.RetrieveFutureRequest,
    "GetInfoRequest": requests.NamedModel,
    "LoadWeightsRequest": requests.LoadWeightsRequest,
    "LoraConfig": requests.LoraConfig,
    "OptimStepRequest": requests.OptimStepRequest,
    "SampleRequest": requests.AskSamples,
    "SamplingParams": requests.SamplingParams,
    "SaveWeightsExternalRequest": requests.SaveExternal,
    "SaveWeightsForSamplerRequest": requests.SaveForSampler,
    "SaveWeightsRequest": requests.SaveWeightsRequest,
    "SessionHeartbeatRequest": requests.NamedSession,
}
"""The client's messages to routes that are answered, and our records of them."""
UNREAD = frozenset({"ClientConfigRequest", "TelemetrySendRequest"})
"""Messages that are answered whatever they say."""
REFUSED_MESSAGES = frozenset(
    {
        "CopyWeightsRequest",
        "CreateCustomLossRequest",
        "FuturesRetrieveRequest",
        "GetBillingUsageRequest",
        "GetCurrentCheckpointStorageUsageRequest",
        "JoinSamplingSessionRequest",
        "SessionSearchRequest",
        "UnloadModelRequest",
    }
)
"""Messages to routes that are refused; ``unload_model`` is one that no method calls."""
_OUT = "refused: "
FIELDS: Mapping[tuple[str, str], str] = {
    ("CreateSessionRequest", "tags"): "changes nothing: there is no console to search in",
    ("CreateSessionRequest", "project_id"): "changes nothing: a key has its own runs",
    ("CreateSessionRequest", "sdk_version"): "changes nothing: all versions get the same answers",
    ("FutureRetrieveRequest", "allow_metadata_only"): "changes nothing: results are sent whole",
    ("LoadWeightsRequest", "weights_access_token"): f"{_OUT}weights are published",
    ("LoadWeightsRequest", "optimizer_config"): f"{_OUT}but for AdamW",
    ("CreateModelRequest", "optimizer_config"): f"{_OUT}but for AdamW",
    ("OptimStepRequest", "optim_params"): "AdamParams; others are refused",
    ("SampleRequest", "base_model"): f"{_OUT}the sampling session names the model",
    ("SampleRequest", "model_path"): f"{_OUT}the sampling session names the weights",
    ("SampleRequest", "prompt_alt_tokens_k"): f"{_OUT}sample from the prompt's beginnings",
    ("SampleRequest", "record_stability_info"): (
        "changes nothing: stable_reinforce reads the datums' logprobs"
    ),
    ("SaveWeightsExternalRequest", "age_encryption_recipients"): f"{_OUT}nothing is encrypted",
}
"""Fields that are not simply honored."""


def read_source() -> str:
    """The installed client's source."""
    folder = Path(inspect.getfile(tinker)).parent
    files = (file for file in folder.rglob("*.py") if not file.name.endswith("_test.py"))
    return "\n".join(file.read_text(encoding="utf-8") for file in files)


def find_routes() -> list[tuple[str, str]]:
    """Method and path of every route that the installed client names, without the prefix."""
    source = read_source()
    found = {(method.upper(), path) for method, path in _CALL.findall(source)}
    called = {path for _, path in found}
    return sorted(
        found | {("GET", path) for path in _STRING.findall(source) if path not in called},
        key=lambda route: route[::-1],
    )


def find_messages() -> dict[str, type[BaseModel]]:
    """The client's requests, and the parts of them that have settings, by name."""
    parts = {"AdamParams", "LoraConfig", "SamplingParams"}
    return {
        name: kind
        for name, kind in inspect.getmembers(tinker.types, inspect.isclass)
        if issubclass(kind, BaseModel) and (name.endswith("Request") or name in parts)
    }


def explain_route(method: str, path: str, routes: list[Route]) -> str:
    """What becomes of a route; empty where nothing is there for it."""
    # A checkpoint's id is two segments.
    concrete = re.sub(r"\{\w+\}", "x", path.replace("{checkpoint_id}", "weights/x"))
    scope = {"type": "http", "path": _PREFIX + concrete, "method": method, "root_path": ""}
    for route in routes:
        if route.matches(scope)[0] is Match.FULL:
            own = route.path.removeprefix(_PREFIX)
            return f"{_OUT}{REFUSED[method, own]}" if (method, own) in REFUSED else "answered"
    return ""


def write_table(routes: list[Route]) -> str:
    """The document; ``routes`` are those of the platform's app."""
    reasons = {path: why for (_, path), why in REFUSED.items()}
    methods = [
        (f"`{name}`", f"{_OUT}{reasons[REFUSES[name]]}" if name in REFUSES else "answered")
        for name in find_methods()
    ]
    paths = [
        (f"`{method} {path}`", explain_route(method, path, routes))
        for method, path in find_routes()
    ]
    fields = [(f"`{message}.{field}`", how) for (message, field), how in sorted(FIELDS.items())]
    return "\n".join(
        [
            "# What Tinker's client may ask",
            "",
            f"Of tinker {tinker.__version__}, by introspection of the package "
            "(`python -m tests.clients.surface_table`). A test holds",
            "this page equal to it. docs/tinker.md says what differs from Tinker's service.",
            "",
            *_lines("method", methods),
            "",
            "`METHOD_async` is the same method, to be awaited. Routes are below `/api/v1`:",
            "",
            *_lines("route", paths),
            "",
            "Every field of every request is honored but for these:",
            "",
            *_lines("field", fields),
            "",
        ]
    )


def _lines(what: str, rows: list[tuple[str, str]]) -> Iterator[str]:
    yield f"| {what} | here |"
    yield "|---|---|"
    for name, how in rows:
        yield f"| {name} | {how} |"


def main() -> None:
    """Print the document."""
    import tempfile

    from hearth.control.app import create_gateway
    from hearth.local import EmbeddedPlatform
    from hearth.tinker.app import create_app
    from hearth.tinker.front import Front

    with (
        tempfile.TemporaryDirectory() as folder,
        EmbeddedPlatform(work_dir=Path(folder)) as platform,
    ):
        app = create_app(Front(platform.plane, create_gateway(platform.plane)))
        sys.stdout.write(write_table([each for each in app.routes if isinstance(each, Route)]))


if __name__ == "__main__":
    main()
