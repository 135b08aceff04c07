"""The application of the terminal, and the table of runs that it begins with."""

from __future__ import annotations

import time
from typing import Any, ClassVar

from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from hearth.viewer.database import Database
from hearth.viewer.library import Library
from hearth.viewer.run import RecordedRun
from hearth.viewer.terminal.curves import CurvesScreen
from hearth.viewer.terminal.drawing import cell, heading, spark
from hearth.viewer.tokens import TokenReader

LOOK_EVERY_S = 1.0
"""How often the files of runs that are shown are looked at."""
_STATES = {"running": "green", "ended": "", "failed": "red", "killed": "red", "stalled": "yellow"}


class TerminalViewer(App[None]):
    """Runs, curves and samples in a terminal."""

    CSS = """
    Screen { background: $background; }
    .title { height: 1; padding: 0 1; background: $panel; text-style: bold; }
    .note { height: auto; max-height: 4; padding: 0 1; color: $text-muted; }
    DataTable { height: 1fr; background: $background; }
    Input { height: 1; border: none; padding: 0 1; background: $surface; }
    #plot { height: 14; padding: 0 1; }
    #tokens { padding: 0 1; }
    #facts { height: auto; padding: 0 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("escape", "leave", "back"),
    ]
    ENABLE_COMMAND_PALETTE = False

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self.database = Database(library.roots)
        self.reader = TokenReader()

    def on_mount(self) -> None:
        """Begin with the runs, or with the only one."""
        self.push_screen(RunsScreen(self.library))
        runs = self.library.runs()
        if len(runs) == 1:
            self.push_screen(CurvesScreen(runs[0], self.database, self.reader))

    def action_leave(self) -> None:
        """Leave the field that is typed in, else what is shown; the runs stay."""
        if isinstance(self.focused, Input):
            self.screen.query_one(DataTable).focus()
        elif len(self.screen_stack) > 2:
            self.pop_screen()

    def on_unmount(self) -> None:
        """Close the database."""
        self.database.close()


class RunsScreen(Screen[None]):
    """All runs, read again while they grow."""

    def __init__(self, library: Library) -> None:
        super().__init__()
        self.library = library
        self._shown: Any = None
        self._runs: list[RecordedRun] = []

    def compose(self) -> ComposeResult:
        """A title, the table, the keys."""
        yield Static("", classes="title")
        yield DataTable[Text](cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Fill the table, and keep it so."""
        table = self.query_one(DataTable)
        for name in ("run", "state", "step", "rows", "reward", "held-out", "time", "curve", "loss"):
            is_number = name in ("step", "reward", "held-out")
            table.add_column(heading(name, is_number=is_number), key=name)
        self._refresh()
        self.set_interval(LOOK_EVERY_S, self._refresh)

    def _refresh(self) -> None:
        runs = self.library.runs()
        rows = [run.row() for run in runs]
        shown = [(row["key"], row["state"], row["step"], row["updated"]) for row in rows]
        if shown == self._shown:
            return
        self._shown, self._runs = shown, runs
        title = f"{len(runs)} runs" if len(runs) != 1 else "1 run"
        self.query_one(".title", Static).update(Text(f"hearth view  {title}"))
        table = self.query_one(DataTable)
        place = table.cursor_row
        table.clear()
        for row in rows:
            table.add_row(*_make_cells(row), key=row["key"])
        table.move_cursor(row=min(place, max(0, len(rows) - 1)))

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the run."""
        app = self.app
        assert isinstance(app, TerminalViewer)
        if event.row_key.value is not None:
            run = self.library.find(event.row_key.value)
            app.push_screen(CurvesScreen(run, app.database, app.reader))


def _make_cells(row: dict[str, Any]) -> list[Text]:
    rows_total = row["rows_total"]
    done = row["rows_done"]
    rows = None if done is None else f"{done}/{rows_total}" if rows_total else str(done)
    state = Text(row["state"], style=_STATES.get(row["state"], ""))
    return [
        cell(row["name"], width=32),
        state,
        cell(row["step"]),
        cell(rows),
        cell(row["reward"], ".3f"),
        cell(row["held_out"], ".3f"),
        cell(_describe_time(row["duration_s"])),
        spark(row["spark"]),
        cell(row["policy_loss"], width=20),
    ]


def _describe_time(seconds: float | None) -> str | None:
    if seconds is None:
        return None
    if seconds < 60:
        return f"{seconds:.0f} s"
    return (
        time.strftime("%H:%M:%S", time.gmtime(seconds))
        if seconds < 86400
        else (f"{seconds / 86400:.1f} d")
    )
