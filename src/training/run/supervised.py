"""What the recipes share that train on given answers: encoded rows, and the metrics of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import tinker

from hearth.errors import ConfigError
from training.config.supervised import SupervisedConfig
from training.data.conversations import Conversation
from training.data.given_rows import choose_eval_rows, choose_rows
from training.data.rows import IndexedRow, Row
from training.platform.run_infra import TrainerInfra, check_platform, load_tokenizer
from training.run.base_loop import BaseLoop
from training.run.trackers import check_trackers
from training.samples.datums import datum_from_tokens_weights

logger = logging.getLogger(__name__)

EncodeRow = Callable[[Any, Row, str], Sequence[Conversation]]
"""A row's conversations; its arguments are the tokenizer, the row, and its name for messages."""
SupervisedLoop = BaseLoop[Any, TrainerInfra]


@dataclass(frozen=True)
class EncodedRows:
    """The rows of a run as token ids."""

    tokenizer: Any
    rows: list[Row]
    examples: list[Sequence[Conversation]]
    """The conversations of each row."""
    eval_rows: list[Row]
    eval_examples: list[Sequence[Conversation]]


def encode_rows(
    config: SupervisedConfig,
    rows: Sequence[Row] | None,
    eval_rows: Sequence[Row] | None,
    encode: EncodeRow,
) -> EncodedRows:
    """The rows to train on and the held-out ones; what is above ``max_seq_len`` is left out.

    Raises:
        ConfigError: a row breaks its rule, none is left, or the platform, a tracker or the
            tokenizer cannot be used; nothing was started.
    """
    check_platform(config)
    check_trackers(config)
    train, held_out = choose_rows(config, rows), choose_eval_rows(config, eval_rows)
    tokenizer = load_tokenizer(config.tokenizer_config)
    return EncodedRows(
        tokenizer,
        *_encode_fitting(config, tokenizer, train, encode, "rows"),
        *_encode_fitting(config, tokenizer, held_out, encode, "eval_rows"),
    )


def _encode_fitting(
    config: SupervisedConfig, tokenizer: Any, rows: Sequence[Row], encode: EncodeRow, name: str
) -> tuple[list[Row], list[Sequence[Conversation]]]:
    pairs = [(row, encode(tokenizer, row, f"{name}[{place}]")) for place, row in enumerate(rows)]
    fitting = [(row, parts) for row, parts in pairs if max(map(len, parts)) <= config.max_seq_len]
    if left_out := len(pairs) - len(fitting):
        logger.warning(
            "%d of the %d %s have more than max_seq_len=%d tokens and are left out",
            left_out,
            len(pairs),
            name,
            config.max_seq_len,
        )
    if pairs and not fitting:
        raise ConfigError(
            f"{name} must have one of at most max_seq_len={config.max_seq_len} tokens, got "
            f"{min(max(map(len, parts)) for _, parts in pairs)} in the shortest: raise max_seq_len"
        )
    return [row for row, _ in fitting], [parts for _, parts in fitting]


def to_datum(conversation: Conversation) -> tinker.Datum:
    """A datum whose weights are 1 on the answers that are trained, and 0 elsewhere."""
    return datum_from_tokens_weights(
        conversation.tokens.tolist(), conversation.is_said.astype(float).tolist()
    )


def list_batches(loop: SupervisedLoop) -> Iterator[list[IndexedRow]]:
    """The unfinished rows, ``batch_size`` at a time; at the end there may be fewer."""
    rows = loop.rows()
    while batch := list(islice(rows, loop.config.batch_size)):
        yield batch


def log_step(
    loop: SupervisedLoop,
    batch: Sequence[IndexedRow],
    metrics: Mapping[str, float],
    optimizer: tinker.OptimStepResponse,
    tokens: int,
) -> None:
    """Count a step that is done, and write its metrics; its passes computed so many ``tokens``."""
    run = loop.run
    loop.count_steps()
    run.cursor.finish(row.index for row in batch)
    own = {f"train/{name}": value for name, value in (optimizer.metrics or {}).items()}
    wall, times = max(run.now() - run.step_started, 1e-9), run.clock.take()
    computing = times.get("perf/fwd_bwd_time", 0.0) + times.get("perf/optim_step_time", 0.0)
    loop.log_step(
        {
            **{f"train/{name}": value for name, value in metrics.items()},
            **own,
            "train/step": float(run.step),
            "train/rows": float(len(batch)),
            **times,
            "perf/step_wall_time": wall,
            "perf/train_tokens_per_s": tokens / max(computing, 1e-9),
        }
    )
