from pathlib import Path

import orjson
import pytest

from hearth.errors import ConfigError
from training.data.rows import load_rows
from training.examples.gsm8k.convert import command, convert
from training.rewards import answer_reward

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "gsm8k"
LINE = {"question": "Two and 1,000?", "answer": "It is <<2+1000=1002>>1,002.\n#### 1,002"}


def write_lines(folder: Path, *lines: object) -> str:
    path = folder / "gsm8k.jsonl"
    path.write_bytes(b"\n".join(orjson.dumps(line) for line in lines))
    return str(path)


def test_a_line_becomes_a_row_whose_answer_the_reward_accepts(tmp_path):
    source = write_lines(tmp_path, LINE)

    assert command(["--source", source, "--output", str(tmp_path / "rows.jsonl")]) == 0

    (row,) = load_rows(str(tmp_path / "rows.jsonl"))
    assert row["ground_truth"] == "1002"
    assert row["messages"][0]["content"].startswith("Two and 1,000?")
    assert answer_reward("<answer>1002</answer>", row) == 1.0


def test_a_line_without_an_answer_is_named(tmp_path):
    source = write_lines(tmp_path, LINE, {"question": "x", "answer": "no hashes"})

    with pytest.raises(ConfigError, match=r"gsm8k\.jsonl:2 must hold"):
        convert(source, str(tmp_path / "rows.jsonl"))
    assert not (tmp_path / "rows.jsonl").exists()


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs GSM8K beside the repository")
def test_the_recipe_runs_on_real_rows(trial, tmp_path):
    rows = tmp_path / "rows.jsonl"
    convert(str(SHARED / "train.jsonl"), str(rows), max_rows=4)

    run = trial(
        dataset=str(rows), max_seq_len=2048, reward_fn=lambda text, row: sum(map(ord, text)) % 7
    )

    assert run.summary.rows == 4
    assert run.summary.steps == 2
