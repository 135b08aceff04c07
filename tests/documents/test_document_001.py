"""Document 001: the recipe, and a loop of one's own on ``setup_infra``."""

from __future__ import annotations

import asyncio
from typing import get_type_hints

import pytest
from tests.documents import extraction
from tests.integration.runs import read_steps

from hearth.errors import ClosedError
from training.rollouts.runner import find_declared_arguments
from training.samples.rollout import RolloutSample, collect_runs
from training.utils import WeightSyncScope
from training.utils.rl import build_grpo_datums, make_grpo_loss_fn

RECIPE = "Using the recipe"
PROVISION = "Provision resources with `setup_infra`"
LOOP = "Training loop"
ASYNC = "Async RL *(experimental)*"
CANCELLED = "JOB_STATE_CANCELLED"


@pytest.fixture
def names(reader):
    given = reader()
    given.update(build_grpo_datums=build_grpo_datums, make_grpo_loss_fn=make_grpo_loss_fn)
    return given


def test_every_snippet_has_a_test(document):
    assert len(document("001").snippets) == 4


def test_the_recipe_trains_against_a_reference_and_leaves_nothing_running(
    document, substituted, platform, names, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)

    extraction.execute(substituted(document("001").after(RECIPE).text), names)

    log = tmp_path / "grpo_logs"
    steps = read_steps(log)
    assert len(steps) >= 2
    assert all(step["train/grad_norm"] > 0 and "train/mean_kl" in step for step in steps)
    assert len(list(log.glob("wandb/offline-run-*"))) == 1
    assert platform.states() == ([CANCELLED] * 2, [0])


def test_the_loop_trains_inside_the_block_that_provisioned_it(
    document, substituted, platform, names
):
    provision, loop = (
        substituted(document("001").after(heading).text) for heading in (PROVISION, LOOP)
    )
    seen = {}

    def look() -> None:
        last = {"temperature": 0.0, "max_tokens": 2}
        rows = names["dataset"].rows
        datums = names["datums"]
        for role in ("policy", "reference"):
            outputs = names[role].forward(datums, "cross_entropy").loss_fn_outputs
            seen[role] = [list(output["logprobs"].data) for output in outputs]
        messages = rows[0]["messages"]
        seen["served"] = names["sampler"].sample_with_tokens(messages, n=1, **last).result()[0]

    names["dataset"].at_end = look
    extraction.execute(extraction.one_block(provision, loop), names)

    infra, steps = names["infra"], names["step"]
    assert seen["policy"] != seen["reference"]
    assert platform.snapshots(infra.policy_job_id, seen["served"].snapshot_identity) == [
        f"step-{n + 1:05d}" for n in range(steps)
    ]
    assert seen["served"].weight_version == steps
    assert seen["served"].snapshot_identity.startswith(f"step-{steps:05d}-")
    assert [name.weight_version for name in names["completions"]] == [steps - 1] * 4
    assert names["deploy_cfg"].weight_sync_scope is WeightSyncScope.PER_TRAINER
    platform.assert_released()


def test_as_written_the_clients_say_that_their_block_has_ended(
    document, substituted, platform, names
):
    provision, loop = (
        substituted(document("001").after(heading).text) for heading in (PROVISION, LOOP)
    )

    extraction.execute(provision, names)
    states, replicas = platform.states()
    with pytest.raises(ClosedError, match="inside the `with` block"):
        extraction.execute(loop, names)

    assert set(states) == {CANCELLED}
    assert replicas == [0]
    for client in (names["policy"], names["reference"]):
        with pytest.raises(ClosedError, match="inside the `with` block"):
            client.forward([], "cross_entropy")
    with pytest.raises(ClosedError, match="inside the `with` block"):
        names["tracker"].save_and_hotload("late")


def test_a_rollout_function_takes_a_row_and_may_give_nothing(document, names):
    names["RolloutSample"] = RolloutSample
    extraction.execute(document("001").after(ASYNC).text, names)
    rollout_fn = names["rollout_fn"]

    assert get_type_hints(rollout_fn)["return"] == RolloutSample | None
    assert find_declared_arguments(rollout_fn) == []
    assert collect_runs(asyncio.run(rollout_fn({})), "row 0") == []
