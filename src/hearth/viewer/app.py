"""The viewer's routes: parse, ask, answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.routing import Route

from hearth.errors import HearthError, NotFoundError, RequestError
from hearth.records.layout import SampleId
from hearth.viewer.access import KeyedApp
from hearth.viewer.compare import compare_runs
from hearth.viewer.database import Database
from hearth.viewer.exports import FORMATS, export_samples
from hearth.viewer.jobs import SamplingJobs
from hearth.viewer.library import Library
from hearth.viewer.live import Live
from hearth.viewer.prompts import list_prompts, show_prompt
from hearth.viewer.reports import report_of
from hearth.viewer.run import RecordedRun, stamp
from hearth.viewer.samples import FILTERS, Samples, parse_count
from hearth.viewer.timeline import MOST_SPANS
from hearth.viewer.tokens import TokenReader
from hearth.viewer.whereabouts import can_sample_again
from hearth.wire.asgi import App
from hearth.wire.http import error_response

ASSETS = Path(__file__).with_name("assets")
_SHOWN_STEPS = 20
_QUERIES_AT_ONCE = 4
_MOST_AGAIN = 64
_REPORT_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox"
_OPTIONS = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS

Answer = Callable[[Request], Any]


class Viewer:
    """What the routes ask: the runs, their samples, and what goes on. Used on one event loop."""

    def __init__(self, library: Library, jobs: SamplingJobs | None = None) -> None:
        self.library = library
        self.database = Database(library.roots)
        self.tokens = TokenReader()
        self.live = Live(library)
        self.jobs = jobs or SamplingJobs()
        self._room = asyncio.Semaphore(_QUERIES_AT_ONCE)

    def run(self, request: Request) -> RecordedRun:
        """The run that a request names, as its files are now."""
        run = self.library.find(request.path_params["run"])
        run.refresh()
        return run

    def samples(self, request: Request) -> Samples:
        """The samples of the run that a request names."""
        return Samples(self.database, self.run(request))

    def load_ahead(self) -> None:
        """Load the samples of the run that was named, if it is one, before they are asked for."""
        runs = self.library.runs()
        if len(runs) == 1:
            runs[0].refresh()
            self.database.samples(runs[0])
        # The first scalar imports pandas where it is installed, which takes a third of a second.
        pa.scalar(0)

    async def answer(self, ask: Answer, request: Request) -> Any:
        """What ``ask`` returns, on a thread; a few at a time, so that memory is bounded."""
        async with self._room:
            return await run_in_threadpool(ask, request)


def create_app(library: Library, key: str, cookie: str, jobs: SamplingJobs | None = None) -> App:
    """The viewer's app, which answers whoever shows the key."""
    viewer = Viewer(library, jobs)

    @contextlib.asynccontextmanager
    async def live_long(_: Starlette) -> AsyncIterator[None]:
        loading = asyncio.create_task(run_in_threadpool(viewer.load_ahead))
        yield
        await loading
        await viewer.jobs.close()
        viewer.database.close()

    app = Starlette(
        routes=[*_api_routes(viewer), Route("/{path:path}", _page)],
        exception_handlers={HearthError: _refuse, HTTPException: _refuse_path, Exception: _refuse},
        lifespan=live_long,
    )
    app.state.viewer = viewer
    return KeyedApp(app, key, cookie)


ROUTES: Mapping[str, str] = {
    "GET /api/schema": "",
    "GET /api/runs": "",
    "GET /api/runs/{run}": "",
    "GET /api/runs/{run}/series": "names",
    "GET /api/runs/{run}/events": "",
    "GET /api/runs/{run}/timeline": "from_step to_step",
    "GET /api/runs/{run}/samples": " ".join((*FILTERS, "sort", "descending", "offset", "limit")),
    "GET /api/runs/{run}/samples/{sample}": "",
    "GET /api/runs/{run}/histogram": " ".join(("column", "bins", *FILTERS)),
    "GET /api/runs/{run}/groups/{group}": "",
    "GET /api/runs/{run}/prompts": "search kind sort descending offset limit",
    "GET /api/runs/{run}/prompts/{prompt}": "",
    "GET /api/runs/{run}/export": " ".join(("format", *FILTERS)),
    "GET /api/runs/{run}/report": "what id",
    "POST /api/runs/{run}/again": "",
    "GET /api/jobs/{job}": "",
    "GET /api/compare": "runs",
    "GET /api/live": "",
}
"""Every route of the API with its parameters; docs/viewer.md says what they mean."""


