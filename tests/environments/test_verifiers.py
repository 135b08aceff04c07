"""Tasksets of verifiers in whole runs: captured token by token, dropped where they fail."""

import sys
from dataclasses import replace

import pytest
from tests.integration.conftest import async_config
from tests.integration.runs import Trial, read_metrics, read_samples
from tests.integration.test_environments import fields

pytest.importorskip("verifiers.v1", reason="needs verifiers: make test-environments")

from hearth.errors import ConfigError
from training.environments.find import find_environment
from training.recipes import async_rl_loop, igpo_loop, rl_loop

TASKSET = """
import random
import verifiers.v1 as vf

__all__ = ["WordSums"]


class SumData(vf.TaskData):
    answer: str
    fails: bool = False


class SumTask(vf.Task[SumData]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        if self.data.fails:
            raise KeyError("no such sum")
        return float(trace.last_reply == f"<answer>{self.data.answer}</answer>")

    @vf.reward(weight=0.5)
    async def short(self, trace: vf.Trace) -> float:
        return 1.0 / (1 + len(trace.last_reply))


class SumConfig(vf.TasksetConfig):
    largest: int = 99
    fails_at: int = -1


class WordSums(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        rng = random.Random(0)
        for place in range(40):
            a, b = (rng.randint(0, self.config.largest) for _ in range(2))
            data = SumData(
                prompt=f"What is {a} + {b}?", answer=str(a + b), fails=place == self.config.fails_at
            )
            yield SumTask(data, self.config.task)
"""


@pytest.fixture(autouse=True)
def taskset(tmp_path, monkeypatch):
    (tmp_path / "word_sums.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    sys.modules.pop("word_sums", None)


@pytest.fixture
def run(tmp_path):
    count = 0

    def run(recipe=async_rl_loop, **changes):
        nonlocal count
        count += 1
        folder = tmp_path / f"run-{count}"
        settings = {"environment": "verifiers:word_sums", "max_rows": 4, "eval_rows": 2}
        usual = vars(fields(folder, async_config, **settings | changes))
        return Trial(folder, recipe.main(recipe.Config(**usual)))

    return run


def test_what_verifiers_rolls_out_is_trained_as_it_was_sampled_and_repeats(run):
    first, second = run(), run()

    steps = [record for record in read_metrics(first.folder) if record["type"] == "train"]
    assert len(steps) == 2
    assert all(step["parity/max"] < 1e-4 for step in steps)
    samples = read_samples(first.folder)
    assert len(samples) == 4 * 4 + 2 * 2
    for sample in samples:
        parts = dict(sample["reward_parts"])
        assert parts.keys() == {"right", "short"}
        assert sample["reward"] == pytest.approx(sum(parts.values()))
    assert first.has_weights_of(second)
    assert first.records() == second.records()


def test_tasks_are_held_out_one_in_five_or_from_a_taskset_of_their_own():
    tasks = find_environment("verifiers:word_sums")
    train, held_out = tasks.rows(None, whole=True), tasks.rows(None, held_out=True)
    other = find_environment("verifiers:word_sums", {"held_out": {"largest": 5}})

    assert [row["seed"] for row in held_out] == list(range(4, 40, 5))
    assert len(train) == 32
    assert not {row["task"] for row in train} & {row["task"] for row in held_out}
    assert train[0]["ground_truth"].isdigit()
    assert len(other.rows(None)) == len(other.rows(None, held_out=True)) == 40


def test_an_episode_that_fails_is_dropped_with_its_reason(run):
    trial = run(environment_args={"taskset": {"fails_at": 1}}, max_rows=4)

    failed = [sample for sample in read_samples(trial.folder) if sample["outcome"] == "failed"]
    assert {sample["row"] for sample in failed} == {1}
    assert len(failed) == 4
    assert "no such sum" in failed[0]["reason"]
    assert trial.summary.steps >= 1


def test_igpo_has_the_answers_of_tasks(run):
    assert len(run(igpo_loop).records()) == 2


def test_rl_loop_says_which_recipe_rolls_out(tmp_path):
    given = rl_loop.Config(environment="verifiers:word_sums", base_model="x", max_rows=2)

    with pytest.raises(ConfigError, match=r"of one turn without tools in this recipe, .*async"):
        rl_loop.main(replace(given, log_path=str(tmp_path / "run")))


@pytest.mark.parametrize(
    ("task", "args", "message"),
    [
        ("no_such_taskset", {}, "must be a taskset of verifiers .*ModuleNotFoundError: taskset"),
        ("word_sums", {"taskset": {"larges": 1}}, "must be a taskset of verifiers .*larges"),
    ],
)
def test_a_taskset_that_cannot_be_made_is_refused(task, args, message):
    with pytest.raises(ConfigError, match=message):
        find_environment(f"verifiers:{task}", args)
