"""On-policy distillation: the student samples, a teacher scores every token, the student follows.

The algorithm is the functions ``train``, ``sample_group``, ``train_step`` and the two ways to
follow a teacher, ``follow_sampled`` and ``follow_top``, of this file. Windows and steps are those
of ``rl_loop``. The teacher is a second deployment, whose weights stay.

``distill_loss="reverse_kl"``: each sampled token's advantage is the teacher's logprob less the
student's. Its mean is minus the KL from student to teacher, which the policy gradient lowers, token
by token ("On-Policy Distillation", Thinking Machines 2025). ``"top_k"``: at each sampled place the
student learns the teacher's probabilities of its ``teacher_top_k`` most probable tokens, the KL
from teacher to student, where the student's own answers lead (arXiv:2306.13649).

Rewards are watched and not trained: they say what the distillation is for.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import tinker
import torch
from torch import Tensor

from hearth.errors import TransportError
from hearth.sdk import DeploymentSampler
from training.config.parts import DeployConfig
from training.config.single_turn import SingleTurnConfig
from training.config.validation import counts_below_one, validate
from training.data.rows import IndexedRow, Row
from training.environments.choose import Given, GivenEnvironment, choose_scored_rows
from training.platform.teacher import check_teacher, provision_teacher
from training.rewards import AnyReward
from training.rollouts.single_turn import sample_row
from training.run.begin import begin_run
from training.run.command import recipe, run_command, run_until_signal
from training.run.loop import Loop, RunSummary
from training.run.window import SampledWindow
from training.samples import RowOutcome, score_row, to_datums
from training.samples.groups import TrainSample
from training.update import PolicyUpdate, StepBatch, policy_loss
from training.update.policy_losses import LossFunction


@dataclass(kw_only=True)
class Config(SingleTurnConfig):
    """Settings of ``distillation_loop``."""

    log_path: str = "runs/distillation_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""
    teacher_model: str = ""
    """Model that scores the student's answers, with the student's tokenizer: a registered name, a
    folder or a hub id."""
    teacher: DeployConfig = field(default_factory=DeployConfig)
    """The teacher's deployment; teacher.deployment_id names one that runs."""
    distill_loss: Literal["reverse_kl", "top_k"] = "reverse_kl"
    """What the student follows: the teacher's logprobs of the tokens that it sampled itself, or the
    teacher's most probable tokens at their places."""
    teacher_top_k: int = 16
    """With distill_loss=top_k: how many tokens of the teacher, 20 at most."""
    policy_loss: str = "importance_sampling"
    """With distill_loss=reverse_kl: the loss that takes the advantages of tokens."""
    kl_beta: float = 0.0
    """Weight of a KL to a frozen copy of the student as it began; 0 needs no such copy."""
    truncated_completions: Literal["drop", "score"] = "score"
    """What becomes of completions cut by max_completion_tokens: score trains the tokens that are
    there, drop leaves them out."""

    @property
    def objective_name(self) -> str:
        """What is minimized."""
        return self.distill_loss

    @property
    def card_tags(self) -> list[str]:
        """The model's tags."""
        return ["distillation", self.distill_loss]

    @property
    def least_completions(self) -> int:
        """Each token is scored by itself: one completion is enough."""
        return 1

    def validate(self) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ConfigError: one line per problem.
        """
        own = list(counts_below_one(self, "teacher_top_k"))
        if not self.teacher_model:
            own.append("teacher_model must be a registered name, a folder or a hub id, got ''")
        if self.temperature != 1.0:
            own.append(
                f"temperature must be 1, got {self.temperature}: the teacher's logprobs are of "
                "temperature 1, and those of the student are compared with them"
            )
        if self.teacher_top_k > MOST_TOP:
            own.append(f"teacher_top_k must be <= {MOST_TOP}, got {self.teacher_top_k}")
        for name, usual in (("kl_beta", 0.0), ("ppo_n_minibatches", 1)):
            if self.distill_loss == "top_k" and getattr(self, name) != usual:
                value = getattr(self, name)
                own.append(f"{name} must be {usual:g} with distill_loss='top_k', got {value}")
        validate(self, own)


MOST_TOP = 20
"""Most probable tokens that a deployment tells."""


@recipe
def main(
    config: Config,
    rows: Sequence[Row] | None = None,
    *,
    reward_fn: AnyReward | None = None,
    eval_rows: Sequence[Row] | None = None,
    environment: GivenEnvironment | None = None,
) -> RunSummary:
    """Train until the rows run out, as ``rl_loop.main``.

    Rewards are measured, of what is sampled and of held-out rows, and change nothing. For rows
    without right answers give ``training.rewards.no_reward``.

    Raises:
        ConfigError: a setting or a row breaks its rule, or the teacher has another tokenizer;
            nothing was started.
        ParityError: sampler and trainer disagree, and ``parity_stops`` is on.
    """
    config.validate()
    given = Given(environment, rows, eval_rows)
    rows, eval_rows, reward_fn = choose_scored_rows(config, given, reward_fn)
    check_teacher(config, config.teacher_model, config.teacher)
    most = config.max_concurrent
    with (
        begin_run(config, rows, eval_rows, max_concurrent=most) as (infra, run),
        provision_teacher(config, infra, config.teacher_model, config.teacher, most) as teacher,
    ):
        run_until_signal(train(Loop(config, infra, run), teacher, reward_fn))
        return run.summary(infra)


async def train(loop: Loop[Config], teacher: DeploymentSampler, reward_fn: AnyReward) -> None:
    """All windows, with a weight sync after each."""
    sync, run = loop.config.sync, loop.run
    if sync.before_training or (sync.interval > 0 and run.must_publish(loop.infra)):
        await loop.sync_weights()
    await loop.evaluate_if_due(reward_fn, always=True)
    for rows in loop.windows():
        first_step = run.step
        sample = partial(sample_group, loop, teacher, reward_fn)
        async with SampledWindow(loop, rows, sample) as window:
            while await train_step(loop, window):
                pass
        if sync.interval > 0 and run.step > first_step:
            await loop.sync_weights()
        await loop.evaluate_if_due(reward_fn)
    await loop.evaluate_if_due(reward_fn, always=True)
    await loop.save_and_export()


async def sample_group(
    loop: Loop[Config], teacher: DeploymentSampler, reward_fn: AnyReward, row: IndexedRow
) -> RowOutcome:
    """One row: the student's completions, with what the teacher says of each of their tokens."""
    config = loop.config
    with loop.run.busy.sample():
        sampled = await sample_row(config, loop.infra, row)
    scored = await score_row(config, sampled, reward_fn)
    if scored.dropped:
        return scored.drop(scored.dropped)
    untaught = [0.0] * len(scored.samples)
    samples = [sample for [sample] in to_datums(scored.trajectories, untaught, config.replay)]
    try:
        if config.distill_loss == "top_k":
            work = [follow_top(teacher, sample, config.teacher_top_k) for sample in samples]
        else:
            work = [follow_sampled(teacher, sample) for sample in samples]
        followed = await asyncio.gather(*work)
    except TransportError as error:
        return replace(scored.drop("failed"), error=error)
    means = [mean_advantage(sample) for sample in followed]
    return scored.keep(means, [[sample] for sample in followed])


