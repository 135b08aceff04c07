"""Ray's reason for the death of an actor, in one line."""

from __future__ import annotations

import re

from ray.exceptions import OutOfMemoryError

_DETAIL = re.compile(
    r"Worker exit detail: (?P<detail>.*?)(?: There are some potential|$)", re.DOTALL
)
_LONGEST = 300


def explain_death(error: Exception, lost_node: str | None) -> str:
    """The reason of an actor's end; ``lost_node`` names its node where that is gone, too."""
    text = str(error)
    if lost_node is not None:
        return f"its machine was lost: {lost_node} is no longer in the cluster"
    if isinstance(error, OutOfMemoryError) or "running low on memory" in text:
        return f"its machine ran out of memory: {shorten_error(error)}"
    return f"its actor died: {shorten_error(error)}"


def shorten_error(error: Exception) -> str:
    """The text of an error of Ray's, without its advice."""
    text = str(error)
    match = _DETAIL.search(text)
    useful = match["detail"] if match is not None else text
    line = " ".join(useful.split()) or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
