"""``hearth eval``: answers of several models to the same rows, and how far the models differ."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import math
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console
from rich.table import Table

from hearth.errors import ConfigError
from hearth.records.models import find_model, name_deployment
from training.config.async_recipe import AsyncConfig
from training.config.single_turn import SingleTurnConfig
from training.data.given_rows import choose_rows
from training.data.rows import IndexedRow, Row
from training.environments.choose import Given, choose_environment
from training.environments.tasks import EnvironmentTasks
from training.platform.run_infra import ServedModel, open_platform, serve_model
from training.rewards import AnyReward, check_reward, choose_reward
from training.rewards.scoring import gather_or_cancel
from training.rollouts.runner import Rollouts, RowTrajectories, Submission
from training.run.background_evaluation import judge_trajectories
from training.run.command import run_until_signal
from training.run.eval_verb import EvalOptions
from training.run.evaluation import EVAL_SEED_OFFSET, EvalResult, EvalSample
from training.run.evaluation import evaluate as evaluate_rows
from training.run.intervals import (
    Difference,
    Interval,
    mean_interval,
    paired_difference,
    share_interval,
)
from training.run.log_path import (
    has_results,
    hold_log_path,
    move_aside,
    prepare_log_path,
    write_config,
)
from training.run.metrics import MetricsLog
from training.run.pass_at_k import pass_at_k
from training.run.recorder import Recorder, RecordLimits
from training.run.timeline import Timeline
from training.run.token_bytes import read_tokens
from training.samples.rollout import RolloutFn, RolloutSetup

ENVIRONMENT_ROWS = 100
"""Tasks of an environment where no number is given."""
HTTP_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Tasks:
    """What the models are asked, and what scores an answer; None where episodes are played."""

    rows: Sequence[Row]
    reward: AnyReward | None
    environment: EnvironmentTasks | None


@dataclass(frozen=True)
class Measured:
    """What a model earned."""

    name: str
    source: str
    """The folder or hub id that it was loaded from."""
    folder: Path
    """Where its answers are kept."""
    result: EvalResult

    @property
    def rewards(self) -> dict[int, float]:
        """The mean reward of each row that has one."""
        by_row = self._by_row()
        return {
            place: sum(sample.reward for sample in samples) / len(samples)
            for place, samples in by_row.items()
        }

    def pass_rates(self) -> dict[int, dict[int, float]]:
        """pass@k of each row, for k = 1, 2, 4, ...; rows with fewer answers than k are left out."""
        counts = {
            place: (len(samples), sum(sample.is_right for sample in samples))
            for place, samples in self._by_row().items()
        }
        most = max((n for n, _ in counts.values()), default=0)
        ks = [1 << power for power in range(most.bit_length())]
        return {
            k: {place: pass_at_k(n, c, k) for place, (n, c) in counts.items() if n >= k} for k in ks
        }

    def describe(self) -> dict[str, Any]:
        """All that is known of it, for JSON."""
        metrics = self.result.metrics()
        rates = {
            f"pass@{k}": dataclasses.asdict(share_interval(list(rates.values())))
            for k, rates in self.pass_rates().items()
        }
        return {
            "model": self.name,
            "source": self.source,
            "folder": str(self.folder),
            **rates,
            "reward": dataclasses.asdict(mean_interval(list(self.rewards.values()))),
            "answers": len(self.result.samples),
            "failed_samples": self.result.failed_samples,
            "failed_rewards": self.result.failed_rewards,
            "mean_length": metrics.get("eval/response_len/mean"),
            "truncated_ratio": metrics.get("eval/truncated_ratio"),
        }

    def _by_row(self) -> dict[int, list[EvalSample]]:
        by_row: dict[int, list[EvalSample]] = {}
        for sample in self.result.samples:
            by_row.setdefault(sample.place, []).append(sample)
        return by_row


def evaluate_and_report(options: EvalOptions) -> list[Measured]:
    """Evaluate all models, one after the other, and print what they earned.

    Raises:
        ConfigError: an option breaks its rule; nothing was started.
    """
    _check(options)
    sources = [find_model(model) for model in options.models]
    config = _make_config(options)
    tasks = _choose_tasks(config, options)
    names = _name_models(sources)
    measured: list[Measured] = []
    with (
        tempfile.TemporaryDirectory(prefix="hearth-eval-") as folder,
        open_platform(Path(folder)) as platform,
    ):
        for name, source in zip(names, sources, strict=True):
            id = f"eval-{name_deployment(source)}"[:56].rstrip("-") + f"-{secrets.token_hex(2)}"
            with serve_model(
                platform, source, deployment_id=id, max_concurrent=options.max_concurrent
            ) as model:
                measured.append(_evaluate_model(options, config, tasks, model, name))
    _report(options, tasks, measured)
    return measured


def _check(options: EvalOptions) -> None:
    if not options.models:
        raise ConfigError("models must name at least one model, got none")
    if (options.dataset is None) == (options.environment is None):
        raise ConfigError(
            f"dataset or environment must be given, got {options.dataset!r} and "
            f"{options.environment!r}: one of the two has the rows"
        )
    for name in ("samples", "max_completion_tokens", "max_concurrent"):
        if getattr(options, name) < 1:
            raise ConfigError(f"{name} must be >= 1, got {getattr(options, name)}")
    if options.temperature < 0:
        raise ConfigError(f"temperature must be >= 0, got {options.temperature}")


def _make_config(options: EvalOptions) -> SingleTurnConfig:
    """The options as a recipe's settings, which rows, rewards and environments are chosen by."""
    config = SingleTurnConfig(
        columns=options.columns,
        environment=options.environment,
        environment_args=options.environment_args,
        max_rows=options.max_rows,
        eval_samples_per_prompt=options.samples,
        completions_per_prompt=options.samples,
        max_completion_tokens=options.max_completion_tokens,
        temperature=options.temperature,
        seed=options.seed,
        max_concurrent=options.max_concurrent,
        reward=options.reward,
        reward_timeout_s=options.reward_timeout_s,
        reward_errors=options.reward_errors,
    )
    if options.dataset is not None:
        config.dataset = options.dataset
    return config


