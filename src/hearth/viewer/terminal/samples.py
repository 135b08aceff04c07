"""A run's samples in a table: filtered, searched and sorted as the server does it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from hearth.errors import HearthError
from hearth.viewer.database import Database
from hearth.viewer.run import RecordedRun
from hearth.viewer.samples import FILTERS, Samples
from hearth.viewer.terminal.drawing import cell, clean, heading
from hearth.viewer.terminal.tokens import SampleScreen
from hearth.viewer.tokens import TokenReader

PAGE = 200
LOOK_EVERY_S = 1.0
SORTS = ("step", "reward", "advantage", "length", "mean_logprob")
_COLUMNS: tuple[tuple[str, str], ...] = (
    ("kind", ""),
    ("step", ""),
    ("row", ""),
    ("completion", ""),
    ("reward", ".3f"),
    ("advantage", ".3f"),
    ("length", ""),
    ("outcome", ""),
    ("finish_reason", ""),
)
_TITLES = {"completion": "no.", "finish_reason": "finish", "advantage": "adv."}
_HELP = "words to find, or conditions: outcome=trained reward_min=1 step_max=50 kind=eval regex=..."


class SamplesScreen(Screen[None]):
    """Samples page by page; new ones come while the run goes on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "filter"),
        Binding("o", "sort", "order"),
        Binding("r", "reverse", "reverse"),
        Binding("n", "turn(1)", "next page"),
        Binding("p", "turn(-1)", "previous"),
    ]

    def __init__(self, run: RecordedRun, database: Database, reader: TokenReader) -> None:
        super().__init__()
        self.run_shown = run
        self.database = database
        self.reader = reader
        self.sort = SORTS[0]
        self.is_descending = True
        self.first = 0
        self.total = 0
        self._signature: Any = None

    def compose(self) -> ComposeResult:
        """The run and the order, the filter, the table, the keys."""
        yield Static("", classes="title")
        yield Input(placeholder=_HELP, compact=True)
        yield DataTable[Text](cursor_type="row", zebra_stripes=True)
        yield Footer()

    async def on_mount(self) -> None:
        """Show the newest, and go on."""
        table = self.query_one(DataTable)
        for name, _ in _COLUMNS:
            is_number = name not in ("kind", "outcome", "finish_reason")
            table.add_column(heading(_TITLES.get(name, name), is_number=is_number), key=name)
        table.add_column("text", key="text")
        table.focus()
        await self._look()
        self.set_interval(LOOK_EVERY_S, self._look)

    async def on_input_submitted(self, _: Input.Submitted) -> None:
        """Ask with the filter."""
        self.first = 0
        await self._ask()
        self.query_one(DataTable).focus()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the sample."""
        if event.row_key.value is not None:
            samples = Samples(self.database, self.run_shown)
            self.app.push_screen(SampleScreen(samples, self.reader, event.row_key.value))

    def action_search(self) -> None:
        """Type a filter."""
        self.query_one(Input).focus()

    async def action_sort(self) -> None:
        """Sort by the next column."""
        self.sort = SORTS[(SORTS.index(self.sort) + 1) % len(SORTS)]
        await self._ask()

    async def action_reverse(self) -> None:
        """Turn the order round."""
        self.is_descending = not self.is_descending
        await self._ask()

    async def action_turn(self, pages: int) -> None:
        """Show another page."""
        first = self.first + pages * PAGE
        if 0 <= first < self.total:
            self.first = first
            await self._ask()

    async def _look(self) -> None:
        signature = self.run_shown.signature()
        if signature != self._signature:
            self._signature = signature
            await self._ask()

    async def _ask(self) -> None:
        query = parse_filter(self.query_one(Input).value) | {
            "sort": self.sort,
            "descending": str(self.is_descending).lower(),
            "offset": str(self.first),
            "limit": str(PAGE),
        }
        title = self.query_one(".title", Static)
        try:
            page = await asyncio.to_thread(self._read_page, query)
        except HearthError as error:
            title.update(Text(clean(str(error)), style="red"))
            return
        self.total = page["total"]
        table = self.query_one(DataTable)
        place = table.cursor_row
        table.clear()
        for row in page["rows"]:
            cells = [cell(row[name], form, 14) for name, form in _COLUMNS]
            table.add_row(*cells, cell(row["text"], width=120), key=row["id"])
        table.move_cursor(row=min(place, max(0, len(page["rows"]) - 1)))
        order = f"by {self.sort} {'downward' if self.is_descending else 'upward'}"
        last = min(self.first + PAGE, self.total)
        shown = f"{self.first + 1} to {last} of {self.total}" if self.total else "none"
        title.update(Text(clean(f"{self.run_shown.name}  samples {shown}  {order}")))

    def _read_page(self, query: Mapping[str, str]) -> dict[str, Any]:
        self.run_shown.refresh()
        return Samples(self.database, self.run_shown).page(query)


def parse_filter(text: str) -> dict[str, str]:
    """``name=value`` words as the server's filters, all others together as what to find."""
    query: dict[str, str] = {}
    words: list[str] = []
    for word in re.findall(r"[\w]+=\"[^\"]*\"|\S+", text):
        name, separator, value = word.partition("=")
        if separator and name in FILTERS:
            query[name] = value.strip('"')
        else:
            words.append(word)
    if words:
        query["search"] = " ".join(words)
    return query
