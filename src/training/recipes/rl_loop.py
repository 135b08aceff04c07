"""GRPO and its relatives, synchronous: sample a batch, score it, take a step, sync weights, repeat.

The phases of one step, as ``train`` runs them:

1. sample: every row of the window gets ``completions_per_prompt`` completions, all at once;
2. score: rewards, then advantages within each group; groups without spread are dropped;
3. forward and backward: reference logprobs where KL asks for them, then the policy loss;
4. one optimizer step;
5. weight sync: the deployment serves the new weights before the next window samples.

A window holds ``weight_sync_interval`` steps. With 1 (the default) nothing overlaps and every
sample is on-policy. With N > 1 the rows of N steps sample together and train as they arrive. With 0
there is one window and no sync. ``async_rl_loop`` overlaps across windows as well.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal

import tinker

from hearth.errors import NotFoundError, RequestError, TransportError
from training.rewards import answer_reward
from training.utils.checkpoints import choose_checkpoint, read_manifest
from training.utils.command import refuse_inside_event_loop, run_command, run_until_signal
from training.utils.config import (
    CISPOConfig,
    DAPOConfig,
    DefaultFloat,
    DefaultInt,
    DeployConfig,
    DROConfig,
    GSPOConfig,
    HotloadConfig,
    InfraConfig,
    ResumeConfig,
    SyncSettings,
    TISConfig,
    TrainerConfig,
    WandBConfig,
    WeightSyncConfig,
    merged_sync,
    plain_config,
)
from training.utils.log_path import hold_log_path, prepare_log_path, write_config
from training.utils.metrics import Display, MetricsLog
from training.utils.rl.advantages import group_advantages, is_uniform, usable_group
from training.utils.rl.evaluation import RewardFunction
from training.utils.rl.objectives import (
    TrainSample,
    builtin_call,
    objective_options,
    old_rows,
    ref_rows,
    samples_of,
    tis_options,
)
from training.utils.rl.platform import PlatformSpec, RunInfra, check_platform, provision
from training.utils.rl.policy_losses import make_policy_loss_fn
from training.utils.rl.rollout import (
    Draw,
    PromptGroup,
    behavior_rows,
    rollout_metrics,
    row_seed,
    version_metrics,
)
from training.utils.rows import IndexedRow, Row, epoch_rows, load_rows, prompt_messages
from training.utils.run import (
    Run,
    RunSummary,
    batch_metrics,
    check_start,
    merged_metrics,
    step_times,
)
from training.utils.validation import validate

logger = logging.getLogger(__name__)

GSM8K_SAMPLE = (
    "https://raw.githubusercontent.com/eval-protocol/python-sdk/main/development/gsm8k_sample.jsonl"
)
# Rows that fail in a row before the run gives up: by then it is the platform, not the row.
MAX_FAILED_ROWS = 5
RECOVERABLE = (TransportError, NotFoundError, RequestError, TimeoutError)


@dataclass(kw_only=True)
class Config:
    """Settings of ``rl_loop``. Names from older documents are accepted and mean the same."""

    log_path: str = "runs/rl_loop"
    """Folder of the run: metrics.jsonl, config.json, checkpoints."""
    base_model: str = "accounts/fireworks/models/qwen3-8b"
    """Model to start from: a registered name, a folder or a hub id."""
    dataset: str = GSM8K_SAMPLE
    """Rows to train on: JSONL path or http(s) URL, lines of {messages, ground_truth}."""
    max_rows: int = 100
    """Number of dataset rows to use."""
    epochs: int = 1
    """Passes over the rows."""
    shuffle: bool = False
    """Give each epoch its own order."""
    seed: int = 0
    """Fixes sampling, shuffling and adapter initialization."""

    completions_per_prompt: int = 4
    """Completions per row: the group that rewards are centered in."""
    prompt_groups_per_step: int = 1
    """Groups per optimizer step."""
    max_completion_tokens: int = 1024
    """Longest completion, in tokens."""
    temperature: float = 1.0
    """Sampling temperature; policy logprobs are taken at the same temperature."""
    max_seq_len: int = 4096
    """Longest prompt plus completion, in tokens."""
    max_concurrent: int = 32
    """Sampling requests in flight, counted one by one."""
    truncated_completions: Literal["drop", "score"] = "drop"
    """What becomes of completions cut by max_completion_tokens."""

    policy_loss: str = "grpo"
    """grpo, importance_sampling, reinforce, dapo, dro, gspo or cispo."""
    loss_path: Literal["client", "builtin"] = "client"
    """Where the loss runs: in this file's process, or inside the trainer (no KL there)."""
    kl_beta: float = 0.001
    """Weight of the KL to the frozen reference (grpo and reinforce); 0 needs no reference."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that KL."""
    eps_clip: float = 0.2
    """PPO clip of grpo, downward; does nothing while the ratio is 1."""
    eps_clip_high: float | None = None
    """PPO clip of grpo, upward; None is the same as eps_clip."""
    ratio_log_cap: float = 20.0
    """Guard on the size of log ratios."""
    tis_enabled: bool = False
    """Truncated importance sampling against the sampler's logprobs, on top of any loss."""
    tis: TISConfig = field(default_factory=TISConfig)
    """Its cap and level."""
    dapo: DAPOConfig = field(default_factory=DAPOConfig)
    """Options of dapo."""
    gspo: GSPOConfig = field(default_factory=GSPOConfig)
    """Options of gspo."""
    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    """Options of cispo."""
    dro: DROConfig = field(default_factory=DROConfig)
    """Options of dro."""
    router_replay: bool = False
    """Replay the sampler's expert choices in the trainer (MoE)."""

    learning_rate: float = 1e-5
    """AdamW's learning rate."""
    beta1: float = 0.9
    """AdamW's first moment decay."""
    beta2: float = 0.999
    """AdamW's second moment decay."""
    eps: float = 1e-8
    """AdamW's denominator floor."""
    weight_decay: float = 0.01
    """AdamW's decoupled decay."""
    grad_clip_norm: float = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    grad_accumulation_normalization: Literal["num_loss_tokens", "num_sequences", "none"] = (
        "num_loss_tokens"
    )
    """What the summed gradient is divided by, in the one place that averages."""
    ppo_n_minibatches: int = 1
    """Optimizer steps per batch."""
    lora_rank: int = 0
    """0 trains all parameters, above 0 a LoRA adapter of that rank."""
    min_samples_per_fwd_bwd: int | None = None
    """Samples that start a forward and backward pass while others are drawn; None is the cap."""
    max_samples_per_fwd_bwd: int = 256
    """Cap on samples per forward and backward call."""

    weight_sync_interval: int = DefaultInt(1)
    """Optimizer steps per weight sync; 0 never syncs."""
    weight_sync_before_training: bool = False
    """Publish the initial weights before the first sample."""
    weight_sync_timeout: float = DefaultFloat(600.0)
    """Seconds until a snapshot must be served."""
    dcp_save_interval: int = DefaultInt(0)
    """Optimizer steps per resumable checkpoint; 0 writes none. Not given, the embedded platform
    writes one now and then, for at most a fiftieth of the time."""
    dcp_timeout: float = DefaultFloat(2700.0)
    """Seconds that writing a checkpoint may take."""
    save_final_checkpoint: bool = True
    """Write a checkpoint at the end too, where dcp_save_interval is on."""
    output_model_id: str | None = None
    """Promote the final weights to the model accounts/me/models/ID, in Hugging Face format."""
    merge_adapter: bool = False
    """Promote a LoRA adapter merged into its model, instead of as a PEFT adapter."""
    init_from_checkpoint: str | None = None
    """Start from another run's checkpoint: its folder, or JOB:NAME on a served platform."""
    warm_start_from_adapter: str | None = None
    """Start a LoRA policy from a PEFT adapter's folder."""
    keep_checkpoints: int | None = None
    """Resumable checkpoints to keep, the newest, and two at least; None keeps all that
    dcp_save_interval asks for."""
    cleanup_on_exit: bool = True
    """At the end cancel the trainers and scale the deployment to zero, where the run started them;
    a job or a running deployment that you name goes on running."""

    eval_dataset: str | None = None
    """Held-out rows, JSONL path or URL; None evaluates nothing."""
    eval_every: int = 0
    """Optimizer steps per evaluation; 0 evaluates at the start and the end only."""
    eval_rows: int = 256
    """Number of held-out rows to use."""
    eval_samples_per_prompt: int = 1
    """Completions per held-out row."""

    placement: Literal["inline", "process"] = "inline"
    """Embedded platform: trainer and deployment as threads of this process, or as processes."""
    trainer: TrainerConfig = field(default_factory=TrainerConfig)
    """Where trainers run."""
    deployment: DeployConfig = field(default_factory=DeployConfig)
    """The inference deployment and the tokenizer."""
    wandb: WandBConfig = field(default_factory=WandBConfig)
    """Weights & Biases."""
    resume: ResumeConfig = field(default_factory=ResumeConfig)
    """Where to go on from; a run with checkpoints in log_path goes on by itself."""
    infra: InfraConfig = field(default_factory=InfraConfig)
    """Older spelling of ``trainer``."""
    weight_sync: WeightSyncConfig = field(default_factory=WeightSyncConfig)
    """Older spelling of the ``weight_sync_*`` and ``dcp_*`` fields."""
    hotload: HotloadConfig = field(default_factory=HotloadConfig)
    """Oldest spelling of the same."""

    @property
    def sync(self) -> SyncSettings:
        """Weight sync settings of all spellings together.

        Raises:
            ConfigError: two spellings of one setting differ.
        """
        return merged_sync(self, self.weight_sync, self.hotload)

    @property
    def needs_reference(self) -> bool:
        """Whether anything asks for reference logprobs."""
        shape = self.trainer.reference_training_shape_id or self.infra.ref_training_shape_id
        return bool(self.kl_beta > 0 or shape or self.trainer.reference_job_id)

    def validate(self) -> None:
        """Check everything that can be checked without loading a model.

        Raises:
            ConfigError: one line per problem.
        """
        validate(self)


