"""Every metric of a recipe, from ``training.run.metric_table``."""

from __future__ import annotations

import re
from collections.abc import Iterator

from training.run.metric_table import FAMILIES, METRICS, MetricNote

_NAME = re.compile(rf"\b(?:{'|'.join(FAMILIES)})/[\w/@{{}}]+")


def describe_metrics() -> str:
    """A section for each family, an entry for each metric."""
    lines: list[str] = []
    for family, title in FAMILIES.items():
        lines.append(f"## {family}/: {title[0].lower()}{title[1:]}\n")
        for note in METRICS:
            if note.name.startswith(f"{family}/"):
                lines += _describe_metric(note)
    return "\n".join(lines)


def _describe_metric(note: MetricNote) -> Iterator[str]:
    unit = f" · {note.unit}" if note.unit else ""
    yield f"`{note.name}`{unit}"
    yield f": {_mark_names(note.meaning)}"
    yield ""
    remedy = f" **If not:** {note.remedy}" if note.remedy else ""
    if note.healthy != "any":
        yield f"  **Healthy:** {_mark_names(note.healthy + '.' + remedy)}"
        yield ""


def _mark_names(text: str) -> str:
    """The text with the metrics that it names as code."""
    return _NAME.sub(lambda found: f"`{found[0]}`", text)
