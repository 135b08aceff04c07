"""Supervised fine-tuning: train on the answers of given conversations, and on nothing else.

The algorithm is the two functions ``train`` and ``train_step`` of this file. A row is
``{"messages": [...]}`` and ends with the assistant's answer. The loss is the mean cross-entropy per
token over the answers of a batch: those of all its conversations, each token the same. The prompts
are read and not trained. Which tokens are an answer is what the chat template adds to the prompt
that a sampler would be given (``training.data.conversations``).

A row is encoded before anything is started, the trainer packs a batch into passes of
``trainer.micro_batch_tokens`` without padding, and neither changes the loss.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from training.config.supervised import SupervisedConfig, supervised_problems
from training.config.validation import validate
from training.data.conversations import Conversation, encode_conversation, read_messages, read_tools
from training.data.rows import IndexedRow, Row
from training.run.base_loop import BaseLoop
from training.run.begin import begin_training
from training.run.command import recipe, run_command, run_until_signal
from training.run.state import RunSummary
from training.run.supervised import (
    EncodedRows,
    SupervisedLoop,
    encode_rows,
    list_batches,
    log_step,
    to_datum,
)


@dataclass(kw_only=True)
class Config(SupervisedConfig):
    """Settings of ``sft_loop``."""

    log_path: str = "runs/sft_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""

    @property
    def card_tags(self) -> list[str]:
        """The model's tags."""
        return ["sft"]

    def validate(self) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ConfigError: one line per problem.
        """
        validate(self, supervised_problems(self))


@recipe
def main(
    config: Config, rows: Sequence[Row] | None = None, *, eval_rows: Sequence[Row] | None = None
) -> RunSummary:
    """Train until the rows run out.

    ``rows`` replace ``config.dataset`` and ``eval_rows`` replace ``config.eval_dataset``; neither
    is cut to the config's number of rows. A row has ``messages``, of which the last one is the
    assistant's, and may have ``tools`` for the chat template; the assistant's messages with
    ``"weight": 0`` are not trained. Ctrl-C and SIGTERM end the run cleanly: what was trained is in
    ``log_path``, and the platform is taken down.

    Raises:
        ConfigError: a setting or a row breaks its rule, or the chat template does not tell answers
            from prompts; nothing was started.
    """
    config.validate()
    encoded = encode_rows(config, rows, eval_rows, encode_row)
    with begin_training(config, encoded.tokenizer, encoded.rows, encoded.eval_rows) as (infra, run):
        run_until_signal(train(BaseLoop(config, infra, run), encoded))
        return run.summary(infra)


def encode_row(tokenizer: Any, row: Row, where: str) -> list[Conversation]:
    """The row's conversation as token ids, its answers marked."""
    messages = read_messages(row.get("messages"), f"{where}.messages")
    return [encode_conversation(tokenizer, messages, read_tools(row, where), where)]


async def train(loop: SupervisedLoop, encoded: EncodedRows) -> None:
    """All steps, with the held-out loss before, after, and every ``eval_every`` steps."""
    await evaluate_if_due(loop, encoded, always=True)
    for batch in list_batches(loop):
        await train_step(loop, batch, encoded)
        await evaluate_if_due(loop, encoded)
    await evaluate_if_due(loop, encoded, always=True)
    await loop.save_and_export()


async def train_step(
    loop: SupervisedLoop, batch: Sequence[IndexedRow], encoded: EncodedRows
) -> None:
    """One optimizer step on the mean loss per answer token of a batch."""
    policy, clock = loop.infra.policy_client, loop.run.clock
    datums = [to_datum(chat) for row in batch for chat in encoded.examples[row.source]]
    with clock.span("perf/fwd_bwd_time"):
        result = await policy.forward_backward(datums, "cross_entropy")  # a sum over tokens
    with clock.span("perf/optim_step_time"):
        params = loop.adam_params([row.index for row in batch])
        done = await policy.optim_step(params, "num_loss_tokens")  # divided here, once
    loss = result.metrics["loss:sum"] / result.metrics["active_tokens:sum"]
    log_step(loop, batch, {"loss": loss}, done, sum(datum.model_input.length for datum in datums))
    # After its record: a resumed run drops the records of steps that its checkpoint does not hold.
    await loop.save_if_due()


async def evaluate_if_due(
    loop: SupervisedLoop, encoded: EncodedRows, *, always: bool = False
) -> None:
    """The mean loss per answer token of the held-out rows, every ``eval_every`` steps."""
    run = loop.run
    if not run.is_eval_due(loop.config, run.step, always=always):
        return
    run.eval_begun = run.step
    datums = [to_datum(chat) for example in encoded.eval_examples for chat in example]
    with run.clock.span("perf/eval_time"):
        result = await loop.infra.policy_client.forward(datums, "cross_entropy")
    tokens = result.metrics["active_tokens:sum"]
    loss = result.metrics["loss:sum"] / tokens
    run.note_held_out(run.step, {"eval/loss": loss, "eval/tokens": tokens}, f"loss {loss:.4f}")


def command(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Train with the settings that files and flags give; returns the exit code."""
    return run_command(Config(), main, arguments, program=program)


if __name__ == "__main__":
    sys.exit(command())