def main(
    config: Config, rows: Sequence[Row] | None = None, *, reward_fn: RewardFunction = answer_reward
) -> RunSummary:
    """Train until the rows run out.

    ``rows`` take the place of ``config.dataset`` and are not cut by ``max_rows``.
    ``reward_fn(text, row)`` scores one completion. Ctrl-C and SIGTERM end the run cleanly: what was
    trained is in ``log_path``, and the platform is taken down.

    Raises:
        ConfigError: a setting or a row breaks its rule; nothing was started.
    """
    started = time.perf_counter()
    refuse_inside_event_loop()
    config.validate()
    if rows is None:
        rows = load_rows(config.dataset, config.max_rows)
    eval_rows = load_rows(config.eval_dataset, config.eval_rows) if config.eval_dataset else []
    log_path = prepare_log_path(config.log_path)
    spec = PlatformSpec.of(config, log_path)
    check_platform(spec)
    with hold_log_path(log_path):
        checkpoints = read_manifest(log_path)
        resumed = choose_checkpoint(checkpoints, config.resume.resume_from, config.seed)
        resumed_step = resumed.step if resumed is not None else None
        if resumed is None:
            check_start(config)
        write_config(log_path, plain_config(config))
        with (
            Display.open(len(rows) * config.epochs) as display,
            provision(spec, on_status=display.note) as infra,
            MetricsLog.open(log_path, config.wandb, plain_config(config), resumed_step) as log,
        ):
            run = Run(log_path, log, display, rows, eval_rows, started, checkpoints=checkpoints)
            run.begin(config, infra, resumed)
            run_until_signal(train(config, infra, run, reward_fn))
            return run.summary(infra)


