"""Rollout functions in processes of a cluster: the samples of a run whose functions run here."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import async_config
from tests.integration.rollouts import make_rollouts
from tests.integration.runs import Trial
from tests.integration.served import Served
from tests.scale.cluster.clusters import Nodes

from hearth.errors import ConfigError
from training.recipes import async_rl_loop
from training.rollouts.cluster import run_on_cluster
from training.samples.rollout import RolloutFn, RolloutSample, RolloutSetup


@pytest.fixture(scope="module")
def served(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A platform that all nodes reach."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HEARTH_API_KEYS", "x")
        platform = Served(
            tmp_path_factory.mktemp("platform"),
            host=nodes.host,
            allow_folders=True,
            trainer_threads=1,
            deployment_threads=1,
        )
        yield platform
        platform.stop()


@pytest.fixture
def platform(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIREWORKS_BASE_URL", served.url)
    monkeypatch.setenv("FIREWORKS_API_KEY", "x")


def elsewhere(setup: RolloutSetup) -> RolloutFn:
    """The plain rollout function, which says in which process it ran."""
    plain = make_rollouts()(setup)

    async def rollout_fn(row: dict[str, Any], **place: int) -> RolloutSample | None:
        (Path(setup.extras["seen"]) / str(os.getpid())).touch()
        given = {name: place[name] for name in ("cursor_index", "sample_index")}
        return await plain(row, **given)

    return rollout_fn


def run(folder: Path, **changes: Any) -> tuple[Trial, list[str]]:
    seen = folder / "seen"
    seen.mkdir(parents=True)
    fields = async_config(
        folder,
        max_rows=4,
        output_model_id=None,
        synchronous_training=True,
        rollout_extras={"seen": str(seen)},
        **changes,
    )
    trial = Trial(folder, async_rl_loop.main(fields, rollout_fn_factory=elsewhere))
    return trial, [path.name for path in seen.iterdir()]


def test_rollouts_elsewhere_sample_what_they_would_sample_here(cluster, platform, tmp_path):
    whole, here = run(tmp_path / "here")
    trial, there = run(tmp_path / "there", rollout_workers="ray", rollout_worker_count=2)

    assert here == [str(os.getpid())]
    assert len(there) == 2
    assert str(os.getpid()) not in there
    names = ("rollout/raw_reward", "train/loss_sum")
    for mine, theirs in zip(trial.records(), whole.records(), strict=True):
        assert [mine[name] for name in names] == pytest.approx([theirs[name] for name in names])


def test_a_platform_that_a_node_does_not_reach_is_refused_at_once(cluster):
    setup = RolloutSetup(
        tokenizer=None,
        tokenizer_id="",
        sample_kwargs={},
        inference_base_url="http://127.0.0.1:9",
        api_key="x",
        model="",
        completions_per_prompt=1,
        extras={"seen": ""},
    )
    with pytest.raises(ConfigError, match="HEARTH_URL must be an address that every node"):
        run_on_cluster(elsewhere, 1)(setup)


def test_a_platform_in_this_process_cannot_be_reached_from_elsewhere(tmp_path):
    fields = async_config(tmp_path, rollout_workers="ray")
    with pytest.raises(ConfigError, match="rollout_workers must be 'loop' without HEARTH_URL"):
        fields.validate()
