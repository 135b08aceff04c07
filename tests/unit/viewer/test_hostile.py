import asyncio
import json
import shutil

import pytest
from tests.integration.viewer import made_up
from tests.unit.viewer.conftest import open_viewer

from hearth.records.layout import SAMPLES, VOCABULARY
from hearth.records.table import write_vocabulary
from hearth.viewer.library import Library
from hearth.viewer.live import Live

RUN = "/api/runs/run"


async def ask(client, path, **query):
    answer = await client.get(RUN + path, params=query)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.slow
async def test_hostile_texts_are_answered_as_data(tmp_path):
    made_up.write_hostile_run(tmp_path / "run")
    async with open_viewer(tmp_path / "run") as client:
        rows = (await ask(client, "/samples", sort="reward"))["rows"]
        run = await ask(client, "")
        for row in rows:
            report = await client.get(f"{RUN}/report", params={"what": "sample", "id": row["id"]})
            assert report.status_code == 200
            assert "<script" not in report.text
            assert "\u202e" not in report.text
            assert "\x1b" not in report.text
        group = await client.get(f"{RUN}/report", params={"what": "group", "id": "train.0"})
        whole = await client.get(f"{RUN}/report")

    assert len(rows) > len(made_up.HOSTILE_TEXTS)
    assert rows[-1]["reward"] is None  # it was NaN
    assert all(len(row["text"]) <= 300 for row in rows)
    assert run["config"]["policy_loss"] == made_up.SCRIPT
    for page in (group, whole):
        assert page.status_code == 200
        assert "<script" not in page.text


async def test_lines_that_are_no_records_are_left_out_and_counted(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    with (run / "metrics.jsonl").open("wb") as file:
        file.write(b'{"type":"train","step":1,"rollout/reward":NaN,"a":1}\n')
        file.write(b"no json\n[1, 2]\n\xff\xfe\n{}\n")
        file.write(b'{"type":"train","step":2,"text":"' + b"x" * 10_000_000 + b'","a":2}\n')
        file.write(b"[" * 100_000 + b"NaN\n")
        file.write(b'{"type":"train","step":3,"a":3,"b":1e999}\n')
        file.write(b'{"type":"train","step":9,"a":NaN,"\\ud800":1}\n')
        file.write(b'{"type":"train","step":4,"a"')
    async with open_viewer(run) as client:
        series = await ask(client, "/series", names="rollout/reward,a")
        shown = await ask(client, "")

    assert series["steps"] == [1, 2, 3]
    assert series["series"]["a"] == [1, 2, 3]
    assert series["series"]["rollout/reward"] == [None] * 3
    assert shown["step"] == 3
    assert "5 lines of metrics.jsonl are no records" in shown["recording"]["text"]


async def test_a_damaged_file_is_named_and_the_others_are_shown(tmp_path):
    run = tmp_path / "run"
    made_up.write_run(run, steps=4)
    content = (run / SAMPLES / "train-000002.parquet").read_bytes()
    (run / SAMPLES / "train-000002.parquet").write_bytes(content[: len(content) // 2])
    (run / SAMPLES / "train-000003.parquet").write_bytes(b"no Parquet at all")
    async with open_viewer(run) as client:
        page = await ask(client, "/samples", kind="train")
        shown = await ask(client, "")
        sample = await client.get(f"{RUN}/samples/train.2.2.0.0")

    assert page["total"] == 16
    assert set(shown["recording"]["damaged"]) == {"train-000002.parquet", "train-000003.parquet"}
    assert "train-000002.parquet" in shown["recording"]["text"]
    assert sample.status_code == 404


async def test_a_file_that_was_mended_is_shown_again(tmp_path):
    run = tmp_path / "run"
    made_up.write_run(run, steps=2)
    path = run / SAMPLES / "train-000001.parquet"
    content = path.read_bytes()
    path.write_bytes(content[:100])
    async with open_viewer(run) as client:
        before = (await ask(client, "/samples"))["total"]
        draft = path.with_name("draft")
        draft.write_bytes(content)
        draft.replace(path)
        after = await ask(client, "/samples")
        shown = await ask(client, "")

    assert (before, after["total"]) == (8, 16)
    assert shown["recording"]["damaged"] == {}


@pytest.mark.parametrize("name", [VOCABULARY, "../timeline.jsonl", "../config.json"])
async def test_a_file_of_noise_takes_nothing_else_with_it(tmp_path, name):
    run = tmp_path / "run"
    made_up.write_run(run, steps=1)
    (run / SAMPLES / name).write_bytes(b"\xff\x00{]" * 100)
    async with open_viewer(run) as client:
        for path in ("", "/series", "/events", "/timeline", "/samples", "/report"):
            await client.get(RUN + path)
            assert (await client.get(RUN + path)).status_code == 200, path
        sample = await ask(client, "/samples/train.1.0.0.0")

    assert len(sample["tokens"]["texts"]) == len(sample["tokens"]["ids"])


async def test_bytes_of_tokens_may_be_anything(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    made_up.write_file(run, "train", 1, [made_up.make_sample("train", 1, 0, 0, "a")])
    bytes_of = [b"\xff\xfe", b"\xed\xa0\x80", *[b"\x80"] * 256]
    write_vocabulary(run / SAMPLES / VOCABULARY, bytes_of, {0}, "made-up")
    async with open_viewer(run) as client:
        sample = await ask(client, "/samples/train.1.0.0.0")

    assert set(sample["tokens"]["texts"]) == {None}
    assert sample["parts"]


async def test_a_run_that_vanishes_is_not_found_and_nothing_breaks(tmp_path):
    made_up.write_run(tmp_path / "run", steps=2)
    made_up.write_run(tmp_path / "other", steps=1)
    async with open_viewer(tmp_path) as client:
        await ask(client, "/samples")
        shutil.rmtree(tmp_path / "run")
        for path in ("", "/samples", "/samples?search=a", "/samples/train.1.0.0.0", "/timeline"):
            assert (await client.get(RUN + path)).status_code in (200, 404), path
        assert (await client.get("/api/runs")).status_code == 200


@pytest.mark.slow
async def test_listeners_hear_of_a_step_within_a_second(tmp_path):
    run = tmp_path / "run"
    made_up.begin(run)
    live = Live(Library([run]))
    events = live.listen()
    assert await anext(events) == b"retry: 1000\n\n"
    heard = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0.6)  # the watcher has looked once

    made_up.append_step(run, 1)
    event = json.loads((await asyncio.wait_for(heard, 30)).removeprefix(b"data: "))
    live.close()

    assert (event["run"], event["state"]) == ("run", "running")
    assert event["step"] in (None, 1)
    assert all(rest.startswith(b"data: ") for rest in [event async for event in events])