def _api_routes(viewer: Viewer) -> list[Route]:
    answers: dict[str, Answer] = {
        "/schema": lambda _: {
            "routes": [
                {"route": route, "parameters": names.split()} for route, names in ROUTES.items()
            ]
        },
        "/runs": lambda _: {"runs": _list_runs(viewer)},
        "/runs/{run}": lambda request: _show_run(viewer, request),
        "/runs/{run}/series": lambda request: _show_series(viewer, request),
        "/runs/{run}/events": lambda request: {"events": viewer.run(request).events()},
        "/runs/{run}/timeline": lambda request: _show_timeline(viewer, request),
        "/runs/{run}/samples": lambda request: viewer.samples(request).page(request.query_params),
        "/runs/{run}/samples/{sample}": lambda request: _show_sample(viewer, request),
        "/runs/{run}/histogram": lambda request: viewer.samples(request).histogram(
            request.query_params
        ),
        "/runs/{run}/groups/{group}": lambda request: viewer.samples(request).group(
            request.path_params["group"]
        ),
        "/runs/{run}/prompts": lambda request: list_prompts(
            viewer.samples(request), request.query_params
        ),
        "/runs/{run}/prompts/{prompt}": lambda request: show_prompt(
            viewer.samples(request), request.path_params["prompt"]
        ),
        "/compare": lambda request: _compare(viewer, request),
    }
    routes = [Route(f"/api{path}", _json(viewer, ask)) for path, ask in answers.items()]
    return [
        *routes,
        Route("/api/runs/{run}/export", _bind(viewer, _export)),
        Route("/api/runs/{run}/report", _bind(viewer, _report)),
        Route("/api/runs/{run}/again", _bind(viewer, _sample_again), methods=["POST"]),
        Route("/api/jobs/{job}", _bind(viewer, _show_job)),
        Route("/api/live", _bind(viewer, _listen)),
        Route("/api/{path:path}", _refuse_route, methods=["GET", "POST", "PUT", "PATCH", "DELETE"]),
    ]


def _json(viewer: Viewer, ask: Answer) -> Callable[[Request], Awaitable[Response]]:
    def encode(request: Request) -> bytes:
        return orjson.dumps(ask(request), option=_OPTIONS)

    async def respond(request: Request) -> Response:
        body = await viewer.answer(encode, request)
        return Response(body, media_type="application/json")

    return respond


def _bind(
    viewer: Viewer, handle: Callable[[Viewer, Request], Awaitable[Response]]
) -> Callable[[Request], Awaitable[Response]]:
    async def respond(request: Request) -> Response:
        return await handle(viewer, request)

    return respond


def _list_runs(viewer: Viewer) -> list[dict[str, Any]]:
    rows = viewer.library.table()
    counts = viewer.database.count_samples(viewer.library.runs())
    for row in rows:
        row |= {"has_samples": row["key"] in counts, "samples": counts.get(row["key"], 0)}
    return rows


def _show_run(viewer: Viewer, request: Request) -> dict[str, Any]:
    run = viewer.run(request)
    counts = viewer.database.count_samples([run])
    stamps = [stamp(file.path) for file in run.files()]
    sizes = [at[1] for at in stamps if at is not None]
    damaged = viewer.database.list_damaged(run)
    return {
        **run.row(),
        "differs": {},
        "has_samples": run.key in counts,
        "samples": counts.get(run.key, 0),
        "config": run.config(),
        "changed": run.read_changed_settings(),
        "metrics": run.metrics.names(),
        "evaluations": run.metrics.evaluations(),
        "versions": run.timeline.versions,
        "rescored": run.list_rescored(),
        "recording": {
            "bytes": sum(sizes),
            "files": len(sizes),
            "text": _describe_recording(run, damaged),
            "damaged": damaged,
        },
    }


def _describe_recording(run: RecordedRun, damaged: Mapping[str, str]) -> str:
    notes = [
        str(event.get("text", "")) for event in run.timeline.events if event["name"] == "recording"
    ][-1:]
    if damaged:
        notes.append(f"{len(damaged)} damaged files are left out: {', '.join(sorted(damaged)[:5])}")
    if run.metrics.skipped:
        notes.append(f"{run.metrics.skipped} lines of metrics.jsonl are no records")
    return "; ".join(note for note in notes if note)


def _show_series(viewer: Viewer, request: Request) -> dict[str, Any]:
    run = viewer.run(request)
    names = [name for name in request.query_params.get("names", "").split(",") if name]
    return run.metrics.series(names, run.times())


def _show_timeline(viewer: Viewer, request: Request) -> dict[str, Any]:
    run, query = viewer.run(request), request.query_params
    last = parse_count(query, "to_step", 0, 2**53) or run.timeline.last_steps(1)[1]
    last = last or run.metrics.step or 0
    first = parse_count(query, "from_step", max(0, last - _SHOWN_STEPS + 1), 2**53)
    spans = run.timeline.spans(first, last)
    if run.files():
        room = max(0, MOST_SPANS - len(spans))
        spans += Samples(viewer.database, run).spans(first, last, room)
    origin = run.timeline.origin
    if origin is None and spans:
        origin = min(span["start"] for span in spans)
    names = ("lane", "name", "start", "end", "step", "version", "rows", "sample")
    return {
        "spans": [{name: span.get(name) for name in names} for span in spans],
        "origin": origin,
        "from_step": first,
        "to_step": last,
    }


