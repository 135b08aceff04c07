"""The forms of a dataset: files, folders and what the library ``datasets`` loads."""

import logging

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hearth.errors import ConfigError
from training.data.rows import load_rows
from training.data.sources import open_dataset

ROWS = [
    {"question": f"What is {number} + 7?", "answer": f"{number + 7:03d}", "level": number}
    for number in range(5)
]
COLUMNS = {"messages": "question", "ground_truth": "answer"}


def expected(rows=ROWS):
    return [
        row
        | {
            "messages": [{"role": "user", "content": row["question"]}],
            "ground_truth": row["answer"],
        }
        for row in rows
    ]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The same rows in each form."""
    jsonl = tmp_path / "rows.jsonl"
    jsonl.write_bytes(b"\n".join(map(orjson.dumps, ROWS)) + b"\n")
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet", row_group_size=2)
    (tmp_path / "parts").mkdir()
    for place, part in enumerate((ROWS[:2], ROWS[2:])):
        pq.write_table(pa.Table.from_pylist(part), tmp_path / "parts" / f"part-{place}.parquet")
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "train.jsonl").write_bytes(jsonl.read_bytes())
    (tmp_path / "hub" / "test.jsonl").write_bytes(orjson.dumps(ROWS[4]) + b"\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("dataset", ["rows.jsonl", "rows.parquet", "parts"])
def test_each_form_gives_the_same_rows(folder, dataset):
    assert load_rows(dataset, columns=COLUMNS) == expected()


@pytest.fixture
def hub(folder, monkeypatch):
    """A folder that stands for the hub, and a cache of the test's own."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    datasets.disable_progress_bars()
    return f"hf:{folder / 'hub'}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("split", "rows"), [("", ROWS), (":test", ROWS[4:]), (":train[1:3]", ROWS[1:3])]
)
def test_a_dataset_of_the_hubs_library_has_splits_and_slices(hub, split, rows):
    assert load_rows(hub + split, columns=COLUMNS) == expected(rows)


@pytest.mark.slow
def test_no_more_rows_are_streamed_than_are_used_and_it_is_said_that_there_are_others(hub, caplog):
    with caplog.at_level(logging.WARNING, logger="training"):
        assert load_rows(hub, 3, columns=COLUMNS) == expected(ROWS[:3])
        assert load_rows(hub, 5, columns=COLUMNS) == expected()

    assert [
        record.getMessage() for record in caplog.records if record.name.startswith("training")
    ] == [f"max_rows=3 leaves out rows of {hub}"]
    assert len(list(open_dataset(hub, 2).items)) == 3


@pytest.mark.slow
def test_what_the_hubs_library_cannot_load_is_named(hub):
    with pytest.raises(
        ConfigError, match=r"dataset must be one that can be loaded, got .*:nowhere"
    ):
        load_rows(f"{hub}:nowhere")


def test_a_csv_keeps_its_texts(folder):
    (folder / "rows.csv").write_text('question,answer\n"What is 0, plus 7?",007\n')

    (row,) = load_rows("rows.csv", columns=COLUMNS)

    assert row["ground_truth"] == "007"
    assert row["messages"] == [{"role": "user", "content": "What is 0, plus 7?"}]


@pytest.mark.parametrize("line", ["only one", "one,two,three"])
def test_a_csv_row_of_another_length_is_named(folder, line):
    (folder / "rows.csv").write_text(f"question,answer\na,b\n{line}\n")

    with pytest.raises(ConfigError, match=r"rows\.csv, row 2 must have as many values as"):
        load_rows("rows.csv", columns=COLUMNS)


@pytest.mark.parametrize("names", [[], ["a.jsonl", "b.csv"]])
def test_a_folder_has_files_of_one_kind(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("{}\n")

    with pytest.raises(ConfigError, match="dataset must be a folder of files of one kind"):
        load_rows(str(tmp_path))


def test_a_column_that_is_not_there_is_named_with_those_that_are(folder):
    with pytest.raises(
        ConfigError,
        match=r"columns\.ground_truth must be a column .*, got 'solution' for rows\.jsonl:1, which "
        r"has \['answer', 'level', 'question'\]",
    ):
        load_rows("rows.jsonl", columns={"messages": "question", "ground_truth": "solution"})


def test_a_damaged_table_is_named(folder):
    (folder / "rows.parquet").write_bytes(b"PAR1 and no more")

    with pytest.raises(ConfigError, match=r"dataset must be a Parquet file, got 'rows\.parquet'"):
        load_rows("rows.parquet")
