"""The way into a run that all recipes share: judge, lock the folder, provision, load."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, TypeVar

from hearth.collector import collect_rarely
from hearth.telemetry import Stopwatch
from training.config.objective import objective_options
from training.config.parts import own_config
from training.config.recipe import RecipeConfig
from training.config.rl import RLConfig
from training.config.single_turn import SingleTurnConfig
from training.data.rows import Row
from training.platform.run_infra import (
    RunInfra,
    TrainerInfra,
    check_platform,
    load_tokenizer,
    provision,
    provision_trainer,
)
from training.rollouts.router_replay import warn_dense_policy
from training.rollouts.single_turn import check_prompt
from training.run.checkpoints import choose_checkpoint, read_manifest
from training.run.closing import closing_lines, name_recipe
from training.run.continuation import (
    check_continuation,
    describe_training,
    find_changed,
    write_trained_on,
)
from training.run.log_path import (
    has_results,
    hold_log_path,
    move_aside,
    prepare_log_path,
    write_config,
)
from training.run.metrics import Display, MetricsLog
from training.run.recorder import Recorder, RecordLimits, go_on_with_samples, set_samples_aside
from training.run.state import Run, check_start
from training.run.timeline import Timeline
from training.run.token_bytes import read_tokens
from training.run.trackers import check_trackers, open_trackers

logger = logging.getLogger(__name__)

InfraT = TypeVar("InfraT", bound=TrainerInfra)
Provision = Callable[..., AbstractContextManager[InfraT]]
"""Provisions a run's platform: ``(config, tokenizer, on_status=...)``."""


@contextlib.contextmanager
def begin_run(
    config: RLConfig,
    rows: Sequence[Row],
    eval_rows: Sequence[Row] = (),
    *,
    max_concurrent: int,
    running_requests: Literal["drain", "keep"] = "drain",
) -> Iterator[tuple[RunInfra, Run]]:
    """A run that samples, on its platform, with what it starts from loaded.

    After the ``with`` both are closed. ``log_path`` belongs to the run meanwhile. What can be
    judged without the platform is judged before anything is started.

    Raises:
        ConfigError: the folder, a checkpoint, the tokenizer or a setting cannot be used.
        HearthError: the platform cannot be reached, or refuses.
    """
    started = time.perf_counter()
    check_platform(config)
    check_trackers(config)
    tokenizer = load_tokenizer(config.tokenizer_config)
    if isinstance(config, SingleTurnConfig) and rows:
        check_prompt(config, tokenizer, rows[0])
    warn_unbounded_ratio(config)
    sampling = partial(provision, max_concurrent=max_concurrent, running_requests=running_requests)
    with _begin(config, tokenizer, rows, eval_rows, sampling, started) as (infra, run):
        warn_dense_policy(config.replay, config.base_model, has_experts=infra.has_experts)
        with record_samples(config, run, tokenizer), _rare_collections():
            yield infra, run


@contextlib.contextmanager
def begin_training(
    config: RecipeConfig, tokenizer: Any, rows: Sequence[Row], eval_rows: Sequence[Row] = ()
) -> Iterator[tuple[TrainerInfra, Run]]:
    """``begin_run`` for a recipe that samples nothing, whose rows the tokenizer has encoded.

    Raises:
        ConfigError: the folder, a checkpoint or a setting cannot be used.
        HearthError: the platform cannot be reached, or refuses.
    """
    started = time.perf_counter()
    with _begin(config, tokenizer, rows, eval_rows, provision_trainer, started) as (infra, run):
        run.timeline.begin_step(run.step + 1)
        yield infra, run


@contextlib.contextmanager
def _begin(
    config: RecipeConfig,
    tokenizer: Any,
    rows: Sequence[Row],
    eval_rows: Sequence[Row],
    provision_infra: Provision[InfraT],
    started: float,
) -> Iterator[tuple[InfraT, Run]]:
    trained_on = describe_training(config, rows)
    # Late: a start that is refused leaves no empty folder.
    log_path = prepare_log_path(config.log_path)
    with hold_log_path(log_path), Display.open(len(rows) * config.epochs) as display:
        checkpoints = [] if config.resume.mode == "never" else read_manifest(log_path)
        resumed = choose_checkpoint(checkpoints, config.resume.resume_from)
        if resumed is not None:
            check_continuation(log_path, config, trained_on, rows)
        else:
            check_start(config)
            if has_results(log_path):
                aside = move_aside(log_path)
                display.note(f"the older run of this folder is in {aside} now")
        write_config(log_path, own_config(config))
        write_trained_on(log_path, trained_on)
        resumed_step = resumed.step if resumed is not None else None
        with (
            open_trackers(config, log_path, resumed_step) as trackers,
            Timeline.open(
                log_path, resumed_step, recipe=name_recipe(config), changed=find_changed(config)
            ) as timeline,
            provision_infra(config, tokenizer, on_status=display.note) as infra,
            MetricsLog.open(log_path, trackers, resumed_step) as log,
        ):
            run = Run(
                log_path,
                log,
                display,
                rows,
                eval_rows,
                started,
                checkpoints=checkpoints,
                clock=Stopwatch(on_span=timeline.see_phase),
                timeline=timeline,
            )
            run.begin(config, infra, resumed)
            try:
                yield infra, run
            except KeyboardInterrupt as interruption:
                interruption.add_note(f"finished steps and metrics are in {log_path}")
                raise
        for line in closing_lines(run):
            display.note(line)


@contextlib.contextmanager
def record_samples(config: RLConfig, run: Run, tokenizer: Any) -> Iterator[None]:
    """Have a run record its samples, behind those of what it goes on from."""

    def say(line: str) -> None:
        run.display.note(line)
        run.timeline.event("recording", line)

    limits = RecordLimits(config.record_share, config.seed, config.record_max_gb * 1e9)
    if run.cursor.count or run.step:
        aside = go_on_with_samples(run.log_path, run.step, run.cursor)
    else:
        aside = set_samples_aside(run.log_path)
    if aside is not None:
        say(f"samples that are sampled again were moved to {aside}")
    run.timeline.begin_step(run.step + 1)
    opening = Recorder.open(
        run.log_path, run.timeline.run, limits, lambda: read_tokens(tokenizer), say
    )
    with opening as run.recorder:
        run.recorder.step = run.step
        yield


def warn_unbounded_ratio(config: RLConfig) -> None:
    """Say that nothing bounds the ratio by which older samples are weighted."""
    may_be_older = config.is_off_policy or config.sync.interval != 1
    is_bounded = objective_options(config).has_trust_region or config.ratio_max is not None
    if may_be_older and not is_bounded:
        logger.warning(
            "policy_loss %r weighs samples of older weights by a ratio that nothing bounds: use "
            "importance_sampling with ratio_max=10, or grpo, dapo, gspo, cispo or dro",
            config.policy_loss,
        )


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector look at less, and less often.

    What is there by now, libraries, models and the platform, stays to the end: 450,000 objects,
    0.25 s for each full collection.
    """
    gc.freeze()
    try:
        with collect_rarely():
            yield
    finally:
        gc.unfreeze()