async def train(config: Config, infra: RunInfra, run: Run, reward_fn: RewardFunction) -> None:
    """All windows, with weights published between them."""
    is_synced = config.sync.interval > 0
    if config.sync.before_training or (is_synced and run.must_publish(infra)):
        await sync_weights(infra, run)
    await run.evaluate_if_due(config, infra, reward_fn, always=True)

    for window in windows(config, run):
        first_step = run.step
        await train_window(config, infra, run, window, reward_fn)
        if is_synced and run.step > first_step:
            await sync_weights(infra, run)  # 5.
        await run.evaluate_if_due(config, infra, reward_fn)

    run.mention_untrained_rows()
    await run.evaluate_if_due(config, infra, reward_fn, always=True)
    await run.save_if_due(config, infra, is_last=True)
    await run.export_model(config, infra)


async def train_window(
    config: Config, infra: RunInfra, run: Run, window: list[IndexedRow], reward_fn: RewardFunction
) -> None:
    """Sample all rows of a window together and train their groups as they come, to the last."""
    batch = Batch()
    run.step_started = time.perf_counter()
    async with aclosing(sample_window(config, infra, run, window, reward_fn)) as draws:
        async for draw in draws:  # 1. and 2.
            note_draw(run, draw)
            if draw.group is not None:
                batch.add(draw.group)
            while piece := batch.next_piece(config):
                with run.busy.train():
                    await forward_backward(config, infra, run, batch, piece)  # 3.
            if batch.is_full(config):
                await finish_step(config, infra, run, batch)  # 4.
                batch = Batch()
    if batch.groups:
        await finish_step(config, infra, run, batch)


