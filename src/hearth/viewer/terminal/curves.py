"""The numbers of a run: a line for each, and the chosen one drawn large."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import DataTable, Footer, Input, Static

from hearth.viewer.database import Database
from hearth.viewer.run import RecordedRun
from hearth.viewer.terminal.drawing import cell, clean, heading, plot, spark
from hearth.viewer.terminal.samples import SamplesScreen
from hearth.viewer.tokens import TokenReader

FIRST = (
    "rollout/raw_reward",
    "rollout/reward",
    "eval/accuracy",
    "train/ref_kl",
    "train/mean_kl",
    "rollout/entropy",
    "train/grad_norm",
    "train/ppo_clip_frac",
    "train/clip_frac",
    "tis/clip_frac",
    "parity/p95",
    "train/inference_diff",
    "version/sample_staleness_mean",
    "rollout/response_len/mean",
    "rollout/truncated_ratio",
    "signal/useful_row_ratio",
    "perf/rollout_samples_per_s",
)
"""What matters first; all other names follow in their order."""
LOOK_EVERY_S = 1.0
_PLOT_LINES = 10


class CurvesScreen(Screen[None]):
    """One run's numbers, read on while it runs."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("s", "samples", "samples"),
        Binding("slash", "search", "search"),
    ]

    def __init__(self, run: RecordedRun, database: Database, reader: TokenReader) -> None:
        super().__init__()
        self.run_shown = run
        self.database = database
        self.reader = reader
        self._signature: Any = None
        self._series: dict[str, tuple[list[int], list[float]]] = {}

    def compose(self) -> ComposeResult:
        """The run, the drawn curve, the names with their values, the keys."""
        yield Static("", classes="title")
        yield Static("", id="plot")
        yield Input(placeholder="a part of a name", compact=True, id="search")
        yield DataTable[Text](cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Read the numbers, and go on."""
        table = self.query_one(DataTable)
        for name in ("name", "last", "lowest", "highest", "curve"):
            is_number = name not in ("name", "curve")
            table.add_column(heading(name, is_number=is_number), key=name)
        self._refresh()
        table.focus()
        self.set_interval(LOOK_EVERY_S, self._refresh)

    def on_resize(self) -> None:
        """Draw as wide as there is room."""
        self._draw()

    def on_input_changed(self, _: Input.Changed) -> None:
        """List the names that have the text."""
        self._list_names()

    def on_input_submitted(self, _: Input.Submitted) -> None:
        """Back to the list."""
        self.query_one(DataTable).focus()

    def on_data_table_row_highlighted(self, _: DataTable.RowHighlighted) -> None:
        """Draw the chosen curve."""
        self._draw()

    def action_search(self) -> None:
        """Type a part of a name."""
        self.query_one(Input).focus()

    def action_samples(self) -> None:
        """Show the run's samples."""
        self.app.push_screen(SamplesScreen(self.run_shown, self.database, self.reader))

    def _refresh(self) -> None:
        run = self.run_shown
        signature = (run.signature(), run.state().state)
        if signature == self._signature:
            return
        self._signature = signature
        run.refresh()
        row = run.row()
        parts = [row["name"], row["state"], f"step {row['step'] or 0}"]
        parts += [text for text in (row["recipe"], row["policy_loss"], row["base_model"]) if text]
        if row["state_text"]:
            parts.append(row["state_text"])
        self.query_one(".title", Static).update(Text(clean("  ".join(parts))))
        self._series = _read_series(run)
        self._list_names()

    def _list_names(self) -> None:
        table = self.query_one(DataTable)
        wanted = self.query_one(Input).value.lower()
        chosen = _find_chosen(table)
        table.clear()
        names = [name for name in _order(self._series) if wanted in name.lower()]
        for name in names:
            known = [value for value in self._series[name][1] if math.isfinite(value)]
            cells = [cell(number, ".5g") for number in (known[-1], min(known), max(known))]
            table.add_row(cell(name, width=40), *cells, spark(known, 20), key=name)
        if chosen in names:
            table.move_cursor(row=names.index(chosen))
        self._draw()

    def _draw(self) -> None:
        panel = self.query_one("#plot", Static)
        name = _find_chosen(self.query_one(DataTable))
        if name is None or name not in self._series:
            panel.update(Text("no numbers yet" if not self._series else "no such name"))
            return
        steps, values = self._series[name]
        known = [value for value in values if math.isfinite(value)]
        width = max(10, self.size.width - 14)
        lines = plot(values, width, _PLOT_LINES)
        drawn = Text(no_wrap=True)
        drawn.append(f"{'':>11}{clean(name)}\n", style="bold")
        for number, line in enumerate(lines):
            edge = {0: max(known), len(lines) - 1: min(known)}.get(number)
            label = f"{edge:>10.4g} " if edge is not None else " " * 11
            drawn.append(label, style="dim")
            drawn.append(line + "\n", style="cyan")
        ends = f"step {steps[0]}", f"{steps[-1]}"
        drawn.append(" " * 11 + ends[0] + ends[1].rjust(width - len(ends[0])), style="dim")
        panel.update(drawn)


def _read_series(run: RecordedRun) -> dict[str, tuple[list[int], list[float]]]:
    """Steps and numbers by name; names without any number are left out."""
    found = run.metrics.series(run.metrics.names(), {})
    series: dict[str, tuple[list[int], list[float]]] = {}
    for part in (found["eval"], found):
        for name, values in part["series"].items():
            if any(math.isfinite(value) for value in values):
                series[name] = (part["steps"], values)
    return series


def _order(names: dict[str, Any]) -> list[str]:
    first = [name for name in FIRST if name in names]
    return [*first, *sorted(name for name in names if name not in first)]


def _find_chosen(table: DataTable[Text]) -> str | None:
    if not table.row_count:
        return None
    return table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value
