import io
import json
import math

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from hearth.errors import ConfigError
from hearth.records.layout import SAMPLES, name_file
from hearth.records.table import make_table, write_samples
from training.rewards import Score, ScoringReward
from training.run.rescore import find_reward, rescore_and_report
from training.run.rescore_report import Pair, compare, describe
from training.run.rescore_verb import RescoreOptions

HERE = __name__


class HalfLength(ScoringReward):
    def score(self, completion, row):
        return Score(len(completion) / 2)


def length(text, row):
    return len(text)


async def later(text, row):
    return float(row["ground_truth"])


def picky(text, row):
    if text == "bad":
        raise ValueError("not this one")
    return Score(1.0)


def topic(text, row):
    return float(row.get("topic", -1))


half_length = HalfLength()


def write_step(folder, step, texts, rewards, *, row=0, truth="7", kind="train"):
    """One group of a step."""
    (folder / SAMPLES).mkdir(exist_ok=True)
    count = len(texts)
    columns = {
        "kind": [kind] * count,
        "step": [step] * count,
        "index": [step] * count,
        "row": [row] * count,
        "completion": list(range(count)),
        "segment": [0] * count,
        "length": [len(text or "") for text in texts],
        "reward": rewards,
        "text": texts,
        "ground_truth": [truth] * count,
    }
    write_samples(folder / SAMPLES / name_file(kind, step), [make_table(columns)], "the-run")


def run_rescore(folder, reward, **options):
    out = io.StringIO()
    options = RescoreOptions(run=str(folder), reward=f"{HERE}:{reward}", **options)
    path = rescore_and_report(options, Console(file=out, width=200))
    return pq.read_table(path), out.getvalue()


@pytest.fixture
def folder(tmp_path):
    write_step(tmp_path, 1, ["a", "bb", ""], [0.0, 1.0, None])
    write_step(tmp_path, 2, ["bad", "cccc"], [1.0, 0.0], row=1, truth="9")
    write_step(tmp_path, 0, ["e"], [1.0], kind="eval")
    return tmp_path


def test_every_sample_gets_the_new_reward_in_a_file_that_names_the_function(folder):
    table, printed = run_rescore(folder, "length")

    rows = {(row["kind"], row["step"], row["completion"]): row for row in table.to_pylist()}
    assert {place: row["reward"] for place, row in rows.items()} == {
        ("eval", 0, 0): 1.0,
        ("train", 1, 0): 1.0,
        ("train", 1, 1): 2.0,
        ("train", 1, 2): None,  # nothing was sampled
        ("train", 2, 0): 3.0,
        ("train", 2, 1): 4.0,
    }
    assert table.schema.metadata[b"hearth.reward"].decode() == f"{HERE}:length"
    assert table.schema.metadata[b"hearth.run"] == b"the-run"
    assert (folder / "rescored" / "length.parquet").exists()
    assert "5 of 6 samples have both rewards" in printed


@pytest.mark.parametrize(
    ("reward", "first"), [("later", 7.0), ("half_length", 0.5), ("picky", 1.0), ("length", 1.0)]
)
def test_a_reward_of_any_kind_is_taken(reward, first, folder):
    table, _ = run_rescore(folder, reward, workers=1)

    found = {
        (row["kind"], row["step"], row["completion"]): row["reward"] for row in table.to_pylist()
    }
    assert found["train", 1, 0] == first


def test_errors_are_kept_counted_and_the_first_is_shown(folder):
    table, printed = run_rescore(folder, "picky")

    errors = [row["error"] for row in table.to_pylist() if row["error"]]
    assert errors == ["ValueError: not this one"]
    assert "1 calls failed, the first with ValueError: not this one" in printed


@pytest.mark.slow
def test_several_processes_give_the_same_rewards_in_the_same_order(folder, tmp_path, monkeypatch):
    # Where other processes find it, as a module of the current folder.
    (tmp_path / "own_reward.py").write_text("def length(text, row): return len(text)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    options = RescoreOptions(run=str(folder), reward="own_reward:length", workers=2)

    path = rescore_and_report(options, Console(file=io.StringIO()))

    alone, _ = run_rescore(folder, "length", name="alone")
    assert pq.read_table(path).column("reward") == alone.column("reward")


def test_a_result_is_replaced_only_when_asked(folder):
    run_rescore(folder, "length", name="mine")

    with pytest.raises(ConfigError, match="name must be new, got 'mine'"):
        run_rescore(folder, "later", name="mine")
    table, _ = run_rescore(folder, "later", name="mine", replace=True)
    assert table.column("reward").to_pylist()[1] == 7.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reward": "nothing"}, "reward must be MODULE:FUNCTION"),
        ({"reward": "no_such_module:f"}, "reward must name a function"),
        ({"reward": f"{HERE}:HERE"}, "reward must name a function"),
        ({"reward": f"{HERE}:length", "name": "../x"}, "name must be of letters"),
        ({"reward": f"{HERE}:length", "workers": 0}, "workers must be >= 1"),
    ],
)
def test_a_wrong_option_is_refused_before_anything_is_scored(options, message, folder):
    with pytest.raises(ConfigError, match=message):
        rescore_and_report(RescoreOptions(run=str(folder), **options), Console())
    assert not (folder / "rescored").exists()


