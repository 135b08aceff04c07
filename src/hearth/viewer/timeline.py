"""What a run's ``timeline.jsonl`` says: its events, and the spans of single steps.

Spans stay in the file. What is kept of them is where in it each step's are, and when the step
ended.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hearth.records.timeline import ENDS, OLDER_CHECKPOINT, STARTS
from hearth.viewer.lines import GrowingFile, Line, parse_object

MOST_EVENTS = 20_000
MOST_SPANS = 20_000
_TEXT_FIELDS = {"type", "time", "step", "name", "text", "pid", "pid_started", "host", "boot_id"}


class RecordedTimeline:
    """What the file says now; ``refresh`` reads on. One thread at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = GrowingFile(path)
        self._forget()

    def _forget(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.turns: list[dict[str, Any]] = []
        """Those of them at which the run started, went on or ended; all, however many there are."""
        self.versions: list[tuple[int, int]] = []
        """Weight versions and the steps after which they were published."""
        self._places: dict[int, tuple[int, int]] = {}
        self._resumes: list[tuple[int, int]] = []
        self._ends: dict[int, float] = {}
        self._sessions: list[list[float]] = []
        self._kills: list[tuple[float, int]] = []
        """The last moments of sessions that did not end by themselves, and their last steps."""

    def refresh(self) -> None:
        """Read what was appended, or all of a file that was replaced."""
        is_new, lines = self._file.read_new()
        if is_new:
            self._forget()
        for line in lines:
            content = line.content
            if content.get("type") == "span":
                self._add_span(line)
            elif content.get("type") == "event" and _is_number(content.get("time")):
                self._add_event(line)

    def start(self) -> dict[str, Any]:
        """The event of the last start; {} where nothing is recorded."""
        return next((event for event in reversed(self.turns) if event["name"] in STARTS), {})

    def seconds(self, time: float) -> float | None:
        """How long the run had run at a unix time, without the time between its sessions."""
        place = bisect_right(self._sessions, time, key=lambda session: session[0]) - 1
        if place < 0:
            return None
        before = sum(end - start for start, end in self._sessions[:place])
        start, end = self._sessions[place]
        is_last = place == len(self._sessions) - 1
        return before + (time if is_last else min(time, end)) - start

    def step_ends(self) -> dict[int, float]:
        """Seconds at which each step's last span ended."""
        seconds = {step: self.seconds(end) for step, end in self._ends.items()}
        return {step: value for step, value in seconds.items() if value is not None}

    @property
    def duration(self) -> float | None:
        """Seconds that the run has run; None where nothing is recorded."""
        return sum(end - start for start, end in self._sessions) if self._sessions else None

    @property
    def origin(self) -> float | None:
        """Unix time of the first start."""
        return self._sessions[0][0] if self._sessions else None

    def list_events(self) -> list[dict[str, Any]]:
        """All events as the API gives them, and where a session ended without saying so, a kill."""
        events = [
            {
                "time": event["time"],
                "seconds": self.seconds(event["time"]),
                "step": event.get("step"),
                "name": event["name"],
                "text": str(event.get("text") or _describe(event)),
            }
            for event in self.events
        ]
        kills = [
            {
                "time": end,
                "seconds": self.seconds(end),
                "step": step,
                "name": "killed",
                "text": "the run's process was gone",
            }
            for end, step in self._kills
        ]
        return sorted(events + kills, key=lambda event: event["time"])

    def spans(self, first: int, last: int) -> list[dict[str, Any]]:
        """The spans of the steps from ``first`` to ``last``, as they were written, by start."""
        places = [place for step, place in self._places.items() if first <= step <= last]
        if not places:
            return []
        start, end = min(place[0] for place in places), max(place[1] for place in places)
        found = [
            line.content
            for line in self._read_between(start, end)
            if first <= line.content["step"] <= last and not self._is_void(line)
        ]
        return sorted(found, key=lambda span: span["start"])[:MOST_SPANS]

    def last_steps(self, count: int) -> tuple[int, int]:
        """The first and the last of the newest ``count`` steps that have spans."""
        last = max(self._places, default=0)
        return max(0, last - count + 1), last

    def _add_span(self, line: Line) -> None:
        span = line.content
        if not _is_span(span):
            return
        step, end = span["step"], float(span["end"])
        first = self._places.get(step, (line.place, 0))[0]
        self._places[step] = (first, line.place)
        self._ends[step] = max(end, self._ends.get(step, end))
        self._touch(end)
        if span["name"] == "weight_sync" and type(span.get("version")) is int:
            self.versions.append((span["version"], step))

    def _add_event(self, line: Line) -> None:
        event = line.content
        if not isinstance(event.get("name"), str):
            return
        if event["name"] in STARTS or event["name"] in ENDS:
            if event["name"] in STARTS and self.turns and self.turns[-1]["name"] in STARTS:
                self._kills.append((self._sessions[-1][1], max(self._places, default=0)))
            self.turns.append(event)
        if len(self.events) < MOST_EVENTS:
            self.events.append(event)
        time, step = float(event["time"]), event.get("step")
        if event["name"] in STARTS:
            self._sessions.append([time, time])
        self._touch(time)
        if event["name"] in ("resume", OLDER_CHECKPOINT) and type(step) is int:
            self._resumes.append((line.place, step))
            for later in [known for known in self._places if known > step]:
                del self._places[later]
                self._ends.pop(later, None)
            self.versions = [pair for pair in self.versions if pair[1] <= step]
        if event["name"] == "weight_sync" and type(event.get("version")) is int:
            pair = (event["version"], step if type(step) is int else 0)
            if pair not in self.versions[-2:]:
                self.versions.append(pair)

    def _touch(self, time: float) -> None:
        if self._sessions:
            self._sessions[-1][1] = max(self._sessions[-1][1], time)

    def _is_void(self, line: Line) -> bool:
        """Whether a later resume takes the step again."""
        return any(
            line.place < place and line.content["step"] > step for place, step in self._resumes
        )

    def _read_between(self, start: int, end: int) -> Iterator[Line]:
        """The spans of a part of the file, whose last line begins at ``end``."""
        try:
            with self._path.open("rb") as file:
                file.seek(start)
                place = start
                for text in file:
                    content = parse_object(text)
                    if content is not None and _is_span(content):
                        yield Line(place, content)
                    place += len(text)
                    if place > end:
                        return
        except OSError:
            return


def _is_span(content: dict[str, Any]) -> bool:
    return (
        content.get("type") == "span"
        and type(content.get("step")) is int
        and isinstance(content.get("lane"), str)
        and isinstance(content.get("name"), str)
        and _is_number(content.get("start"))
        and _is_number(content.get("end"))
    )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and abs(value) < 1e15


def _describe(event: dict[str, Any]) -> str:
    """What an event without a text has beside its time."""
    facts = {name: value for name, value in event.items() if name not in _TEXT_FIELDS}
    return ", ".join(f"{name} {value}" for name, value in facts.items())[:300]
