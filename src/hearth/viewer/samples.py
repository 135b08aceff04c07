"""Questions about a run's samples: which there are, in which order, how many of what."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import duckdb

from hearth.errors import ConfigError, NotFoundError, RequestError
from hearth.records.layout import OUTCOMES, RESCORED, SampleId
from hearth.viewer.database import COLUMNS, NUMBERS, Database, SampleTable
from hearth.viewer.run import RecordedRun

MOST_LISTED = 1000
MOST_BINS = 400
_EXCERPT = 300
_BEFORE_MATCH = 80
_PROMPT_END = 160
_LONGEST_PATTERN = 1000
_ID_COLUMNS = ("step", "kind", "index", "completion", "segment")

ROW_COLUMNS = (
    "kind",
    "step",
    "index",
    "row",
    "epoch",
    "completion",
    "segment",
    "reward",
    "advantage",
    "outcome",
    "reason",
    "finish_reason",
    "length",
    "prompt_len",
    "turns",
    "tool_calls",
    "mean_logprob",
    "version",
    "parsed",
    "sample_s",
    "score_s",
    "started",
)
"""What a row of an answer has of the samples' columns."""

_COMPARISONS: dict[str, tuple[str, type]] = {
    "step_min": ('"step" >= ?', int),
    "step_max": ('"step" <= ?', int),
    "length_min": ('"length" >= ?', int),
    "length_max": ('"length" <= ?', int),
    "reward_min": ('"reward" >= ?', float),
    "reward_max": ('"reward" <= ?', float),
    "row": ('"row" = ?', int),
    "index": ('"index" = ?', int),
    "epoch": ('"epoch" = ?', int),
    "version": ('"version" = ?', int),
}
FILTERS = (
    "kind",
    "outcome",
    "finish_reason",
    *_COMPARISONS,
    "parsed",
    "search",
    "regex",
    "in",
    "rescored",
)
"""The names of all filters."""


@dataclass(frozen=True)
class Filters:
    """Which samples are asked for: conditions, each with its values, and what their texts have."""

    conditions: tuple[tuple[str, Any], ...] = ()
    pattern: str | None = None
    """RE2, to be found in the text or the prompt."""
    search: str | None = None
    """The text that the pattern stands for, where it is one."""
    places: str = "both"
    """``text``, ``prompt`` or ``both``: where to look for it."""
    rescored: str | None = None

    @classmethod
    def parse(cls, query: Mapping[str, str]) -> Filters:
        """The filters of a request.

        Raises:
            RequestError: a value breaks its rule.
        """
        conditions: list[tuple[str, Any]] = []
        for name in ("kind", "outcome", "finish_reason"):
            if query.get(name):
                wanted = query[name].split(",")
                conditions.append((f'"{name}" IN (SELECT unnest(?))', wanted))
        for outcome in query.get("outcome", "").split(","):
            if outcome and outcome not in OUTCOMES:
                raise RequestError(f"outcome must be of {OUTCOMES}, got {outcome[:80]!r}")
        for name, (condition, kind) in _COMPARISONS.items():
            if query.get(name):
                conditions.append((condition, parse_number(query, name, kind)))
        if query.get("parsed"):
            conditions.append(('"parsed" = ?', _parse_truth(query, "parsed")))
        places = query.get("in") or "both"
        if places not in ("text", "prompt", "both"):
            raise RequestError(f"in must be text, prompt or both, got {places[:80]!r}")
        return cls(
            tuple(conditions),
            _parse_pattern(query),
            query.get("search") or None,
            places,
            query.get("rescored") or None,
        )


@dataclass
class Selection:
    """SQL of the samples that filters choose: ``FROM source WHERE condition``, with its values."""

    source: str
    condition: str
    values: list[Any] = field(default_factory=list)
    has_rescored: bool = False

    @property
    def sql(self) -> str:
        """The clauses."""
        return f"FROM {self.source} WHERE {self.condition}"


