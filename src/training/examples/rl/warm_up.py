"""Supervised training of an example's own model, before it is trained by reward."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from training.data.rows import Row
from training.recipes.sft_loop import Config, main

BATCH = 32


def warm_up(
    folder: Path,
    write_start: Callable[[Path], None],
    rows: Sequence[Row],
    *,
    learning_rate: float,
    max_seq_len: int,
) -> None:
    """Make a model's folder: what ``write_start`` writes, trained on the rows in their order.

    It appears whole or not at all. The run is beside it, as ``FOLDER.warm_up``, where a start after
    a kill goes on. Without rows nothing is trained. The same machine makes the same weights.
    """
    run = folder.with_name(f"{folder.name}.warm_up")
    start, made = run / "start", run / "start"
    if not start.exists():
        _write_whole(start, write_start)
    if rows:
        config = Config(
            log_path=str(run),
            base_model=str(start),
            batch_size=BATCH,
            shuffle=False,
            learning_rate=learning_rate,
            lr_schedule="linear",
            warmup_steps=0.05,
            beta2=0.98,
            weight_decay=0.0,
            max_seq_len=max_seq_len,
        )
        made = main(config, rows).model_path
        assert made is not None, "steps were taken"
    _write_whole(folder, lambda unfinished: shutil.copytree(made, unfinished))


def _write_whole(folder: Path, write: Callable[[Path], object]) -> None:
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    write(unfinished)
    unfinished.rename(folder)
