import http.server
import threading
from pathlib import Path

import pytest

from hearth.errors import ConfigError
from training.data.rows import epoch_rows, load_rows, prompt_messages
from training.recipes import rl_loop

GOOD = '{"messages": [{"role": "user", "content": "hi"}], "ground_truth": "1"}\n'


def write(folder: Path, text: str) -> str:
    path = folder / "rows.jsonl"
    path.write_text(text)
    return str(path)


def test_a_malformed_row_is_named_by_file_and_line(tmp_path):
    path = write(tmp_path, GOOD * 16 + '{"messages": \n' + GOOD)

    with pytest.raises(ConfigError, match=rf"{path}:17 must be a JSON object"):
        load_rows(path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"ground_truth": "1"}', "messages must be a non-empty list"),
        ('{"messages": []}', "messages must be a non-empty list"),
        ('{"messages": [{"role": "user"}]}', r"messages\[0\].content must be a string"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', r"messages\[0\].role must be one of"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "more than assistant turns"),
        ("[1]", "must be a JSON object"),
    ],
    ids=["missing", "empty", "content", "role", "assistant", "list"],
)
def test_a_row_that_cannot_be_sampled_is_refused(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        load_rows(write(tmp_path, line))


def test_a_dataset_is_whole_unless_rows_are_counted_and_what_is_left_out_is_said(tmp_path, caplog):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n\n' * 150)

    assert len(load_rows(str(path), rl_loop.Config().max_rows, needs_messages=False)) == 150
    assert len(load_rows(str(path), 150, needs_messages=False)) == 150
    assert caplog.messages == []
    assert len(load_rows(str(path), 100, needs_messages=False)) == 100
    assert caplog.messages == [f"max_rows=100 leaves out 50 of the 150 rows of {path}"]


def test_max_rows_cuts_the_dataset_and_blank_lines_do_not_count(tmp_path):
    path = write(tmp_path, "\n".join([GOOD] * 150))

    assert len(load_rows(path, 100)) == 100
    assert len(load_rows(path)) == 150


@pytest.mark.parametrize("text", ["", "\n\n"], ids=["empty", "blank"])
def test_a_dataset_without_rows_is_refused(tmp_path, text):
    with pytest.raises(ConfigError, match="at least one row"):
        load_rows(write(tmp_path, text))


def test_a_missing_file_and_an_unreachable_url_are_named():
    with pytest.raises(ConfigError, match="no such file"):
        load_rows("nowhere.jsonl")
    with pytest.raises(ConfigError, match="must be reachable"):
        load_rows("http://127.0.0.1:9/rows.jsonl")


@pytest.mark.slow
def test_rows_load_from_a_url(tmp_path):
    write(tmp_path, GOOD * 3)

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(tmp_path))

        def log_message(self, *args):
            """Keep the test's output clean."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        rows = load_rows(f"http://127.0.0.1:{server.server_port}/rows.jsonl")
        server.shutdown()

    assert len(rows) == 3


def test_assistant_turns_are_dropped_from_the_prompt():
    roles = ["system", "user", "assistant", "user", "assistant"]
    row = {"messages": [{"role": role, "content": role} for role in roles]}

    assert [message["role"] for message in prompt_messages(row)] == ["system", "user", "user"]


def test_epochs_visit_every_row_and_finished_ones_are_left_out():
    rows = [{"n": n} for n in range(4)]

    visits = list(epoch_rows(rows, epochs=2, shuffle=False, seed=0, done=frozenset({1, 6})))

    assert [visit.index for visit in visits] == [0, 2, 3, 4, 5, 7]
    assert [visit.row["n"] for visit in visits] == [0, 2, 3, 0, 1, 3]


def test_a_shuffled_epoch_is_a_permutation_that_the_seed_repeats():
    rows = [{"n": n} for n in range(50)]

    def order(seed: int) -> list[int]:
        return [v.row["n"] for v in epoch_rows(rows, epochs=2, shuffle=True, seed=seed)]

    first = order(1)
    assert first == order(1)
    assert first != order(2)
    assert sorted(first[:50]) == sorted(first[50:]) == list(range(50))
    assert first[:50] != first[50:]
