"""``rl_loop`` on two nodes: an embedded run's numbers, and what a lost node means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import config
from tests.integration.rollouts import spread
from tests.integration.runs import Trial
from tests.scale.cluster.clusters import nodes_of_workers, places
from tests.scale.cluster.greedy import LOGPROB_TOLERANCE, SAMPLES_OF_STEP, needs_vllm, on_vllm

from training.recipes import rl_loop
from training.utils import TrainerConfig

STEPS = 3
CLOSE = 1e-5


class Seen:
    """A reward function that keeps the order of what it scores, and may do something first."""

    def __init__(self, at: int | None = None, do: Callable[[], None] | None = None) -> None:
        self.prompts: list[str] = []
        self._at = at
        self._do = do

    def __call__(self, text: str, row: Any) -> float:
        self.prompts.append(row["messages"][0]["content"])
        if self._do is not None and len(self.prompts) == self._at:
            self._do()
        return spread(text, row)

    def steps(self) -> list[list[str]]:
        """What was scored for each step; rows of one step finish in any order."""
        whole = range(0, len(self.prompts), SAMPLES_OF_STEP)
        return [sorted(self.prompts[first : first + SAMPLES_OF_STEP]) for first in whole]


def run_rl_loop(folder: Path, reward: Seen, **changes: Any) -> Trial:
    """A finished run of ``rl_loop`` for three steps."""
    fields = config(folder, max_rows=2 * STEPS, output_model_id=None, **changes)
    return Trial(folder, rl_loop.main(fields, reward_fn=reward))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Seen]:
    """``rl_loop``, all in this process."""
    seen = Seen()
    return run_rl_loop(tmp_path_factory.mktemp("embedded"), seen), seen


def test_rl_loop_through_the_object_store_has_the_numbers_of_an_embedded_run(
    cluster, whole, tmp_path
):
    used: list[str] = []
    seen = Seen(at=1, do=lambda: used.extend(nodes_of_workers().values()))

    trial = run_rl_loop(tmp_path, seen, placement="ray", snapshot_store="ray")

    embedded, expected = whole
    assert len(set(used)) == 2
    assert seen.steps() == expected.steps()
    assert len(trial.records()) == STEPS
    for mine, theirs in zip(trial.records(), embedded.records(), strict=True):
        names = [name for name in theirs if name.startswith("train/")]
        assert [mine[name] for name in names] == pytest.approx(
            [theirs[name] for name in names], abs=CLOSE, rel=CLOSE
        )


@needs_vllm
def test_rl_loop_goes_on_when_the_node_of_a_replica_is_lost(two_nodes, whole, tmp_path):
    before: list[dict[str, list[str]]] = []

    def lose_the_small_node() -> None:
        before.append(places())
        two_nodes.lose(two_nodes.smallest)

    seen = Seen(at=SAMPLES_OF_STEP + 2, do=lose_the_small_node)
    trial = run_rl_loop(
        tmp_path,
        seen,
        placement="ray",
        dcp_save_interval=1,
        trainer=TrainerConfig(ranks=2),
        deployment=on_vllm(2),
    )

    (used,) = before
    assert len(used["deployment"]) == 3
    assert len(set(used["deployment"])) == 2
    records = trial.records()
    assert trial.summary.steps == len(records) == STEPS
    assert trial.summary.version == STEPS
    assert seen.steps() == whole[1].steps()
    assert all(record["parity/max"] < LOGPROB_TOLERANCE for record in records)
    assert all(record["train/grad_norm"] > 0 for record in records)