def windows(config: Config, run: Run) -> Iterator[list[IndexedRow]]:
    """Unfinished rows in order, cut where the deployment gets new weights."""
    left = epoch_rows(
        run.rows, epochs=config.epochs, shuffle=config.shuffle, seed=config.seed,
        done=run.cursor.finished(),
    )  # fmt: skip
    size = config.sync.interval * config.prompt_groups_per_step
    while window := list(islice(left, size) if size else left):
        yield window


async def sample_window(
    config: Config, infra: RunInfra, run: Run, window: list[IndexedRow], reward_fn: RewardFunction
) -> AsyncGenerator[Draw]:
    """Outcomes of a window's rows, all sampled at once.

    In the order of the rows where a window is one step, so that a run repeats exactly; where
    training overlaps sampling, in the order in which they finish.
    """
    tasks = [asyncio.create_task(draw_row(config, infra, run, row, reward_fn)) for row in window]
    overlaps = config.sync.interval != 1 or config.min_samples_per_fwd_bwd is not None
    try:
        for task in asyncio.as_completed(tasks) if overlaps else tasks:
            with run.clock.span("perf/sample_wait_time"):
                draw = await task
            yield draw
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def draw_row(
    config: Config, infra: RunInfra, run: Run, row: IndexedRow, reward_fn: RewardFunction
) -> Draw:
    """Completions, rewards and advantages of one row, or the reason why it is dropped."""
    try:
        with run.busy.draw():
            completions = await infra.sampler.sample_with_tokens(
                prompt_messages(row.row), n=config.completions_per_prompt,
                max_tokens=config.max_completion_tokens, temperature=config.temperature,
                max_seq_len=config.max_seq_len, seed=row_seed(config.seed, row.index),
            )  # fmt: skip
    except RECOVERABLE as error:
        return Draw(row, dropped="failed", error=error)
    if not completions:
        return Draw(row, dropped="overlong_prompt")
    kept = [one for one in completions if is_scored(config, one.finish_reason)]
    rewards = [float(reward_fn(one.text, row.row)) for one in kept]
    reason = usable_group(rewards) or ("uniform" if is_uniform(rewards) else None)
    if reason is not None:
        return Draw(row, dropped=reason, completions=completions, rewards=rewards)
    group = PromptGroup(
        row=row,
        completions=kept,
        rewards=rewards,
        advantages=group_advantages(rewards),
        behavior_logprobs=[behavior_rows(one) for one in kept],
    )
    return Draw(row, group=group, completions=completions, rewards=rewards)


