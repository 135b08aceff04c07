"""What is drawn in a terminal: texts made harmless, curves of braille dots, colors of numbers."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator, Sequence

from rich.style import Style
from rich.text import Text

_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""Braille's bits by row and column of a character."""
_BLANK = 0x2800
_REPLACED = "\N{REPLACEMENT CHARACTER}"
LINE_END = "⏎"

# Blue and orange are told apart by the color-blind, and both carry white text.
_BLUE, _ORANGE, _RED = (38, 98, 190), (190, 96, 10), (176, 32, 32)
_VERSIONS = ((38, 98, 190), (150, 90, 20), (20, 120, 100), (130, 60, 140), (90, 90, 100))


def clean(text: str, *, keeps_lines: bool = False) -> str:
    """A text without anything that a terminal acts on: controls, escapes, marks of direction.

    A tab is a blank, a line end ``⏎`` (with ``keeps_lines`` and a new line); all others of that
    kind become U+FFFD. Marks that combine are left out, as a pile of them covers other lines.
    """
    end = f"{LINE_END}\n" if keeps_lines else LINE_END
    return "".join(_clean_character(character, end) for character in text)


def _clean_character(character: str, line_end: str) -> str:
    if character == "\n":
        return line_end
    if character == "\t":
        return " "
    kind = unicodedata.category(character)
    if kind in ("Mn", "Me"):
        return ""
    return _REPLACED if kind in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") else character


def cell(value: object, form: str = "", width: int | None = None) -> Text:
    """A value for a table: a number in a form, on the right; a text made harmless; - for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return Text("-", style="dim", justify="right")
    if isinstance(value, int | float) and not isinstance(value, bool):
        return Text(f"{value:{form}}", justify="right")
    # Long ones are cut first: cleaning looks at each character.
    shown = clean(str(value)[: (width or 200) + 1])
    return Text(shown if width is None or len(shown) <= width else shown[: width - 1] + "…")


def heading(name: str, *, is_number: bool) -> Text:
    """The title of a column, above its numbers."""
    return Text(name, justify="right" if is_number else "left")


def spark(values: Sequence[float | None], width: int = 16) -> Text:
    """A curve in one line."""
    return Text("\n".join(plot(values, width, 1)), style="cyan")


def plot(values: Sequence[float | None], width: int, height: int) -> list[str]:
    """A curve in ``height`` lines of ``width`` characters, each of two by four dots."""
    columns, rows = width * 2, height * 4
    points = list(_means(values, columns))
    known = [value for value in points if value is not None]
    grid = [[0] * width for _ in range(height)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    before: int | None = None
    for column, value in enumerate(points):
        if value is None:
            before = None
            continue
        share = (value - low) / (high - low) if high > low else 0.5
        row = round((1 - share) * (rows - 1))
        # The line goes on from the last point, so that a steep one has no holes.
        step = 0 if before is None or before == row else 1 if row > before else -1
        for dot in range(row if before is None else before + step, row + (step or 1), step or 1):
            grid[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        before = row
    return ["".join(chr(_BLANK + bits) for bits in line) for line in grid]


def _means(values: Sequence[float | None], most: int) -> Iterator[float | None]:
    """``most`` values: means of equal stretches, or points on the lines between fewer values."""
    count = len(values)
    if count == 0:
        return
    if count <= most:
        for column in range(most):
            place = column * (count - 1) / (most - 1) if most > 1 else 0.0
            left, right = (_finite(values[round_(place)]) for round_ in (math.floor, math.ceil))
            share = place - math.floor(place)
            yield None if left is None or right is None else left + share * (right - left)
        return
    for column in range(most):
        stretch = values[column * count // most : (column + 1) * count // most]
        known = [value for item in stretch if (value := _finite(item)) is not None]
        yield sum(known) / len(known) if known else None


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def shade_logprob(value: float) -> Style:
    """Red the more improbable a token was, from e^-0.1 (none) to e^-6."""
    return _shade(_RED, (-value - 0.1) / 5.9)


def shade_signed(value: float, largest: float) -> Style:
    """Blue above 0, orange below, as strong as ``value`` is beside ``largest``."""
    return _shade(_BLUE if value > 0 else _ORANGE, abs(value) / largest if largest else 0.0)


def shade_version(version: int) -> Style:
    """A color for each weight version, the next one another."""
    red, green, blue = _VERSIONS[version % len(_VERSIONS)]
    return Style.parse(f"white on rgb({red},{green},{blue})")


def _shade(color: tuple[int, int, int], strength: float) -> Style:
    if not strength > 0.02:
        return Style()
    strength = 0.25 + 0.75 * min(1.0, strength)
    red, green, blue = (round(24 + (part - 24) * strength) for part in color)
    return Style.parse(f"white on rgb({red},{green},{blue})")