def _choose_tasks(config: SingleTurnConfig, options: EvalOptions) -> Tasks:
    environment = choose_environment(config, Given())
    if environment is None:
        rows = choose_rows(config, None, needs_messages=True)
        reward = choose_reward(config, None)
        check_reward(config, reward, rows, [])
        return Tasks(rows, reward, None)
    if config.reward is not None:
        raise ConfigError(
            f"reward must not be given with environment={environment.name!r}, got "
            f"{config.reward!r}: it has its own"
        )
    count = ENVIRONMENT_ROWS if options.max_rows is None else options.max_rows
    single = environment.is_single_turn
    rows = environment.rows(count, held_out=True, whole=single)
    return Tasks(rows, environment.reward() if single else None, environment)


def _name_models(sources: Sequence[str]) -> list[str]:
    """A name for each model: as short as is clear, and fit for a folder."""
    names = [name_deployment(source) for source in sources]
    return [
        name if names.count(name) == 1 else f"{name}-{place}"
        for place, name in enumerate(names, start=1)
    ]


def _evaluate_model(
    options: EvalOptions, config: SingleTurnConfig, tasks: Tasks, model: ServedModel, name: str
) -> Measured:
    folder = prepare_log_path(str(Path(options.log_path).expanduser() / name))
    results: list[EvalResult] = []

    async def work() -> None:
        results.append(await _sample(config, tasks, model))

    with hold_log_path(folder):
        if has_results(folder):
            move_aside(folder)
        write_config(folder, {"base_model": model.base_model, **dataclasses.asdict(options)})
        tokens = partial(read_tokens, model.tokenizer)
        with (
            Timeline.open(folder, None, recipe="eval") as timeline,
            MetricsLog.open(folder) as log,
            Recorder.open(folder, timeline.run, RecordLimits(), tokens, lambda _: None) as recorder,
        ):
            with timeline.span("sampler", "eval"):
                run_until_signal(work())
            (result,) = results
            recorder.begin_evaluation(0, tasks.rows, result.sampled_trajectories)
            recorder.finish()
            log.write("eval", 0, result.metrics())
            timeline.event("eval", f"held-out {result.describe()}")
    return Measured(name, model.base_model, folder, result)


async def _sample(config: SingleTurnConfig, tasks: Tasks, model: ServedModel) -> EvalResult:
    if tasks.reward is not None:
        return await evaluate_rows(model.sampler, tasks.rows, tasks.reward, config)
    assert tasks.environment is not None, "rows without a reward are an environment's"
    setup = _make_setup(config, model)
    with contextlib.closing(setup.closing):
        return await _play(config, tasks.rows, tasks.environment.make_rollout_fn(setup))


