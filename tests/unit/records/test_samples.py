"""Files of samples: what is written comes back, from here and from other programs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow.parquet as pq
import pytest

from hearth.errors import NotFoundError
from hearth.records.layout import SAMPLES, SampleId, files_of_step, list_files, name_file
from hearth.records.reading import read_group, read_run_id, read_sample, read_vocabulary, to_records
from hearth.records.table import SCHEMA, make_table, write_samples, write_vocabulary


def sample(step: int, index: int, completion: int, **fields: Any) -> dict[str, Any]:
    """A sample of two prompt tokens and three sampled ones."""
    return {
        "run": "r1",
        "kind": "train",
        "step": step,
        "index": index,
        "row": index,
        "epoch": 0,
        "completion": completion,
        "segment": 0,
        "tokens": [1, 2, 3, 4, 5],
        "prompt_len": 2,
        "loss_mask": [False, False, True, True, True],
        "behavior_logprobs": np.array([np.nan, np.nan, -0.5, -0.25, -1], np.float32),
        "versions": [-1, -1, 7, 7, 8],
        "reward": 0.5 * completion,
        "reward_parts": {"answer": 1.0, "form": 0.25},
        "outcome": "trained",
        "text": "four",
        "prompt": "2 + 2",
        "seeds": [2**62 + 1],
        "length": 3,
        **fields,
    }


def write(folder: Path, samples: list[dict[str, Any]], first: int, last: int | None = None) -> Path:
    (folder / SAMPLES).mkdir(exist_ok=True)
    path = folder / SAMPLES / name_file(samples[0]["kind"], first, last)
    columns = {name: [line.get(name) for line in samples] for name in SCHEMA.names}
    write_samples(path, [make_table(columns)], "r1")
    return path


def test_a_sample_comes_back_as_it_was_written(tmp_path: Path) -> None:
    write(tmp_path, [sample(3, 9, number) for number in range(4)], 3)

    found = read_sample(tmp_path, SampleId("train", 3, 9, 2))

    assert found["tokens"].tolist() == [1, 2, 3, 4, 5]
    assert found["behavior_logprobs"][2:].tolist() == [-0.5, -0.25, -1.0]
    assert math.isnan(found["behavior_logprobs"][0])
    assert found["loss_mask"].tolist() == [False, False, True, True, True]
    assert found["versions"].tolist() == [-1, -1, 7, 7, 8]
    assert found["seeds"] == [2**62 + 1]
    assert found["reward"] == 1.0
    assert found["reward_parts"] == {"answer": 1.0, "form": 0.25}
    assert found["policy_logprobs"] is None
    assert found["ground_truth"] is None
    assert set(found) == set(SCHEMA.names)


def test_duckdb_reads_the_files_by_their_names(tmp_path: Path) -> None:
    write(tmp_path, [sample(3, 9, number) for number in range(4)], 3)
    write(tmp_path, [sample(4, 10, number, reward=None) for number in range(2)], 4)

    found = duckdb.sql(
        "select count(*), count(reward), sum(reward), max(length), max(versions[5]), "
        f"max(reward_parts['form']) from '{tmp_path}/samples/train-*.parquet'"
    ).fetchall()

    assert found == [(6, 4, 3.0, 3, 8, 0.25)]


def test_a_file_says_its_schema_and_its_run(tmp_path: Path) -> None:
    path = write(tmp_path, [sample(3, 9, 0)], 3)

    assert pq.read_metadata(path).metadata[b"hearth.schema"] == b"1"
    assert read_run_id(list_files(tmp_path)[0]) == "r1"


def test_a_merged_file_takes_the_place_of_those_that_it_covers(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        write(tmp_path, [sample(step, step, 0)], step)
    write(tmp_path, [sample(1, 1, 0), sample(2, 2, 0)], 1, 2)
    write(tmp_path, [sample(1, 1, 0, kind="eval")], 1)

    names = [file.path.name for file in list_files(tmp_path)]

    assert names == ["eval-000001.parquet", "train-000001-000002.parquet", "train-000003.parquet"]
    assert [file.path.name for file in files_of_step(tmp_path, "train", 2)] == names[1:2]


def test_a_group_is_read_in_the_order_of_its_completions(tmp_path: Path) -> None:
    write(tmp_path, [sample(2, 7, number) for number in (2, 0, 1)], 2)

    group = read_group(tmp_path, "train", 7, columns=["step", "index", "completion", "segment"])

    assert [line["completion"] for line in group] == [0, 1, 2]
    assert read_group(tmp_path, "train", 8) == []


def test_of_a_row_that_was_evaluated_twice_the_last_time_is_read(tmp_path: Path) -> None:
    for step in (0, 5):
        write(tmp_path, [sample(step, 1, 0, kind="eval", reward=float(step))], step)

    assert read_group(tmp_path, "eval", 1)[0]["reward"] == 5.0
    assert read_group(tmp_path, "eval", 1, step=0)[0]["reward"] == 0.0


@pytest.mark.slow
def test_a_large_file_is_cut_so_that_one_sample_needs_a_part_of_it(tmp_path: Path) -> None:
    tokens = np.arange(36_000)
    lines = [sample(1, number, 0, tokens=tokens, versions=tokens) for number in range(64)]

    path = write(tmp_path, lines, 1)

    groups = pq.read_metadata(path).num_row_groups
    assert 3 <= groups <= 32
    assert read_sample(tmp_path, SampleId("train", 1, 40, 0))["tokens"].sum() == tokens.sum()


def test_an_unknown_sample_is_refused(tmp_path: Path) -> None:
    write(tmp_path, [sample(3, 9, 0)], 3)

    with pytest.raises(NotFoundError, match=r"train\.3\.9\.1\.0"):
        read_sample(tmp_path, SampleId("train", 3, 9, 1))
    for text in ("train.3.9.1", "../../x.1.1.1.1", "train.1.1.1.x", ""):
        with pytest.raises(NotFoundError):
            SampleId.parse(text)
    assert SampleId.parse("eval.0.5.1.2") == SampleId("eval", 0, 5, 1, 2)


def test_an_empty_file_has_the_columns(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).mkdir()
    path = tmp_path / SAMPLES / name_file("train", 1)

    write_samples(path, [], "r1")

    assert pq.read_table(path).schema.names == SCHEMA.names
    assert to_records(pq.read_table(path)) == []


def test_the_vocabulary_has_bytes_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / SAMPLES).mkdir()
    tokens = [b"<eos>", b"a", None, b"\xf0\x9f", b"\x99\x82"]
    write_vocabulary(tmp_path / SAMPLES / "tokens.parquet", tokens, {0}, "r1")

    vocabulary = read_vocabulary(tmp_path)

    assert vocabulary.special == {0}
    assert vocabulary.to_texts([1, 3, 0]) == ["a", None, "<eos>"]
    assert vocabulary.decode([1, 3, 4]) == "a\N{SLIGHTLY SMILING FACE}"
    assert vocabulary.to_bytes([2, 99]) == [b"", b""]