async def follow_sampled(teacher: DeploymentSampler, sample: TrainSample) -> TrainSample:
    """The sample with an advantage for each sampled token: the teacher's logprob less its own."""
    rollout, count = sample.rollout, sample.rollout.completion_len
    (told,) = await teacher.score_token_ids([rollout.tokens], last=count)
    own = sample.behavior_logprobs[-count:].tolist()
    gaps = [theirs - mine for theirs, mine in zip(told, own, strict=True)]
    return replace(sample, advantage=[0.0] * (len(rollout.tokens) - 1 - count) + gaps)


async def follow_top(teacher: DeploymentSampler, sample: TrainSample, k: int) -> TrainSample:
    """The sample with K + 1 targets for each token: the sampled one, and the teacher's likeliest.

    Their weights are 0, and the teacher's probabilities among its K; all are 0 in the prompt.
    """
    rollout, count = sample.rollout, sample.rollout.completion_len
    told = await teacher.score_top_tokens(rollout.tokens, k, last=count)
    length = len(rollout.tokens) - 1
    targets = torch.zeros((length, k + 1), dtype=torch.int64)
    targets[:, 0] = torch.tensor(rollout.tokens[1:])
    targets[-count:, 1:] = torch.tensor([[token for token, _ in top] for top in told])
    logprobs = torch.tensor([[logprob for _, logprob in top] for top in told], dtype=torch.float64)
    weights = torch.zeros((length, k + 1))
    weights[-count:, 1:] = logprobs.softmax(1).float()
    inputs = {"target_tokens": targets, "weights": weights}
    datum = tinker.Datum(
        model_input=sample.datum.model_input,
        loss_fn_inputs={
            name: tinker.TensorData.from_torch(value) for name, value in inputs.items()
        },
    )
    return replace(sample, datum=datum, advantage=sample.mask.tolist())


