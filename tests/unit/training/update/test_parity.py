"""How far sampler and trainer are apart: what is compared, what it amounts to, what comes of it."""

import asyncio
import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from tests.unit.training.platform_script import ScriptedTrainer, Seconds, infra_of
from tests.unit.training.trial_rollouts import config_of, group_from, row_of, sample_of

from hearth.errors import ConfigError
from hearth.telemetry import Stopwatch
from training.run.loop import Loop
from training.run.metrics import Display, MetricsLog
from training.run.signal import SignalWatch
from training.run.state import Run
from training.samples.groups import PromptGroup, TrainSample
from training.update.parity import ParityError, logprob_gaps, parity_metrics, parity_problem
from training.update.policy_losses import policy_loss
from training.update.policy_update import PolicyUpdate


def sampled_by(*versions: list[int], logprobs: list[float], mask: list[int]) -> TrainSample:
    rollout = sample_of(
        tokens=list(range(5, 5 + len(mask))),
        logprobs=logprobs,
        loss_mask=mask,
        versions=list(versions) or None,
    )
    return TrainSample.from_rollout(rollout, 1.0)


# What is compared


def test_sampled_tokens_are_compared_and_nothing_else():
    sample = sampled_by([3, 3], logprobs=[0.0, -1.0, 0.0, -0.5, -2.0], mask=[0, 1, 0, 1, 1])

    gaps = logprob_gaps([sample], [[-1.25, -9.0, -0.5, -1.0]], version=3)

    assert gaps.tolist() == [0.25, 0.0, 1.0]
    scored = torch.tensor([-1.0, 0.0, -1.0, -2.0])
    assert logprob_gaps([sample, sample], [scored] * 2, 3).tolist() == 2 * [0, 0.5, 0]


@pytest.mark.parametrize("versions", [[[2, 2]], [[2, 1], [3, 1]], []])
def test_a_sample_that_other_weights_sampled_in_part_or_nobody_knows_which_is_not_compared(
    versions,
):
    sample = sampled_by(*versions, logprobs=[0.0, -1.0, -1.0], mask=[0, 1, 1])

    assert logprob_gaps([sample], [[-5.0, -5.0]], version=3).numel() == 0


def test_a_version_that_sampled_nothing_of_a_sample_does_not_count():
    sample = sampled_by([2, 0], [3, 2], logprobs=[0.0, -1.0, -1.0], mask=[0, 1, 1])

    assert logprob_gaps([sample], [[-1.0, -1.5]], version=3).tolist() == [0.0, 0.5]


# What it amounts to


def test_percentiles_largest_and_mean_exponential():
    gaps = torch.arange(101, dtype=torch.float64) / 100

    found = parity_metrics([gaps[:30], gaps[30:]])

    assert found == {
        "parity/p50": pytest.approx(0.5),
        "parity/p95": pytest.approx(0.95),
        "parity/max": pytest.approx(1.0),
        "parity/mean_exp": pytest.approx(sum(math.exp(i / 100) for i in range(101)) / 101),
        "parity/tokens": 101.0,
    }
    assert parity_metrics([]) == parity_metrics([gaps[:0]]) == {}


def test_a_problem_is_a_95th_percentile_above_the_threshold():
    metrics = {"parity/p95": 0.25, "parity/max": 7.0}

    assert parity_problem(metrics, 0.25) is None
    assert parity_problem({}, 0.1) is None
    assert "got 0.25 (largest 7)" in (parity_problem(metrics, 0.2) or "")
    assert parity_problem({"parity/p95": math.nan, "parity/max": math.nan}, 0.2) is not None


# An update. The scripted trainer says -0.5 for every token.


def group(versions: list[list[int]], *logprobs: float) -> PromptGroup:
    """One sample per logprob, which both of its two sampled tokens have."""
    samples = [
        [sample_of(float(place), logprobs=[0.0, 0.0, logprob, logprob], versions=versions)]
        for place, logprob in enumerate(logprobs)
    ]
    return group_from(row_of(0), samples)


def parity_of(folder: Path, piece: PromptGroup, version: int | None, **options: Any) -> Any:
    trainer = ScriptedTrainer(Seconds(fwd_bwd=0.0, optim_step=0.0), lambda: 0.0, lambda: 0)
    config = config_of(**options)
    update = PolicyUpdate(config, infra_of(trainer, folder), Stopwatch(), version=version)

    async def train() -> None:
        for batch in await update.prepare([piece]):
            await update.forward_backward(batch, policy_loss(config, batch))
        await update.optim_step()

    asyncio.run(train())
    return update.parity()


@pytest.mark.parametrize("options", [{}, {"ppo_n_minibatches": 2}])
def test_an_update_compares_once_before_it_moves_the_policy(tmp_path, options):
    found = parity_of(tmp_path, group([[4, 2]], -0.5, -0.75), 4, **options)

    assert found["parity/tokens"] == 4
    assert found["parity/max"] == pytest.approx(0.25)
    assert found["parity/p50"] == pytest.approx(0.125)


@pytest.mark.parametrize("version", [None, 5])
def test_samples_of_other_weights_are_not_compared(tmp_path, version):
    assert parity_of(tmp_path, group([[4, 2]], -0.5, -0.75), version) == {}


# A run


@pytest.fixture
def run(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    display = Display(0, Console(file=io.StringIO(), width=10_000))
    yield Run(tmp_path, log, display, [], (), 0.0, step=7)
    log.close()


APART = {"parity/p95": 0.3, "parity/max": 1.0}


def test_a_run_says_it_now_and_then_and_ends_only_where_it_is_asked_to(run):
    said: list[str] = []
    run.signal = SignalWatch(note=said.append)

    def check(**options: Any) -> None:
        Loop(config_of(**options), cast("Any", None), run).check_parity(APART)

    for _ in range(3):
        check()
    check(parity_threshold=0.5, parity_stops=True)

    assert len(said) == 1
    assert "sampler and trainer must agree within parity_threshold=0.2 nats" in said[0]
    with pytest.raises(ParityError, match=r"step 7: sampler and trainer must agree"):
        check(parity_stops=True)


def test_versions_compare_only_while_the_deployment_serves_what_the_trainer_has(run):
    assert run.comparable_version is None

    run = replace(run, version=3, synced_step=7)
    assert run.comparable_version == 3
    run.step = 8
    assert run.comparable_version is None


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan])
def test_a_threshold_that_is_no_distance_is_refused(value):
    with pytest.raises(ConfigError, match="parity_threshold must be > 0"):
        config_of(parity_threshold=value).validate()
