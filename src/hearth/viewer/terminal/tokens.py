"""One sample: its facts, and its tokens colored by one of their numbers."""

from __future__ import annotations

import asyncio
import base64
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import Screen
from textual.widgets import Footer, Static

from hearth.errors import HearthError
from hearth.records.layout import SampleId
from hearth.viewer.samples import Samples
from hearth.viewer.terminal.drawing import clean, shade_logprob, shade_signed, shade_version
from hearth.viewer.tokens import TokenReader

COLORS = ("behavior", "advantage", "gap", "ratio", "version", "none")
_TITLES = {
    "behavior": "logprob of the sampler (red: improbable)",
    "advantage": "advantage (blue above 0, orange below)",
    "gap": "trainer's logprob less the sampler's (blue above 0, orange below)",
    "ratio": "log of the ratio (blue above 0, orange below)",
    "version": "weight version",
    "none": "nothing",
}
MOST_TOKENS = 20_000
"""More of a sample are not drawn; the page in the browser has all."""
_FACTS = (
    "outcome",
    "reason",
    "reward",
    "advantage",
    "finish_reason",
    "length",
    "prompt_len",
    "turns",
    "tool_calls",
    "version",
    "parsed",
    "sample_s",
    "ground_truth",
)


class SampleScreen(Screen[None]):
    """One sample of a run, and from there its neighbors in the group."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("c", "color", "color"),
        Binding("left_square_bracket", "move('previous')", "previous"),
        Binding("right_square_bracket", "move('next')", "next"),
    ]

    def __init__(self, samples: Samples, reader: TokenReader, sample: str) -> None:
        super().__init__()
        self.samples = samples
        self.reader = reader
        self.sample = sample
        self.color = COLORS[0]
        self._content: dict[str, Any] | None = None

    def compose(self) -> ComposeResult:
        """The sample's id, its facts, its tokens, the keys."""
        yield Static("", classes="title")
        yield Static("", id="facts")
        with VerticalScroll():
            yield Static("", id="tokens")
        yield Footer()

    async def on_mount(self) -> None:
        """Read the sample."""
        await self._open(self.sample)
        self.query_one(VerticalScroll).focus()

    async def action_move(self, side: str) -> None:
        """Open the sample before or after this one in the group."""
        neighbor = self._content["neighbors"][side] if self._content else None
        if neighbor:
            await self._open(neighbor)

    def action_color(self) -> None:
        """Color by the next number that the sample has."""
        known = self._content["values"] if self._content else {}
        names = [name for name in COLORS if name == "none" or name in known]
        names = names or list(COLORS[-1:])
        place = names.index(self.color) if self.color in names else -1
        self.color = names[(place + 1) % len(names)]
        self._draw()

    async def _open(self, sample: str) -> None:
        try:
            self._content = await asyncio.to_thread(self._read, sample)
        except HearthError as error:
            self.query_one("#tokens", Static).update(Text(clean(str(error)), style="red"))
            return
        self.sample = sample
        self.query_one(VerticalScroll).scroll_home(animate=False)
        self._draw()

    def _read(self, sample: str) -> dict[str, Any]:
        content = self.reader.read(self.samples.run, SampleId.parse(sample))
        content["neighbors"] = self.samples.neighbors(SampleId.parse(sample))
        return content

    def _draw(self) -> None:
        content = self._content
        assert content is not None, "it has been read"
        color = self.color if self.color in content["values"] else "none"
        title = f"{self.samples.run.name}  {self.sample}  colors: {_TITLES[color]}"
        self.query_one(".title", Static).update(Text(clean(title)))
        self.query_one("#facts", Static).update(_describe(content))
        self.query_one("#tokens", Static).update(draw_tokens(content, color))


def draw_tokens(content: dict[str, Any], color: str) -> Text:
    """The tokens of a sample as text; what was not sampled is dim, special ones are in angles."""
    tokens, mask = content["tokens"], content["mask"]
    special = set(tokens["special"])
    shade = _shader(content, color)
    drawn = Text(overflow="fold")
    for place, text in enumerate(tokens["texts"][:MOST_TOKENS]):
        style = shade(place) if mask[place] else Style(dim=True)
        if place in special:
            style += Style(italic=True)
        shown = _show_bytes(tokens, place) if text is None else clean(text, keeps_lines=True)
        drawn.append(shown or "·", style)
    if len(tokens["texts"]) > MOST_TOKENS:
        left = len(tokens["texts"]) - MOST_TOKENS
        drawn.append(f"\n... {left} more tokens: the browser shows them", "dim")
    return drawn


def _show_bytes(tokens: dict[str, Any], place: int) -> str:
    """A token whose bytes are no text alone, in hexadecimal."""
    return f"<{base64.b64decode(tokens['bytes'][place]).hex(' ')}>"


def _shader(content: dict[str, Any], color: str) -> Callable[[int], Style]:
    values = content["values"].get(color)
    if color == "none" or values is None:
        return lambda _: Style()
    if color == "version":
        return lambda place: shade_version(int(values[place]))
    numbers: Sequence[float] = values
    if color == "ratio":
        numbers = [math.log(value) if value > 0 else 0.0 for value in values]
    if color == "behavior":
        return lambda place: _if_finite(numbers[place], shade_logprob)
    sampled = zip(numbers, content["mask"], strict=True)
    known = [abs(value) for value, is_sampled in sampled if is_sampled and math.isfinite(value)]
    largest = max(known, default=0.0)
    return lambda place: _if_finite(numbers[place], lambda value: shade_signed(value, largest))


def _if_finite(value: float, shade: Callable[[float], Style]) -> Style:
    return shade(float(value)) if math.isfinite(value) else Style()


def _describe(content: dict[str, Any]) -> Text:
    """The facts of a sample in a line or two."""
    facts = Text()
    for name in _FACTS:
        value = content.get(name)
        if value is None:
            continue
        shown = f"{value:.4g}" if isinstance(value, float) else clean(str(value)[:200])
        facts.append(f"{name} ", "dim")
        facts.append(f"{shown}   ")
    return facts
