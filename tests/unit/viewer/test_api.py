import base64
import io
import os
import re
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.integration.viewer import made_up
from tests.unit.viewer.conftest import open_viewer

from hearth.records.table import make_table, write_samples

FIRST = "/api/runs/first"


async def ask(client, path, **query):
    answer = await client.get(path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_runs_are_found_a_few_levels_deep_with_what_they_differ_in(viewer):
    rows = (await ask(viewer, "/api/runs"))["runs"]

    assert [(row["name"], row["key"]) for row in rows] == [
        ("deep/second", "deep~second"),
        ("first", "first"),
        ("old", "old"),
    ]
    second, first, old = rows
    assert (first["state"], first["step"], first["samples"]) == ("ended", 12, 105)
    assert first["reward"] == pytest.approx(0.6)
    assert first["held_out"] == pytest.approx(0.84)
    assert first["spark"] == pytest.approx([0.05 * step for step in range(1, 13)])
    assert first["duration_s"] == pytest.approx(26.0)
    assert second["differs"]["temperature"] == 0.5
    assert "log_path" not in second["differs"]
    assert (old["has_samples"], old["samples"], old["step"]) == (False, 0, 1)


async def test_a_run_says_its_settings_metrics_and_evaluations(viewer):
    run = await ask(viewer, "/api/runs/deep~second")

    assert run["config"]["temperature"] == 0.5
    assert "rollout/entropy" in run["metrics"]
    assert [entry["step"] for entry in run["evaluations"]] == [4, 8, 12]
    assert run["recording"]["files"] == 15
    assert run["recording"]["bytes"] > 1000


async def test_series_have_steps_times_and_numbers_and_evaluations_beside_them(viewer):
    names = "train/grad_norm,eval/accuracy,nothing"

    series = await ask(viewer, f"{FIRST}/series", names=names)

    assert series["steps"] == list(range(1, 13))
    assert series["times"] == pytest.approx([2.0 * step + 1.9 for step in range(1, 13)])
    grad_norm = [1 + 0.1 * step for step in range(1, 13)]
    assert series["series"] == {"train/grad_norm": pytest.approx(grad_norm)}
    assert series["eval"]["steps"] == [4, 8, 12]
    assert series["eval"]["series"]["eval/accuracy"] == pytest.approx([0.28, 0.56, 0.84])


async def test_events_come_with_seconds_since_the_start(viewer):
    events = (await ask(viewer, f"{FIRST}/events"))["events"]

    assert events[0]["name"] == "start"
    assert events[0]["seconds"] == 0
    assert (events[-1]["name"], events[-1]["seconds"]) == ("end", 26.0)
    assert events[1]["seconds"] == pytest.approx(3.9)


async def test_time_between_a_kill_and_a_resume_does_not_count(tmp_path):
    made_up.begin(tmp_path / "run")
    made_up.append_step(tmp_path / "run", 1)
    made_up.append_step(tmp_path / "run", 2)
    resumed = {"type": "event", "time": made_up.BEGAN + 1000, "step": 1, "name": "resume"}
    span = {"type": "span", "step": 2, "lane": "loop", "name": "again"}
    span |= {"start": made_up.BEGAN + 1001, "end": made_up.BEGAN + 1002}
    made_up.append(tmp_path / "run" / "timeline.jsonl", resumed, span)

    async with open_viewer(tmp_path) as client:
        run = await ask(client, "/api/runs/run")
        spans = (await ask(client, "/api/runs/run/timeline", from_step=2, to_step=2))["spans"]
        events = (await ask(client, "/api/runs/run/events"))["events"]

    assert run["resumes"] == 1
    assert run["duration_s"] == pytest.approx(5.9 + 2)
    assert events[-1]["seconds"] == pytest.approx(5.9)
    killed, resume = events[-2:]
    assert (killed["name"], killed["step"], killed["seconds"]) == ("killed", 2, pytest.approx(5.9))
    assert (resume["name"], resume["step"]) == ("resume", 1)
    recorded = [span["name"] for span in spans if span["name"] != "completion"]
    assert recorded == ["again"]  # those before the resume do not count


async def test_the_timeline_has_spans_of_phases_and_of_single_completions(viewer):
    timeline = await ask(viewer, f"{FIRST}/timeline", from_step=3, to_step=4)

    names = [span["name"] for span in timeline["spans"]]
    assert names.count("forward_backward") == 2
    assert names.count("completion") == 2 * 8 + 3
    assert timeline["origin"] == made_up.BEGAN
    completion = next(span for span in timeline["spans"] if span["name"] == "completion")
    assert completion["end"] - completion["start"] == pytest.approx(0.5)
    assert {span["step"] for span in timeline["spans"]} == {3, 4}


@pytest.mark.parametrize(
    ("query", "total"),
    [
        ({}, 105),
        ({"kind": "eval"}, 3 * 3),
        ({"kind": "train,eval"}, 105),
        ({"outcome": "stale"}, 44 + 4),
        ({"step_min": 3, "step_max": 4, "kind": "train"}, 16),
        ({"reward_min": 0.5, "kind": "eval"}, 3),
        ({"row": 2, "kind": "train"}, 16),
        ({"index": 2, "kind": "train"}, 4),
        ({"version": 3, "kind": "train"}, 8),
        ({"parsed": 0}, 0),
        ({"search": "SUM OF 7 ", "in": "text"}, 4),
        ({"search": "sum of 7 ", "in": "prompt"}, 0),
        ({"search": "what is 7 "}, 4),
        ({"regex": r"of 1\d and", "in": "text"}, 40),
        ({"finish_reason": "length"}, 0),
    ],
)
@pytest.mark.slow
async def test_filters_choose_samples(viewer, query, total):
    page = await ask(viewer, f"{FIRST}/samples", **query, limit=3)

    assert page["total"] == total
    assert len(page["rows"]) == min(3, total)


async def test_rows_have_what_tables_show(viewer):
    page = await ask(viewer, f"{FIRST}/samples", kind="train", step_min=2, limit=1)

    row = page["rows"][0]
    assert row["id"] == "train.2.2.0.0"
    assert (row["reward"], row["advantage"], row["version"], row["turns"]) == (0.0, -0.5, 1, 1)
    assert row["text"] == "The sum of 2 and 2 is 4."
    assert row["prompt_end"].endswith("assistant\n")
    assert row["match"] is None


async def test_sorting_is_by_any_number_and_ties_keep_their_order(viewer):
    ids = []
    for offset in (0, 60):
        query = {"sort": "reward", "descending": 1, "offset": offset, "limit": 60}
        page = await ask(viewer, f"{FIRST}/samples", **query)
        ids += [(-row["reward"], row["step"], row["kind"], row["index"]) for row in page["rows"]]

    assert len(ids) == 105
    assert ids == sorted(ids)


async def test_a_match_is_shown_where_it_stands_in_units_of_utf_16(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    sample = made_up.make_sample("train", 1, 0, 0, "\U0001f600 " * 400 + "Needle here")
    made_up.write_file(run, "train", 1, [sample])
    async with open_viewer(run) as client:
        row = (await ask(client, "/api/runs/run/samples", search="nEEdle"))["rows"][0]

    units = row["text"].encode("utf-16-le")
    start, end = row["match"]
    assert units[2 * start : 2 * end].decode("utf-16-le") == "Needle"
    assert row["match_in"] == "text"
    assert row["text_start"] == 800 - 80


async def test_rescored_rewards_are_a_column_to_sort_by(tmp_path):
    run = tmp_path / "run"
    made_up.write_run(run, steps=2)
    (run / "rescored").mkdir()
    names = ("step", "kind", "index", "completion", "segment", "reward")
    table = make_table(
        dict(zip(names, ([1, 1], ["train"] * 2, [0, 0], [0, 1], [0, 0], [0.25, 0.75]), strict=True))
    ).select([*names])
    pq.write_table(table, run / "rescored" / "other.parquet")

    async with open_viewer(run) as client:
        shown = await ask(client, "/api/runs/run")
        query = {"rescored": "other", "sort": "rescored", "descending": 1, "limit": 3}
        rows = (await ask(client, "/api/runs/run/samples", **query))["rows"]
        missing = await client.get("/api/runs/run/samples", params={"rescored": "nothing"})

    assert shown["rescored"] == ["other"]
    assert [row["rescored"] for row in rows] == [0.75, 0.25, None]
    assert missing.status_code == 404


async def test_a_histogram_counts_every_sample_once(viewer):
    whole = await ask(viewer, f"{FIRST}/histogram", column="completion")
    reward = await ask(viewer, f"{FIRST}/histogram", column="reward", bins=4, kind="train")
    missing = await ask(viewer, f"{FIRST}/histogram", column="advantage", kind="eval")

    assert whole["edges"] == [-0.5, 0.5, 1.5, 2.5, 3.5]
    assert whole["counts"] == [24 + 9, 24, 24, 24]
    assert reward["edges"] == [0, 0.25, 0.5, 0.75, 1]
    assert reward["counts"] == [64, 0, 0, 32]
    assert missing == {"edges": [], "counts": [], "missing": 9}


async def test_a_group_stands_side_by_side_with_whole_texts(viewer):
    group = await ask(viewer, f"{FIRST}/groups/train.4")

    assert (group["step"], group["row"], group["ground_truth"]) == (3, 4, "7")
    assert group["rewards"] == [1, 0, 0, 1]
    assert (group["mean"], group["std"]) == (0.5, 0.5)
    assert group["prompt"].startswith("<|im_start|>user\nWhat is 4 + 3?")
    assert [row["text"][-2:] for row in group["samples"]] == ["7.", "8.", "9.", "0."]


async def test_an_evaluations_group_is_the_last_one_unless_its_step_is_named(viewer):
    assert (await ask(viewer, f"{FIRST}/groups/eval.1"))["step"] == 12
    assert (await ask(viewer, f"{FIRST}/groups/eval.1.4"))["step"] == 4


async def test_a_prompt_is_followed_through_time(viewer):
    listed = await ask(viewer, f"{FIRST}/prompts", kind="train", sort="row")
    shown = await ask(viewer, f"{FIRST}/prompts/train.2")

    assert listed["total"] == 6
    row = listed["rows"][2]
    assert (row["row"], row["times"], row["best"]) == (2, 4, 1.0)
    assert row["solved_share"] == pytest.approx(4 / 16)
    assert [entry["step"] for entry in shown["steps"]] == [2, 5, 8, 11]
    assert [len(entry["samples"]) for entry in shown["steps"]] == [4] * 4
    assert shown["steps"][1]["samples"][0]["text"] == "The sum of 8 and 5 is 13."


async def test_a_sample_has_exact_tokens_and_aligned_values(viewer):
    sample = await ask(viewer, f"{FIRST}/samples/train.3.4.1.0")

    tokens, values = sample["tokens"], sample["values"]
    assert "".join(tokens["texts"][sample["prompt_len"] : -1]) == sample["text"]
    assert [tokens["texts"][place] for place in tokens["special"]] == [
        "<|im_start|>",
        "<|im_end|>",
        "<|im_start|>",
        "<|im_end|>",
    ]
    count = len(tokens["ids"])
    assert all(len(array) == count for array in (sample["mask"], *values.values()))
    assert values["behavior"][0] is None
    assert values["behavior"][-1] == -0.5
    assert values["gap"][-1] == pytest.approx(0.01)
    assert [place for place, is_hit in enumerate(values["clipped"]) if is_hit] == [
        sample["prompt_len"] + 1
    ]
    assert values["version"][-1] == 2
    assert sample["neighbors"] == {"previous": "train.3.4.0.0", "next": "train.3.4.2.0"}
    assert sample["reward_parts"] == {"correct": 0.0, "form": 0.5}
    assert sample["again"]["possible"] is False


async def test_entropies_that_another_program_has_added_are_shown(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    sample = made_up.make_sample("train", 1, 0, 0, "yes")
    made_up.write_file(run, "train", 1, [sample])
    path = run / "samples" / "train-000001.parquet"
    entropies = [0.5] * len(sample["tokens"])
    table = pq.read_table(path)
    pq.write_table(table.append_column("entropies", pa.array([entropies])), path)
    async with open_viewer(run) as client:
        shown = await ask(client, "/api/runs/run/samples/train.1.0.0.0")

    assert shown["values"]["entropy"] == entropies


async def test_a_conversation_is_cut_at_its_templates_marks(viewer):
    sample = await ask(viewer, f"{FIRST}/samples/train.3.4.1.0")

    parts = [(part["role"], part["sampled"], part["text"]) for part in sample["parts"]]
    assert parts == [
        ("user", False, "<|im_start|>user\nWhat is 4 + 3?<|im_end|>\n"),
        ("assistant", False, "<|im_start|>assistant\n"),
        ("assistant", True, "The sum of 4 and 3 is 8.<|im_end|>"),
    ]


async def test_bytes_that_are_no_text_alone_are_shown_as_bytes(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    sample = made_up.make_sample("train", 1, 0, 0, "\u20ac")
    made_up.write_file(run, "train", 1, [sample])
    async with open_viewer(run) as client:
        shown = await ask(client, "/api/runs/run/samples/train.1.0.0.0")

    first = shown["prompt_len"]
    assert shown["tokens"]["texts"][first : first + 3] == [None] * 3
    given = [base64.b64decode(text) for text in shown["tokens"]["bytes"][first : first + 3]]
    assert b"".join(given).decode() == "\u20ac"


async def test_numbers_that_javascript_does_not_know_are_texts(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    sample = made_up.make_sample("train", 1, 0, 0, "x") | {"seeds": [2**60 + 1, 7]}
    made_up.write_file(run, "train", 1, [sample])
    async with open_viewer(run) as client:
        shown = await ask(client, "/api/runs/run/samples/train.1.0.0.0")

    assert shown["seeds"] == [str(2**60 + 1), 7]


async def test_each_run_parts_from_the_first_at_a_metric_and_at_a_sample_and_token(viewer):
    compared = await ask(viewer, "/api/compare", runs="first,deep~second,first")

    assert {"field": "temperature", "values": [None, 0.5, None]} in compared["config"]
    parts, same = compared["parts"]
    assert (parts["run"], parts["step"]) == ("deep~second", 1)
    assert (parts["metric"], parts["metric_step"]) == ("rollout/raw_reward", 1)
    assert parts["sample"] == "train.5.8.0.0"
    assert parts["token"] == prompt_tokens(8, 5) + len("The sum of 8 and 5 is 13")
    assert (same["run"], same["step"], same["sample"]) == ("first", None, None)


@pytest.mark.slow
async def test_a_sample_that_one_run_lacks_is_a_difference_but_not_an_evaluation(tmp_path):
    for name in ("one", "two"):
        made_up.write_run(tmp_path / name, steps=4)
    lacking = tmp_path / "two" / "samples"
    (lacking / "eval-000004.parquet").unlink()
    async with open_viewer(tmp_path) as client:
        (equal,) = (await ask(client, "/api/compare", runs="one,two"))["parts"]
        (lacking / "train-000003.parquet").unlink()
        (parts,) = (await ask(client, "/api/compare", runs="one,two"))["parts"]

    assert equal["step"] is None
    assert (parts["step"], parts["sample"], parts["missing_in"]) == (3, "train.3.4.0.0", "two")
    assert parts["token"] is None


@pytest.mark.slow
async def test_runs_with_more_text_than_is_kept_are_compared(tmp_path, monkeypatch):
    for name, shift in (("one", 0.0), ("two", 0.25), ("three", 0.25)):
        made_up.write_run(tmp_path / name, steps=6, shift=shift)
    monkeypatch.setattr("hearth.viewer.database.TEXT_BYTES", 2000)
    async with open_viewer(tmp_path) as client:
        compared = await ask(client, "/api/compare", runs="one,two,three")

    assert [parts["sample"] for parts in compared["parts"]] == ["train.5.8.0.0"] * 2


def prompt_tokens(index, step):
    question = f"<|im_start|>user\nWhat is {index} + {step}?<|im_end|>\n<|im_start|>assistant\n"
    return len(made_up.encode(question))


@pytest.mark.slow
async def test_two_runs_with_equal_numbers_part_where_their_tokens_do(tmp_path):
    for name, shift in (("one", 0.0), ("two", 0.25)):
        made_up.begin(tmp_path / name)
        for step in range(1, 8):
            samples = [
                made_up.make_sample(
                    "train", step, step, place, made_up.answer(step, step, place, shift)
                )
                for place in range(4)
            ]
            made_up.write_file(tmp_path / name, "train", step, samples)

    async with open_viewer(tmp_path) as client:
        parts, same = (await ask(client, "/api/compare", runs="one,two,one"))["parts"]

    assert (parts["step"], parts["metric"]) == (5, None)
    assert parts["sample"] == "train.5.5.0.0"
    assert parts["token"] == prompt_tokens(5, 5) + len("The sum of 5 and 5 is 10")
    assert "'.' (id 48) in one and ' ' (id 34) in two" in parts["reason"]
    assert same["step"] is None


async def test_what_is_filtered_can_be_had_as_csv_and_as_parquet(viewer):
    csv = await viewer.get(f"{FIRST}/export", params={"format": "csv", "kind": "eval"})
    parquet = await viewer.get(f"{FIRST}/export", params={"format": "parquet", "step_max": 3})

    lines = csv.text.splitlines()
    assert lines[0].startswith('"kind","step","index"')
    assert sum("held-out" in line for line in lines) == 9
    assert csv.headers["content-disposition"] == 'attachment; filename="first-samples.csv"'
    table = pq.read_table(io.BytesIO(parquet.content))
    assert len(table) == 24
    assert table["tokens"][0].as_py()[0] == 0


@pytest.mark.parametrize(
    "query",
    [{}, {"what": "group", "id": "train.4"}, {"what": "sample", "id": "train.3.4.1.0"}],
    ids=["run", "group", "sample"],
)
async def test_a_report_is_one_file_without_scripts(viewer, query):
    report = await viewer.get(f"{FIRST}/report", params=query)

    assert report.headers["content-type"].startswith("text/html")
    assert "attachment" in report.headers["content-disposition"]
    assert "<script" not in report.text
    assert "http:" not in report.text
    assert "https:" not in report.text
    assert "assistant" in report.text or "The sum of" in report.text


async def test_a_run_whose_process_lives_but_writes_nothing_has_stalled(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    made_up.append_step(run, 1)
    started = time.time()
    states = []
    async with open_viewer(run) as client:
        for quiet_s in (0, 100, 140):
            for path in (*run.iterdir(), *run.rglob("*.parquet")):
                os.utime(path, (started - quiet_s, started - quiet_s))
            states.append((await ask(client, "/api/runs"))["runs"][0]["state"])
            states.append((await ask(client, "/api/runs/run"))["state"])
        made_up.append_step(run, 2)
        states.append((await ask(client, "/api/runs/run"))["state"])

    assert states == [*["running"] * 4, *["stalled"] * 2, "running"]


@pytest.mark.slow
async def test_a_run_that_grows_is_seen_at_every_step(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    async with open_viewer(run) as client:
        for step in range(1, 6):
            made_up.append_step(run, step)
            row = (await ask(client, "/api/runs"))["runs"][0]
            page = await ask(client, "/api/runs/run/samples")

            assert (row["state"], row["step"], row["samples"]) == ("running", step, 8 * step)
            assert page["total"] == 8 * step
        await _merge(run, 5)
        assert (await ask(client, "/api/runs/run/samples"))["total"] == 40
        found = await ask(client, "/api/runs/run/samples", search="sum of 6 ", limit=1)
        assert found["rows"][0]["id"] == "train.4.6.0.0"


async def _merge(run, steps):
    tables = [
        pq.read_table(run / "samples" / f"train-{step:06d}.parquet") for step in range(1, steps + 1)
    ]
    write_samples(run / "samples" / f"train-000001-{steps:06d}.parquet", tables, "made-up")


async def test_texts_beyond_the_memory_for_them_are_read_from_the_files(runs, monkeypatch):
    monkeypatch.setattr("hearth.viewer.database.TEXT_BYTES", 0)
    async with open_viewer(runs) as client:
        found = await ask(client, f"{FIRST}/samples", search="sum of 7 and", limit=2)
        group = await ask(client, f"{FIRST}/groups/train.4")
        prompt = await ask(client, f"{FIRST}/samples", search="what is 7 ", limit=2)

    assert (found["total"], prompt["total"]) == (4, 4)
    assert found["rows"][0]["text"] == "The sum of 7 and 4 is 11."
    assert group["samples"][0]["text"] == "The sum of 4 and 3 is 7."


async def test_the_schema_lists_every_route(viewer):
    from hearth.viewer.app import ROUTES

    routes = {entry["route"] for entry in (await ask(viewer, "/api/schema"))["routes"]}

    assert routes == set(ROUTES)
    for route in ROUTES:
        method, path = route.split()
        names = {"run": "first", "sample": "train.3.4.1.0", "group": "train.4"}
        names |= {"prompt": "train.2", "job": "none"}
        if path != "/api/live" and method == "GET":
            answer = await viewer.get(path.format(**names), params={"runs": "first,old"})
            assert answer.status_code == (404 if "jobs" in path else 200), path


def test_the_documentation_has_every_route_and_parameter():
    from hearth.viewer.app import ROUTES

    page = Path(__file__).parents[3] / "docs" / "viewer.md"
    lines = re.findall(r"^\| `((?:GET|POST) /api\S*)` \|([^|]*)\|", page.read_text(), re.MULTILINE)

    documented = {route: set(names.split()) for route, names in lines}
    assert documented == {route: set(names.split()) for route, names in ROUTES.items()}


@pytest.mark.parametrize(
    ("regex", "literal"),
    [
        ("[0-9]+ apples", " apples"),
        ("ab?c", "a"),
        ("abc*d", "ab"),
        ("ab+cd", "ab"),
        ("x{2}yz", "yz"),
        ("[a]bc]d", "bc"),
        (r"\d+ is \w+", " is "),
        (r"a\.bcd", "bcd"),
        ("a|b", ""),
        ("[[:alpha:]x]yz", ""),
        ("(?i)abc", ""),
        (r"\x{41}bc", ""),
        (r"\Qa?b\E", ""),
        ("[^]abc]d", "d"),
        ("(one|two) apples", " apples"),
        (r"ab(\d+)?c", "ab"),
        ("ab(c(d|e)f)*gh|i", ""),
        ("(?:a|b)cde", "cde"),
        (r"\(ab(c", "ab"),
        ("[(|]abc", "abc"),
        ("ab{c|d}", ""),
    ],
)
def test_the_text_that_a_pattern_needs_is_in_all_that_it_finds(regex, literal):
    from hearth.viewer.samples import find_literal

    assert find_literal(regex) == literal
