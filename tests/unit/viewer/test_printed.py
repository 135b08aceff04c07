"""``hearth show`` and ``hearth compare`` print what the viewer reads, in 80 columns."""

import json

import pytest

from hearth.viewer.printed import compare, is_flat
from hearth.viewer.verb import view
from training.run.show import show


@pytest.fixture(autouse=True)
def _of_80_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")


def write_flat_run(folder, **metrics):
    folder.mkdir(parents=True)
    records = [
        {"type": "train", "step": step, "rollout/raw_reward": 0.0, "train/grad_norm": 0.1} | metrics
        for step in range(1, 10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def test_a_run_is_its_curve_its_held_out_numbers_and_its_best_and_worst_samples(runs, capsys):
    assert show([str(runs / "first")]) == 0

    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("first: ended, step 12, rl_loop, grpo")
    assert "rollout/raw_reward: 0.05 at first, 0.6 at last" in text
    assert "held-out reward: 0.500 at step 4, 0.500 at step 12" in text
    assert "flat" not in text
    best, worst = text.split("best samples")[1].split("worst samples")
    assert best.count("reward 1") == worst.count("reward 0") == 3
    assert "answer The sum of 16 and 9 is 25." in best


@pytest.mark.parametrize(
    ("accuracy", "told"), [(0.25, "held-out accuracy: 0.250"), (0.0, "held-out reward: 0.250")]
)
def test_a_mean_of_held_out_rewards_is_an_accuracy_where_each_is_0_or_1(
    tmp_path, capsys, accuracy, told
):
    folder = write_flat_run(tmp_path / "run")
    record = {"type": "eval", "step": 9, "eval/accuracy": accuracy, "eval/reward": 0.25}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record) + "\n")

    assert show([str(folder)]) == 0

    assert f"{told} at step 9" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("metrics", "cause"),
    [
        ({"rollout/truncated_ratio": 0.8}, "80% of the answers were cut at a length limit"),
        ({"rollout/parse_fail_ratio": 0.9}, "no answer was found in 90% of the completions"),
        ({"signal/useful_row_ratio": 0.1}, "90% of the rows taught nothing"),
        ({}, "no step shows a cause: is learning_rate high enough"),
    ],
)
def test_a_flat_reward_has_its_causes_named(tmp_path, capsys, metrics, cause):
    assert show([str(write_flat_run(tmp_path / "run", **metrics))]) == 0

    told = capsys.readouterr().out.split("the reward is flat:")[1]
    assert cause in told
    assert ("in 9 of 9 steps: " in told) == bool(metrics)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0.5] * 9, True),
        ([0.5, 0.6, 0.4] * 6, True),
        ([0.1, 0.2, 0.3, 0.4, 0.5, 0.6], False),
        ([0.5, 0.5, 0.5], False),
    ],
)
def test_a_curve_is_flat_if_its_end_is_where_its_beginning_was(rewards, expected):
    assert is_flat(rewards) is expected


def test_a_folder_that_is_no_run_is_refused_with_what_it_has(runs, capsys, tmp_path):
    assert show([str(tmp_path / "none")]) == 2
    assert show([str(tmp_path)]) == 2
    assert "got " + str(tmp_path) + ": it has no metrics.jsonl" in capsys.readouterr().err
    assert show([str(runs)]) == 2
    assert "it has " + str(runs / "deep" / "second") in capsys.readouterr().err


def test_two_runs_are_set_side_by_side_with_what_differs(runs, capsys):
    assert compare([str(runs / "first"), str(runs / "deep" / "second")]) == 0

    lines = capsys.readouterr().out.splitlines()
    text = "\n".join(lines)
    assert max(map(len, lines[:-1])) <= 80
    assert [line.split() for line in lines if line.startswith("temperature")] == [
        ["temperature", "-", "0.5"]
    ]
    assert "held-out reward, first  0.500 at step 4" in text
    assert lines[-1].startswith("second parts from first at step 1: rollout/raw_reward is ")
    assert "; token " in lines[-1]


def test_each_run_is_set_beside_the_first(runs, capsys):
    folders = [runs / "first", runs / "deep" / "second", runs / "first"]
    assert compare([str(folder) for folder in folders]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines[:-2])) <= 80
    assert lines[-2].startswith("second parts from first at step 1: ")
    assert lines[-1] == "first: the runs are equal in what both have on record"


def test_a_viewer_for_the_terminal_is_refused_in_a_pipe(runs, capsys):
    assert view([str(runs), "--terminal"]) == 2
    assert "got a pipe or a file: hearth show RUN prints a run" in capsys.readouterr().err


def test_a_run_beside_itself_differs_in_nothing(runs, capsys):
    assert compare([str(runs / "first"), str(runs / "first")]) == 0

    text = capsys.readouterr().out
    assert "no setting differs" in text
    assert "the runs are equal in what both have on record" in text
