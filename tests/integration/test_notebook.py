"""The notebook of the documentation runs from its first cell to its last."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOK = Path(__file__).parents[2] / "docs" / "notebooks" / "first_run.ipynb"


def read_outputs(notebook: Any, word: str) -> dict[str, str]:
    """What the cell whose code has ``word`` shows, by type; printed lines as ``stdout``."""
    (cell,) = [cell for cell in notebook.cells if word in cell.source and "outputs" in cell]
    shown: dict[str, str] = {}
    for output in cell.outputs:
        shown |= output.get("data", {})
        if output.output_type == "stream":
            shown[output.name] = shown.get(output.name, "") + output.text
    return shown


def test_the_notebook_goes_from_rows_to_a_plot_and_a_table_of_samples(tmp_path, monkeypatch):
    for name in ("HEARTH_URL", "HEARTH_API_KEY", "FIREWORKS_BASE_URL", "FIREWORKS_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)

    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()

    assert read_outputs(notebook, "def reward")["text/plain"] == "(1.0, 0.0)"
    assert int(read_outputs(notebook, "summary.steps")["text/plain"]) > 4
    assert len(read_outputs(notebook, "metrics.plot")["image/png"]) > 1000
    assert read_outputs(notebook, "sort_values")["text/html"].count("<tr") == 1 + 16