def _show_sample(viewer: Viewer, request: Request) -> dict[str, Any]:
    run = viewer.run(request)
    sample = SampleId.parse(request.path_params["sample"])
    content = viewer.tokens.read(run, sample)
    content["neighbors"] = Samples(viewer.database, run).neighbors(sample)
    content["again"] = can_sample_again(run, content)
    return content


def _compare(viewer: Viewer, request: Request) -> dict[str, Any]:
    names = [name for name in request.query_params.get("runs", "").split(",") if name]
    runs = [viewer.library.find(name) for name in names]
    return compare_runs(runs, viewer.database, viewer.tokens)


async def _export(viewer: Viewer, request: Request) -> Response:
    def write(request: Request) -> Any:
        return export_samples(viewer.samples(request), request.query_params)

    file = await viewer.answer(write, request)
    kind = request.query_params.get("format", "csv")
    run = request.path_params["run"]

    async def read() -> AsyncIterator[bytes]:
        with file:
            while block := await run_in_threadpool(file.read, 2**20):
                yield block

    headers = {"content-disposition": _attachment(f"{run}-samples.{kind}")}
    return StreamingResponse(read(), media_type=FORMATS[kind], headers=headers)


async def _report(viewer: Viewer, request: Request) -> Response:
    def write(request: Request) -> tuple[str, str]:
        return report_of(viewer.run(request), viewer.database, viewer.tokens, request.query_params)

    name, page = await viewer.answer(write, request)
    headers = {
        "content-disposition": _attachment(f"{name}.html"),
        "content-security-policy": _REPORT_POLICY,
    }
    return Response(page, media_type="text/html; charset=utf-8", headers=headers)


async def _sample_again(viewer: Viewer, request: Request) -> Response:
    try:
        asked = orjson.loads(await request.body())
    except orjson.JSONDecodeError:
        asked = None
    if not isinstance(asked, dict) or not isinstance(asked.get("sample"), str):
        raise RequestError("body must be an object with the id of a sample, got another one")
    count, is_exact = asked.get("count", 1), asked.get("exact", True)
    if type(count) is not int or not 1 <= count <= _MOST_AGAIN:
        raise RequestError(f"count must be in 1..{_MOST_AGAIN}, got {str(count)[:40]}")
    if type(is_exact) is not bool:
        raise RequestError(f"exact must be true or false, got {str(is_exact)[:40]}")
    run = await viewer.answer(viewer.run, request)
    sample = SampleId.parse(asked["sample"])
    job = viewer.jobs.start(run.folder, str(sample), count, is_exact=is_exact)
    return Response(orjson.dumps({"job": job}), media_type="application/json")


async def _show_job(viewer: Viewer, request: Request) -> Response:
    content = viewer.jobs.find(request.path_params["job"])
    return Response(orjson.dumps(content), media_type="application/json")


async def _listen(viewer: Viewer, _: Request) -> Response:
    events = viewer.live.listen()
    first = await anext(events)

    async def stream() -> AsyncIterator[bytes]:
        try:
            yield first
            async for event in events:
                yield event
        finally:
            await events.aclose()

    return StreamingResponse(stream(), media_type="text/event-stream")


async def _refuse_route(request: Request) -> Response:
    raise NotFoundError(
        f"path must be one that GET /api/schema lists, got {request.url.path[:200]!r}"
    )


async def _page(request: Request) -> Response:
    """An asset, or the page itself at every other path."""
    path = request.path_params["path"]
    if path.startswith("assets/"):
        name = path.removeprefix("assets/")
        file = ASSETS / name
        if "/" in name or name.startswith(".") or not file.is_file():
            raise NotFoundError(f"asset must be one of the page's, got {name[:80]!r}")
        return FileResponse(file, headers={"cache-control": "no-cache"})
    return FileResponse(ASSETS / "index.html")


def _attachment(name: str) -> str:
    safe = "".join(
        char if char.isascii() and (char.isalnum() or char in "-_.~") else "_" for char in name
    )
    return f'attachment; filename="{safe}"'


async def _refuse(_: Request, error: Exception) -> Response:
    return error_response(error)


async def _refuse_path(request: Request, error: Any) -> Response:
    return error_response(
        RequestError(
            f"{request.method} {request.url.path[:200]} must be asked otherwise, got "
            f"{error.status_code} {error.detail}"
        )
    )