class Samples:
    """The samples of one run, as its files are now. Any thread may call it."""

    def __init__(self, database: Database, run: RecordedRun) -> None:
        self.database = database
        self.run = run
        self.table: SampleTable = database.samples(run)

    def select(self, filters: Filters) -> Selection:
        """What filters choose.

        Raises:
            RequestError: the pattern is no regular expression.
            NotFoundError: the samples were not scored again under that name.
        """
        table = self.table
        selection = Selection(table.name, "true")
        if filters.rescored is not None:
            selection.source = (
                f"(SELECT r.*, n.reward AS rescored FROM {table.name} r "
                f"LEFT JOIN {self._load_rescored(filters.rescored)} n "
                "USING (step, kind, index, completion, segment))"
            )
            selection.has_rescored = True
        for condition, value in filters.conditions:
            selection.condition += f" AND {condition}"
            selection.values.append(value)
        if filters.pattern is not None:
            found = self.find_text(filters)
            selection.condition += f" AND place IN (SELECT place FROM {found})"
        return selection

    def page(self, query: Mapping[str, str]) -> dict[str, Any]:
        """The samples that a request asks for, and how many there are of them."""
        began = time.perf_counter()
        filters = Filters.parse(query)
        selection = self.select(filters)
        offset = parse_count(query, "offset", 0, 2**53)
        limit = parse_count(query, "limit", 200, MOST_LISTED)
        order = self._order(query, selection)
        extra = ", rescored" if selection.has_rescored else ""
        columns = ", ".join(f'"{name}"' for name in ROW_COLUMNS) + extra
        total = self.database.query(f"SELECT count(*) {selection.sql}", selection.values)[0][0]
        found = self.database.query(
            f"SELECT place, {columns} {selection.sql} ORDER BY {order} LIMIT {limit} "
            f"OFFSET {offset}",
            selection.values,
        )
        rows = [make_row(record[1:], selection.has_rescored) for record in found]
        places = [record[0] for record in found]
        excerpts = self._excerpts(places, filters)
        for place, row in zip(places, rows, strict=True):
            row |= excerpts.get(place, _NO_EXCERPT)
        milliseconds = (time.perf_counter() - began) * 1000
        return {"total": total, "rows": rows, "query_ms": round(milliseconds, 2)}

    def histogram(self, query: Mapping[str, str]) -> dict[str, Any]:
        """How many samples have which value of a column, in bins of equal width.

        Whole numbers of a small range have a bin each.
        """
        selection = self.select(Filters.parse(query))
        column = self._numeric(query.get("column", "reward"), selection, "column")
        bins = parse_count(query, "bins", 40, MOST_BINS, least=1)
        low, high, known, total = self.database.query(
            f"SELECT min({column}), max({column}), count({column}), count(*) {selection.sql}",
            selection.values,
        )[0]
        if not known:
            return {"edges": [], "counts": [], "missing": total}
        low, high = float(low), float(high)
        is_whole = (
            NUMBERS.get(column.strip('"'), "").endswith("INT")
            or NUMBERS.get(column.strip('"')) == "INTEGER"
        )
        if is_whole and high - low < bins:
            bins = int(high - low) + 1
            low, high = low - 0.5, high + 0.5
        elif high == low:
            low, high = low - 0.5, high + 0.5
        width = (high - low) / bins
        counts = [0] * bins
        for place, count in self.database.query(
            f"SELECT least(floor(({column} - ?) / ?), ?)::INTEGER AS bin, count(*) "
            f"{selection.sql} AND {column} IS NOT NULL GROUP BY bin",
            [low, width, bins - 1, *selection.values],
        ):
            counts[max(0, place)] += count
        edges = [low + width * place for place in range(bins)] + [high]
        return {"edges": edges, "counts": counts, "missing": total - known}

    def group(self, name: str) -> dict[str, Any]:
        """All samples of ``KIND.INDEX`` or ``KIND.INDEX.STEP``, with their texts.

        Raises:
            NotFoundError: there is no such group.
        """
        kind, *numbers = name.split(".")
        if len(numbers) not in (1, 2) or not all(_is_whole(number) for number in numbers):
            raise NotFoundError(f"a group must be KIND.INDEX or KIND.INDEX.STEP, got {name[:80]!r}")
        values: list[Any] = [kind, int(numbers[0])]
        condition = "kind = ? AND index = ?"
        if len(numbers) == 2:
            condition, values = f"{condition} AND step = ?", [*values, int(numbers[1])]
        samples = self.read_whole(condition, values)
        samples = [row for row in samples if row["step"] == samples[-1]["step"]]
        if not samples:
            raise NotFoundError(f"a group must be on record, got {name[:80]!r}")
        first = samples[0]
        rewards = [row["reward"] for row in samples if row["segment"] == 0]
        known = [reward for reward in rewards if reward is not None]
        mean = sum(known) / len(known) if known else None
        deviation = (
            (sum((reward - mean) ** 2 for reward in known) / len(known)) ** 0.5
            if mean is not None
            else None
        )
        return {
            "kind": kind,
            "index": first["index"],
            "row": first["row"],
            "epoch": first["epoch"],
            "step": first["step"],
            "outcome": first["outcome"],
            "reason": first["reason"],
            "prompt": first["prompt"],
            "ground_truth": self.ground_truth(first["place"]),
            "rewards": rewards,
            "mean": mean,
            "std": deviation,
            "samples": [_leave_out(row, "place", "prompt") for row in samples],
        }

    def read_whole(self, condition: str, values: Sequence[Any]) -> list[dict[str, Any]]:
        """Rows with whole texts and prompts in the order of steps."""
        columns = ", ".join(f'"{name}"' for name in ROW_COLUMNS)
        found = self.database.query(
            f"SELECT place, {columns} FROM {self.table.name} WHERE {condition} "
            "ORDER BY step, index, completion, segment LIMIT 5000",
            values,
        )
        places = [record[0] for record in found]
        source, texts_of = self.table.texts(places)
        texts = {
            place: (text, prompt)
            for place, text, prompt in self.database.query(
                f"SELECT place, text, prompt FROM {source}", texts_of
            )
        }
        rows: list[dict[str, Any]] = []
        for record in found:
            row = make_row(record[1:])
            text, prompt = texts.get(record[0], (None, None))
            prompt = prompt or ""
            row |= {"text": text or "", "text_start": 0, "prompt": prompt, "place": record[0]}
            row |= {"prompt_end": prompt[-_PROMPT_END:], "match": None, "match_in": None}
            rows.append(row)
        return rows

    def prompt_ends(self, places: Sequence[int]) -> dict[int, str]:
        """The last characters of prompts by place."""
        if not places:
            return {}
        source, values = self.table.texts(places)
        found = self.database.query(
            f"SELECT place, right(prompt, {_PROMPT_END}) FROM {source}", values
        )
        return {place: prompt or "" for place, prompt in found}

    def ground_truth(self, place: int) -> str | None:
        """The truth of a sample's row."""
        path = self.table.path_of(place)
        if path is None:
            return None
        try:
            found = self.database.query(
                "SELECT ground_truth FROM read_parquet(?, file_row_number = true) "
                "WHERE file_row_number = ?",
                [[str(path)], place % 2**32],
            )
        except duckdb.Error:  # gone meanwhile, or of a run that wrote none
            return None
        return found[0][0] if found else None

    def neighbors(self, sample: SampleId) -> dict[str, str | None]:
        """The ids before and after a sample in its group."""
        found = self.database.query(
            f"SELECT completion, segment FROM {self.table.name} WHERE kind = ? AND step = ? "
            "AND index = ? ORDER BY completion, segment",
            [sample.kind, sample.step, sample.index],
        )
        ids = [str(SampleId(sample.kind, sample.step, sample.index, *pair)) for pair in found]
        if str(sample) not in ids:
            return {"previous": None, "next": None}
        place = ids.index(str(sample))
        return {
            "previous": ids[place - 1] if place else None,
            "next": ids[place + 1] if place + 1 < len(ids) else None,
        }

    def spans(self, first: int, last: int, most: int) -> list[dict[str, Any]]:
        """When the samples of steps were sampled, as spans of the timeline."""
        found = self.database.query(
            f"SELECT kind, step, index, completion, segment, started, sample_s, version, row "
            f"FROM {self.table.name} WHERE step BETWEEN ? AND ? AND started IS NOT NULL "
            "AND sample_s IS NOT NULL ORDER BY started LIMIT ?",
            [first, last, most],
        )
        return [
            {
                "lane": "sampler",
                "name": "completion",
                "start": started,
                "end": started + seconds,
                "step": step,
                "version": version,
                "rows": [row],
                "sample": str(SampleId(kind, step, index, completion, segment)),
            }
            for kind, step, index, completion, segment, started, seconds, version, row in found
        ]

    def _order(self, query: Mapping[str, str], selection: Selection) -> str:
        ids = ", ".join(f'"{name}"' for name in _ID_COLUMNS)
        if not query.get("sort"):
            return ids
        column = self._numeric(query["sort"], selection, "sort")
        is_descending = "descending" in query and _parse_truth(query, "descending")
        return f"{column} {'DESC' if is_descending else 'ASC'} NULLS LAST, {ids}"

    def _numeric(self, name: str, selection: Selection, what: str) -> str:
        known = [*NUMBERS, *(["rescored"] if selection.has_rescored else [])]
        if name not in known:
            raise RequestError(f"{what} must be one of {sorted(known)}, got {name[:80]!r}")
        return f'"{name}"'

    def find_text(self, filters: Filters) -> str:
        """The table of places whose text or prompt the filters' pattern is found in."""
        table, places = self.table, filters.places
        if filters.search is not None and not filters.search.isascii():
            test, pattern = "contains(lower({}), lower(?))", filters.search
        else:
            test, pattern = "regexp_matches({}, ?)", filters.pattern or ""
        given = [pattern]
        literal = find_literal(pattern) if filters.search is None else ""
        if literal:  # searched ten times as fast, and few texts are left for the pattern
            test, given = f"contains({{0}}, ?) AND {test.replace('{}', '{0}')}", [literal, pattern]
        if table.has_text:
            tests = {
                "text": test.format("text"),
                "prompt": f"prompt_key IN (SELECT prompt_key FROM {table.prompts} "
                f"WHERE {test.format('prompt')})",
            }
            wanted = tests.values() if places == "both" else (tests[places],)
            halves = table.list_halves()
            sql = " UNION ALL ".join(
                f"SELECT place FROM {table.name} WHERE {half} AND ({' OR '.join(wanted)})"
                for half in halves
            )
            values = given * len(wanted) * len(halves)
        else:
            names = ("text", "prompt") if places == "both" else (places,)
            source, values = table.texts()
            values = [*values, *given * len(names)]
            sql = f"SELECT place FROM {source} WHERE {' OR '.join(map(test.format, names))}"
        try:
            return table.remember((test, pattern, places), sql, values)
        except duckdb.InvalidInputException as error:
            raise RequestError(
                f"regex must be a regular expression of RE2, got {pattern[:80]!r}: "
                f"{str(error).splitlines()[0][:200]}"
            ) from None

    def _excerpts(self, places: Sequence[int], filters: Filters) -> dict[int, dict[str, Any]]:
        """The beginning of each text, or the part of it where the pattern is found."""
        if not places:
            return {}
        source, values = self.table.texts(places)
        if filters.pattern is None:
            found = self.database.query(
                f"SELECT place, left(text, {_EXCERPT}), right(prompt, {_PROMPT_END}) FROM {source}",
                values,
            )
            return {
                place: {**_NO_EXCERPT, "text": text or "", "prompt_end": prompt or ""}
                for place, text, prompt in found
            }
        found = self.database.query(
            f"""SELECT place, hit, begins, substr(text, begins + 1, {_EXCERPT}),
                hit_at - begins - 1, right(prompt, {_PROMPT_END}), in_prompt FROM (
                SELECT *, CASE WHEN hit_at + length(hit) - 1 > {_EXCERPT}
                    THEN greatest(hit_at - 1 - {_BEFORE_MATCH}, 0) ELSE 0 END AS begins FROM (
                    SELECT *, strpos(text, hit) AS hit_at FROM (
                        SELECT place, text, prompt, regexp_extract(text, ?) AS hit,
                        regexp_extract(right(prompt, {_PROMPT_END}), ?) AS in_prompt
                        FROM {source})))""",
            [filters.pattern, filters.pattern, *values],
        )
        return {record[0]: _place_match(filters.places, record) for record in found}

    def _load_rescored(self, name: str) -> str:
        """The table of new rewards by sample."""
        if name not in self.run.list_rescored():
            raise NotFoundError(
                f"rescored must be one of {self.run.list_rescored()}, got {name[:80]!r}: "
                "run hearth rescore"
            )
        path = self.run.path(RESCORED, f"{name}.parquet")
        at = path.stat().st_mtime_ns if path.exists() else 0
        try:
            return self.table.remember(
                ("rescored", name, at),
                "SELECT step::BIGINT AS step, kind::VARCHAR AS kind, index::BIGINT AS index, "
                "completion::INTEGER AS completion, segment::INTEGER AS segment, "
                "any_value(CASE WHEN isfinite(reward::DOUBLE) THEN reward::DOUBLE END) AS reward "
                "FROM read_parquet(?) GROUP BY ALL",
                [[str(path)]],
            )
        except duckdb.Error as error:
            raise ConfigError(
                f"{path.name} must be a file of hearth rescore, got "
                f"{str(error).splitlines()[0][:200]}"
            ) from None


