"""One run, group or sample as one HTML file that needs nothing else: no scripts, no network."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup

from hearth.errors import RequestError
from hearth.records.layout import SampleId
from hearth.viewer.database import Database
from hearth.viewer.library import flatten
from hearth.viewer.run import RecordedRun
from hearth.viewer.samples import Samples
from hearth.viewer.tokens import TokenReader

_CURVES = (
    ("rollout/raw_reward", "reward"),
    ("eval/accuracy", "held-out accuracy"),
    ("train/ref_kl", "KL to the reference"),
    ("rollout/entropy", "entropy"),
    ("train/grad_norm", "gradient norm"),
    ("train/ppo_clip_frac", "clip share"),
    ("parity/p95", "parity, 95th percentile"),
    ("version/sample_staleness_mean", "staleness"),
    ("rollout/response_len/mean", "completion length"),
    ("rollout/truncated_ratio", "truncated"),
    ("signal/useful_row_ratio", "rows with signal"),
    ("perf/rollout_samples_per_s", "samples per second"),
)
_WIDTH, _HEIGHT = 320, 110
_MOST_POINTS = 400
_MOST_TOKENS = 20_000
_SHOWN = 8
"""Samples of a run's report, of the best and of the worst."""
_INVISIBLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]"
)
"""Characters that show nothing, or change how others are shown."""


def report_of(
    run: RecordedRun, database: Database, reader: TokenReader, query: Mapping[str, str]
) -> tuple[str, str]:
    """The file's name without its end, and the page.

    Raises:
        RequestError: ``what`` is no kind of report.
        NotFoundError: there is no such group or sample.
    """
    what, name = query.get("what", "run"), query.get("id", "")
    samples = Samples(database, run)
    if what == "run":
        content = _describe_run(run, samples)
    elif what == "group":
        content = {"group": samples.group(name)}
    elif what == "sample":
        content = _describe_sample(run, reader, SampleId.parse(name))
    else:
        raise RequestError(f"what must be run, group or sample, got {what[:80]!r}")
    page = (
        _environment()
        .get_template(f"{what}.html")
        .render(
            run=run.row(), written=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()), **content
        )
    )
    return "-".join(part for part in (run.key, name or what) if part), page


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hearth.viewer", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["shown"] = show_text
    environment.filters["number"] = format_number
    return environment


def show_text(text: str | None) -> Markup:
    """A text as HTML, in which what is invisible or reorders others is written out."""
    escaped = str(Markup.escape(text or ""))
    return Markup(  # noqa: S704 - escaped above; what is put in is a number
        _INVISIBLE.sub(lambda char: f'<i class="code">U+{ord(char[0]):04X}</i>', escaped)
    )


def format_number(value: object, digits: int = 4) -> str:
    """A number as people read it; a dash for none."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "\u2013" if value is None or isinstance(value, float) else str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def _describe_run(run: RecordedRun, samples: Samples) -> dict[str, Any]:
    series = run.metrics.series([name for name, _ in _CURVES], {})
    curves = []
    for name, title in _CURVES:
        source = series["eval"] if name.startswith("eval/") else series
        points = _points(source["steps"], source["series"].get(name, ()))
        if points:
            curves.append({"title": title, "name": name, "last": points[-1][1], **_draw(points)})
    columns = {"sort": "reward", "limit": str(_SHOWN)}
    return {
        "curves": curves,
        "config": flatten(run.config()),
        "evaluations": run.metrics.evaluations(),
        "events": run.events()[-200:],
        "best": samples.page({**columns, "descending": "1"})["rows"],
        "worst": samples.page(columns)["rows"],
        "width": _WIDTH,
        "height": _HEIGHT,
    }


def _points(steps: Sequence[int], values: Sequence[float]) -> list[tuple[int, float]]:
    known = [pair for pair in zip(steps, values, strict=False) if math.isfinite(pair[1])]
    every = max(1, math.ceil(len(known) / _MOST_POINTS))
    return known[::every] if every == 1 or not known else [*known[::every], known[-1]]


def _draw(points: Sequence[tuple[int, float]]) -> dict[str, Any]:
    """The line of points in a box, and the numbers at its edges."""
    steps, values = [point[0] for point in points], [point[1] for point in points]
    left, right, low, high = min(steps), max(steps), min(values), max(values)
    wide, tall = max(right - left, 1), (high - low) or 1.0
    line = " ".join(
        f"{(step - left) / wide * (_WIDTH - 4) + 2:.1f},"
        f"{_HEIGHT - 2 - (value - low) / tall * (_HEIGHT - 4):.1f}"
        for step, value in points
    )
    return {"line": line, "left": left, "right": right, "low": low, "high": high}


def _describe_sample(run: RecordedRun, reader: TokenReader, sample: SampleId) -> dict[str, Any]:
    content = reader.read(run, sample)
    values = content["values"]
    logprobs = values.get("policy", values.get("behavior"))
    tokens = content["tokens"]
    special = set(tokens["special"])
    parts = []
    for part in content["parts"]:
        places = range(part["start"], min(part["end"], _MOST_TOKENS))
        parts.append(
            {
                **part,
                "tokens": [
                    {
                        "text": tokens["texts"][place],
                        "bytes": tokens["bytes"][place],
                        "is_special": place in special,
                        "shade": _shade(logprobs, place, part["sampled"]),
                        "title": _title(place, tokens["ids"][place], values),
                    }
                    for place in places
                ],
            }
        )
    return {"sample": content, "parts": parts, "is_cut": len(tokens["ids"]) > _MOST_TOKENS}


def _shade(logprobs: np.ndarray | None, place: int, is_sampled: bool) -> int:
    """0 for likely to 4 for unlikely tokens; 0 where there is no logprob."""
    if logprobs is None or not is_sampled or not math.isfinite(logprobs[place]):
        return 0
    return sum(float(logprobs[place]) < bound for bound in (-0.1, -0.7, -2.0, -5.0))


def _title(place: int, number: int, values: Mapping[str, np.ndarray]) -> str:
    facts = [
        f"{name} {format_number(array[place].item())}"
        for name, array in values.items()
        if not (array.dtype.kind == "f" and not math.isfinite(array[place]))
    ]
    return "  ".join([f"token {place}", f"id {number}", *facts])
