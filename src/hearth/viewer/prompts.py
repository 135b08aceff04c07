"""One prompt through time: the answers to a row of the dataset, step by step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hearth.errors import NotFoundError, RequestError
from hearth.viewer.samples import MOST_LISTED, Filters, Samples, parse_count

SOLVED = 0.5
"""A reward above this counts as a right answer, as in the evaluations' accuracy."""
_SORTS = ("row", "times", "first_reward", "last_reward", "best", "solved_share")


def list_prompts(samples: Samples, query: Mapping[str, str]) -> dict[str, Any]:
    """Rows of the dataset with how their answers went; ``search`` looks into prompts.

    Raises:
        RequestError: a value breaks its rule.
    """
    table = samples.table
    sort = query.get("sort") or "row"
    if sort not in _SORTS:
        raise RequestError(f"sort must be one of {list(_SORTS)}, got {sort[:80]!r}")
    direction = "DESC" if query.get("descending") in ("1", "true") else "ASC"
    offset = parse_count(query, "offset", 0, 2**53)
    limit = parse_count(query, "limit", 200, MOST_LISTED)
    condition, values = "true", []
    if query.get("kind"):
        condition, values = "kind = ?", [query["kind"]]
    if query.get("search"):
        found = samples.find_text(Filters.parse({"search": query["search"], "in": "prompt"}))
        condition += f" AND place IN (SELECT place FROM {found})"
    # The mean of each step first, so that a step counts once however many answers it has.
    sql = f"""SELECT kind, row, count(*) AS times, arg_min(mean, step) AS first_reward,
        arg_max(mean, step) AS last_reward, max(best) AS best,
        sum(solved) / nullif(sum(known), 0) AS solved_share, max(place) AS place
        FROM (SELECT kind, row, step, avg(reward) AS mean, max(reward) AS best,
            count_if(reward > {SOLVED}) AS solved, count(reward) AS known, min(place) AS place
            FROM {table.name} WHERE {condition} AND segment = 0 GROUP BY kind, row, step)
        GROUP BY kind, row"""
    total = samples.database.query(f"SELECT count(*) FROM ({sql})", values)[0][0]
    found = samples.database.query(
        f"{sql} ORDER BY {sort} {direction} NULLS LAST, kind, row LIMIT {limit} OFFSET {offset}",
        values,
    )
    names = ("kind", "row", "times", "first_reward", "last_reward", "best", "solved_share")
    ends = samples.prompt_ends([record[-1] for record in found])
    rows = [
        {**dict(zip(names, record, strict=False)), "prompt_end": ends.get(record[-1], "")}
        for record in found
    ]
    return {"total": total, "rows": rows}


def show_prompt(samples: Samples, name: str) -> dict[str, Any]:
    """All answers to ``KIND.ROW``.

    Raises:
        NotFoundError: there are none.
    """
    kind, _, row = name.partition(".")
    if not row.removeprefix("-").isdecimal() or len(row) > 18:
        raise NotFoundError(f"a prompt must be KIND.ROW, got {name[:80]!r}")
    found = samples.read_whole("kind = ? AND row = ?", [kind, int(row)])
    if not found:
        raise NotFoundError(f"prompt {name[:80]} must be on record, got no answer to it")
    steps: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for sample in found:
        steps.setdefault((sample["step"], sample["index"]), []).append(sample)
    return {
        "kind": kind,
        "row": int(row),
        "prompt": found[0]["prompt"],
        "ground_truth": samples.ground_truth(found[0]["place"]),
        "steps": [_describe_step(group) for group in steps.values()],
    }


def _describe_step(group: list[dict[str, Any]]) -> dict[str, Any]:
    rewards = [row["reward"] for row in group if row["segment"] == 0 and row["reward"] is not None]
    first = group[0]
    return {
        "step": first["step"],
        "epoch": first["epoch"],
        "index": first["index"],
        "mean": sum(rewards) / len(rewards) if rewards else None,
        "samples": [
            {name: value for name, value in row.items() if name not in ("place", "prompt")}
            for row in group
        ],
    }