_NO_EXCERPT: dict[str, Any] = {
    "text": "",
    "text_start": 0,
    "prompt_end": "",
    "match": None,
    "match_in": None,
}


def make_row(values: Sequence[Any], has_rescored: bool = False) -> dict[str, Any]:
    """A row of an answer from the values of ``ROW_COLUMNS``."""
    names = (*ROW_COLUMNS, "rescored") if has_rescored else ROW_COLUMNS
    row = dict(zip(names, values, strict=True))
    return {
        "id": ".".join(
            str(row[name]) for name in ("kind", "step", "index", "completion", "segment")
        ),
        **row,
    }


def parse_number(query: Mapping[str, str], name: str, kind: Callable[[str], Any]) -> Any:
    """A number of a request.

    Raises:
        RequestError: it is none.
    """
    text = query[name]
    try:
        value = kind(text)
        if abs(value) < 2**62:
            return value
    except (ValueError, OverflowError):
        pass
    rule = "a whole number" if kind is int else "a number"
    raise RequestError(f"{name} must be {rule}, got {text[:80]!r}")


def parse_count(
    query: Mapping[str, str], name: str, default: int, most: int, *, least: int = 0
) -> int:
    """A count of a request between ``least`` and ``most``.

    Raises:
        RequestError: it is none.
    """
    if not query.get(name):
        return default
    value = parse_number(query, name, int)
    if not least <= value <= most:
        raise RequestError(f"{name} must be in {least}..{most}, got {value}")
    return value


