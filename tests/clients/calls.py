"""Calls every public method of a client's classes, and says what became of each."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

ANSWERED, REFUSED, FAILED = "answered", "refused", "failed"
Calls = Mapping[str, Callable[[], Any]]


def find_methods(kinds: Sequence[type]) -> list[str]:
    """``Class.method`` of every public method; those ending with ``_async`` are the same ones."""
    return [
        f"{kind.__name__}.{name}"
        for kind in kinds
        for name in dir(kind)
        if not name.startswith("_") and not name.endswith("_async")
    ]


def get(value: Any) -> Any:
    """A result, whether it is in a future or not."""
    return value.result(120) if hasattr(value, "result") else value


def report(
    calls: Calls,
    methods: Sequence[str],
    refuses: Collection[str],
    refusals: tuple[type[Exception], ...],
) -> int:
    """Call each method, and print a line of JSON for it.

    ``refusals`` are the errors that refuse with a reason. Returns 0 if each method was answered, or
    refused where ``refuses`` names it.
    """
    warnings.simplefilter("ignore")
    is_right = True
    for method in [*(set(methods) - calls.keys()), *calls]:
        if method not in methods:
            continue
        outcome, says = FAILED, "nobody calls it"
        began_s = time.perf_counter()
        if method in calls:
            try:
                outcome, says = ANSWERED, type(get(calls[method]())).__name__
            except refusals as error:
                outcome, says = REFUSED, str(error)
            except Exception as error:  # noqa: BLE001 - the report says which
                says = f"{type(error).__name__}: {error}"
        is_expected = outcome == (REFUSED if method in refuses else ANSWERED)
        is_right &= is_expected
        seconds = round(time.perf_counter() - began_s, 2)
        line = {"method": method, "outcome": outcome, "says": says[:300], "seconds": seconds}
        sys.stdout.write(json.dumps(line | {"is_expected": is_expected}) + "\n")
        sys.stdout.flush()
    return 0 if is_right else 1
