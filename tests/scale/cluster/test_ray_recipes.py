"""The recipes on two nodes: the numbers of an embedded run, and what a lost node means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.integration.conftest import Trial, async_config, config
from tests.integration.rollouts import drawing, spread
from tests.scale.cluster.clusters import Nodes, nodes_of_workers

from training.recipes import async_rl_loop, rl_loop

SHAPES: dict[str, dict[str, Any]] = {"one-rank-one-replica": {}}
"""What a run changes of its config to be on more processes."""
CLOSE = 1e-5
DRAWS_OF_STEP = 8


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
        whole = range(0, len(self.prompts), DRAWS_OF_STEP)
        return [sorted(self.prompts[first : first + DRAWS_OF_STEP]) for first in whole]


def trained(folder: Path, reward: Seen | None = None, **changes: Any) -> tuple[Trial, Seen]:
    """A finished run of ``rl_loop`` for three steps."""
    seen = reward or Seen()
    asked = config(folder, **{"max_rows": 6, "output_model_id": None} | changes)
    return Trial(folder, rl_loop.main(asked, reward_fn=seen)), seen


def numbers(trial: Trial) -> list[dict[str, float]]:
    """What the trainer said of each step."""
    return [
        {name: value for name, value in one.items() if name.startswith("train/")}
        for one in trial.records()
    ]


def check_same(trial: Trial, whole: Trial) -> None:
    assert len(numbers(trial)) == len(numbers(whole)) == 3
    for mine, theirs in zip(numbers(trial), numbers(whole), strict=True):
        assert mine == pytest.approx(theirs, abs=CLOSE, rel=CLOSE)


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Trial, Seen]:
    return trained(tmp_path_factory.mktemp("embedded"))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("snapshot_store", ["folder", "ray"])
def test_rl_loop_on_two_nodes_has_the_numbers_of_an_embedded_run(
    cluster: Nodes, embedded: tuple[Trial, Seen], tmp_path: Path, snapshot_store: str,
    shape: dict[str, Any],
) -> None:  # fmt: skip
    used: list[str] = []
    reward = Seen(at=1, do=lambda: used.extend(nodes_of_workers().values()))

    trial, seen = trained(tmp_path, reward, placement="ray", snapshot_store=snapshot_store, **shape)

    whole, expected = embedded
    assert len(set(used)) == 2
    assert seen.steps() == expected.steps()
    check_same(trial, whole)


def test_async_rl_loop_runs_on_two_nodes(cluster: Nodes, tmp_path: Path) -> None:
    asked = async_config(tmp_path, placement="ray", max_rows=6, output_model_id=None)

    trial = Trial(tmp_path, async_rl_loop.main(asked, rollout_fn_factory=drawing()))

    assert len(trial.records()) == 3


@pytest.mark.parametrize("victim", ["deployment", "trainer"])
def test_a_node_that_is_lost_in_the_middle_ends_no_run(
    cluster: Nodes, embedded: tuple[Trial, Seen], tmp_path: Path, victim: str
) -> None:
    killed: list[str] = []

    def kill() -> None:
        node = nodes_of_workers()[victim]
        cluster.add(1)
        cluster.kill(node)
        killed.append(node)

    reward = Seen(at=12, do=kill)
    trial, _ = trained(tmp_path, reward, placement="ray", dcp_save_interval=1)

    whole, _ = embedded
    assert len(killed) == 1
    check_same(trial, whole)
