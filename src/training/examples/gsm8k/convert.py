"""Convert GSM8K's ``question``/``answer`` lines to rows with ``messages`` and ``ground_truth``.

``python -m training.examples.gsm8k.convert --source train.jsonl --output gsm8k.jsonl``
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import tyro
from rich.console import Console

from hearth.errors import ConfigError
from hearth.files import write_file
from training.rewards import marked_answer
from training.run.command import run_to_exit_code

INSTRUCTION = "Solve the problem and put the final number into <answer></answer>."


@dataclass(kw_only=True)
class ConvertOptions:
    """Convert GSM8K's lines to rows for the recipes."""

    source: str
    """GSM8K's JSONL file: ``question`` and ``answer``, whose last line is ``#### NUMBER``."""
    output: str
    """JSONL file to write."""
    max_rows: int = 0
    """Number of rows to convert; 0 converts all."""


def convert_row(line: dict[str, Any], *, where: str) -> dict[str, Any]:
    """One GSM8K line as a row.

    Raises:
        ConfigError: ``question`` is missing, or ``answer`` has no ``####`` line.
    """
    truth = marked_answer(str(line.get("answer", "")))
    if not isinstance(line.get("question"), str) or truth is None:
        raise ConfigError(
            f"{where} must hold question and an answer with '#### NUMBER', got {line}"
        )
    prompt = f"{line['question']}\n{INSTRUCTION}"
    return {
        "messages": [{"role": "user", "content": prompt}],
        "ground_truth": truth.replace(",", ""),
    }


def convert(source: str, output: str, max_rows: int = 0) -> int:
    """Convert a file; returns the number of rows written.

    Raises:
        ConfigError: the source is missing, or a line is no GSM8K line (it is named).
    """
    path = Path(source).expanduser()
    if not path.is_file():
        raise ConfigError(f"source must be GSM8K's JSONL file, got {source!r}: no such file")
    lines = path.read_bytes().splitlines()[: max_rows or None]
    rows: list[bytes] = []
    for number, line in enumerate(lines, start=1):
        try:
            content = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise ConfigError(f"{source}:{number} must be a JSON object: {error}") from None
        rows.append(orjson.dumps(convert_row(content, where=f"{source}:{number}")))
    write_file(Path(output).expanduser(), b"\n".join(rows) + b"\n")
    return len(rows)


def command(arguments: list[str] | None = None) -> int:
    """Convert as the flags say."""
    options = tyro.cli(ConvertOptions, args=arguments)

    def run() -> None:
        count = convert(options.source, options.output, options.max_rows)
        Console().print(f"{count} rows in {options.output}", highlight=False)

    return run_to_exit_code(run)


if __name__ == "__main__":
    sys.exit(command())