def test_a_folder_without_samples_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="run must be a folder with recorded samples"):
        rescore_and_report(RescoreOptions(run=str(tmp_path), reward=f"{HERE}:length"), Console())


def test_the_whole_row_is_given_where_the_dataset_still_has_it(folder, tmp_path):
    dataset = tmp_path / "rows.jsonl"
    rows = [{"ground_truth": "7", "topic": 3}, {"ground_truth": "another", "topic": 4}]
    dataset.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {"dataset": str(dataset), "max_rows": 10, "eval_dataset": None, "eval_rows": 10}
    (tmp_path / "config.json").write_text(json.dumps(config))

    table, _ = run_rescore(folder, "topic")

    found = {(row["kind"], row["step"]): row["reward"] for row in table.to_pylist()}
    # The second row is another one by now, and the held-out rows are not there.
    assert found == {("train", 1): None, ("train", 2): -1.0, ("eval", 0): -1.0}
    assert table.column("reward").to_pylist()[1:3] == [3.0, 3.0]


def pair(step, completion, before, after, text="", kind="train"):
    sample = {"kind": kind, "step": step, "index": step, "completion": completion, "segment": 0}
    return Pair(sample | {"reward": before, "text": text}, after)


def test_the_comparison_counts_what_changes_for_training():
    pairs = [
        # The best answer changes.
        pair(1, 0, 1.0, 0.0),
        pair(1, 1, 0.0, 1.0),
        # Becomes uniform.
        pair(2, 0, 1.0, 1.0),
        pair(2, 1, 0.0, 1.0),
        # Stops being uniform; one that was best still is.
        pair(3, 0, 0.0, 0.0),
        pair(3, 1, 0.0, 1.0),
        # Stays as it is.
        pair(4, 0, 0.0, 0.0),
        pair(4, 1, 1.0, 1.0),
        pair(4, 2, None, 1.0),
        pair(4, 0, 0.5, 0.25, kind="eval"),
    ]

    comparison = compare(pairs)

    assert (comparison.samples, comparison.compared) == (10, 9)
    assert (comparison.groups, comparison.best_changed) == (4, 1)
    assert (comparison.became_uniform, comparison.stopped_uniform) == (1, 1)
    parts = [(part.name, part.count, part.before, part.after) for part in comparison.parts]
    assert parts == [
        ("step 1", 2, 0.5, 0.5),
        ("step 2", 2, 0.5, 1.0),
        ("step 3", 2, 0.0, 0.5),
        ("step 4", 2, 0.5, 0.5),
        ("held-out", 1, 0.5, 0.25),
    ]
    # Of (1 0 1 0 0 0 0 1 .5) and (0 1 1 1 0 1 0 1 .25).
    assert comparison.correlation == pytest.approx((1 / 12) / math.sqrt(34 / 9), rel=1e-12)
    differ = [str(pair.identity) for pair in comparison.differ_most]
    assert differ == [
        "train.1.1.0.0",
        "train.1.1.1.0",
        "train.2.2.1.0",
        "train.3.3.1.0",
        "eval.4.4.0.0",
    ]


def test_the_correlation_is_unknown_where_a_reward_is_constant():
    assert compare([pair(1, 0, 1.0, 0.0), pair(1, 1, 1.0, 5.0)]).correlation is None


def test_nothing_that_a_model_wrote_reaches_the_terminal_raw():
    hostile = "\x1b[2J\x07red\u202e\n\n[bold]x[/bold]" + "y" * 200

    (line,) = [line for line in describe(compare([pair(1, 0, 0.0, 2.0, hostile)])) if "->" in line]

    assert line.isprintable()
    assert "[bold]x" in line
    assert len(line) < 130


def test_a_class_is_no_reward_but_its_object_is():
    assert find_reward(f"{HERE}:half_length") is half_length
    with pytest.raises(ConfigError, match="an object of the class"):
        find_reward(f"{HERE}:HalfLength")