def is_scored(config: Config, finish_reason: str) -> bool:
    """Whether a completion may carry a reward."""
    return finish_reason != "length" or config.truncated_completions == "score"


def note_draw(run: Run, draw: Draw) -> None:
    """Count an outcome.

    Raises:
        HearthError: several rows failed one after the other; the last one's error.
    """
    run.stats.add(draw)
    if draw.group is None:
        run.cursor.finish([draw.row.index])
    if draw.error is None:
        run.failed_in_a_row = 0
        return
    run.failed_in_a_row += 1
    logger.warning("row %d is dropped: %s", draw.row.index, draw.error)
    if run.failed_in_a_row >= MAX_FAILED_ROWS:
        raise draw.error


@dataclass
class Batch:
    """The groups of one optimizer step, in pieces of one forward and backward call each."""

    groups: list[PromptGroup] = field(default_factory=list)
    waiting: list[PromptGroup] = field(default_factory=list)
    results: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)

    def add(self, group: PromptGroup) -> None:
        """Take one more group."""
        self.groups.append(group)
        self.waiting.append(group)

    def is_full(self, config: Config) -> bool:
        """Whether the step has all its groups."""
        return len(self.groups) >= config.prompt_groups_per_step

    def next_piece(self, config: Config, *, flush: bool = False) -> list[PromptGroup]:
        """Groups that are due for a forward and backward call: enough of them, or the last ones.

        Minibatches are cut from the whole batch, so it is then one piece.
        """
        most = config.max_samples_per_fwd_bwd // config.completions_per_prompt
        least = most
        if config.min_samples_per_fwd_bwd is not None:
            least = config.min_samples_per_fwd_bwd // config.completions_per_prompt
        if config.ppo_n_minibatches > 1:
            most = least = config.prompt_groups_per_step
        if not (flush or self.is_full(config) or len(self.waiting) >= least):
            return []
        piece, self.waiting = self.waiting[:most], self.waiting[most:]
        return piece


async def forward_backward(
    config: Config, infra: RunInfra, run: Run, batch: Batch, piece: Sequence[PromptGroup]
) -> None:
    """Add the policy loss's gradient of some groups; with minibatches, take their steps too."""
    samples = samples_of(piece)
    await score_reference(config, infra, run, samples)
    if config.ppo_n_minibatches > 1 or config.loss_path == "builtin":
        await score_old_policy(config, infra, run, samples)
    minibatches = chunks(samples, math.ceil(len(samples) / config.ppo_n_minibatches))
    for number, minibatch in enumerate(minibatches, start=1):
        for part in chunks(minibatch, config.max_samples_per_fwd_bwd):
            with run.clock.span("perf/fwd_bwd_time"):
                result = await policy_gradient(config, infra, part)
            batch.results.append((len(part), result.metrics))
        if number < len(minibatches):
            await optimizer_step(config, infra, run, batch)


def chunks(samples: Sequence[TrainSample], size: int) -> list[Sequence[TrainSample]]:
    """Contiguous slices of at most ``size`` samples."""
    return [samples[start : start + size] for start in range(0, len(samples), size)]


async def policy_gradient(
    config: Config, infra: RunInfra, samples: Sequence[TrainSample]
) -> tinker.ForwardBackwardOutput:
    """One forward and backward of ``samples`` under the configured loss."""
    objective, tis = objective_options(config), tis_options(config)
    if config.loss_path == "builtin":
        call = builtin_call(objective, config.policy_loss, tis, samples)
        return await infra.policy.inner.forward_backward(
            call.data, call.loss_fn, call.loss_fn_config | {"temperature": config.temperature}
        )
    loss_fn = make_policy_loss_fn(
        config.policy_loss,
        advantages=[one.advantage for one in samples],
        behavior_logprobs=[one.behavior_logprobs for one in samples],
        old_logprobs=old_rows(samples),
        ref_logprobs=ref_rows(samples),
        config=objective,
        tis=tis,
    )
    return await infra.policy.inner.forward_backward_custom(
        [one.datum for one in samples], loss_fn, temperature=config.temperature
    )