def mean_advantage(sample: TrainSample) -> float:
    """Per sampled token."""
    assert isinstance(sample.advantage, Sequence), "one for each token"
    return math.fsum(sample.advantage) / sample.rollout.completion_len


def distillation_loss(config: Config, batch: StepBatch) -> LossFunction:
    """The loss over a batch, a sum over tokens, with ``teacher_kl`` among its metrics."""
    if config.distill_loss == "top_k":
        return top_k_loss
    loss_fn = policy_loss(config, batch)
    assert callable(loss_fn), "it runs here"
    tokens = sum(sample.rollout.completion_len for sample in batch.samples)
    gaps = [mean_advantage(sample) * sample.rollout.completion_len for sample in batch.samples]
    return with_metric(loss_fn, "teacher_kl", -math.fsum(gaps) / tokens)


def with_metric(loss_fn: LossFunction, name: str, value: float) -> LossFunction:
    """The same loss with a metric more."""

    def loss_with_metric(
        data: list[tinker.Datum], logprobs: list[Tensor]
    ) -> tuple[Tensor, dict[str, float]]:
        loss, metrics = loss_fn(data, logprobs)
        return loss, metrics | {name: value}

    return loss_with_metric


def top_k_loss(data: list[tinker.Datum], logprobs: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
    """The KL from the teacher's probabilities of its K tokens to the student's, summed over tokens.

    ``logprobs`` are the student's of all candidates [N - 1, K + 1].
    """
    weights = torch.cat([datum.loss_fn_inputs["weights"].to_torch() for datum in data])
    loss = (torch.xlogy(weights, weights) - weights * torch.cat(logprobs)).sum()
    tokens = int(weights.any(1).sum())
    return loss, {"teacher_kl": float(loss.detach()) / tokens, "active_tokens": float(tokens)}


async def train_step(loop: Loop[Config], window: SampledWindow) -> bool:
    """One optimizer step on the window's next groups, as they arrive; False when none are left."""
    config, run = loop.config, loop.run
    update = PolicyUpdate(
        config, loop.infra, run.clock, run.kl, run.comparable_version, loop.before_step
    )
    trained_version = run.version + run.steps_since_sync
    while groups := await window.next_piece():
        with run.busy.train():
            for batch in await update.prepare(groups):
                await update.forward_backward(batch, distillation_loss(config, batch))
    if not update.groups:
        return False
    with run.busy.train():
        await update.optim_step()
    loop.count_step(update)
    run.cursor.finish(group.row.index for group in update.groups)
    loop.log_step(loop.step_metrics(update, trained_version))
    # After its record: a resumed run drops the records of steps that its checkpoint does not hold.
    await loop.save_if_due()
    return True


def command(arguments: Sequence[str] | None = None, program: str | None = None) -> int:
    """Train with the settings that files and flags give; returns the exit code."""
    return run_command(Config(), main, arguments, program=program)


if __name__ == "__main__":
    sys.exit(command())