def _make_setup(config: SingleTurnConfig, model: ServedModel) -> RolloutSetup:
    return RolloutSetup(
        tokenizer=model.tokenizer,
        tokenizer_id=model.base_model,
        sample_kwargs={
            "max_tokens": config.max_completion_tokens,
            "temperature": config.temperature,
            "top_p": 1.0,
            "top_k": 0,
            "max_seq_len": None,
            "http_timeout": HTTP_TIMEOUT_S,
            "logprobs": True,
        },
        inference_base_url=model.inference_url,
        api_key=model.api_key,
        model=model.sampler.model,
        completions_per_prompt=config.eval_samples_per_prompt,
        concurrency=model.sampler.concurrency,
    )


async def _play(config: SingleTurnConfig, rows: Sequence[Row], rollout_fn: RolloutFn) -> EvalResult:
    """Episodes of all rows."""
    settings = AsyncConfig(
        seed=config.seed + EVAL_SEED_OFFSET,
        completions_per_prompt=config.eval_samples_per_prompt,
        min_group_size=1,
        temperature=config.temperature,
    )
    rollouts = Rollouts(rollout_fn, settings, num_rows=len(rows))
    room = asyncio.Semaphore(max(1, config.max_concurrent // config.eval_samples_per_prompt))

    async def sample_row(place: int, row: Row) -> RowTrajectories:
        async with room:
            where = IndexedRow(place, epoch=0, row=row, source=place)
            return await rollouts.trajectories(Submission(where, 0, 0, is_trained=False))

    sampled = await gather_or_cancel([sample_row(place, row) for place, row in enumerate(rows)])
    return judge_trajectories(rows, sampled)


def _report(options: EvalOptions, tasks: Tasks, measured: Sequence[Measured]) -> None:
    differences = [
        (model, measure, difference)
        for model in measured[1:]
        for measure, difference in _compare(model, measured[0]).items()
    ]
    if options.json:
        told = {
            "rows": len(tasks.rows),
            "samples": options.samples,
            "models": [model.describe() for model in measured],
            "differences": [
                {
                    "model": model.name,
                    "against": measured[0].name,
                    "measure": measure,
                    **dataclasses.asdict(difference),
                }
                for model, measure, difference in differences
            ],
        }
        sys.stdout.write(orjson.dumps(told).decode() + "\n")
        return
    console = Console(soft_wrap=True, highlight=False)
    console.print(_make_table(measured), width=max(console.width, 40 * (1 + len(measured))))
    for model, measure, difference in differences:
        console.print(
            f"{model.name} - {measured[0].name}, {measure}: {_signed(difference.interval)} "
            f"({difference.better} rows better, {difference.worse} worse of {difference.rows})",
            markup=False,
        )
    console.print(f"read the answers: hearth view {options.log_path}", markup=False)


def _compare(model: Measured, first: Measured) -> Mapping[str, Difference]:
    rates, others = model.pass_rates(), first.pass_rates()
    return {
        **{f"pass@{k}": paired_difference(rates[k], others[k]) for k in rates if k in others},
        "reward": paired_difference(model.rewards, first.rewards),
    }


def _make_table(measured: Sequence[Measured]) -> Table:
    table = Table("", *(model.name for model in measured), box=None)
    rates = [model.pass_rates() for model in measured]
    for k in sorted({k for of_model in rates for k in of_model}):
        shares = [share_interval(list(of_model.get(k, {}).values())) for of_model in rates]
        table.add_row(f"pass@{k}", *map(str, shares))
    rewards = [mean_interval(list(model.rewards.values())) for model in measured]
    table.add_row("reward", *map(str, rewards))
    results = [model.result for model in measured]
    table.add_row("answers", *(str(len(result.samples)) for result in results))
    left_out = [result.failed_samples + result.failed_rewards for result in results]
    if any(left_out):
        table.add_row("left out", *map(str, left_out))
    lengths = [result.metrics().get("eval/response_len/mean", math.nan) for result in results]
    table.add_row("tokens", *(f"{length:.1f}" for length in lengths))
    return table


def _signed(interval: Interval) -> str:
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