async def score_reference(
    config: Config, infra: RunInfra, run: Run, samples: Sequence[TrainSample]
) -> None:
    """Give every sample the frozen reference's logprobs, where there is a reference."""
    if infra.reference is None:
        return
    with run.clock.span("perf/ref_forward_time"):
        scored = await infra.reference.inner.forward(
            [one.datum for one in samples], "cross_entropy", {"temperature": config.temperature}
        )
    for sample, output in zip(samples, scored.loss_fn_outputs, strict=True):
        sample.ref_logprobs = output["logprobs"].data


async def score_old_policy(
    config: Config, infra: RunInfra, run: Run, samples: Sequence[TrainSample]
) -> None:
    """Give every sample the policy's logprobs before this batch moves it.

    Without minibatches nothing moves in between: the loss then takes the policy's own logprobs as
    the old ones, which is the same numbers for one forward less.
    """
    with run.clock.span("perf/old_policy_forward_time"):
        scored = await infra.policy.inner.forward(
            [one.datum for one in samples], "cross_entropy", {"temperature": config.temperature}
        )
    for sample, output in zip(samples, scored.loss_fn_outputs, strict=True):
        sample.old_logprobs = output["logprobs"].data


async def optimizer_step(config: Config, infra: RunInfra, run: Run, batch: Batch) -> None:
    """One AdamW step on what has accumulated."""
    params = tinker.AdamParams(
        learning_rate=config.learning_rate, beta1=config.beta1, beta2=config.beta2,
        eps=config.eps, weight_decay=config.weight_decay, grad_clip_norm=config.grad_clip_norm,
    )  # fmt: skip
    with run.clock.span("perf/optim_step_time"):
        done = await infra.policy.inner.optim_step(params, config.grad_accumulation_normalization)
    run.step += 1
    batch.results.append((0, done.metrics or {}))


async def finish_step(config: Config, infra: RunInfra, run: Run, batch: Batch) -> None:
    """Train what still waits, step the optimizer, and report."""
    with run.busy.train():
        while piece := batch.next_piece(config, flush=True):
            await forward_backward(config, infra, run, batch, piece)
        await optimizer_step(config, infra, run, batch)
    if math.isnan(run.first_step_s):
        run.first_step_s = time.perf_counter() - run.started
    run.cursor.finish(group.row.index for group in batch.groups)
    report_step(config, run, batch)
    # After its record: a resumed run drops the records of steps that its checkpoint does not hold.
    await run.save_if_due(config, infra)


async def sync_weights(infra: RunInfra, run: Run) -> None:
    """Publish the policy's weights; the next sample is drawn under them."""
    with run.clock.span("perf/weight_sync_time"):
        await asyncio.to_thread(infra.syncer.save_and_hotload, f"step-{run.step:05d}")
    run.version = infra.syncer.version


def report_step(config: Config, run: Run, batch: Batch) -> None:
    """Write the step's metrics and start counting for the next one."""
    metrics = {f"train/{name}": value for name, value in merged_metrics(batch.results).items()}
    metrics["train/step"] = float(run.step)  # the trainer's own count says nothing of this run
    metrics |= batch_metrics(batch.results, config.completions_per_prompt)
    metrics |= rollout_metrics(run.stats, batch.groups)
    metrics |= version_metrics(batch.groups, run.version)
    metrics |= step_times(run, batch.groups)
    run.log.write("train", run.step, metrics)
    run.display.step(run.step, run.cursor.count, metrics)
    run.start_step()


def command(arguments: Sequence[str] | None = None) -> int:
    """Train with the rl_loop recipe; every field of its config is a flag."""
    return run_command(Config, main, arguments, program="python -m training.recipes.rl_loop")


if __name__ == "__main__":
    sys.exit(command())
