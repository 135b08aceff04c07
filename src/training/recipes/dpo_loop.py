"""Direct preference optimization (arXiv:2305.18290): of two answers, make the better one likelier.

The algorithm is the functions ``train``, ``train_step`` and ``dpo_loss`` of this file. A row is
``{"messages": [...], "chosen": ..., "rejected": ...}``: a prompt and two answers, each a text or
the messages of one. The reference is the policy as it is before the first step. Its logprobs are
computed once, before training, and kept in ``log_path/reference.json``, so that one trainer is
enough and a run that goes on has them again. At the start policy and reference are equal and the
loss of each pair is ln 2.

Prompt and answer are masked as in ``sft_loop``; the two answers to a prompt share its pass.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tinker
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from training.config.supervised import SupervisedConfig, supervised_problems
from training.config.validation import validate
from training.data.conversations import Conversation
from training.data.preferences import encode_pair
from training.data.rows import IndexedRow, Row
from training.run.base_loop import BaseLoop
from training.run.begin import begin_training
from training.run.command import recipe, run_command, run_until_signal
from training.run.reference import Reference, read_or_score
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
    """Settings of ``dpo_loop``."""

    log_path: str = "runs/dpo_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""
    learning_rate: float = 1e-6
    """AdamW's learning rate, before schedule and warm-up."""
    dpo_beta: float = 0.1
    """How strongly the policy is held to the reference; rewards are this times log ratios."""

    @property
    def card_tags(self) -> list[str]:
        """The model's tags."""
        return ["dpo"]

    def validate(self) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ConfigError: one line per problem.
        """
        own = list(supervised_problems(self))
        if not (math.isfinite(self.dpo_beta) and self.dpo_beta > 0):
            own.append(f"dpo_beta must be > 0, got {self.dpo_beta}")
        validate(self, own)


@recipe
def main(
    config: Config, rows: Sequence[Row] | None = None, *, eval_rows: Sequence[Row] | None = None
) -> RunSummary:
    """Train until the rows run out.

    ``rows`` replace ``config.dataset`` and ``eval_rows`` replace ``config.eval_dataset``; neither
    is cut to the config's number of rows. Ctrl-C and SIGTERM end the run cleanly: what was trained
    is in ``log_path``, and the platform is taken down.

    Raises:
        ConfigError: a setting or a row breaks its rule, or the chat template does not tell answers
            from prompts; nothing was started. Or the run goes on and its reference's logprobs are
            missing or of other rows.
    """
    config.validate()
    encoded = encode_rows(config, rows, eval_rows, encode_pair)
    with begin_training(config, encoded.tokenizer, encoded.rows, encoded.eval_rows) as (infra, run):
        run_until_signal(train(BaseLoop(config, infra, run), encoded))
        return run.summary(infra)


async def train(loop: SupervisedLoop, encoded: EncodedRows) -> None:
    """The reference once, then all steps, with held-out pairs judged before, between and after."""
    reference = await read_or_score(loop, encoded, score_pairs)
    await evaluate_if_due(loop, encoded, reference, always=True)
    for batch in list_batches(loop):
        await train_step(loop, batch, encoded, reference)
        await evaluate_if_due(loop, encoded, reference)
    await evaluate_if_due(loop, encoded, reference, always=True)
    await loop.save_and_export()


async def score_pairs(
    loop: SupervisedLoop, pairs: Sequence[Sequence[Conversation]]
) -> list[list[float]]:
    """The summed logprob of each pair's chosen and rejected answer, under the policy as it is."""
    answers = [answer for pair in pairs for answer in pair]
    scored = await loop.infra.policy_client.forward(list(map(to_datum, answers)))
    sums = [
        sum_answer(answer, output["logprobs"].to_torch())
        for answer, output in zip(answers, scored.loss_fn_outputs, strict=True)
    ]
    return torch.stack(sums).reshape(-1, 2).tolist()


def sum_answer(answer: Conversation, logprobs: Tensor) -> Tensor:
    """The logprob of a whole answer, from those of N - 1 targets."""
    return logprobs[torch.from_numpy(answer.is_said[1:])].double().sum()


def dpo_loss(policy: Tensor, reference: Tensor, beta: float) -> tuple[Tensor, dict[str, float]]:
    """Minus log sigmoid of the margin of each pair [P], and metrics, means over the pairs.

    ``policy`` and ``reference`` are logprobs of answers [P, 2], chosen and rejected. An answer's
    reward is ``beta`` times its log ratio of policy to reference, and the margin the difference.
    """
    rewards = beta * (policy - reference)
    margins = rewards[:, 0] - rewards[:, 1]
    losses = -logsigmoid(margins)
    told, at = rewards.detach().mean(0).tolist(), margins.detach()
    metrics = {
        "loss": float(losses.detach().mean()),
        "margin": float(at.mean()),
        "accuracy": float((at > 0).double().mean()),
        "chosen_reward": told[0],
        "rejected_reward": told[1],
    }
    return losses, metrics


async def train_step(
    loop: SupervisedLoop, batch: Sequence[IndexedRow], encoded: EncodedRows, reference: Reference
) -> None:
    """One optimizer step on the mean loss of a batch of pairs."""
    policy, clock, beta = loop.infra.policy_client, loop.run.clock, loop.config.dpo_beta
    answers = [answer for row in batch for answer in encoded.examples[row.source]]
    held = torch.tensor([reference.rows[row.source] for row in batch], dtype=torch.float64)

    def loss_fn(
        data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        sums = [sum_answer(*pair) for pair in zip(answers, logprobs, strict=True)]
        losses, metrics = dpo_loss(torch.stack(sums).reshape(-1, 2), held, beta)
        return 2 * losses.sum(), metrics  # a pair's loss for each of its two answers

    datums = [to_datum(answer) for answer in answers]
    with clock.span("perf/fwd_bwd_time"):
        result = await policy.forward_backward_custom(datums, loss_fn)
    with clock.span("perf/optim_step_time"):
        params = loop.adam_params([row.index for row in batch])
        done = await policy.optim_step(params, "num_sequences")  # divided by the answers, once
    metrics = {name: value for name, value in result.metrics.items() if ":" not in name}
    log_step(loop, batch, metrics, done, sum(datum.model_input.length for datum in datums))
    # After its record: a resumed run drops the records of steps that its checkpoint does not hold.
    await loop.save_if_due()


async def evaluate_if_due(
    loop: SupervisedLoop, encoded: EncodedRows, reference: Reference, *, always: bool = False
) -> None:
    """Loss, accuracy and margin of the held-out pairs, every ``eval_every`` steps."""
    run = loop.run
    if not run.is_eval_due(loop.config, run.step, always=always):
        return
    run.eval_begun = run.step
    with run.clock.span("perf/eval_time"):
        sums = await score_pairs(loop, encoded.eval_examples)
    held = torch.tensor(reference.eval_rows, dtype=torch.float64)
    _, metrics = dpo_loss(torch.tensor(sums, dtype=torch.float64), held, loop.config.dpo_beta)
    told = f"loss {metrics['loss']:.4f}, accuracy {metrics['accuracy']:.3f}"
    run.note_held_out(run.step, {f"eval/{name}": value for name, value in metrics.items()}, told)


def command(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Train with the settings that files and flags give; returns the exit code."""
    return run_command(Config(), main, arguments, program=program)


if __name__ == "__main__":
    sys.exit(command())