def _parse_truth(query: Mapping[str, str], name: str) -> bool:
    text = query[name].lower()
    if text not in ("1", "0", "true", "false"):
        raise RequestError(f"{name} must be 1 or 0, got {text[:80]!r}")
    return text in ("1", "true")


def _parse_pattern(query: Mapping[str, str]) -> str | None:
    search, regex = query.get("search"), query.get("regex")
    if search and regex:
        raise RequestError("regex must be unset with search, got both: give one of them")
    text = search or regex
    if not text:
        return None
    if len(text) > _LONGEST_PATTERN:
        raise RequestError(
            f"search and regex must have at most {_LONGEST_PATTERN} characters, got {len(text)}"
        )
    return make_pattern(search) if search else regex


def make_pattern(text: str) -> str:
    """RE2 that finds a text, ignoring case.

    With classes like [kK] RE2 compares several bytes at once; its own flag for case also finds
    the Kelvin sign, and takes six times as long.
    """
    return "".join(_match_char(char) for char in text)


def _match_char(char: str) -> str:
    lower, upper = char.lower(), char.upper()
    if lower != upper and len(lower) == len(upper) == 1:
        return f"[{lower}{upper}]"
    return char if char.isalnum() else f"\\x{{{ord(char):x}}}"


def find_literal(regex: str) -> str:
    """The longest text that everything a regular expression matches has; "" where none is sure."""
    if re.search(r"\[:|\(\?(?!:)|\\[^dDwWsSbB\W_]", regex):
        return ""
    parts = re.findall(
        r"\\.|\[\^?\]?[^\]]*\]|\{[\d,]*\}|[\\\[\]{}()|^$.?*+]|[^\\\[\]{}()|^$.?*+]",
        regex,
        re.DOTALL,
    )
    runs = [""]
    depth = 0
    for part in parts:
        if part == "|" and depth == 0:
            return ""
        depth += {"(": 1, ")": -1}.get(part, 0)
        # A character before ?, * or {} may be missing; after it, and after +, a new text begins,
        # and so it does after a group, of which nothing is sure.
        if part[0] in "?*{":
            runs[-1] = runs[-1][:-1]
        if depth == 0 and len(part) == 1 and part not in "\\[]{}()^$.?*+":
            runs[-1] += part
        else:
            runs.append("")
    return max(runs, key=len)


def _is_whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and len(text) < 19


def _place_match(places: str, record: Sequence[Any]) -> dict[str, Any]:
    """Where a pattern is found in a sample; ``record`` has the columns that ``_excerpts`` reads."""
    _, found, start, text, at, prompt, in_prompt = record
    row = {**_NO_EXCERPT, "text": text or "", "text_start": start or 0, "prompt_end": prompt or ""}
    if places != "prompt" and found and text and at is not None:
        return {**row, "match": _count_units(text, at, at + len(found)), "match_in": "text"}
    row["text_start"] = 0
    if places != "text" and in_prompt and prompt:
        at = prompt.find(in_prompt)
        row["match"] = _count_units(prompt, at, at + len(in_prompt))
    return {**row, "match_in": "prompt"}


def _count_units(text: str, start: int, end: int) -> list[int]:
    """A stretch of characters in UTF-16 code units, as JavaScript counts."""
    end = min(end, len(text))
    return [len(text[:place].encode("utf-16-le", "surrogatepass")) // 2 for place in (start, end)]


def _leave_out(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in names}


assert set(ROW_COLUMNS) <= set(COLUMNS), "the table has what rows show"
